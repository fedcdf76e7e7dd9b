"""Ranks that step alone, as threads, against the methods' own definitions in a few lines of float64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from launched import digest
from torch import Tensor, nn

from evenstep import Ema, Engine, Local, Mesh, Ordered, PipelineModel, Task, Training
from evenstep.errors import LostRankError, NonFiniteError, ReplicaError
from evenstep.parallel import Ddp, Group, Strategy, mapped
from evenstep.pipeline import Layers

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
Batch = tuple[Tensor, Tensor]
Parameters = list[Tensor]
UPDATES, RATE = 13, 0.05


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def model(seed: int = 3) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def batches(update: int, rank: int) -> list[Batch]:
    """Two micro-batches of two to four samples, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * update + rank)
    sizes = [2 + (update + rank) % 3, 2]
    random = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]
    return [(one[:, :2], one[:, 2]) for one in random]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


class Alone:
    """One rank of the reference: a model of its own, stepped by the mean gradient of its own samples, clipped."""

    def __init__(self, rank: int, optimizer: Callable[..., torch.optim.Optimizer], clip: float) -> None:
        self.rank, self.clip, self.net = rank, clip, model()
        self.parameters = list(self.net.parameters())
        self.optimizer = optimizer(self.parameters)

    def gradient(self, update: int) -> tuple[Parameters, int]:
        x, y = (torch.cat(part) for part in zip(*batches(update, self.rank), strict=True))
        total = ((self.net(x).squeeze(-1) - y) ** 2).sum()
        return list(torch.autograd.grad(total, self.parameters)), len(x)

    def step(self, update: int, rate: float) -> None:
        total, count = self.gradient(update)
        self.take([one / count for one in total], rate)

    def take(self, gradients: Parameters, rate: float) -> None:
        norm = torch.sqrt(sum(((one**2).sum() for one in gradients), torch.zeros((), dtype=torch.float64)))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * min(1.0, self.clip / (float(norm) + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)


def mean(ranks: list[Alone]) -> Parameters:
    columns = zip(*(one.parameters for one in ranks), strict=True)
    return [torch.stack([one.detach() for one in column]).mean(0) for column in columns]


Outer = Callable[[Parameters, float], Parameters]  # (the mean, the inner rate) → what ranks go on with


def average(start: Parameters) -> Outer:
    """Local SGD (Lin et al. 2018): parameters are averaged."""
    return lambda mean, rate: mean


def bmuf(*, nesterov: bool, eta: float, zeta: float) -> Callable[[Parameters], Outer]:
    """Chen & Huo 2016: W is the global model, Δ its filtered update; with Nesterov ranks begin with W + η·Δ."""

    def begin(start: Parameters) -> Outer:
        w, begun, delta = start, start, [torch.zeros_like(one) for one in start]

        def act(mean: Parameters, rate: float) -> Parameters:
            nonlocal w, begun, delta
            delta = [eta * d + zeta * (m - b) for d, m, b in zip(delta, mean, begun, strict=True)]
            w = [one + d for one, d in zip(w, delta, strict=True)]
            begun = [one + eta * d for one, d in zip(w, delta, strict=True)] if nesterov else w
            return begun

        return act

    return begin


def slowmo(*, alpha: float, beta: float) -> Callable[[Parameters], Outer]:
    """Wang et al. 2019: u ← β·u + (x₀ - x_τ)/γ,  x₀ ← x₀ - α·γ·u, with γ the inner rate."""

    def begin(start: Parameters) -> Outer:
        x, u = start, [torch.zeros_like(one) for one in start]

        def act(mean: Parameters, rate: float) -> Parameters:
            nonlocal x, u
            u = [beta * v + (begun - end) / rate for v, begun, end in zip(u, x, mean, strict=True)]
            x = [begun - alpha * rate * v for begun, v in zip(x, u, strict=True)]
            return x

        return act

    return begin


def diloco(start: Parameters) -> Outer:
    """Douillard et al. 2023: torch's own SGD with Nesterov momentum on Δ = θ - mean."""
    theta = [one.clone().requires_grad_() for one in start]
    outer = torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True)

    def act(mean: Parameters, rate: float) -> Parameters:
        for one, m in zip(theta, mean, strict=True):
            one.grad = one.detach() - m
        outer.step()
        return [one.detach().clone() for one in theta]

    return act


