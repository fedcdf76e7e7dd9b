"""Sums of gradients of a stage in shards of FSDP2: each rank holds a part of parameters, gradients and state.

Two choices are independent: parameters are gathered by each pass (`PassReducer`) or once per plan of stages
(`PlanReducer`), and gradients are summed by FSDP2 during the last backward or in the order of `blocks`.
"""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn

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
from evenstep.parallel.blocks import Dealing, Gradients, OrderedSum, Sum, in_buckets, packed
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Shards
from evenstep.parallel.reducer import BUCKET_BYTES, Bucket, Reducer, forget_absent
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.tensors import gradient_format

T = TypeVar("T")
_STAMPS = 2**20  # so the squares of all ranks' stamps are summed exactly
_ON_THE_WAY = 2  # buckets of ordered sums at once


@final
class ShardBucket(Bucket):
    """Parameters in shards; the ranks that hold a shard sum their part of the gradients."""

    def __init__(self, shards: Sequence[Any], layout: Shards) -> None:
        self.shards, self.layout = shards, layout
        self.parameters = [shard.sharded_param for shard in shards]
        self.like = torch.empty(0, dtype=summed_in(shards[0]), device=layout.group.device)
        self.shapes: list[torch.Size] = [shard.unsharded_param.shape for shard in shards]
        self.present = [False] * len(shards)
        self.begin()

    def take(self) -> Gradients:
        gradients = [gradient_of(shard) for shard in self.shards]
        for shard in self.shards:
            forget_gradient(shard)
        return [one if one is None else one.to(self.like.dtype) for one in gradients]

    def begin_sum(self, group: Group, dealing: Dealing | None, nodes: Sequence[Gradients]) -> Sum:
        count = self.layout.num_shards
        edges = [0, *accumulate(sum(self._sizes(part)) for part in range(count))]
        slices = [(edges[rank % count], edges[rank % count + 1]) for rank in range(group.ranks)]
        flats = [torch.cat([self._packed(node, part) for part in range(count)]) for node in nodes]
        return OrderedSum(group, cast("Dealing", dealing), flats, slices, like=self.like)

    def share(self) -> None:
        """Each rank keeps its shards."""

    def land(self) -> None:
        mine = cast("OrderedSum", self.sum).slice()
        sizes = self._sizes(self.layout.shard_index)
        for shard, shape, piece in zip(self.shards, self.shapes, mine.split(sizes), strict=True):
            set_gradient(shard, piece.view(-1, *shape[1:]))
        self.sum = None

    def _packed(self, gradients: Gradients, part: int) -> Tensor:
        rows = [self._rows(shape, part) for shape in self.shapes]
        here = [one if one is None else one[own] for one, own in zip(gradients, rows, strict=True)]
        return packed(here, self._sizes(part), self.like)

    def _rows(self, shape: torch.Size, part: int) -> slice:
        each = -(-shape[0] // self.layout.num_shards)  # as `torch.chunk` cuts them
        return slice(min(part * each, shape[0]), min((part + 1) * each, shape[0]))

    def _sizes(self, part: int) -> list[int]:
        rows = [self._rows(shape, part) for shape in self.shapes]
        return [(own.stop - own.start) * shape[1:].numel() for own, shape in zip(rows, self.shapes, strict=True)]


class ShardReducer(Reducer):
    """Sums of gradients of a module in shards; subclasses say when parameters are gathered.

    Args:
        gather_dtype: format in which parameters are gathered and used; gradients are reduced in float32 at least.
    """

    def __init__(self, module: nn.Module, layout: Shards, *, ordered: bool, gather_dtype: torch.dtype | None) -> None:
        super().__init__(module, layout.group)
        self.collects = ordered
        self._layout, self._gather_dtype = layout, gather_dtype
        self._fsdp: Any = module  # an `FSDPModule` once it is wrapped
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._numbers: list[nn.Parameter] = []  # which can't be cut
        self._present: list[bool] = []  # a parameter has a gradient: of the shards, then of the numbers
        self._watched: set[int] = set()  # whose gradients are seen
        self._buckets: list[Bucket] = []  # of the ordered sums, in the order of `_present`
        self._of_numbers: list[Bucket] = []
        self._dealing = Dealing.of_one(0)

    def wrap(self) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        units = self._units()
        check_shardable(self.module)
        self._numbers = [parameter for parameter in self.module.parameters() if not cuttable(parameter)]
        synchronise(self.module, self.group)
        mesh = self.group.mesh(self._layout.num_shards)
        for parameter in filter(cuttable, self.module.parameters()):
            if _is_narrow(parameter):
                parameter.grad_dtype = torch.float32  # of the shards' too, since torch 2.15
        policy = MixedPrecisionPolicy(param_dtype=self._gather_dtype, reduce_dtype=self._reduce_dtype())
        for unit in (*units, self.module):
            fully_shard(
                unit,
                mesh=mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                mp_policy=policy,
                ignored_params=set(self._numbers),
            )
        self._prepare()
        return self.module

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for each in records(self.module):
            choose_formats(each)
        for shard in self._shards:  # as FSDP2 would when it next gathers it
            shard.unsharded_param.requires_grad_(shard.sharded_param.requires_grad)
        self._watch()

    def arm(self) -> None:
        if not self.collects:
            self._arm()

    def reduce(self) -> None:
        if self.collects:
            self._reduce_ordered()
        else:
            self._reduce()

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update, replica_ranks=self._layout.num_shards)

    @abstractmethod
    def _arm(self) -> None:
        """FSDP2 reduces in the next backward, if it reduces beside one."""

    @abstractmethod
    def _reduce(self) -> None:
        """Complete the sums that FSDP2 makes."""

    def _units(self) -> list[nn.Module]:
        return units(self.module)

    def _reduce_dtype(self) -> torch.dtype | None:
        return self._gather_dtype and torch.float32

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
                live.grad_dtype = None  # FSDP2 assigns a gradient in the parameter's format, which becomes float32
        begin(self.module)
        if self.collects:
            for part in self._parts():
                leave_inputs_alone(part)
            for shard in self._shards:  # sums over several uses of a parameter in one micro-batch
                if shard.unsharded_param.dtype != summed_in(shard):
                    shard.unsharded_param.grad_dtype = summed_in(shard)
        sizes = [number.numel() for number in self._numbers]
        cut = in_buckets(sizes, [*map(gradient_format, self._numbers)], BUCKET_BYTES)
        self._of_numbers = [Bucket([self._numbers[place] for place in places]) for places in cut]
        sizes = [shard.unsharded_param.numel() for shard in self._shards]
        cut = in_buckets(sizes, [*map(summed_in, self._shards)], BUCKET_BYTES)
        of_shards = [ShardBucket([self._shards[place] for place in places], self._layout) for places in cut]
        self._buckets = [*of_shards, *self._of_numbers]
        self._forget_presence()
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
            bucket.begin()

    def _forget_presence(self) -> None:
        self._present = [False] * (len(self._shards) + len(self._numbers))

    def _complete_sums(self) -> None:
        for each in records(self.module):
            complete_sums(each)

    def _gradients(self) -> Gradients:
        return [*map(gradient_of, self._shards), *(number.grad for number in self._numbers)]

    def _forget_gradients(self) -> None:
        for shard in self._shards:
            forget_gradient(shard)
        for number in self._numbers:
            number.grad = None

    def _summed(self, values: Sequence[float]) -> list[float]:
        return self.group.sum_floats(values)

    def _collect_ordered(self, microbatch: int, present: Sequence[bool]) -> None:
        place = self._dealing.places_of(self.group.rank)[microbatch]
        flags = iter(present)
        for bucket in self._buckets:
            bucket.tree.add(place, [one if next(flags) else None for one in bucket.take()])

    def _reduce_ordered(self) -> None:
        on_the_way: deque[Bucket] = deque()
        for bucket in self._buckets:
            bucket.start(self.group, self._dealing)
            on_the_way.append(bucket)
            if len(on_the_way) > _ON_THE_WAY:
                _landed(on_the_way.popleft())
        for bucket in on_the_way:
            _landed(bucket)
        self._present = [has for bucket in self._buckets for has in bucket.present]
        self._forget_absent()

    def _forget_absent(self) -> None:
        flags = self._summed([float(has) for has in self._present])
        self._forget_presence()
        forget_absent([*(shard.sharded_param for shard in self._shards), *self._numbers], flags)

    def _finish(self) -> None:
        for bucket in self._of_numbers:
            bucket.start(self.group, None)
        for bucket in self._of_numbers:
            bucket.land()
        self._forget_absent()
        for shard in self._shards:
            parameter = shard.sharded_param
            if parameter.grad is not None and parameter.grad_dtype is None:
                parameter.grad = parameter.grad.float()


