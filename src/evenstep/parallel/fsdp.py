"""Full sharding by torch's FSDP2: each rank holds a part of parameters, gradients and optimizer state.

FSDP2 averages by default; here every reduction is a SUM. Single numbers stay whole on every rank. Two choices are
independent: parameters are gathered by each pass (`PassReducer`) or once per plan of stages (`PlanReducer`), and
gradients are summed by FSDP2 during the last backward or in the order of `blocks`.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Self, TypeVar, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name, require_whole
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import has_gradient_hooks
from evenstep.internals.fsdp import (
    add_late_gradient,
    begin,
    choose_formats,
    complete_sums,
    count_collectives,
    end_backward,
    forget_gathers,
    forget_gradient,
    forget_order,
    gradient_of,
    leave_inputs_alone,
    parts,
    records,
    set_gradient,
)
from evenstep.parallel.blocks import (
    BLOCKS,
    Dealing,
    Gradients,
    OrderedSum,
    Sum,
    Tree,
    begin_ordered_sum,
    in_buckets,
    packed,
)
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Shards
from evenstep.parallel.reducer import BUCKET_BYTES, ChoosesTrained, Reducer
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.parallel.strategies import Reduction, Strategy
from evenstep.tensors import gradient_format

T = TypeVar("T")
_STAMPS = 2**20  # so the squares of all ranks' stamps are summed exactly
_ON_THE_WAY = 2  # buckets of ordered sums at once


@final
class Fsdp(Strategy):
    """Shards of a module that FSDP2 gathers where they are used.

    With ordered sums gradients are whole on each rank until they are summed.

    Args:
        group: the ranks, of a `Processes`.
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
        gather_dtype: the number format in which parameters are gathered and used; their own by default. Gradients
            are always reduced in float32 at least.
        offload: whether shards wait in the CPU's memory; needs an accelerator.
        reduction, blocks: see `Strategy`.
    """

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        gather_dtype: torch.dtype | None = None,
        offload: bool = False,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
    ) -> None:
        if shard_ranks is not None:
            require_whole("shard_ranks", shard_ranks, at_least=1, advice="all ranks share by default")
        _check_sharding(group.ranks, shard_ranks)
        layout = Shards(group, num_shards=shard_ranks or group.ranks, exact=reduction == "ordered")
        super().__init__(group, layout, reduction=reduction, blocks=blocks)
        self.gather_dtype = gather_dtype
        self.offload = offload

    def gathering(self, dtype: torch.dtype) -> Self:
        if self.gather_dtype not in (None, dtype):
            raise ArgumentError(
                f"`gather_dtype` must be the format that the model computes in, {format_name(dtype)}, or left out, but "
                f"is {format_name(self.gather_dtype)}; leave it out.",
                field="gather_dtype",
            )
        other = copy(self)
        other.gather_dtype = dtype
        return other

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return PlanReducer(module, self) if per_plan else PassReducer(module, self)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        on_cpu = self.is_ordered and self.group.device.type == "cpu"
        if on_cpu and any(options.get("fused") for options in optimizer.param_groups):
            raise ArgumentError(
                "on the CPU, torch's fused optimizers round the ends of a tensor differently from its middle, so a "
                "step of shards does not have the bits of a step of the whole; build the optimizer with "
                '`foreach=True` instead of `fused=True`, or reduce as "fast".',
                field="fused",
            )


def _check_sharding(ranks: int, shard_ranks: int | None) -> None:
    if torch.__version__ < "2.13":  # as versions, not as text
        raise ArgumentError(
            f"`fsdp` needs torch 2.13 or newer, whose FSDP2 can forget passes that failed and reduce what some ranks "
            f"don't use, but this is torch {torch.__version__}; install a newer one, or take `zero1` or `ddp`.",
            field="fsdp",
        )
    if shard_ranks is not None and ranks % shard_ranks:
        raise ArgumentError(
            f"`shard_ranks` must divide the {ranks} data-parallel ranks, but is {shard_ranks}; set a divisor, or leave "
            f"it out to shard over all.",
            field="shard_ranks",
        )


@dataclass(slots=True)
class _Bucket:
    places: list[int]
    tree: Tree = field(default_factory=Tree)


class ShardedReducer(Reducer, ChoosesTrained):
    """Sums of gradients of a module in shards; subclasses say when parameters are gathered."""

    def __init__(self, module: nn.Module, strategy: Fsdp) -> None:
        super().__init__(module, strategy.group)
        self.collects = strategy.is_ordered
        self._strategy = strategy
        self._fsdp: Any = module  # an `FSDPModule` once it is wrapped
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._numbers: list[nn.Parameter] = []  # which can't be cut
        self._present: list[bool] = []  # a parameter has a gradient: of the shards, then of the numbers
        self._watched: set[int] = set()  # whose gradients are seen
        self._buckets: list[_Bucket] = []  # of ordered sums
        self._formats: list[torch.dtype] = []  # in which gradients are added in order, as `_present`
        self._dealing = Dealing.of_one(0)

    def wrap(self) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        units = self._units()
        check_shardable(self.module)
        self._numbers = [parameter for parameter in self.module.parameters() if not cuttable(parameter)]
        synchronise(self.module, self.group)
        mesh = self.group.mesh(self._strategy.layout.num_shards)
        for parameter in filter(cuttable, self.module.parameters()):
            if _is_narrow(parameter):
                parameter.grad_dtype = torch.float32  # of the shards' too, since torch 2.15
        policy = MixedPrecisionPolicy(param_dtype=self._strategy.gather_dtype, reduce_dtype=self._reduce_dtype())
        for unit in (*units, self.module):
            fully_shard(
                unit,
                mesh=mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._strategy.offload else OffloadPolicy(),
                ignored_params=set(self._numbers),
            )
        self._prepare()
        return self.module

    def arm(self) -> None:
        if not self.collects:
            self._arm()

    def reduce(self) -> None:
        if self.collects:
            self._reduce_ordered()
        else:
            self._reduce()

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update, replica_ranks=self._strategy.layout.num_shards)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for each in records(self.module):
            choose_formats(each)
        for shard in self._shards:  # as FSDP2 would when it next gathers it
            shard.unsharded_param.requires_grad_(shard.sharded_param.requires_grad)
        self._watch()

    @abstractmethod
    def _arm(self) -> None:
        """FSDP2 reduces in the next backward, if it reduces beside one."""

    @abstractmethod
    def _reduce(self) -> None:
        """Complete the sums that FSDP2 makes."""

    def _units(self) -> list[nn.Module]:
        return units(self.module)

    def _reduce_dtype(self) -> torch.dtype | None:
        return self._strategy.gather_dtype and torch.float32

    def _parts(self) -> list[Any]:
        return [part for _, part in parts(self.module)]

    def _prepare(self) -> None:
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)
            part.unshard()  # makes the parameters that autograd sees
            part.reshard()
        self._shards = [shard for each in records(self.module) for shard in each.fsdp_params]
        for shard in self._shards:
            live = shard.sharded_param
            if _is_narrow(live) and live.grad_dtype == live.dtype:
                live.grad_dtype = None  # FSDP2 assigns a gradient of its own format, which becomes float32
        begin(self.module)
        if self.collects:
            for part in self._parts():
                leave_inputs_alone(part)
            for shard in self._shards:  # sums over several uses of a parameter in one micro-batch
                if shard.unsharded_param.dtype != _summed_in(shard):
                    shard.unsharded_param.grad_dtype = _summed_in(shard)
            self._formats = [*map(_summed_in, self._shards), *map(gradient_format, self._numbers)]
            self._buckets = self._in_buckets()
        self._present = [False] * (len(self._shards) + len(self._numbers))
        self._watched = set()
        self._watch()

    def _watch(self) -> None:
        watched = [*(shard.unsharded_param for shard in self._shards), *self._numbers]
        for number, parameter in enumerate(watched):
            if parameter.requires_grad and number not in self._watched:
                parameter.register_hook(partial(self._seen, number))
                self._watched.add(number)

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        self._present[number] = True
        return gradient

    def _reset(self, dealing: Dealing | None) -> None:
        self._dealing = dealing or Dealing.of_one(0)
        forget_gathers(self.module)
        self._fsdp.reset_iter_state()
        self._forget_gradients()
        self._forget_presence()
        for bucket in self._buckets:
            bucket.tree = Tree()

    def _forget_presence(self) -> None:
        self._present = [False] * len(self._present)

    def _complete_sums(self) -> None:
        for each in records(self.module):
            complete_sums(each)

    def _gradients(self) -> list[Tensor | None]:
        return [*map(gradient_of, self._shards), *(number.grad for number in self._numbers)]

    def _forget_gradients(self) -> None:
        for shard in self._shards:
            forget_gradient(shard)
        for number in self._numbers:
            number.grad = None

    def _summed(self, values: Sequence[float]) -> list[float]:
        return self.group.sum_floats(values)

    def _present_anywhere(self) -> list[bool]:
        flags = self._summed([float(has) for has in self._present])
        self._forget_presence()
        return [flag > 0 for flag in flags]

    def _finish(self, present: Sequence[bool]) -> None:
        for shard, has in zip(self._shards, present, strict=False):
            parameter = shard.sharded_param
            if not has:
                parameter.grad = None
            elif parameter.grad_dtype is None:
                parameter.grad = parameter.grad.float()
        self._sum_numbers(present[len(self._shards) :])

    def _sum_numbers(self, present: Sequence[bool]) -> None:
        for number, has in zip(self._numbers, present, strict=True):
            if not has:
                number.grad = None
            elif not number.numel():
                number.grad = torch.zeros_like(number, dtype=gradient_format(number))
        having = [number for number, has in zip(self._numbers, present, strict=True) if has and number.numel()]
        if not having:
            return
        own = [torch.zeros_like(one, dtype=gradient_format(one)) if one.grad is None else one.grad for one in having]
        total = torch.cat([one.flatten() for one in own])
        self.group.sum(total)()
        for number, gradient in zip(having, total.split([one.numel() for one in having]), strict=True):
            number.grad = gradient.view(number.shape).to(gradient_format(number))

    def _collect_ordered(self, microbatch: int, gradients: Gradients) -> None:
        self._forget_gradients()
        place = self._dealing.places_of(self.group.rank)[microbatch]
        for bucket in self._buckets:
            mine = [(gradients[place], self._formats[place]) for place in bucket.places]
            bucket.tree.add(place, [one if one is None else one.to(format) for one, format in mine])

    def _in_buckets(self) -> list[_Bucket]:
        count = len(self._shards)
        sizes = [one.unsharded_param.numel() for one in self._shards]
        of_shards = in_buckets(sizes, self._formats[:count], BUCKET_BYTES)
        of_numbers = in_buckets([one.numel() for one in self._numbers], self._formats[count:], BUCKET_BYTES)
        shifted = [[count + place for place in places] for places in of_numbers]
        return [_Bucket(places) for places in (*of_shards, *shifted)]

    def _reduce_ordered(self) -> None:
        places = self._dealing.nodes_of(self.group.rank)
        missing: Gradients = [None] * len(self._present)
        on_the_way: deque[tuple[_Bucket, Sum]] = deque()
        for bucket in self._buckets:
            nodes = [bucket.tree.node(self._dealing, place) or missing[: len(bucket.places)] for place in places]
            for place, *each in zip(bucket.places, *nodes, strict=True):
                self._present[place] = any(one is not None for one in each)
            on_the_way.append((bucket, self._begin_sum(bucket, nodes)))
            bucket.tree = Tree()
            if len(on_the_way) > _ON_THE_WAY:
                self._keep(*on_the_way.popleft())
        for each in on_the_way:
            self._keep(*each)
        present = self._present_anywhere()
        parameters = [*(shard.sharded_param for shard in self._shards), *self._numbers]
        for parameter, has in zip(parameters, present, strict=True):
            if not has:
                parameter.grad = None

    def _begin_sum(self, bucket: _Bucket, nodes: Sequence[Gradients]) -> Sum:
        like = torch.empty(0, dtype=self._formats[bucket.places[0]], device=self.group.device)
        if bucket.places[0] >= len(self._shards):
            sizes = [self._numbers[place - len(self._shards)].numel() for place in bucket.places]
            flats = [packed(node, sizes, like) for node in nodes]
            return begin_ordered_sum(self.group, self._dealing, flats, like, sum(sizes))
        num_shards = self._strategy.layout.num_shards
        shapes = [self._shards[place].unsharded_param.shape for place in bucket.places]
        lengths = [sum(_num_elements(shape, num_shards, part) for shape in shapes) for part in range(num_shards)]
        edges = [0, *accumulate(lengths)]
        slices = [(edges[rank % num_shards], edges[rank % num_shards + 1]) for rank in range(self.group.ranks)]
        flats = [_by_shard(node, shapes, num_shards, like) for node in nodes]
        return OrderedSum(self.group, self._dealing, flats, slices, like=like)

    def _keep(self, bucket: _Bucket, total: Sum) -> None:
        if bucket.places[0] >= len(self._shards):
            total.share()
            numbers = [self._numbers[place - len(self._shards)] for place in bucket.places]
            pieces = total.finish().split([number.numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                number.grad = piece.view(number.shape)
            return
        layout = self._strategy.layout
        mine = cast("OrderedSum", total).slice()
        for shard in (self._shards[place] for place in bucket.places):
            shape = shard.unsharded_param.shape
            size = _num_elements(shape, layout.num_shards, layout.shard_index)
            set_gradient(shard, mine[:size].view(-1, *shape[1:]))
            mine = mine[size:]


def _rows(shape: torch.Size, num_shards: int, part: int) -> slice:
    each = -(-shape[0] // num_shards)  # as `torch.chunk` cuts them
    return slice(min(part * each, shape[0]), min((part + 1) * each, shape[0]))


def _num_elements(shape: torch.Size, num_shards: int, part: int) -> int:
    rows = _rows(shape, num_shards, part)
    return (rows.stop - rows.start) * shape[1:].numel()


def _by_shard(gradients: Gradients, shapes: Sequence[torch.Size], num_shards: int, like: Tensor) -> Tensor:
    pieces: list[Tensor] = []
    for part in range(num_shards):
        rows = [_rows(shape, num_shards, part) for shape in shapes]
        here = [g if g is None else g[own] for g, own in zip(gradients, rows, strict=True)]
        pieces.append(packed(here, [_num_elements(shape, num_shards, part) for shape in shapes], like))
    return torch.cat(pieces)


def _summed_in(shard: Any) -> torch.dtype:
    return torch.float32 if shard.orig_dtype.itemsize < 4 else shard.orig_dtype


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < 4


def _called(item: nn.Module) -> Iterator[nn.Module]:
    if isinstance(item, torch.jit.ScriptModule) or type(item).forward is not nn.Module.forward:
        yield item
        return
    for child in item.children():
        yield from _called(child)


def units(module: nn.Module) -> list[nn.Module]:
    """Units of gathering: the items of each `nn.ModuleList` and `nn.Sequential` with parameters.

    The outermost lists only, of an item that is a container without a forward what it holds, and no item that shares a
    parameter with another part of the module; what is left over belongs to `module` itself.

    >>> block = lambda: nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.Tanh())})
    >>> len(units(nn.ModuleDict({"wte": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])})))
    2
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    lists = lists or ([module] if isinstance(module, nn.Sequential) else [])
    inner = {id(item) for outer in lists for item in outer.modules() if item is not outer}
    outermost = [item for part in lists if id(part) not in inner for item in part]
    items = [one for item in outermost for one in _called(item) if any(map(cuttable, one.parameters()))]
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(item: nn.Module) -> bool:
        own: dict[int, int] = {}
        for _, parameter in item.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        return all(uses[key] == count for key, count in own.items())

    return [item for item in items if alone(item)]


