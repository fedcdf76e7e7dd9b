"""`training` flags of modules, which hooks may change: a part that wakes up, a norm that is frozen."""

from typing import final

from torch import nn

from evenstep.tensors import plain
from evenstep.train.state import Tree


@final
class ModuleFlags:
    """`training` flags of a model that differ from those at the run's beginning, by module name.

    Flags that are loaded before the run begins are set when it begins.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> flags = ModuleFlags(model); flags.begin()
    >>> _ = model[1].eval(); flags.state_dict()
    {'1': {'now': False, 'built': True}}
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(plain(name), module) for name, module in model.named_modules()]
        self._built: dict[str, bool] | None = None
        self._loaded: Tree | None = None

    def begin(self) -> None:
        """Take the flags as they are for those at the run's beginning, the first time, and set loaded ones."""
        if self._built is None:
            self._built = self._flags()
            self._set(self._loaded)

    def state_dict(self) -> Tree:
        if self._built is None:
            return self._loaded or {}
        return {
            name: {"now": now, "built": self._built[name]}
            for name, now in self._flags().items()
            if now != self._built[name]
        }

    def load_state_dict(self, state: Tree | None) -> None:
        """Set the flags of a saved run; one that begins otherwise in this run keeps its own.

        Args:
            state: None, of an older checkpoint, changes nothing.
        """
        self._loaded = state
        if self._built is not None:
            self._set(state)

    def _flags(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._modules}

    def _set(self, state: Tree | None) -> None:
        if state is None or self._built is None:
            return
        for name, module in self._modules:
            built = self._built[name]
            saved = state.get(name)
            module.training = saved["now"] if saved is not None and saved["built"] == built else built
