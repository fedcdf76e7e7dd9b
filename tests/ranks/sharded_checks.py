"""What two real processes with FSDP2 do; `test_sharded.py` starts them and reads what they print.

Each check is a function of the group that returns what is to be compared; ranks run all of them in one process.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, Failures, Loss, MapData, Mixture, Task, Trainer, Training, is_dummy_pass
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Uncertainty
from evenstep.data import AllTasks, RoundRobin
from evenstep.parallel import Ddp, Fsdp, Group, Processes, Single, Strategy
from evenstep.train import FailurePolicy

NOT_COMPARED: dict[str, Tensor] = {}  # what other ranks have of a run of one process: the first compares, and prints
DATA = [(torch.tensor([n / 9, 1.0, n % 2]), torch.tensor(n % 3 / 2)) for n in range(20)]


DOUBLE = [(x.double(), y.double()) for x, y in DATA]


class Heads(nn.Module):
    """A trunk of blocks and two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.even, self.odd = nn.Linear(3, 1), nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, points: Tensor, odd: bool = False) -> Tensor:
        for block in self.blocks:
            points = torch.tanh(block(points))
        points = self.norm(points) if len(points) > 1 else points
        return self.odd(points) if odd else self.even(points)


class Square(Task):
    """Uses the second head for no batch, or for those of rank `odd_rank`."""

    def __init__(self, odd_rank: int = -1, rank: int = 0, spoil: Callable[[], None] | None = None) -> None:
        self.odd, self.spoil = odd_rank == rank, spoil

    def inputs(self, batch: Any) -> Any:
        if self.spoil is not None:
            self.spoil()
        return {"points": batch[0], "odd": self.odd}

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum())


class Plain(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def trainer(strategy: Strategy, task: Any = None, *, samples: int = 20, **more: Any) -> Trainer:
    model = more.pop("model", None) or Heads()
    options: dict[str, Any] = {"updates": 3, "data": MapData(DATA[:samples], global_batch_size=8, micro_batch_size=2)}
    return Trainer(
        model=model,
        task=task or Square(),
        # torch plans fewer operations over shards for it than for AdamW
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5, foreach=True),
        device="cpu",
        strategy=strategy,
        # BatchNorm is left out where a batch is a single sample
        train=replace(more.pop("train", Training()), check_loss=False),
        **(options | more),
    )


def values(one: Trainer) -> dict[str, Tensor]:
    return one.state_dict()["model"]


def same(a: dict[str, Tensor], b: dict[str, Tensor], names: str = "") -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if names in name)


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    if a is NOT_COMPARED or b is NOT_COMPARED:
        return 0.0
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def clipped_large_and_odd_tensors_have_the_bits_of_one_process(group: Group) -> object:
    """Tensors of 8 pieces, of rows that 8 does not divide, of few elements, and of a single number."""

    def run(strategy: Strategy) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4096), nn.Linear(4096, 50), nn.Linear(50, 8), nn.PReLU(), nn.Linear(8, 1))
        one = trainer(strategy, Plain(), model=model, train=Training(clip_norm=0.01))
        one.train()
        return values(one)

    return same(run(Fsdp(group)), run(Single()))


def a_head_without_work_keeps_parameters_and_state(group: Group) -> object:
    one = trainer(Fsdp(group, reduction="fast"))
    before = values(one)
    one.train()
    state = one.state_dict()
    return same(before, state["model"], "odd"), "odd.weight" in state["optimizer"]["state"]


def a_rank_without_work_changes_nothing(group: Group) -> object:
    """One micro-batch an update: rank 1 has none. Its passes must leave no trace, in statistics neither."""
    data: Any = {"data": MapData(DATA[:6], global_batch_size=2, micro_batch_size=2)}
    ours, theirs = trainer(Fsdp(group, reduction="fast"), **data), trainer(Single(), **data)
    ours.train(), theirs.train()
    mean = values(ours)["norm.running_mean"]
    # Its own statistics never moved from 0, and the mean over ranks is what both have after each update.
    return near(
        {k: v for k, v in values(theirs).items() if "norm.r" not in k and "num" not in k}, values(ours)
    ) < 1e-6, bool(mean.isfinite().all())


