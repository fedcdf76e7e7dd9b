"""What two real processes with FSDP2 do; `test_sharded.py` starts them.

Each check is a function of the group that returns what is to be compared; ranks run all of them in one process.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from evenstep import Ema, Failures, MapData, Mixture, Task, Trainer, Training, is_dummy_pass
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Uncertainty
from evenstep.parallel import Ddp, Fsdp, Group, Processes, Single, Strategy
from evenstep.train import FailurePolicy
from kit import Squares, filled

NOT_COMPARED: dict[str, Tensor] = {}  # what other ranks have of a run of one process: the first compares, and prints
DATA = [(torch.tensor([n / 9, 1.0, n % 2]), torch.tensor(n % 3 / 2)) for n in range(20)]


DOUBLE = [(x.double(), y.double()) for x, y in DATA]


class Heads(nn.Module):
    """A trunk of blocks and two heads, of which no batch uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.even, self.odd = nn.Linear(3, 1), nn.Linear(3, 1)
        filled(self, 5)

    def forward(self, points: Tensor) -> Tensor:
        for block in self.blocks:
            points = torch.tanh(block(points))
        return self.even(self.norm(points) if len(points) > 1 else points)


class Square(Squares):
    """Calls `spoil` before each forward."""

    def __init__(self, spoil: Callable[[], None] = lambda: None) -> None:
        self.spoil = spoil

    def inputs(self, batch: Any) -> Any:
        self.spoil()
        return batch[0]


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
        one = trainer(strategy, Squares(), model=model, train=Training(clip_norm=0.01))
        one.train()
        return values(one)

    return same(run(Fsdp(group)), run(Single()))


def a_head_without_work_keeps_parameters_and_state(group: Group) -> object:
    one = trainer(Fsdp(group, reduction="fast"))
    before = values(one)
    one.train()
    state = one.state_dict()
    return same(before, state["model"], "odd"), "odd.weight" in state["optimizer"]["state"]


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


class Calls(Squares):
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


class Counted(Squares):
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


class Several(nn.Module):
    """A trunk and a list of heads, each of which FSDP2 gathers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])
        filled(self, 6)

    def forward(self, points: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(points).tanh())


class OfHead(Squares):
    """Uses one head."""

    def __init__(self, head: int) -> None:
        self.head = head

    def inputs(self, batch: Any) -> Any:
        return {"points": batch[0], "head": self.head}


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


class Full(OfHead):
    """Runs out of memory once, when its inputs have been asked for `skip` times."""

    def __init__(self, head: int, skip: int) -> None:
        super().__init__(head)
        self.left = skip

    def inputs(self, batch: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise MemoryError("injected")
        return super().inputs(batch)

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient(group: Group) -> object:
    """By strategy and task; also in passes that count nowhere."""
    alone = _mixed(Single(), updates=2)
    alone.train()
    wanted, apart, struck = values(alone), list[float](), 0
    for rank, (kind, head) in enumerate(((partial(Fsdp, reduction="fast"), 0), (Fsdp, 1))):
        tasks: dict[str, OfHead] = {name: OfHead(place) for place, name in enumerate("abc")}
        tasks["abc"[head]] = full = Full(head, head if group.rank == rank else 99)
        one = _mixed(kind(group), task=tasks, updates=2)
        one.train()
        apart.append(near(values(one), wanted))
        struck += group.gather(full.left < 0)[rank]
    return struck, max(apart) < 1e-12


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
            task=Squares(),
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
        self.blocks = nn.ModuleList([filled(nn.Linear(3, 1).double(), 7)])
        self.scale = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def loss(self, output: Any, batch: Any) -> Tensor:
        wanted = self.blocks[0](batch[0]) * self.scale
        return ((output - wanted) ** 2).sum() + (wanted.squeeze(-1) - batch[1]).square().sum()


def what_a_task_trains_is_that_of_one_process(group: Group) -> object:
    """Reduced, clipped, averaged, saved whole, and gone on with by another strategy."""

    def run(strategy: Strategy, *, updates: int, state: Any = None) -> Any:
        if group.rank and isinstance(strategy, Ddp):
            return state, NOT_COMPARED
        model, task = Heads().double(), Centers()
        model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]  # whose statistics ranks average
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
        return state, {**state["model"], **{f"average {name}": value for name, value in state["ema"].items()}}

    (_, ours), (_, theirs) = run(Fsdp(group), updates=4), run(Ddp(), updates=4)
    half, _ = run(Fsdp(group), updates=2)
    (_, again), (_, moved) = (run(one, updates=4, state=half) for one in (Fsdp(group), Ddp()))
    return near(ours, theirs), near(ours, again), near(ours, moved), "task_parameters.blocks.0.weight" in ours


class Predicts(Squares):
    def predict(self, output: Tensor, batch: Any) -> Any:
        kept = {"out": output, "mask": output > 0, "half": output.bfloat16(), "none": output[:0]}
        return [kept, None if len(output) < 2 else ("several", output.sum())]


def shards_predict_what_one_process_does(group: Group) -> object:
    """In the order of the data, on the first rank."""

    def predicted(strategy: Strategy) -> list[Any]:
        one = trainer(strategy, Predicts(), model=filled(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))))
        some = MapData(DATA[:9], global_batch_size=5, micro_batch_size=2, shuffle=False)
        return [(list(each.samples), each.output) for each in one.predict(some)]

    (ours, spec), (alone, wanted) = tree_flatten(predicted(Fsdp(group))), tree_flatten(predicted(Single()))
    equal = [torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, alone, strict=False)]
    return spec == wanted and all(equal), len(ours) > 20


CHECKS = [
    clipped_large_and_odd_tensors_have_the_bits_of_one_process,
    a_head_without_work_keeps_parameters_and_state,
    a_dummy_pass_can_be_told_and_leaves_no_trace,
    a_rank_without_work_beside_one_with_several_passes,
    non_finite_numbers_of_an_unseen_pass_reach_nobody,
    an_update_that_raised_on_all_ranks_leaves_nothing_behind,
    methods_and_learned_coefficients_are_those_of_one_process,
    memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient,
    state_of_an_optimizer_that_has_stepped_is_cut,
    what_a_task_trains_is_that_of_one_process,
    shards_predict_what_one_process_does,
]


def found() -> dict[str, object]:
    group = Processes(torch.device("cpu"), timeout_s=60)
    made = {check.__name__: check(group) for check in CHECKS}
    group.gather(None)
    group.close()
    return made
