"""Plans, action by action: what a stage asks of its reducer and of the step of micro-batches that runs."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence

from evenstep.errors import TaskError
from evenstep.parallel import Group
from evenstep.parallel.reducer import Reducer
from evenstep.pipeline import SCHEDULES, Action, Layout, Op, Plan, executed
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.runner import Runner
from evenstep.pipeline.stage import Stage
from evenstep.pipeline.wire import Address, Wire, detached

ONE = Layout.chain(ranks=1)


def sequential(microbatches: list[int]) -> Plan:
    return SCHEDULES["sequential"].plans(ONE, microbatches)[0]


class Log(Reducer):
    """Writes down what it is asked for, as a reducer and as a step of micro-batches."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), Group())
        self.said: list[str] = []

    def arm(self) -> None:
        self.said.append("arm")

    def collect(self, microbatch: int) -> None:
        self.said.append(f"collect {microbatch}")

    def reduce(self) -> None:
        self.said.append("reduce")

    def unshard(self) -> None:
        self.said.append("unshard")

    def reshard(self) -> None:
        self.said.append("reshard")

    def forward(
        self, stage: Stage, received: Mapping[int, Any], microbatch: int
    ) -> tuple[Mapping[int, Any], Tensor | None]:
        assert stage.is_whole
        assert not received
        self.said.append(f"F{microbatch}")
        return {}, torch.tensor(float(microbatch))

    def backward(self, loss: Tensor, microbatch: int) -> None:
        assert loss.item() == microbatch
        self.said.append(f"B{microbatch}")

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, microbatch: int) -> None:
        self.said.append(f"done {microbatch}")

    def completed(self, microbatch: int) -> int | None:
        return microbatch

    def acted(self, op: Op) -> None: ...


def run(plan: Plan, log: Log) -> list[str]:
    Runner([Stage(nn.Identity(), log)]).run(plan, log)
    return log.said


def test_the_runner_does_what_the_plan_says_in_its_order() -> None:
    said = run(sequential([3, 5]), Log())
    assert said == ["F3", "B3", "done 3", "collect 3", "F5", "arm", "B5", "done 5", "collect 5", "reduce"]


def test_shards_are_gathered_and_freed_where_the_plan_says_so() -> None:
    said = run(executed(sequential([0]), [0], gathers=True), Log())
    assert said == ["unshard", "F0", "arm", "B0", "done 0", "collect 0", "reduce", "reshard"]


def test_what_waits_for_its_backward_is_let_go_when_an_action_raises() -> None:
    class Failing(Log):
        def backward(self, loss: Tensor, microbatch: int) -> None:
            raise ValueError("no")

    log = Failing()
    stage = Stage(nn.Identity(), log)
    both = tuple(Action(op, 0, number) for op in (Op.FORWARD, Op.BACKWARD) for number in (0, 1))
    with pytest.raises(ValueError, match="no"):
        Runner([stage]).run(both, log)
    with pytest.raises(KeyError):
        Runner([stage]).run((Action(Op.BACKWARD, 0, 1),), log)


def test_a_reduction_never_overtakes_that_of_a_later_stage() -> None:
    actions = [(Op.ARM, 0), (Op.BACKWARD, 0), (Op.ARM, 2), (Op.BACKWARD, 2), (Op.REDUCE, 2), (Op.REDUCE, 0)]
    plan = tuple(Action(op, stage, 5 if op is Op.BACKWARD else -1) for op, stage in actions)
    assert " ".join(map(str, executed(plan, [0, 2]))) == "0B5 2A 2B5 2R 0A 0R"
    assert " ".join(map(str, executed(plan, [0, 2], overlaps=False))) == "0B5 2B5 2A 2R 0A 0R"


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(0, 9), st.booleans(), st.booleans())
def test_stages_execute_the_checked_plan_in_one_order_on_all_replicas(
    name: str, ranks: int, microbatches: int, overlaps: bool, gathers: bool
) -> None:
    layout = SCHEDULES[name].layout(ranks)
    for rank, checked in enumerate(SCHEDULES[name].plans(layout, range(microbatches))):
        own = layout.stages_of(rank)
        plan = executed(checked, own, overlaps=overlaps, gathers=gathers)
        added = (Op.ARM, Op.UNSHARD, Op.RESHARD)
        assert [one for one in plan if one.op not in added] == [one for one in checked if one.op not in added]
        ends = [(plan[: len(own)], Op.UNSHARD), (plan[-len(own) :], Op.RESHARD)]
        assert [[Action(op, stage) for stage in own] == list(end) for end, op in ends] == [gathers] * 2
        reductions = [one for one in plan if one.op in (Op.ARM, Op.REDUCE)]
        assert reductions == [Action(op, stage) for stage in reversed(own) for op in (Op.ARM, Op.REDUCE)]


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).tanh())


def made(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(bias), Block(bias))