class Experts(nn.Module):
    """Counts rows in a buffer, and real rows in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("rows", torch.zeros(()))
        self.dummies, self.real = 0, 0

    def forward(self, points: Tensor) -> Tensor:
        self.rows += len(points)
        self.dummies += is_dummy_pass()
        self.real += not is_dummy_pass()
        return self.linear(points)


class Calls(Plain):
    calls = 0

    def loss(self, output: Any, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(output, batch)


def a_dummy_pass_can_be_told_and_leaves_no_trace(group: Group) -> object:
    """One micro-batch an update: rank 1 has none."""
    model, task = Experts(), Calls()
    data = MapData(DATA[:6], global_batch_size=2, micro_batch_size=2)
    trainer(Fsdp(group), task, model=model, data=data).train()
    found = sorted(group.gather((model.real, model.dummies, task.calls)))
    return found, float(model.rows) > 0


class Counted(Plain):
    """Whose first half of each global batch has no weight."""

    def weight(self, batch: Any) -> float:
        return float((batch[0][:, 0] > 0.2).sum())

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2 * (batch[0][:, 0] > 0.2)).sum()


def a_rank_without_work_beside_one_with_several_passes(group: Group) -> object:
    """On copies that each rank holds whole nothing is gathered, so nothing but the order tells passes apart."""
    found: list[float] = []
    for shard_ranks, kind in (
        (1, partial(Fsdp, reduction="fast")),
        (2, partial(Fsdp, reduction="fast")),
        (1, Fsdp),
        (2, Fsdp),
    ):
        ones: list[Trainer] = []
        for strategy in (Single(), kind(group, shard_ranks=shard_ranks)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
            data = MapData(DATA[:4] + DATA[:4], global_batch_size=4, micro_batch_size=1, shuffle=False)
            ones.append(trainer(strategy, Counted(), model=model, data=data))
            ones[-1].train()
        found.append(near(*map(values, ones)))
    return max(found) < 1e-6


def non_finite_numbers_of_an_unseen_pass_reach_nobody(group: Group) -> object:
    """Update 1 is skipped because its batch is not finite; rank 1, without work after it, runs that batch unseen."""
    bad = [(torch.full((3,), torch.inf), torch.tensor(0.0))] * 4 + DATA[:2]
    data = MapData(bad, global_batch_size=4, micro_batch_size=2, shuffle=False)
    one = trainer(
        Fsdp(group, reduction="fast"),
        data=data,
        updates=None,
        epochs=1,
        failures=Failures(non_finite=FailurePolicy("skip", limit=2)),
    )
    result = one.train()
    return result.update, all(bool(value.isfinite().all()) for value in values(one).values())


def an_update_that_raised_on_all_ranks_leaves_nothing_behind(group: Group) -> object:
    def train(strategy: Strategy, fail_at: int) -> dict[str, Tensor]:
        calls = [0]

        def spoil() -> None:
            calls[0] += 1
            if calls[0] == fail_at:
                raise ValueError("this once")

        one = trainer(strategy, Square(spoil=spoil), samples=16)
        try:
            one.train()
        except ValueError:
            one.train()
        return values(one)

    # Each rank has two micro-batches: the fourth pass is the second of update 2, after a backward.
    return [same(train(kind(group), 4), train(kind(group), 0)) for kind in (Fsdp, partial(Fsdp, reduction="fast"))]


def sixteen_bit_parameters_train(group: Group) -> object:
    def plain() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    class Points(Square):
        def inputs(self, batch: Any) -> Any:
            return batch[0]

    ours, theirs = (
        trainer(strategy, Points(), model=plain(), precision=precision)
        for strategy, precision in ((Fsdp(group, reduction="fast"), "bf16-true"), (Single(), "32-true"))
    )
    ours.train(), theirs.train()
    return 0 < near(values(theirs), values(ours)) < 0.03, sorted({str(value.dtype) for value in values(ours).values()})


class Several(nn.Module):
    """A trunk and a list of heads, each of which FSDP2 gathers by itself."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(6)
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, points: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(points).tanh())