@final
class PassReducer(ShardedReducer):
    """Shards of a module that each pass gathers: all ranks must run the same passes, with the same collectives in each.

    A rank with fewer micro-batches runs dummy passes with zero gradients. All ranks run micro-batches of one kind (of
    one task) at the same time, kinds in turn. Stamps of collectives are compared in each sum.
    """

    def __init__(self, module: nn.Module, strategy: Fsdp) -> None:
        super().__init__(module, strategy)
        self._muted = False
        self._owed = False  # a dummy pass takes the place of the last backward, in which others reduce
        self._stamp = 0  # hash of the collectives since the stamps were compared
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._dummy: Callable[[], None]  # runs a dummy pass

    def begin(self, dealing: Dealing | None = None) -> None:
        self._stamp = 0
        self._owed = False
        self._reset(dealing)
        if not self.collects:
            self._accumulate_only()

    def collect(self, microbatch: int) -> None:
        if self.collects:
            present = [g if has else None for g, has in zip(self._gradients(), self._present, strict=True)]
            self._forget_presence()
            self._collect_ordered(microbatch, present)

    def pad_passes(self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str, last: bool) -> None:
        """Before an update's or an evaluation's passes: run dummy passes, until all ranks run the same number.

        Args:
            work: this rank's micro-batches, or what they are cut into.
            run: runs a micro-batch without a trace: no metrics, no changed buffers. What it adds to gradients is
                removed here.
            backward: whether passes come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: whether no passes of another kind follow in this accumulation.
        """
        here = [0.0] * (2 * self.group.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.group.rank], here[self.group.ranks + self.group.rank] = len(work), float(example is not None)
        told = self._summed(here)
        counts, have = told[: self.group.ranks], told[self.group.ranks :]
        if not any(counts):
            return
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if self.group.rank == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        self._dummy = partial(self._run_dummy, example, run)
        missing = int(max(counts)) - len(work)
        owed = backward and last and not work and missing > 0
        accumulated = any(self._present)  # by other kinds
        for _ in range(missing - owed):
            self._dummy()
            if not accumulated:  # else zeros have been added
                self._forget_gradients()
        if owed and self.collects:  # nothing is reduced in the backward, so the dummy pass may go first
            self._dummy()
            self._forget_gradients()
        elif owed:
            self._owed = True

    def _arm(self) -> None:
        self._complete_sums()
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_is_last_backward(True)

    def _reduce(self) -> None:
        if self._owed:
            self._owed = False
            self._dummy()
        self._accumulate_only()
        self._finish(self._present_anywhere())

    def _accumulate_only(self) -> None:
        self._fsdp.set_requires_gradient_sync(False)
        self._fsdp.set_is_last_backward(False)

    def _run_dummy(self, example: T, run: Callable[[T], None]) -> None:
        self._muted = True
        try:
            run(example)
        finally:
            self._muted = False

    def _summed(self, values: Sequence[float]) -> list[float]:
        stamp = float(self._stamp)
        self._stamp = 0
        stamps = [stamp, stamp * stamp]
        *sums, total, squares = self.group.sum_floats([*values, *stamps])
        if [total, squares] != [self.group.sum_of_same(one) for one in stamps]:
            raise TaskError(
                "the ranks called other blocks of the model, or in another order, so `fsdp` has gathered or summed "
                "tensors of different blocks; call all blocks for each micro-batch, or use `ddp` or `zero1`."
            )
        return sums

    def _prepare(self) -> None:
        super()._prepare()
        count_collectives(self.module, self._count)
        # FSDP2's own hooks are not compiled either
        self._fsdp.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)
        if self.collects:
            self._fsdp.set_requires_gradient_sync(False)
        else:
            self._accumulate_only()

    def _count(self, number: int) -> None:
        self._stamp = (self._stamp * 31 + number + 1) % _STAMPS

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self._muted else super()._seen(number, gradient)

    def _begin_pass(self, *_: Any) -> None:
        forget_order(self.module)


