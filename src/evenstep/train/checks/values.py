"""Checks of what hooks give by the names of parameters."""

from torch import Tensor, nn

from evenstep.arguments import advice, require_table, said
from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor, unwrapped
from evenstep.names import named_parameters


def check_like_parameters(values: object, model: nn.Module) -> None:
    """Raise ArgumentError unless `values` are tensors like the parameters of their names."""
    given = require_table("values", values, "`trainer.norms({name: tensor})`")
    parameters = named_parameters(unwrapped(model))
    for name, value in given.items():
        if name not in parameters:
            raise ArgumentError(f"`values` has `{name}`, which no parameter is called; {advice(name, parameters)}")
        one = parameters[name]
        if not isinstance(value, Tensor) or value.shape not in (one.shape, local_tensor(one).shape):
            what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else said(value)
            raise ArgumentError(
                f"`values['{name}']` must be a tensor of shape {list(one.shape)}, as the parameter is, but is {what}; "
                f"give such a tensor."
            )
