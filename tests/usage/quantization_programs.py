"""What tests of quantisation run on several ranks."""

from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

from evenstep import Checkpointing, Ema, Hook, Logging, MapData, Mesh, PipelineModel, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.events import UpdateEnd
from evenstep.extras.quantization import LayerGroup, ProductQuantization, QuantizationAware, QuantizationNoise
from evenstep.parallel import Ddp, Local, Ordered, Strategy

POINTS = [
    (torch.randn(8, generator=(draw := torch.Generator().manual_seed(n))), torch.randn(2, generator=draw))
    for n in range(24)
]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def hook_of(kind: str) -> Any:
    if kind == "aware":
        options = {"weight_dtype": "int4", "granularity": 8}
        return QuantizationAware("IntxWeightOnlyConfig", options=options, layers=("2", "4"), after_update=3)
    if kind == "noise":
        return QuantizationNoise(("0", "2"), p=0.2, block_size=4, after_update=1)
    groups = [
        LayerGroup(layers=("0",), after_update=2, block_size=4, num_centroids=6),
        LayerGroup(layers=("2",), after_update=4, block_size=8, num_centroids=5),
    ]
    return ProductQuantization(groups)


def strategy_of(name: str, model: Any, group: Any) -> Strategy:
    if name == "stages":
        return Ordered(model.mesh.data)
    return Local(Ddp(group)) if name == "local" else strategy_named(name, group)


def quantized(
    kind: str, strategy: str, *, stop: int | None = None, folder: str | None = None, group: Any = None
) -> str:
    """A digest of parameters and average after 6 updates, or why it is refused."""

    class StopAt(Hook):
        def after_update(self, event: UpdateEnd) -> None:
            if event.update == stop:
                self.trainer.request_stop("test")

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    hook = hook_of(kind)
    try:
        model: nn.Module = net
        if strategy == "stages":
            model = PipelineModel(net, mesh=Mesh.of(group, pipeline=2), schedule="zb_h1")
        hook.prepare(model)
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True),
            data=MapData(POINTS, global_batch_size=8, micro_batch_size=2),
            updates=6,
            device="cpu",
            strategy=strategy_of(strategy, model, group),
            folder=folder,
            hooks=[hook, StopAt()],
            train=Training(clip_norm=1.0, ema=Ema(decay=0.5)),
            checkpoint=Checkpointing(asynchronous=False),
            log=Logging(writers=()),
        )
        if folder is not None:
            trainer.resume()
        trainer.train()
    except ArgumentError as error:
        return str(error)
    state = trainer.state_dict()  # all together
    return digest({**state["model"], **{f"ema.{name}": one for name, one in state["ema"].items()}})


def on_strategies(
    kind: str, strategies: tuple[str, ...], stops: tuple[int, ...], folder: str, group: Any = None
) -> dict[str, set[str]]:
    """What `quantized` gives on these ranks, stopped and resumed at each of `stops`."""
    group = group or group_of_ranks()
    results: dict[str, set[str]] = {}
    for strategy in strategies:
        for stop in stops:
            own = f"{folder}/{kind}-{strategy}-{stop}"
            first = quantized(kind, strategy, stop=stop, folder=own, group=group)
            last = first if " " in first else quantized(kind, strategy, folder=own, group=group)
            results.setdefault(strategy, set()).add(last)
    return results


def codebooks_and_noise(folder: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Both in one launch."""
    group = group_of_ranks()
    codebooks = on_strategies("product", ("ddp", "zero1"), (1, 3, 5), folder, group)
    return codebooks, on_strategies("noise", ("ordered-zero1", "ordered-fsdp", "stages"), (3,), folder, group)
