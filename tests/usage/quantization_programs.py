"""What tests of quantisation share: a small run, and what is run on several ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

from evenstep import (
    Checkpointing,
    Ema,
    Failures,
    Hook,
    Logging,
    Loss,
    MapData,
    Mesh,
    PipelineModel,
    Task,
    Trainer,
    Training,
)
from evenstep.errors import ArgumentError
from evenstep.events import StepEnd, UpdateEnd
from evenstep.extras.quantization import (
    LayerGroup,
    ProductQuantization,
    QuantizationAware,
    QuantizationNoise,
    compressed_state,
)
from evenstep.parallel import Ddp, Fsdp, Local, Ordered, OrderedFsdp, Single, Strategy

POINTS = [
    (torch.randn(8, generator=(draw := torch.Generator().manual_seed(n))), torch.randn(2, generator=draw))
    for n in range(24)
]
GROUPS = (
    LayerGroup(layers=("0",), after_update=2, block_size=4, num_centroids=6),
    LayerGroup(layers=("2",), after_update=4, block_size=8, num_centroids=5),
)


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Writes(Square):
    def evaluate(self, model: Any, batch: Any) -> Loss:
        return Loss(model(batch[0]).sum())


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(3)  # of its own: ranks that are threads share torch's
    with torch.no_grad():
        for one in model.parameters():
            one.uniform_(-0.4, 0.4, generator=generator)
    return model


def data_for(model: nn.Module, *, micro: int = 4) -> MapData:
    """The points in their order, in the format of the model."""
    dtype = next(model.parameters()).dtype
    points = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in POINTS]
    return MapData(points, global_batch_size=8, micro_batch_size=micro, shuffle=False)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, **options)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)


def trainer_of(
    model: nn.Module,
    hooks: Sequence[Hook],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    micro: int = 4,
    updates: int = 6,
    **more: Any,
) -> Trainer:
    """A trainer of a model that the hooks prepare."""
    for hook in hooks:
        hook.prepare(model)
    data = data_for(model, micro=micro)
    options: dict[str, Any] = {"task": Square(), "data": data, "evaluations": data, **more}
    return Trainer(
        model=model,
        optimizer=optimizer(model),
        updates=updates,
        device="cpu",
        hooks=hooks,
        checkpoint=Checkpointing(asynchronous=False),
        log=Logging(writers=()),
        **options,
    )


class StopAt(Hook):
    """Stops after an update; None: never."""

    def __init__(self, update: int | None) -> None:
        self._update = update

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == self._update:
            self.trainer.request_stop("test")


class SpoilOnce(Hook):
    """Saves update 1, and makes the gradient of update 5 not finite, once."""

    is_done = False

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == 1:
            self.trainer.request_save()

    def after_step(self, event: StepEnd) -> None:
        if event.update == 4 and not self.is_done:
            self.is_done = True
            spoil(self.trainer.model)


def spoil(model: nn.Module) -> None:
    """Make the next loss, and so its gradient, not finite."""
    with torch.no_grad():
        model.get_parameter("4.bias").fill_(float("nan"))


class Rounded(nn.Sequential):
    """The same, computed in bfloat16 with rounded parameters, by torch alone."""

    _calls = False

    def forward(self, input: Tensor) -> Tensor:
        if self._calls:
            return super().forward(input)
        self._calls = True
        try:
            narrow = {name: one.bfloat16() for name, one in self.named_parameters()}
            return torch.func.functional_call(self, narrow, (input.bfloat16(),)).float()
        finally:
            self._calls = False


def hooks_of(kind: str) -> list[Hook]:
    if kind == "aware":
        options = {"weight_dtype": "int4", "granularity": 8}
        return [QuantizationAware("IntxWeightOnlyConfig", options=options, layers=("2", "4"), after_update=3)]
    noise = QuantizationNoise(("0", "2"), p=0.2, block_size=4, after_update=1)
    if kind == "noise":
        return [noise]
    return [ProductQuantization(GROUPS), *([noise] if kind == "product and noise" else [])]


def strategy_of(name: str, model: nn.Module, group: Any) -> Strategy:
    if isinstance(model, PipelineModel):
        return strategy_named(name.removeprefix("stages").lstrip("-") or "ordered", model.mesh.data)
    return Local(Ddp(group)) if name == "local" else strategy_named(name, group)


def quantized(
    kind: str, strategy: str, *, stop: int | None = None, folder: str | None = None, group: Any = None
) -> str:
    """A digest of parameters, average and optimizer after 6 updates, or why it is refused."""
    model: nn.Module = net()
    try:
        if strategy.startswith("stages"):
            model = PipelineModel(model, mesh=Mesh.of(group, pipeline=2), split_at=["2"], schedule="zb_h1")
        trainer = trainer_of(
            model,
            [*hooks_of(kind), StopAt(stop)],
            optimizer=adamw,
            micro=2,
            strategy=strategy_of(strategy, model, group),
            evaluations={},  # none
            folder=None if folder is None else Path(folder),
            train=Training(clip_norm=1.0, ema=Ema(decay=0.5)),
        )
        if folder is not None:
            trainer.resume()
        trainer.train()
    except ArgumentError as error:
        return str(error)
    state = trainer.state_dict()  # all together
    return digest({part: state[part] for part in ("model", "ema")} | {"optimizer": state["optimizer"]["state"]})


def on_strategies(
    kind: str, strategies: Mapping[str, Sequence[int]], folder: str, group: Any = None
) -> dict[str, set[str]]:
    """What `quantized` gives on these ranks with each strategy, stopped and resumed at each of its updates."""
    group = group or group_of_ranks()
    results: dict[str, set[str]] = {}
    for strategy, stops in strategies.items():
        for stop in stops:
            own = f"{folder}/{kind}-{strategy}-{stop}"
            first = quantized(kind, strategy, stop=stop, folder=own, group=group)
            last = first if " " in first else quantized(kind, strategy, folder=own, group=group)
            results.setdefault(strategy, set()).add(last)
    return results


def codebooks_and_noise(folder: str) -> tuple[dict[str, set[str]], dict[str, set[str]], dict[str, set[str]]]:
    """Codebooks summed as is fastest; noise; and noise until layers have codebooks."""
    group, exact = group_of_ranks(), {"ordered-zero1": (3,), "ordered-fsdp": (3,), "stages": (3,)}
    fast = on_strategies("product", {"ddp": (1, 5), "zero1": (3,), "fsdp": (3, 5)}, folder, group)
    noise = on_strategies("noise", exact, folder, group)
    return fast, noise, on_strategies("product and noise", exact, folder, group)


def codebooks(folder: str) -> dict[str, Any]:
    """What codebooks come to on two ranks: by strategy, moved between them, gone back, and how far shards are off."""
    group = group_of_ranks()
    strategies = {"ordered": (3,), "ordered-zero1": (1,), "ordered-fsdp": (3,), "stages": (1,), "local": (1,)}
    results: dict[str, Any] = on_strategies("product", strategies, folder, group)
    for stop, strategy in ((1, "stages"), (3, "ordered-fsdp"), (5, "ordered-zero1"), (None, "ordered")):
        results["moved"] = quantized("product", strategy, stop=stop, folder=f"{folder}/moved", group=group)
    results |= {"back": gone_back(f"{folder}/back", group), "furthest": furthest(group)}
    return results | {"16 bits": in_16_bits(group)}


def in_16_bits(group: Any) -> bool:
    """Whether shards of a model in bfloat16 have the bits of a float32 model that rounds its parameters by itself."""
    alone = trainer_of(Rounded(*net()), hooks_of("product"), strategy=Ordered(), optimizer=adamw, micro=2)
    shards = trainer_of(
        net(), hooks_of("product"), strategy=OrderedFsdp(group), optimizer=adamw, micro=2, precision="bf16-true"
    )
    alone.train()
    shards.train()
    return digest(alone.state_dict()["model"]) == digest(shards.state_dict()["model"])


def gone_back(folder: str, group: Any) -> bool:
    """Whether shards that go back to before a layer was quantised have the bits of one process that does not."""
    ended: list[Any] = []
    for strategy, hooks in ((Ordered(), []), (OrderedFsdp(group), [SpoilOnce()])):
        failures = Failures(non_finite="rewind")
        more: dict[str, Any] = {"folder": Path(folder), "failures": failures} if hooks else {}
        trainer = trainer_of(net(), [*hooks_of("product"), *hooks], strategy=strategy, optimizer=adamw, **more)
        trainer.train()
        ended.append(trainer.state_dict()["model"])
    return digest(ended[0]) == digest(ended[1])


def furthest(group: Any) -> float:
    """How far shards in float64 are off one process: trained, then taken up by other trainers, and as compressed."""
    ended: list[dict[str, Tensor]] = []
    for strategy in (Single(), Fsdp(group)):
        first = trainer_of(net().double(), hooks_of("product"), strategy=strategy)
        first.train()
        state = first.state_dict()["model"]

        def begins_with(model: nn.Module, state: Any = state) -> torch.optim.Optimizer:
            model.load_state_dict(state)
            return sgd(model)

        second = trainer_of(net().double(), hooks_of("product"), strategy=strategy, optimizer=begins_with, updates=3)
        second.train()
        compressed = {f"compressed {name}": one for name, one in compressed_state(first.model).items()}
        again = {f"again {name}": one for name, one in second.state_dict()["model"].items()}
        ended.append({**state, **again, **compressed})
    assert ended[0].keys() == ended[1].keys()
    return max(float((ended[1][name].double() - one.double()).abs().max()) for name, one in ended[0].items())