METHODS: dict[str, tuple[dict[str, Any], Callable[[Parameters], Outer]]] = {
    "local SGD": ({}, average),
    "BMUF, classical": ({"outer_lr": 1.2, "outer_momentum": 0.6}, bmuf(nesterov=False, eta=0.6, zeta=1.2)),
    "BMUF, Nesterov": ({"outer_momentum": 0.75, "nesterov": True}, bmuf(nesterov=True, eta=0.75, zeta=1.0)),
    "SlowMo": ({"outer_lr": 0.9, "outer_momentum": 0.7, "by_inner_rate": True}, slowmo(alpha=0.9, beta=0.7)),
    "DiLoCo": ({"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}, diloco),
}


def rate_of(update: int) -> float:
    """A linear fall from the full rate to a tenth of it over 20 updates: the engine's own schedule, written out."""
    return RATE * (1 - 0.9 * (update - 1) / 19)


def reference(
    ranks: int,
    method: Callable[[Parameters], Outer],
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    every: int,
    synchronous: int = 0,
    reset: bool = False,
    rates: Callable[[int], float] = lambda update: RATE,
) -> tuple[list[Parameters], Parameters]:
    """The parameters of each rank after UPDATES updates, and those that they share."""
    everybody = [Alone(rank, optimizer, clip=0.8) for rank in range(ranks)]
    shared = [one.detach().clone() for one in everybody[0].parameters]
    for update in range(1, synchronous + 1):
        found = [one.gradient(update) for one in everybody]
        count = sum(size for _, size in found)
        total = [torch.stack(column).sum(0) / count for column in zip(*(theirs for theirs, _ in found), strict=True)]
        for one in everybody:
            one.take(total, rates(update))
        shared = mean(everybody)
    outer = method(shared)
    for update in range(synchronous + 1, UPDATES + 1):
        for one in everybody:
            one.step(update, rates(update))
        if (update - synchronous) % every == 0:
            shared = outer(mean(everybody), rates(update))
            for one in everybody:
                one.put(shared)
                one.optimizer = optimizer(one.parameters) if reset else one.optimizer
    return [[p.detach() for p in one.parameters] for one in everybody], shared


def engine(
    group: Group,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    replicas: Callable[[Group], Strategy] = Ddp,
    scheduled: bool = False,
    net: nn.Module | None = None,
    average: Ema | None = None,
    **settings: Any,
) -> Engine:
    net = model() if net is None else net
    return Engine(
        net,
        Square(),
        optimizer(net.parameters()),
        strategy=Local(replicas(group), **settings),
        train=Training(clip_norm=0.8, check_loss=False, ema=average),
        lr_schedule={"kind": "linear", "end_factor": 0.1} if scheduled else None,
        updates=20 if scheduled else None,
        device="cpu",
    )


def shown(one: Engine) -> Parameters:
    with one.evaluating():
        return [parameter.detach().clone() for parameter in one.model.parameters()]


def held(one: Engine) -> Parameters:
    return [parameter.detach().clone() for parameter in one.model.parameters()]


def run(one: Engine, rank: int, updates: int = UPDATES) -> Engine:
    while one.progress.update < updates:
        one.update(*batches(one.progress.update + 1, rank))
    return one


def far(one: Sequence[Parameters], other: Sequence[Parameters]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).abs().max()) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("replicas", [Ddp, Ordered])
@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_its_definition(on_ranks: OnRanks, name: str, replicas: Any) -> None:
    settings, method = METHODS[name]
    more: dict[str, Any] = {"every_updates": 4, "synchronous_updates": 3, "scheduled": True}

    def act(group: Group) -> tuple[Parameters, Parameters]:
        one = run(engine(group, replicas=replicas, **settings, **more), group.rank)
        return held(one), shown(one)

    own, shared = reference(3, method, sgd, every=4, synchronous=3, rates=rate_of)
    found = on_ranks(3, act)
    assert far([theirs for theirs, _ in found], own) < 1e-12
    assert far([theirs for _, theirs in found], [shared] * 3) < 1e-12


@pytest.mark.parametrize("state", ["keep", "reset"])
def test_each_rank_keeps_or_forgets_its_own_optimizer_state(on_ranks: OnRanks, state: str) -> None:
    settings, method = METHODS["DiLoCo"]

    def act(group: Group) -> Parameters:
        return held(run(engine(group, adamw, every_updates=5, inner_state=state, **settings), group.rank))

    own, _ = reference(2, method, adamw, every=5, reset=state == "reset")
    assert far(on_ranks(2, act), own) < 1e-12


STREAMED = {"fragments": 2, "overlap_updates": 1, "own_share": 0.25, **METHODS["DiLoCo"][0]}


def streamed(ranks: int, *, every: int, overlap: int, alpha: float) -> tuple[list[Parameters], Parameters]:
    """Streaming DiLoCo (Douillard et al. 2025) of two fragments, the first weight and the rest, H / 2 apart."""
    everybody = [Alone(rank, sgd, clip=0.8) for rank in range(ranks)]
    shared = [one.detach().clone() for one in everybody[0].parameters]
    fragments = ([0], [1, 2, 3])
    outer = [diloco([shared[place] for place in places]) for places in fragments]
    sent: dict[int, tuple[int, Parameters]] = {}
    for update in range(1, UPDATES + 1):
        for one in everybody:
            one.step(update, RATE)
        for number, places in enumerate(fragments):
            if update % every == number * every // 2:
                sent[number] = update, [mean(everybody)[place] for place in places]
            if number in sent and sent[number][0] + overlap == update:
                for place, value in zip(places, outer[number](sent[number][1], RATE), strict=True):
                    shared[place] = value
                    for one in everybody:
                        one.parameters[place].data.mul_(alpha).add_(value, alpha=1 - alpha)
    return [[p.detach() for p in one.parameters] for one in everybody], shared


@pytest.mark.parametrize(("overlap", "alpha"), [(0, 0.0), (1, 0.25), (3, 0.5)])
@pytest.mark.parametrize("replicas", [Ddp, Ordered])
def test_streaming_is_its_definition(on_ranks: OnRanks, replicas: Any, overlap: int, alpha: float) -> None:
    settings = {**STREAMED, "overlap_updates": overlap, "own_share": alpha}

    def act(group: Group) -> tuple[Parameters, Parameters]:
        one = run(engine(group, replicas=replicas, every_updates=4, **settings), group.rank)
        return held(one), shown(one)

    own, shared = streamed(3, every=4, overlap=overlap, alpha=alpha)
    found = on_ranks(3, act)
    assert far([theirs for theirs, _ in found], own) < 1e-12
    assert far([theirs for _, theirs in found], [shared] * 3) < 1e-12


@pytest.mark.parametrize("replicas", [Ddp, Ordered])
@pytest.mark.parametrize("has_come", [False, True])
def test_a_mean_on_its_way_that_has_come_to_one_rank_is_that_of_all_and_else_of_those_that_are_there(
    on_ranks: OnRanks, has_come: bool, replicas: Any
) -> None:
    def act(group: Group) -> tuple[Tensor, Tensor]:
        one = run(engine(group, replicas=replicas, every_updates=4, **STREAMED), group.rank, updates=4)
        assert one.reducers.alone is not None
        ((_, mean),) = vars(one.reducers.alone)["_flight"].values()
        if has_come and group.rank == 1:
            mean.values()["0.weight"].add_(1.0)  # as it would be with what a lost rank had sent
        elif replicas is Ordered:
            mean.break_off()  # it has come as it was sent
        one.reducers.alone.settle_means(before=5)
        return mean.values()["0.weight"], held(one)[0]

    found = on_ranks(3, act)
    wanted = torch.stack([own for _, own in found]).mean(0) + has_come
    assert far([[come for come, _ in found]], [[wanted] * 3]) < 1e-12


@pytest.mark.parametrize("stop", [3, 4, 6, 9])
@pytest.mark.parametrize("settings", [METHODS["SlowMo"][0], STREAMED], ids=["SlowMo", "streamed"])
def test_a_run_goes_on_in_the_midst_of_a_period_with_the_same_bits(
    on_ranks: OnRanks, settings: dict[str, Any], stop: int
) -> None:
    def act(group: Group) -> tuple[Any, Any]:
        def fresh() -> Engine:
            net = nn.Sequential(*model(), nn.BatchNorm1d(1, momentum=0.3).double())
            return engine(group, adamw, net=net, every_updates=4, synchronous_updates=1, **settings)

        whole = run(fresh(), group.rank, updates=11)
        begun = run(fresh(), group.rank, updates=stop)
        again = fresh()
        again.load_state_dict(copied(begun.state_dict()))
        return digest(run(again, group.rank, updates=11).state_dict()), digest(whole.state_dict())

    found = on_ranks(2, act)
    assert len({one for pair in found for one in pair}) == 1


def copied(tree: Any) -> Any:
    return mapped(tree, torch.clone)


class Momentum(nn.Module):
    """A line, and a frozen one that follows it in forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.key = nn.Linear(2, 1).double(), nn.Linear(2, 1).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.key.weight.lerp_(self.line.weight.detach() + x.mean(0), 0.1)
        return self.line(x) - self.key(x)


@pytest.mark.parametrize("holds", [True, False])
def test_frozen_parameters_that_forwards_move_are_shared_if_the_optimizer_holds_them_and_else_refused(
    on_ranks: OnRanks, holds: bool
) -> None:
    def chosen(parameters: Any) -> torch.optim.Optimizer:
        return adamw([one for one in parameters if holds or one.requires_grad])

    def act(group: Group) -> Any:
        one = engine(group, chosen, net=Momentum(), every_updates=3)
        try:
            return held(run(one, group.rank, updates=6))
        except ReplicaError as error:
            return one.progress.update, str(error)

    first, second = on_ranks(2, act)
    if holds:
        assert far([first], [second]) == 0
    else:
        assert first == second and first[0] == 3 and "first of `key.weight`" in first[1]


class Tables(nn.Module):
    """A line whose forwards make a table, or make it larger, once they see what it is for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.line, self.kind = nn.Linear(2, 1).double(), kind
        table = None if kind == "made" else torch.ones(1, dtype=torch.float64)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape != (2,):
            self.table = torch.ones(2, dtype=torch.float64)
        return self.line(x * self.table)


@pytest.mark.parametrize("together", [0, 2])
@pytest.mark.parametrize("kind", ["made", "enlarged"])
def test_tables_that_forwards_make_or_enlarge_are_left_to_each_rank(
    on_ranks: OnRanks, kind: str, together: int
) -> None:
    def act(group: Group) -> list[Parameters]:
        found = list[Parameters]()
        for build in (lambda: Tables(kind), lambda: nn.Linear(2, 1).double()):
            nets = build(), build()
            for net in nets:
                nn.utils.vector_to_parameters(torch.full((3,), 0.1, dtype=torch.float64), net.parameters())
            settings = {"every_updates": 3, "synchronous_updates": together}
            one, again = (engine(group, net=net, average=Ema(decay=0.5), **settings) for net in nets)
            again.load_state_dict(copied(run(one, group.rank, updates=4).state_dict()))
            found.append([*held(one), *shown(one), *held(again)])
        return found

    assert all(far([first], [second]) == 0 for first, second in on_ranks(2, act))


@pytest.mark.parametrize("name", METHODS)
def test_replicas_in_stages_are_the_same_definition(on_ranks: OnRanks, name: str) -> None:
    settings, method = METHODS[name]

    def act(group: Group) -> tuple[int, Parameters, Parameters]:
        mesh = Mesh.of(group, pipeline=2)
        net = PipelineModel(model(), mesh=mesh, split_at=["2"])
        one = engine(mesh.data, net=net, every_updates=4, synchronous_updates=3, scheduled=True, **settings)
        run(one, mesh.data.rank)
        return mesh.data.rank, held(one), shown(one)

    own, shared = reference(2, method, sgd, every=4, synchronous=3, rates=rate_of)
    for rank, (replica, mine, common) in enumerate(on_ranks(4, act)):
        stage = slice(0, 2) if rank < 2 else slice(2, 4)
        assert far([mine, common], [own[replica][stage], shared[stage]]) < 1e-12


def layers(*, tied: bool) -> Layers:
    """Some that differ in size, with running statistics; of three equal ones two may be one."""
    generator = torch.Generator().manual_seed(5)
    middle = [[nn.Linear(4, 4), nn.Tanh()] for _ in range(3)]
    parts = [nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=0.3), *(part for two in middle for part in two)]
    parts = [part.double() for part in (*parts, nn.Linear(4, 1))]
    with torch.no_grad():
        for one in (one for part in parts for one in part.parameters()):
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) / 2)
    made = Layers.of(parts)
    return Layers(made.layers, ties=(("2.weight", "6.weight"),) if tied else ())


