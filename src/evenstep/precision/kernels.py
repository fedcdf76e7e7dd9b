"""What to do where torch has no kernel for what a precision asks of it."""

import torch

from evenstep.arguments import format_name
from evenstep.precision.precision import Precision

_NARROW: dict[torch.dtype | None, str] = {torch.bfloat16: "BFloat16", torch.float16: "Half"}  # as torch says it
_INSTEAD = {"bf16-mixed": "bf16-true", "16-mixed": "16-true", "float8-mixed": "bf16-true"}


def explain_kernels(error: Exception, precision: Precision) -> None:
    """Add what to do to torch's errors for an LSTM that oneDNN has no kernel of, and for float32 in 16 bits.

    Under autocast on a CPU torch gives an LSTM to oneDNN, whether or not that has a kernel of it for the processor. A
    model of 16 bits meets float32 where a tensor comes to it that nobody has cast.

    >>> from evenstep.precision import Bf16Mixed
    >>> error = RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
    >>> explain_kernels(error, Bf16Mixed()); error.__notes__[0][:54]
    'oneDNN has no kernel of an LSTM in 16 bits for this pr'
    >>> from evenstep.precision import FullPrecision
    >>> error = RuntimeError("expected scalar type Float but found Double - in a layer of the user's")
    >>> explain_kernels(error, FullPrecision()); hasattr(error, "__notes__")
    False
    """
    if precision.name in _INSTEAD and "could not create a primitive descriptor for the LSTM" in str(error):
        error.add_note(
            f"oneDNN has no kernel of an LSTM in 16 bits for this processor, to which torch gives it with precision "
            f"'{precision.name}'. Call `torch.backends.mkldnn.set_flags(False)` before training, after which torch "
            f"computes all by itself, or use precision '{_INSTEAD[precision.name]}'."
        )
    narrow, text = _NARROW.get(precision.format), str(error)
    if narrow is None or not isinstance(error, RuntimeError):
        return
    if narrow in text and "type" in text and "loat" in text.replace(narrow, ""):
        name = format_name(precision.format)
        error.add_note(
            f"With precision '{precision.name}' the parameters are {name}. Floating tensors that `inputs` gives are "
            f"cast to that, in tuples, lists, mappings and dataclasses, but not within objects of other classes, nor "
            f"those that a forward makes. Let `inputs` give one of these, or cast where the tensor is used: "
            f"`x.to(self.weight.dtype)`."
        )