def _landed(bucket: Bucket) -> None:
    bucket.share()
    bucket.land()


def summed_in(shard: Any) -> torch.dtype:
    return torch.float32 if shard.orig_dtype.itemsize < 4 else shard.orig_dtype


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < 4


@final
class PassReducer(ShardReducer):
    """Shards of a module that each pass gathers: all ranks must run the same passes, with the same collectives in each.

    A rank with fewer micro-batches runs dummy passes with zero gradients. All ranks run micro-batches of one kind (of
    one task) at the same time, kinds in turn. Stamps of collectives are compared in each sum.
    """

    _muted = False
    _owed = False  # a dummy pass takes the place of the last backward, in which others reduce
    _stamp = 0  # hash of the collectives since the stamps were compared
    _dummy: Callable[[], None]  # runs a dummy pass

    def begin(self, dealing: Dealing | None = None) -> None:
        self._stamp = 0
        self._owed = False
        self._reset(dealing)
        if not self.collects:
            self._accumulate_only()

    def collect(self, microbatch: int) -> None:
        if self.collects:
            self._collect_ordered(microbatch, self._present)
            self._forget_presence()

    def pad_passes(self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str, last: bool) -> None:
        """Before an update's or an evaluation's passes: run dummy passes, until all ranks run the same number.

        Args:
            work: this rank's micro-batches, or what they are cut into.
            run: runs a micro-batch without metrics and changed buffers; its gradients are removed here.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: no passes of another kind follow in this accumulation.
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
        self._finish()

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
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
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
class PlanReducer(ShardReducer):
    """Shards of one stage, gathered before a plan and kept until they are reduced.

    FSDP2 keeps, gathers and scatters; the plan says when. Replicas may run different numbers of micro-batches.
    """

    def begin(self, dealing: Dealing | None = None) -> None:
        self._reset(dealing)
        self._accumulate_only()  # a try may have failed in the midst of its reduction

    def collect(self, microbatch: int) -> None:
        if self.collects:
            self._collect_ordered(microbatch, [True] * len(self._present))
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
        self._finish()

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
    """Layers below modules that are plain containers with dotted names."""
    for child in module.children():
        yield from layers(child) if type(child) is nn.Module else (child,)


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
    uses = _uses(module)
    return [item for item in items if all(uses[key] == count for key, count in _uses(item).items())]


def _called(item: nn.Module) -> Iterator[nn.Module]:
    if type(item).forward is not nn.Module.forward:
        yield item
        return
    for child in item.children():
        yield from _called(child)


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def check_shardable(module: nn.Module) -> None:
    """Raise ArgumentError for a parameter with a hook, which shards would not call."""
    for name, one in module.named_parameters():
        if cuttable(one) and has_gradient_hooks(one):
            raise ArgumentError(
                f"parameter `{name}` has a hook (`register_hook`), which `fsdp` would not call; change the gradient in "
                f"the forward (`torch.autograd.Function`), or use `ddp` or `zero1`.",
                field=name,
            )


def cuttable(parameter: Tensor) -> bool:
    """Return True for a parameter that ranks can hold parts of.

    >>> cuttable(torch.zeros(3)), cuttable(torch.zeros(())), cuttable(torch.zeros(0, 3))
    (True, False, False)
    """
    return parameter.ndim > 0 and parameter.numel() > 0 and not getattr(parameter, "stays_whole", False)
