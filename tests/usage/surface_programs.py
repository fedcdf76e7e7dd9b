"""What the tests of parameters and of the trainer's surface run on ranks: small models, trained by plain loops too."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Training

UPDATES = 6
SAMPLES = [
    (torch.tensor([(i + 1) / 8, (3 - i) / 4, 0.5], dtype=torch.float64), torch.tensor((i % 3) / 2, dtype=torch.float64))
    for i in range(8)
]


def three_layers() -> nn.Module:
    """Three layers in float64, the first frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    return model


def freezing(model: nn.Module, update: int) -> None:
    """What a run does after update `update`: unfreezes the first layer, freezes the last, then trains all."""
    if update == 2:
        model[0].requires_grad_(True)
    if update == 3:
        model[4].requires_grad_(False)
    if update == 5:
        model[4].requires_grad_(True)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def plain(clip: float | None = 0.05) -> dict[str, list[float]]:
    """The parameters after a plain loop with `freezing`."""
    model = three_layers()
    optimizer = optimizer_of(model.parameters())
    x, y = (torch.stack([sample[i] for sample in SAMPLES]) for i in (0, 1))
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        ((model(x).squeeze(-1) - y) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], clip)
        optimizer.step()
        freezing(model, update)
    return {name: one.flatten().tolist() for name, one in model.named_parameters()}


def trainer_of(model: nn.Module, name: str, **more: Any) -> Any:
    """A trainer of `model` on SAMPLES, with the strategy of this name."""
    from launched import group_of_ranks, strategy_named

    from evenstep import MapData, Task, Trainer

    class Square(Task):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    arguments: dict[str, Any] = {
        "task": Square(),
        "optimizer": more.pop("optimizer", None) or optimizer_of(model.parameters()),
        "data": MapData(SAMPLES, global_batch_size=8, micro_batch_size=2, shuffle=False),
        "updates": UPDATES,
        "device": "cpu",
        "strategy": more.pop("strategy", None) or strategy_named(name, group_of_ranks()),
    }
    return Trainer(model=model, **{**arguments, **more})


def numbers_of(trainer: Any) -> dict[str, list[float]]:
    """The numbers of the model's tensors by name: what a rank can give back, exactly."""
    tensors = trainer.state_dict()["model"]
    return {
        name: (torch.view_as_real(value) if value.is_complex() else value).flatten().tolist()
        for name, value in tensors.items()
    }


def unfreezing(strategy: str, folder: Path | None = None, stop: int | None = None) -> dict[str, list[float]]:
    """The parameters after a run whose hook does `freezing`; stopped after update `stop`, or gone on with.

    Args:
        strategy: by name.
        folder: of the run, which is resumed if it is there.
        stop: after which update.
    """
    from evenstep import Hook

    class Freezing(Hook):
        def after_update(self, event: Any) -> None:
            freezing(self.trainer.model, event.update)
            if event.update == stop:
                self.trainer.request_stop("half")

    trainer = trainer_of(three_layers(), strategy, train=Training(clip_norm=0.05), hooks=[Freezing()], folder=folder)
    if folder is not None and folder.exists():
        trainer.resume()
    trainer.train()
    return numbers_of(trainer)


def outside(strategy: str) -> tuple[dict[str, list[float]], list[bool], list[str]]:
    """The parameters of a run whose optimizer holds the last layer only, which have a gradient then, and incidents."""
    from evenstep import Hook

    said: list[str] = []

    class Listen(Hook):
        def on_incident(self, event: Any) -> None:
            said.append(event.message)

    model = three_layers()
    trainer = trainer_of(model, strategy, optimizer=optimizer_of(model[4].parameters()), hooks=[Listen()])
    trainer.train()
    return numbers_of(trainer), [one.grad is not None for one in model[2].parameters()], said


def given_differently(differences: list[str]) -> dict[str, str]:
    """What is said on this rank where rank 1 is given something else."""
    from launched import group_of_ranks

    from evenstep import Logging, MapData, StreamData
    from evenstep.errors import ReplicaError
    from evenstep.parallel import Ddp, Fsdp

    group = group_of_ranks()
    said = {}
    for what in differences:
        is_other = group.rank == 1
        model = three_layers()
        if is_other and what == "width":
            model[2], model[4] = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
        if is_other and what == "kind":
            model[1] = nn.ReLU()
        if is_other and what == "format":
            model.float()
        if not is_other and what == "buffer":
            model.register_buffer("seen", torch.zeros(2))
        strategy = Fsdp(group, reduction="fast") if is_other and what == "strategy" else Ddp(group)
        train = Training(check_loss=not (is_other and what == "check_loss"))
        log = Logging(every_updates=3 if is_other and what == "log" else 10)
        cut: Any = {"global_batch_size": 8, "micro_batch_size": 1 if is_other and what.startswith("cut") else 2}
        stream = what == "cut of a stream"
        data = StreamData(SAMPLES, shared=True, **cut) if stream else MapData(SAMPLES, **cut)
        try:
            trainer_of(model, "", strategy=strategy, train=train, log=log, data=data).train()
        except ReplicaError as error:
            said[what] = str(error)
    return said


def changed_on_one_rank(what: str) -> int:
    """The updates of a run in which a hook changes something on the first rank only."""
    from evenstep import Hook

    class Change(Hook):
        first_rank_only = True

        def after_update(self, event: Any) -> None:
            if event.update == 2 and what == "lr":
                self.trainer.optimizer.param_groups[0]["lr"] = 0.5
            if event.update == 2 and what == "requires_grad":
                self.trainer.model[0].requires_grad_(True)

    return trainer_of(three_layers(), "ddp", hooks=[Change()]).train().update