class OfHead(Square):
    """Uses one head."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head

    def inputs(self, batch: Any) -> Any:
        return {"points": batch[0], "head": self.head}


def several_tasks_whose_heads_are_gathered_one_by_one(group: Group) -> object:
    def run(strategy: Strategy, mixing: Any) -> dict[str, Tensor]:
        if group.rank and isinstance(strategy, Single):
            return NOT_COMPARED
        sizes = {"a": 8, "b": 6, "c": 2}  # 4, 3 and 1 micro-batches
        data = {name: MapData(DATA, global_batch_size=size, micro_batch_size=2) for name, size in sizes.items()}
        valid = {"valid": Mixture(data, end="max")}
        one = trainer(
            strategy,
            {name: OfHead(head) for head, name in enumerate(sizes)},
            model=Several(),
            data=Mixture(data, mixing=mixing),
            evaluations=valid,
        )
        one.train()
        return values(one) | {"loss": torch.tensor(one.evaluate()["valid"]["c/loss"])}

    found = [
        near(run(Fsdp(group, reduction="fast"), mixing()), run(Single(), mixing())) < 1e-6
        for mixing in (AllTasks, RoundRobin)
    ]
    ordered = near(run(Fsdp(group), AllTasks()), run(Single(), AllTasks())) < 1e-6
    return [*found, ordered]


def _mixed(strategy: Strategy, **more: Any) -> Trainer:
    """Three tasks, of which one has a micro-batch on one rank only."""
    sizes = {"a": 8, "b": 6, "c": 2}
    data = {name: MapData(DOUBLE, global_batch_size=size, micro_batch_size=2) for name, size in sizes.items()}
    task = more.pop("task", None) or {name: OfHead(head) for head, name in enumerate(sizes)}
    return trainer(
        strategy, task, model=Several().double(), **{"train": Training(clip_norm=0.1), "data": Mixture(data)} | more
    )


def methods_and_learned_coefficients_are_those_of_one_process(group: Group) -> object:
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "PcGrad": lambda: {"train": Training(clip_norm=0.1, combine=PcGrad())},
        "AlignedMtl": lambda: {"train": Training(clip_norm=0.1, combine=AlignedMtl())},
        "GradNorm": lambda: {"train": Training(clip_norm=0.1, combine=GradNorm())},
        "Uncertainty": lambda: {"train": Training(clip_norm=0.1, coefficients=Uncertainty(regression=("a",)))},
        "sum": dict,
    }

    def trained(strategy: Strategy, case: Callable[[], dict[str, Any]]) -> dict[str, Tensor]:
        if group.rank and type(strategy) in (Single, Ddp):
            return NOT_COMPARED
        one = _mixed(strategy, **case())
        one.train()
        return values(one)

    wrong: list[str] = []
    for name, case in cases.items():
        apart = near(trained(Fsdp(group), case), trained(Ddp(), case))
        if apart:
            wrong.append(f"{name} {apart:g}")
    return wrong


class Late(OfHead):
    late_weight = True

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(super().loss(output, batch).sum, weight=len(batch[0]))


def a_late_weight_beside_others_is_divided(group: Group) -> object:
    def run(strategy: Strategy, late: bool) -> dict[str, Tensor]:
        kinds = (OfHead, OfHead, Late) if late else (OfHead,) * 3
        one = _mixed(
            strategy, task={name: kind(head) for head, (name, kind) in enumerate(zip("abc", kinds, strict=True))}
        )
        one.train()
        return values(one)

    wanted = run(Single(), late=False)
    return [near(run(kind(group), late=True), wanted) < 1e-9 for kind in (Fsdp, Fsdp)]


class Backward(torch.autograd.Function):
    """The identity, whose backward does something."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.act()
        return gradients[0], None


class Full(OfHead):
    """Runs out of memory once, when `phase` has been passed `skip` times; also in passes that count nowhere."""

    def __init__(self, head: int, phase: str, skip: int) -> None:
        super().__init__(head)
        self.phase, self.skip, self.struck = phase, skip, False

    def strike(self, phase: str) -> None:
        if phase != self.phase or self.struck:
            return
        self.skip -= 1
        if self.skip < 0:
            self.struck = True
            raise MemoryError("injected")

    def inputs(self, batch: Any) -> Any:
        self.strike("inputs")
        return super().inputs(batch)

    def postprocess(self, output: Any, batch: Any) -> Any:
        self.strike("postprocess")
        return Backward.apply(output, partial(self.strike, "backward"))

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient(group: Group) -> object:
    """Each task, phase and strategy at least once."""
    return _runs_out(
        group, [(partial(Fsdp, reduction="fast"), 0, "backward"), (Fsdp, 1, "inputs"), (Fsdp, 2, "postprocess")]
    )


def _runs_out(group: Group, cases: list[tuple[Any, int, str]]) -> object:
    """How often memory ran out as it was to, and where the gradient was another."""
    alone = _mixed(Single(), updates=2)
    alone.train()
    wanted, wrong, struck = values(alone), list[str](), 0
    for number, (kind, head, phase) in enumerate(cases):
        rank, skip = number % 2, (head + number) % 3 % (2 if head == 2 else 3)
        tasks: dict[str, OfHead] = {name: OfHead(place) for place, name in enumerate("abc")}
        tasks["abc"[head]] = full = Full(head, phase if group.rank == rank else "", skip)
        one = _mixed(kind(group), task=tasks, updates=2)
        one.train()
        apart = near(values(one), wanted)
        struck += group.gather(full.struck)[rank]
        if apart > 1e-12:
            wrong.append(f"{kind.__name__}, task {head}, {phase}, rank {rank}: {apart:g}")
    return struck, wrong