@pytest.mark.parametrize(
    ("schedule", "tied", "settings"),
    [
        ("1f1b", True, STREAMED),
        ("interleaved", True, {**METHODS["SlowMo"][0], "synchronous_updates": 1}),
        ("interleaved", False, {**STREAMED, "fragments": 3, "inner_state": "reset"}),
        ("zb_v", True, {"fragments": 4, "replicas": Ordered}),
    ],
)
def test_in_stages_a_run_has_all_bits_of_whole_replicas_also_resumed_as_such(
    on_ranks: OnRanks, schedule: str, tied: bool, settings: dict[str, Any]
) -> None:
    """Of what is shared, each replica's own parameters and optimizer, means on their way, and the average."""

    def fresh(group: Group, pipeline: int) -> tuple[Mesh, Engine]:
        mesh = Mesh.of(group, pipeline=pipeline)
        net = PipelineModel(layers(tied=tied), mesh=mesh, schedule=schedule)
        more: dict[str, Any] = {"replicas": Ddp, **settings}
        return mesh, engine(mesh.data, adamw, net=net, every_updates=4, average=Ema(decay=0.8), **more)

    def ran(ranks: int, pipeline: int, updates: int, state: Any = None) -> Any:
        def act(group: Group) -> Any:
            mesh, one = fresh(group, pipeline)
            if state is not None:
                one.load_state_dict(copied(state))
            return copied(run(one, mesh.data.rank, updates=updates).state_dict())

        return on_ranks(ranks, act)[0]

    def same(one: Any, other: Any) -> bool:
        parts = ("model", "ema", "precision", "trained", "progress", "local")
        return all(digest(one[part]) == digest(other[part]) for part in parts)

    whole, staged = ran(2, 1, 11), ran(4, 2, 11)
    assert same(staged, whole)
    for stop in (3, 5):
        assert same(ran(4, 2, 11, ran(2, 1, stop)), whole) and same(ran(2, 1, 11, ran(4, 2, stop)), whole)