def gradients(model: nn.Module, x: Tensor, deferral: Deferral | None) -> list[Tensor | None]:
    """Of the input and the parameters, after two micro-batches; in two halves if there is a deferral."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        output = model(x)
        if deferral is not None:
            deferral.waiting = []
        output.backward(torch.ones_like(output))
        if deferral is not None:
            with torch.no_grad():
                for work in deferral.end():
                    work()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def all_equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None) and [
        a is None for a in left
    ] == [b is None for b in right]


@pytest.mark.parametrize(
    ("bias", "shape", "dtype"),
    [(True, (5, 8), torch.float32), (False, (2, 3, 4, 8), torch.float64), (True, (8,), torch.bfloat16)],
)
def test_two_halves_are_the_whole(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = gradients(made(bias=bias).to(dtype), x, None)
    for halves in (True, False):
        model, deferral = made(bias=bias).to(dtype), Deferral()
        prepare(model, deferral)
        assert all_equal(gradients(model, x, deferral if halves else None), wanted)


def hooked(model: nn.Sequential) -> None:
    """Gradients are masked and halved by hooks of the user's."""
    first, second = cast("nn.Linear", model[0].first), cast("nn.Linear", model[1].second)
    first.weight.register_hook(lambda gradient: gradient * (torch.arange(8) % 2))
    if second.bias is not None:
        second.bias.register_hook(lambda gradient: gradient / 2)


def normalised(model: nn.Sequential) -> None:
    """Weights are tensors that are computed of others, as `torch.nn.utils.weight_norm` has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(cast("nn.Linear", model[0].first))


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(cast("nn.Linear", model[1].first), "weight", amount=0.3)


@pytest.mark.parametrize(("change", "bias"), [(hooked, True), (normalised, False), (pruned, True)])
def test_weights_that_autograd_must_see_have_their_gradients_in_the_first_half(change: Any, bias: bool) -> None:
    x, found = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)), []
    for deferral in (None, Deferral()):
        model = made(bias=bias)
        if deferral is not None:
            prepare(model, deferral)
        change(model)
        found.append(gradients(model, x, deferral))
    assert all_equal(*found)


def test_frozen_parameters_get_none() -> None:
    x, found = torch.randn(5, 8), []
    for deferral in (None, Deferral()):
        model = made()
        cast("Any", model)[0].first.weight.requires_grad_(False)
        cast("Any", model)[1].second.bias.requires_grad_(False)
        if deferral is not None:
            prepare(model, deferral)
        found.append(gradients(model, x, deferral))
    assert all_equal(*found)


CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Registered:
    x: Any
    mask: Any = None


torch.export.register_dataclass(Registered)


def number(microbatch: int) -> Address:
    return Address("output", 0, 1, microbatch)


TREES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    (torch.ones(2, dtype=torch.bool), None, [torch.tensor(3, dtype=torch.int64)]),
    {"a": Pair(torch.zeros(0, 4), "name"), 3: 2.5},
    torch.ones(3, 2).t(),
    (torch.arange(12.0).view(4, 3)[:, 1:2], torch.arange(6.0).view(2, 3)[:, 0], torch.arange(3.0).expand(2, 3)),
    (torch.ones(5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)),
    (torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j, 3j]).conj().imag),
    None,
    (torch.ones(2), 1, "name"),
    (torch.ones(2), True, "name"),
    (Registered(torch.ones(2), torch.ones(2) > 0), 3),
]


def sent_over(group: Any, trees: list[Any], *, runs: int = 1, by_device: bool = False) -> list[list[Any]]:
    """The trees of several runs, as they arrive on the second of two ranks."""
    wire = Wire(group, CPU)
    wire.by_device = by_device
    arrived: list[list[Any]] = []
    for _ in range(runs):
        wire.begin()
        if group.rank == 0:
            for microbatch, tree in enumerate(trees):
                wire.send(number(microbatch), tree, 1)
            wire.flush()
        else:
            arrived.append([wire.receive(number(microbatch), 0) for microbatch in range(len(trees))])
    return arrived


def assert_same(arrived: Any, tree: Any) -> None:
    flat, wanted = (torch.utils._pytree.tree_flatten(each) for each in (arrived, tree))
    assert flat[1] == wanted[1]
    for mine, theirs in zip(flat[0], wanted[0], strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
            assert mine.data_ptr() % 64 == 0  # or kernels might round otherwise
        else:
            assert mine == theirs and type(mine) is type(theirs)


@pytest.mark.parametrize("by_device", [False, True])
def test_trees_of_all_forms_and_sizes_arrive_in_their_order(on_ranks: Any, by_device: bool) -> None:
    trees = [*TREES, *TREES, torch.ones(100), torch.ones(3), *reversed(TREES)]
    for run in on_ranks(2, lambda group: sent_over(group, trees, runs=2, by_device=by_device))[1]:
        for arrived, tree in zip(run, trees, strict=True):
            assert_same(arrived, tree)


@dataclass
class Hidden:
    x: Tensor


class Labelled(Tensor):
    """A tensor that may hold more than its numbers."""


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda x: {"h": Hidden(x)},
    "set": lambda x: frozenset([x]),
    "function": lambda x: (x, lambda y: y),
    "subclass": lambda x: {"h": x.as_subclass(Labelled)},
    "packed sequence": lambda x: pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_hide_a_gradient_are_refused(case: str) -> None:
    with pytest.raises(TaskError):
        detached(REFUSED[case](torch.ones(2, 3, requires_grad=True) * 2), "the output")
