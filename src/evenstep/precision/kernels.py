"""What to do where torch has no kernel for what a precision asks of it."""

from evenstep.precision.precision import Precision

_INSTEAD = {"bf16-mixed": "bf16-true", "16-mixed": "16-true", "float8-mixed": "bf16-true"}


def explain_kernels(error: Exception, precision: Precision) -> None:
    """Add what to do to torch's error for an LSTM that oneDNN has no kernel of; nothing to any other.

    Under autocast on a CPU torch gives an LSTM to oneDNN, whether or not that has a kernel of it for the processor.

    >>> from evenstep.precision import Bf16Mixed
    >>> error = RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
    >>> explain_kernels(error, Bf16Mixed()); error.__notes__[0][:54]
    'oneDNN has no kernel of an LSTM in 16 bits for this pr'
    """
    if precision.name in _INSTEAD and "could not create a primitive descriptor for the LSTM" in str(error):
        error.add_note(
            f"oneDNN has no kernel of an LSTM in 16 bits for this processor, to which torch gives it with precision "
            f"'{precision.name}'. Call `torch.backends.mkldnn.set_flags(False)` before training, after which torch "
            f"computes all by itself, or use precision '{_INSTEAD[precision.name]}'."
        )
