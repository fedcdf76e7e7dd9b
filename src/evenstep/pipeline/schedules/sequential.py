"""The plan of one stage: each micro-batch forward, then at once backward.

F0 B0 F1 B1 … A B(n-1) R. One micro-batch's activations live at a time. It is not a pipeline; it is what a pipeline's
gradients are compared with.
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan


def sequential(microbatches: Sequence[int]) -> Plan:
    """The plan that runs `microbatches` one after another through stage 0.

    Args:
        microbatches: the global numbers of this rank's micro-batches, in ascending order.

    >>> " ".join(map(str, sequential([0, 1])))
    '0F0 0B0 0F1 0A 0B1 0R'
    >>> " ".join(map(str, sequential([])))  # a rank without work still takes part in the reduction
    '0A 0R'
    """
    actions: list[Action] = []
    for microbatch in microbatches:
        actions += [Action(Op.FORWARD, 0, microbatch), Action(Op.BACKWARD, 0, microbatch)]
    actions.insert(max(len(actions) - 1, 0), Action(Op.ARM, 0))
    actions.append(Action(Op.REDUCE, 0))
    return tuple(actions)


def forwards(microbatches: Sequence[int]) -> Plan:
    """The forward-only plan of stage 0, for evaluation.

    >>> " ".join(map(str, forwards([4, 5])))
    '0F4 0F5'
    """
    return tuple(Action(Op.FORWARD, 0, microbatch) for microbatch in microbatches)