def an_update_of_three_tasks_reduces_each_unit_once(group: Group) -> object:
    import torch.distributed as dist

    counts: list[int] = []
    whole = dist.reduce_scatter_single

    def counted(*args: Any, **more: Any) -> Any:
        counts[-1] += 1
        return whole(*args, **more)

    for updates in (1, 2):
        one = _mixed(Fsdp(group, reduction="fast"), updates=updates)
        counts.append(0)
        dist.reduce_scatter_single = counted
        one.train()
        dist.reduce_scatter_single = whole
    return counts[1] - counts[0]  # three heads, and the rest


def state_of_an_optimizer_that_has_stepped_is_cut(group: Group) -> object:
    def ended(strategy: Strategy) -> tuple[int, Any]:
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        one = Trainer(
            model=model,
            task=Plain(),
            optimizer=optimizer,
            data=MapData(DATA, global_batch_size=8, micro_batch_size=2),
            updates=3,
            device="cpu",
            strategy=strategy,
        )
        averages: list[Any] = [state["exp_avg"] for state in optimizer.state.values()]
        held = sum(getattr(average, "_local_tensor", average).numel() for average in averages)
        one.train()
        state = one.state_dict()
        return held, {**state["model"], **state["optimizer"]["state"]["0.weight"]}

    (whole, wanted), (cut, found) = ended(Ddp()), ended(Fsdp(group))
    return [cut < whole, all(torch.equal(found[name], value) for name, value in wanted.items())]


class Centers(Task):
    """The distance to the trained center of a label, in a block of its own, times a trained scale."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.blocks = nn.ModuleList([nn.Linear(3, 1).double()])
        self.scale = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        with torch.no_grad():
            for one in self.blocks.parameters():
                one.copy_(torch.randn(one.shape, generator=generator))

    def loss(self, output: Any, batch: Any) -> Tensor:
        wanted = self.blocks[0](batch[0]) * self.scale
        return ((output - wanted) ** 2).sum() + (wanted.squeeze(-1) - batch[1]).square().sum()


def what_a_task_trains_is_that_of_one_process(group: Group) -> object:
    """Reduced, clipped, averaged, saved whole, gone on with by another strategy; on a model in lists or in a row."""

    def run(strategy: Strategy, kind: Callable[[], nn.Module], *, updates: int, state: Any = None) -> Any:
        if group.rank and type(strategy) in (Single, Ddp):
            return state, NOT_COMPARED
        model, task = kind(), Centers()
        groups = [{"params": list(model.parameters())}, {"params": [*task.blocks.parameters(), task.scale]}]
        one = Trainer(
            model=model,
            task=task,
            optimizer=torch.optim.AdamW(groups, lr=0.05),
            data=MapData(DOUBLE, global_batch_size=8, micro_batch_size=2),
            strategy=strategy,
            updates=updates,
            device="cpu",
            train=Training(clip_norm=0.5, ema=Ema(decay=0.7), check_loss=False),
        )
        if state is not None:
            one.load_state_dict(state)
        one.train()
        state = one.state_dict()
        averages = {f"average {name}": value for name, value in state["ema"].items()}
        return state, {**state["model"], **averages}

    def row() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def listed() -> nn.Module:
        model = Heads().double()
        model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]  # whose statistics ranks average
        return model

    wrong: list[str] = []
    for name, kind in (("row", row), ("listed", listed)):
        for shards, alone in ((partial(Fsdp, reduction="fast"), Single), (Fsdp, Ddp)):
            (_, ours), (_, theirs) = run(shards(group), kind, updates=4), run(alone(), kind, updates=4)
            half, _ = run(shards(group), kind, updates=2)
            (_, again), (_, moved) = (run(one, kind, updates=4, state=half) for one in (shards(group), alone()))
            exact = 0.0 if shards is Fsdp else 1e-12
            apart = {"one process": near(ours, theirs), "resumed": near(ours, again), "moved": near(ours, moved)}
            wrong += [f"{name} {shards.__name__} {what} {far:g}" for what, far in apart.items() if far > exact]
            if not any(one.startswith("task_parameters.blocks") for one in ours):
                wrong.append("no task_parameters")
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=60)
    found = {name: globals()[name](group) for name in sys.argv[2:]}  # the first is a folder, which nothing here needs
    if group.rank == 0:
        print(json.dumps(found))
    group.close()


if __name__ == "__main__":
    main()
