"""Quantisation-aware training by torchao: chosen layers compute with fake-quantised numbers from a set update on.

torchao rounds weights, and inputs where its configuration says so, to what a quantised layer would have, in the
forward; gradients pass as if it had not (Bengio et al., 2013, https://arxiv.org/abs/1308.3432; Jacob et al., 2018,
https://arxiv.org/abs/1712.05877). Parameters stay float, with their names. `convert` makes the quantised model. It
loads torchao, when a model is prepared.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import require_names, require_whole, said
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError, clause
from evenstep.events import Hook, TrainBegin, UpdateEnd
from evenstep.events.hook import HookTrainer
from evenstep.extras.quantization.layers import on_all_stages
from evenstep.pipeline import PipelineModel
from evenstep.plugins import load_optional

_NOT_FOR: Mapping[str, str] = {
    "whole of stages": "which would not round in the whole model that is put together of stages; leave one of them out",
    "local": "which is for ranks that step together; take the strategy `ddp`, `zero1` or `fsdp`",
    "changing ranks": "which ranks that join in mid-run would not know to round; let a lost rank end the run",
    "compile": "which computes otherwise from a set update on, while what is compiled stays; leave `compile` out",
}


@final
class QuantizationAware(Hook):
    """Trains layers with fake-quantised weights, and inputs, from a set update on.

    Give it the model before the optimizer is built: `prepare` changes the layers, in place. In a run file that is done
    for you. From `after_update` on evaluations are made with rounded numbers, too.

    Args:
        config: torchao's, of the quantisation that the model is trained for: an object, or the name of its class in
            `torchao.quantization`, such as "Int8DynamicActivationIntxWeightConfig" or "IntxWeightOnlyConfig". Or an
            `IntxFakeQuantizeConfig` of the weights, for what torchao can only train.
        options: of the class, where `config` is a name; a number format by its name, "int4", and a granularity by how
            many neighbouring weights share a scale, 32.
        layers: patterns of the names of linear layers, in which `*` is any text, and of embeddings.
        after_update: after how many committed updates rounding begins; 0: with the first.

    Raises:
        ArgumentError: an argument that cannot be.

    >>> QuantizationAware("IntxWeightOnlyConfig", options={"weight_dtype": "int4", "granularity": 32}).name
    'QuantizationAware'
    """

    failure_policy = "stop"  # a run must not go on with some layers quantised, or without what `settle` has raised

    def __init__(
        self,
        config: object,
        *,
        options: Mapping[str, Any] | None = None,
        layers: Sequence[str] = ("*",),
        after_update: int = 0,
    ) -> None:
        require_whole("after_update", after_update, at_least=0, advice="0 rounds from the first on")
        self._patterns = require_names("layers", layers, "`layers=('blocks.*',)`")
        if not isinstance(config, str) and options:
            raise ArgumentError(
                "`options` are of a class that `config` names, but `config` is an object; leave them out."
            )
        self._config, self._options, self._after_update = config, dict(options or {}), after_update
        self._layers: dict[str, nn.Module] = {}

    def prepare(self, model: nn.Module) -> None:
        """Make the layers such that can round, which they do not yet; before the optimizer is built.

        Of a model in stages each rank has its own; all call it together.

        Raises:
            ArgumentError: a pattern that fits no layer, or a configuration that torchao has no training for, or whose
                rounding depends on more than a token or a weight.
            MissingExtraError: torchao is not installed.
        """
        for name in self._chosen(model, nn.Linear, nn.Embedding):
            layer = model.get_submodule(name)
            if type(layer) not in (nn.Linear, nn.Embedding):
                raise ArgumentError(
                    f"`{name}` is a {type(layer).__name__}, but fake-quantised can be Linear and Embedding, these very "
                    f"classes; name the others in `layers`."
                )
            around = [one for place, one in model.named_modules() if name.startswith(f"{place}.")]
            if any(isinstance(one, nn.TransformerEncoderLayer) for one in around):
                raise ArgumentError(
                    f"`{name}` is in a TransformerEncoderLayer of torch, which evaluates with the layer's weight "
                    f"itself, not rounded; write that block with layers of your own, or name other `layers`."
                )
            self._change(name, layer)

    def attach(self, trainer: HookTrainer) -> None:
        ready = self._chosen(trainer.model, _torchao("torchao.quantization.qat").FakeQuantizedLinear, self._embedding())
        self._layers = {name: trainer.model.get_submodule(name) for name in ready}
        for name, layer in self._layers.items():
            if cast("Tensor", layer.weight).dtype == torch.float64:
                raise ArgumentError(
                    f"`{name}.weight` is float64, which torchao does not round; make the model float32, or leave the "
                    f"layer out of `layers`."
                )
        super().attach(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        self._round(state["rounds"])
        return None

    @property
    def rounds(self) -> bool:
        """Whether the layers compute with rounded numbers."""
        return any(one.enabled for layer in self._layers.values() for one in _quantizers(layer))

    def before_train(self, event: TrainBegin) -> None:
        self._round(self._after_update <= event.update)

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == self._after_update:  # also on ranks without such layers, as all settle together
            self.trainer.settle()  # after which an update may turn out to be made again
            self._round(self._after_update <= self.trainer.progress.update)

    def convert(self, model: nn.Module) -> nn.Module:
        """A copy of a trained model whose layers are quantised, as torchao makes it of `config`.

        Raises:
            ArgumentError: `config` is one that torchao can only train for, or the model is in stages.
        """
        if isinstance(model, PipelineModel):
            raise ArgumentError(
                "`convert` makes a copy of a whole model, but this one is in stages; build the model in one process, "
                "`prepare` it, load the checkpoint with `evenstep.load_weights`, and convert that."
            )
        quantization = _torchao("torchao.quantization")
        config = self._made()
        if _is_of_weights(config):
            raise ArgumentError(
                f"torchao has no quantised layers for {type(config).__name__}, only training; give QuantizationAware "
                f"the configuration of such layers, as `IntxWeightOnlyConfig(weight_dtype=torch.int4)`."
            )
        for layer in model.modules():
            for one in _quantizers(layer):
                one.scale = one.zero_point = None  # of the last forward, whose graph can't be copied
        copy = deepcopy(model)
        names = set(self._chosen(copy, _torchao("torchao.quantization.qat").FakeQuantizedLinear, self._embedding()))
        step = _torchao("torchao.quantization.qat").QATConfig(config, step="convert")

        def is_meant(layer: nn.Module, name: str) -> bool:
            return name in names

        quantization.quantize_(copy, step, filter_fn=is_meant)
        return copy

    def _change(self, name: str, layer: nn.Module) -> None:
        qat, config = _torchao("torchao.quantization.qat"), self._made()
        prepared = qat.QATConfig(weight_config=config) if _is_of_weights(config) else qat.QATConfig(config)
        holder = nn.Sequential(layer)

        def is_meant(one: nn.Module, place: str) -> bool:
            return one is layer

        try:
            with undisturbed():  # torchao draws a weight that it then throws away
                _torchao("torchao.quantization").quantize_(holder, prepared, filter_fn=is_meant)
        except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
            raise ArgumentError(
                f"torchao can't train `{name}` for {type(config).__name__}: {clause(error)}."
            ) from error
        made = holder[0]
        if type(made) not in (qat.FakeQuantizedLinear, qat.FakeQuantizedEmbedding):
            raise ArgumentError(
                f"torchao trains `{name}` for {type(config).__name__} by a {type(made).__name__}, of which it is not "
                f"known whether it depends on how a batch is cut; take IntxWeightOnlyConfig, "
                f"Int8DynamicActivationIntxWeightConfig, Int4WeightOnlyConfig or a Float8 one by rows."
            )
        for one in _quantizers(made):
            _check_rounding(one.config)
            one.enabled = False
        layer.__class__ = type(made)  # in place: whoever holds the layer holds the one that rounds
        vars(layer).update({key: value for key, value in vars(made).items() if key not in vars(layer)})
        vars(layer)["_modules"].update(vars(made)["_modules"])
        vars(layer)["evenstep_not_for"] = _NOT_FOR

    def _round(self, rounds: bool) -> None:
        for layer in self._layers.values():
            for one in _quantizers(layer):
                one.enabled = rounds

    def _made(self) -> Any:
        """torchao's configuration."""
        if not isinstance(self._config, str):
            return self._config
        quantization = _torchao("torchao.quantization")
        known = sorted(name for name in dir(quantization) if name.endswith("Config"))
        if self._config not in known:
            near = get_close_matches(self._config, known, cutoff=0.4) or known
            raise ArgumentError(f"`config` is {self._config!r}, but torchao has {', '.join(near)}.")
        try:
            return getattr(quantization, self._config)(
                **{name: _option(name, one) for name, one in self._options.items()}
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ArgumentError(f"`options` can't be for {self._config}, which raised {clause(error)}.") from error

    def _embedding(self) -> Any:
        return _torchao("torchao.quantization.qat").FakeQuantizedEmbedding

    def _chosen(self, model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
        """The names of the layers of these classes that are meant: by "*" all linear ones."""
        there = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
        chosen: dict[str, None] = {}
        for pattern in self._patterns:
            fitting = [
                name
                for name, one in there.items()
                if fnmatchcase(name, pattern) and (pattern != "*" or isinstance(one, nn.Linear))
            ]
            if not on_all_stages(model, fitting):
                what = "linear layer or embedding" if nn.Linear in kinds else "layer that was prepared"
                raise ArgumentError(
                    f"`layers` of QuantizationAware has {pattern!r}, which fits no {what}: call `prepare(model)` "
                    f"before the optimizer is built, and name layers by patterns such as 'blocks.*'; there are "
                    f"{', '.join([*there][:8]) or 'none'}."
                )
            chosen |= dict.fromkeys(fitting)
        return [*chosen]


def _quantizers(layer: nn.Module) -> list[Any]:
    """torchao's, of a layer: of its weight, and of its inputs."""
    made = (getattr(layer, f"{what}_fake_quantizer", None) for what in ("weight", "activation"))
    return [one for one in made if one is not None]


def _is_of_weights(config: object) -> bool:
    """Whether a configuration is of the rounding itself, not of a quantised layer."""
    return isinstance(config, _torchao("torchao.quantization.qat").FakeQuantizeConfigBase)


def _check_rounding(config: Any) -> None:
    """Raise ArgumentError for rounding that keeps something from batch to batch, or looks at all samples of one."""
    if getattr(config, "range_learning", False) or not getattr(config, "is_dynamic", True):
        raise ArgumentError(
            f"{said(config)} keeps scales beside the parameters, which no optimizer steps and no checkpoint holds; "
            f"leave `is_dynamic` and `range_learning` as they are."
        )
    if type(getattr(config, "granularity", None)).__name__ == "PerTensor":
        raise ArgumentError(
            f"{said(config)} rounds by the largest number of a whole tensor, which for inputs depends on how a batch "
            f"is cut; take a granularity of rows or tokens."
        )


def _option(name: str, value: Any) -> Any:
    """A value of a run file as torchao takes it."""
    if name.endswith("dtype") and isinstance(value, str):
        return getattr(torch, value, value)
    if name.endswith("granularity") and isinstance(value, int):
        return _torchao("torchao.quantization").PerGroup(value)
    return value


def _torchao(module: str) -> Any:
    return load_optional(module, "quantization")