@final
class PlanReducer(ShardedReducer):
    """Shards of one stage, gathered before a plan and kept until they are reduced.

    FSDP2 keeps, gathers and scatters; the plan says when. Replicas may run different numbers of micro-batches.
    """

    def begin(self, dealing: Dealing | None = None) -> None:
        self._reset(dealing)
        self._accumulate_only()  # a try may have failed in the midst of its reduction

    def collect(self, microbatch: int) -> None:
        if self.collects:
            self._collect_ordered(microbatch, self._gradients())
        else:
            for shard in self._shards:  # weight gradients that wait come behind the backward
                add_late_gradient(shard)

    def unshard(self) -> None:
        """Gather the stage's parameters: no forward or backward of the plan then waits for other ranks."""
        for part in self._parts():
            part.unshard()

    def reshard(self) -> None:
        live = [one for shard in self._shards for one in (shard.sharded_param, shard.unsharded_param)]
        gradients = [one.grad for one in live]
        self._fsdp.reset_iter_state()
        for one, gradient in zip(live, gradients, strict=True):
            one.grad = gradient  # which FSDP2 forgets as well since torch 2.15

    def _arm(self) -> None:
        """FSDP2 reduces a stage when the plan says so, not beside a backward."""

    def _reduce(self) -> None:
        self._present = [gradient is not None for gradient in self._gradients()]
        # FSDP2 reduces and scatters at the end of a backward
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_is_last_backward(True)
        self._fsdp.set_reshard_after_backward(True)
        self._complete_sums()
        end_backward(self.module)
        self._accumulate_only()
        self._finish(self._present_anywhere())

    def _reduce_dtype(self) -> torch.dtype | None:
        # without a format FSDP2 leaves each micro-batch's gradient where it is
        return None if self.collects else super()._reduce_dtype()

    def _units(self) -> list[nn.Module]:
        return [layer for layer in layers(self.module) if any(True for _ in layer.parameters())]

    def _prepare(self) -> None:
        super()._prepare()
        self._fsdp.set_reshard_after_forward(False)
        self._accumulate_only()

    def _accumulate_only(self) -> None:
        self._fsdp.set_requires_gradient_sync(False)
        self._fsdp.set_is_last_backward(False)
        self._fsdp.set_reshard_after_backward(False)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers below modules that are plain containers with dotted names.

    >>> holder = nn.Module(); holder.add_module("blocks", nn.Module())
    >>> holder.blocks.add_module("0", nn.Linear(1, 1)); holder.add_module("head", nn.ReLU())
    >>> list(layers(holder))
    [Linear(in_features=1, out_features=1, bias=True), ReLU()]
    """
    for child in module.children():
        yield from layers(child) if type(child) is nn.Module else (child,)


def check_shardable(module: nn.Module) -> None:
    """Raise ArgumentError for a parameter with a hook, which shards would not call.

    >>> line = nn.Linear(1, 1); _ = line.weight.register_hook(print)
    >>> check_shardable(line)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: parameter `weight` has a hook (`register_hook`), which `fsdp` would not call; ...
    """
    for name, one in module.named_parameters():
        if cuttable(one) and has_gradient_hooks(one):
            raise ArgumentError(
                f"parameter `{name}` has a hook (`register_hook`), which `fsdp` would not call; change the gradient in "
                f"the forward (`torch.autograd.Function`), or use `ddp` or `zero1`.",
                field=name,
            )


def cuttable(parameter: Tensor) -> bool:
    """Return True for a parameter that ranks can hold parts of.

    >>> import torch
    >>> cuttable(torch.zeros(3)), cuttable(torch.zeros(())), cuttable(torch.zeros(0, 3))
    (True, False, False)
    """
    return parameter.ndim > 0 and parameter.numel() > 0 and not getattr(parameter, "stays_whole", False)
