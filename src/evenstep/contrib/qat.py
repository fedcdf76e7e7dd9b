"""Quantisation-aware training by torchao: chosen layers compute with fake-quantised numbers from a set update on.

torchao rounds weights and inputs in the forward as a quantised layer would; gradients pass unrounded.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any, cast, final

import torch
from torch import nn

from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError
from evenstep.events import Hook, TrainEvent, UpdateEvent
from evenstep.lazy import load_optional
from evenstep.pipeline.pipeline_model import pipeline_of

_NOT_FOR = {
    "changing ranks": "which ranks that join later would not round; let a lost rank end the run",
    "compile": "which computes otherwise from a set update on; leave `compile` out",
}


@final
class QuantizationAware(Hook):
    """Trains linear layers with fake-quantised weights and inputs from a set update on; evaluations round, too.

    Call `prepare(model)` before the optimizer is built; it changes the layers in place. A run file does it for you.

    Args:
        config: torchao's configuration of the quantised layers, or the name of its class in `torchao.quantization`.
        options: arguments of the named class; a number format by its name, "int4"; a granularity by the number of
            neighbouring weights that share a scale, 32.
        layers: patterns of names of linear layers, in which `*` is any text.
        after_update: number of committed updates after which rounding begins; 0: from the first.
    """

    failure_policy = "stop"  # a run must not go on with only some layers rounded

    def __init__(
        self,
        config: object,
        *,
        options: Mapping[str, Any] | None = None,
        layers: Sequence[str] = ("*",),
        after_update: int = 0,
    ) -> None:
        self._config = config
        self._options = dict(options or {})
        self._patterns = tuple(layers)
        self._after_update = after_update
        self._rounding: list[Any] = []

    def prepare(self, model: nn.Module) -> None:
        """Change the chosen layers to torchao's, which do not round yet. Ranks with stages call it together.

        Raises:
            ArgumentError: a pattern that fits no layer, or a layer or configuration that can't be trained.
            MissingExtraError: torchao is not installed.
        """
        for name in self._chosen(model, nn.Linear):
            self._change(name, model.get_submodule(name))

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        names = self._chosen(trainer.model, _qat().FakeQuantizedLinear)
        self._rounding = [one for name in names for one in _quantizers(trainer.model.get_submodule(name))]

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        self._round(state["rounds"])
        return None

    @property
    def rounds(self) -> bool:
        """True once the layers compute with rounded numbers."""
        return any(one.enabled for one in self._rounding)

    def before_train(self, event: TrainEvent) -> None:
        self._round(self._after_update <= event.update)

    def needs_settled(self, update: int) -> bool:
        return update == self._after_update

    def after_update(self, event: UpdateEvent) -> None:
        if event.committed and event.update == self._after_update:
            self._round(True)

    def convert(self, model: nn.Module) -> nn.Module:
        """Copy of a trained whole model with torchao's quantised layers."""
        for layer in model.modules():
            for one in _quantizers(layer):
                one.scale = one.zero_point = None  # of the last forward, whose graph can't be copied
        copy = deepcopy(model)
        names = self._chosen(copy, _qat().FakeQuantizedLinear)
        step = _qat().QATConfig(self._made(), step="convert")

        def is_chosen(layer: nn.Module, name: str) -> bool:
            return name in names

        _quantization().quantize_(copy, step, filter_fn=is_chosen)
        return copy

    def _change(self, name: str, layer: nn.Module) -> None:
        holder = nn.Sequential(layer)

        def is_this(one: nn.Module, name: str) -> bool:
            return one is layer

        with undisturbed():  # torchao draws a weight that it then throws away
            _quantization().quantize_(holder, _qat().QATConfig(self._made()), filter_fn=is_this)
        made = holder[0]
        if type(layer) is not nn.Linear or type(made) is not _qat().FakeQuantizedLinear:
            raise ArgumentError(f"torchao can't train `{name}`, a {type(layer).__name__}, exactly.", field="layers")
        for one in _quantizers(made):
            if type(getattr(one.config, "granularity", None)).__name__ == "PerTensor":
                raise ArgumentError(
                    "`config` has scales of a whole tensor, which depend on how a batch is cut; take rows, groups or "
                    "tokens.",
                    field="config",
                )
            one.enabled = False
        cast("Any", layer).__class__ = type(made)  # in place: owners of the layer then hold the rounding layer
        vars(layer).update({key: value for key, value in vars(made).items() if key not in vars(layer)})
        vars(layer)["_modules"].update(vars(made)["_modules"])
        vars(layer)["evenstep_not_for"] = _NOT_FOR

    def _round(self, rounds: bool) -> None:
        for one in self._rounding:
            one.enabled = rounds

    def _made(self) -> Any:
        if not isinstance(self._config, str):
            return self._config
        options = dict(self._options)
        for name, value in options.items():
            if name.endswith("dtype") and isinstance(value, str):
                options[name] = getattr(torch, value)
            if name.endswith("granularity") and isinstance(value, int):
                options[name] = _quantization().PerGroup(value)
        return getattr(_quantization(), self._config)(**options)

    def _chosen(self, model: nn.Module, kind: type[nn.Module]) -> list[str]:
        there = [name for name, module in model.named_modules() if isinstance(module, kind)]
        chosen: dict[str, None] = {}
        for pattern in self._patterns:
            fitting = [name for name in there if fnmatchcase(name, pattern)]
            if not any(pipeline_of(model).gather(fitting)):
                raise ArgumentError(
                    f"`layers` has {pattern!r}, which fits no {kind.__name__} of the model; call `prepare(model)` "
                    f"before the optimizer is built, with patterns such as 'blocks.*'.",
                    field="layers",
                )
            chosen |= dict.fromkeys(fitting)
        return [*chosen]


def _quantizers(layer: nn.Module) -> list[Any]:
    made = [getattr(layer, f"{part}_fake_quantizer", None) for part in ("weight", "activation")]
    return [one for one in made if one is not None]


def _quantization() -> Any:
    return load_optional("torchao.quantization", "quantization")


def _qat() -> Any:
    return load_optional("torchao.quantization.qat", "quantization")