def test_a_replica_in_stages_whose_gradient_is_not_finite_leaves_its_own_step_out(on_ranks: OnRanks) -> None:
    def ran(ranks: int, pipeline: int) -> Any:
        def act(group: Group) -> Any:
            mesh = Mesh.of(group, pipeline=pipeline)
            one = engine(mesh.data, adamw, net=PipelineModel(layers(tied=True), mesh=mesh), every_updates=4)
            for update in range(1, 7):
                bad = torch.nan if (update, mesh.data.rank) == (3, 1) else 1.0
                one.update(*((x * bad, y) for x, y in batches(update, mesh.data.rank)))
            state = one.state_dict()
            return digest([state[part] for part in ("model", "local")])

        return on_ranks(ranks, act)[0]

    assert ran(4, 2) == ran(2, 1)


def test_what_is_wrong_in_one_stage_of_one_replica_stops_all_alike_in_the_next_share(on_ranks: OnRanks) -> None:
    def act(group: Group) -> list[str]:
        said: list[str] = []
        for wrong in ("number", "rate"):
            mesh = Mesh.of(group, pipeline=2)
            one = engine(mesh.data, net=PipelineModel(model(), mesh=mesh, split_at=["2"]), every_updates=4)
            run(one, mesh.data.rank, updates=3)
            if group.rank == 1 and wrong == "number":
                one.model.get_submodule("0").bias.data.fill_(torch.inf)
            if group.rank == 1 and wrong == "rate":
                one.optimizer.param_groups[0]["lr"] = 0.5
            with pytest.raises((NonFiniteError, ReplicaError)) as caught:
                one.reducers.after_update(4)
            said.append(str(caught.value))
        return said

    for number, rate in on_ranks(4, act):
        assert "after update 4 replica 1 holds parameters that are inf or NaN" in number
        assert "at another learning rate" in rate


class Tied(nn.Module):
    """One weight under two names, and a part that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = model()[0], nn.Linear(5, 1).double()
        self.again, self.norm = nn.Linear(2, 5).double(), nn.BatchNorm1d(5).double()
        self.again.weight, self.twice = self.first.weight, self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.norm(self.first(x) + self.again(x))).tanh())


def test_a_checkpoint_has_what_is_shared_under_every_name(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Any:
        torch.manual_seed(1)
        one = run(engine(group, net=Tied(), every_updates=4), group.rank, updates=6)
        state = copied(one.state_dict())
        with one.evaluating():
            wanted = {name: value.clone() for name, value in one.model.state_dict().items()}
        again = engine(group, net=Tied(), every_updates=4)
        again.load_state_dict(state)
        ends = [digest(run(some, group.rank, updates=9).state_dict()) for some in (one, again)]
        return digest(state["model"]) == digest(wanted), ends

    torch.manual_seed(1)
    for holds, ends in on_ranks(2, act):
        assert holds and ends[0] == ends[1]


def test_a_share_that_broke_off_leaves_running_statistics_as_they_were_and_is_made_anew(on_ranks: OnRanks) -> None:
    class Moving(nn.Module):
        """A buffer of which nothing is known beside those of a normalisation layer."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1, momentum=0.3).double()
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.add_(len(x))
            return self.norm(x)

    def act(group: Group) -> tuple[Any, Any]:
        def fresh() -> Engine:
            return engine(group, net=nn.Sequential(*model(), Moving()), every_updates=4)

        whole, broken = run(fresh(), group.rank, updates=9), run(fresh(), group.rank, updates=3)
        buffers: Any = vars(broken.reducers.alone)["_buffers"]

        def lost(before: Any) -> None:
            raise LostRankError("gone")

        buffers._share_others = lost  # after running statistics were
        with pytest.raises(LostRankError):
            broken.update(*batches(4, group.rank))
        del buffers._share_others
        broken.after_update(4)
        broken.core.is_whole = True
        return digest(run(broken, group.rank, updates=9).state_dict()), digest(whole.state_dict())

    found = on_ranks(2, act)
    assert len({one for pair in found for one in pair}) == 1
