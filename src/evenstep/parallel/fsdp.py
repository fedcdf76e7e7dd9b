"""Sums of gradients of a stage in shards of FSDP2: each rank holds a part of parameters, gradients and state.

FSDP2 gathers parameters. Gradients are summed in buckets of one unit, which start when the last backward through the
unit ends, so a rank never holds whole gradients of all units for long.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import has_gradient_hooks
from evenstep.internals.fsdp import begin, forget_gathers, parts, records, set_gradient, watch_calls
from evenstep.parallel.blocks import NEUTRAL, Dealing, Gradients, begin_slice
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Shards
from evenstep.parallel.reducer import Bucket, Reducer, in_buckets, synchronise

T = TypeVar("T")
_STAMPS = 2**20  # so the squares of all ranks' stamps are summed exactly
_ON_THE_WAY = 2  # buckets at once


@final
class ShardBucket(Bucket):
    """Parameters in shards; the ranks that hold a shard sum their part of the gradients."""

    def __init__(self, shards: Sequence[Any], layout: Shards, mesh: DeviceMesh) -> None:
        super().__init__([shard.unsharded_param for shard in shards])
        self.targets = [shard.sharded_param for shard in shards]
        self._shards, self._layout, self._mesh = shards, layout, mesh
        # of each shard, as `torch.chunk` cuts them
        self._rows = [-(-len(whole) // layout.num_shards) for whole in self.parameters]
        sizes = zip(self._rows, self.parameters, strict=True)
        self._sizes = [rows * whole.shape[1:].numel() for rows, whole in sizes]

    def begin_sum(
        self, group: Group, dealing: Dealing | None, nodes: Sequence[Gradients]
    ) -> Callable[[], Callable[[], Tensor]]:
        flats = [self._packed(node) for node in nodes]
        if dealing is None:
            slice = _begin_scatter(flats[0], self._mesh)
        else:
            size = sum(self._sizes)
            starts = [rank % self._layout.num_shards * size for rank in range(group.ranks)]
            slice = begin_slice(group, dealing, flats, [(start, start + size) for start in starts], like=self.like)
        return lambda: slice

    def keep(self, total: Tensor) -> None:
        for shard, whole, piece in zip(self._shards, self.parameters, total.split(self._sizes), strict=True):
            rows = piece.view(-1, *whole.shape[1:])
            first = self._layout.shard_index * len(rows)
            set_gradient(shard, rows[: max(len(whole) - first, 0)])

    def _packed(self, gradients: Gradients) -> Tensor:
        """All shards one after the other, each with its rows of every gradient, and rows of neutral summands."""
        count = self._layout.num_shards
        columns: list[Tensor] = []
        for gradient, whole, rows in zip(gradients, self.parameters, self._rows, strict=True):
            padded = gradient
            if padded is None or count * rows > len(whole):
                padded = self.like.new_full((count * rows, *whole.shape[1:]), NEUTRAL)
                if gradient is not None:
                    padded[: len(whole)] = gradient
            columns.append(padded.reshape(count, -1))
        return torch.cat(columns, dim=1).view(-1)


def _begin_scatter(flat: Tensor, mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Begin the sum as the backend adds it; each rank gets the slice of its shards."""
    shards = mesh.get_group("shard")
    own = flat.new_empty(flat.numel() // shards.size())
    work: Any = dist.reduce_scatter_single(own, flat, group=shards, async_op=True)

    def finish() -> Tensor:
        work.wait()
        if mesh.ndim > 1:
            dist.all_reduce(own, group=mesh.get_group("dp"))
        return own

    return finish


@final
class ShardReducer(Reducer):
    """Sums of gradients of a module in shards, in float32 at least.

    Where each pass gathers parameters, all ranks must run the same passes: a rank with fewer micro-batches runs dummy
    passes, and all run micro-batches of one kind (of one task) at the same time. Stamps of the units that the ranks
    called are compared in each sum. With `per_plan` parameters are whole from `unshard` to `reshard` instead.
    """

    def __init__(
        self, module: nn.Module, layout: Shards, *, ordered: bool, per_plan: bool, gather_dtype: torch.dtype | None
    ) -> None:
        self.per_plan = per_plan
        self._layout, self._gather_dtype = layout, gather_dtype
        self._fsdp: Any = module  # an `FSDPModule` once it is wrapped
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._of_units: list[list[ShardBucket]] = []
        self._on_the_way: deque[Bucket] = deque()
        self._stamp = 0  # hash of the calls of units since the stamps were compared
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._owed: Callable[[], None] | None = None  # dummy pass in the place of the last, in which others reduce
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}  # gradients from before a dummy pass
        super().__init__(module, layout.group, ordered=ordered)

    def wrap(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        cut = [one for child in self.module.children() for one in with_forward(child)]
        cut = [one for one in cut if any(map(cuttable, one.parameters()))] if self.per_plan else units(self.module)
        check_shardable(self.module)
        synchronise(self.module, self.group)
        self._mesh = self.group.mesh(self._layout.num_shards)
        for parameter in filter(cuttable, self.module.parameters()):
            if _is_narrow(parameter):
                parameter.grad_dtype = torch.float32  # of the shards' too, since torch 2.15
        for unit in (*cut, self.module):
            fully_shard(
                unit,
                mesh=self._mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                # Without a format of reductions FSDP2 leaves gradients where autograd adds them.
                mp_policy=MixedPrecisionPolicy(param_dtype=self._gather_dtype),
                ignored_params={one for one in self.module.parameters() if not cuttable(one)},
            )
        self._prepare()
        self.share([parameter for parameter in self.module.parameters() if parameter.requires_grad])

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        trained = {id(parameter) for parameter in parameters}
        self._of_units = []
        for record in records(self.module):
            for shard in record.fsdp_params:  # as FSDP2 would when it next gathers it
                shard.unsharded_param.requires_grad_(shard.sharded_param.requires_grad)
            own = {
                id(shard.unsharded_param): shard for shard in record.fsdp_params if id(shard.sharded_param) in trained
            }
            cut = in_buckets((shard.unsharded_param for shard in own.values()), self.bucket_bytes)
            shards = ([own[id(whole)] for whole in some] for some in cut)
            self._of_units.append([ShardBucket(some, self._layout, self._mesh) for some in shards])
        numbers = [parameter for parameter in parameters if not cuttable(parameter)]
        of_numbers = [Bucket(some) for some in in_buckets(numbers, self.bucket_bytes)]
        # a backward reaches the last units first; the outermost is the first
        self._buckets = [*(bucket for own in reversed(self._of_units) for bucket in own), *of_numbers]
        self._clear(None)

    def begin(self, dealing: Dealing | None = None) -> None:
        self._stamp = 0
        self._owed = None
        forget_gathers(self.module)
        self._fsdp.reset_iter_state()
        for shard in self._shards:
            shard.unsharded_param.grad = None
        super().begin(dealing)

    def collect(self, microbatch: int) -> None:
        super().collect(microbatch)
        self._forget_calls()

    def arm(self) -> None:
        self._is_armed = True

    def reduce(self) -> None:
        if self._owed is not None:
            self.arm()
            self._owed()
            self._owed = None
        started = (bucket for bucket in self._buckets if bucket.present is not None)
        if any(parameter.grad is not None for bucket in started for parameter in bucket.parameters):
            raise TaskError(
                "a block's parameter got a gradient after the backward of the block had ended, which `fsdp` can't sum; "
                "use a block's parameters in its forward only, or use `ddp` or `zero1`."
            )
        super().reduce()

    def pad_passes(self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str, last: bool) -> None:
        """Before an update's or an evaluation's passes: run dummy passes, until all ranks run the same number.

        Micro-batches of one `kind` go through the same parts of a model; after the `last` kind no other passes follow.
        """
        example: Any = work[0] if work else self._examples.get(kind)
        ranks, here = self.group.ranks, self.group.rank
        mine = [0.0] * (2 * ranks)
        mine[here] = len(work)
        mine[ranks + here] = float(example is not None)
        told = self._summed(mine)
        counts, have = told[:ranks], told[ranks:]
        if not any(counts):
            return
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if here == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        dummy = partial(self._run_dummy, partial(run, example))
        missing = int(max(counts)) - len(work)
        if backward and last and not work:  # others reduce in their last pass
            self._owed = dummy
            missing -= 1
        for _ in range(missing):
            dummy()

    def unshard(self) -> None:
        """Gather the stage's parameters: no forward or backward of the plan then waits for other ranks."""
        for part in parts(self.module):
            part.unshard()

    def reshard(self) -> None:
        gradients = [shard.sharded_param.grad for shard in self._shards]
        self._fsdp.reset_iter_state()
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.sharded_param.grad = gradient  # which FSDP2 forgets as well since torch 2.15

    def _prepare(self) -> None:
        for part in parts(self.module):
            part.unshard()  # makes the parameters that autograd sees
            part.reshard()
        begin(self.module)
        self._fsdp.set_requires_gradient_sync(False)
        if self.per_plan:
            self._fsdp.set_is_last_backward(False)
            self._fsdp.set_reshard_after_backward(False)
            self._fsdp.set_reshard_after_forward(False)
        watch_calls(self.module, self._called, self._ended)
        self._shards = [shard for record in records(self.module) for shard in record.fsdp_params]
        for shard in self._shards:
            live, whole = shard.sharded_param, shard.unsharded_param
            if _is_narrow(live) and live.grad_dtype == live.dtype:
                live.grad_dtype = None  # FSDP2 assigns a gradient in the parameter's format, which becomes float32
            if _is_narrow(whole):  # sums over several uses of a parameter and over micro-batches
                whole.grad_dtype = torch.float32

    def _called(self, unit: int) -> None:
        self._stamp = (self._stamp * 31 + unit + 1) % _STAMPS
        for bucket in self._of_units[unit]:
            bucket.missing += torch.is_grad_enabled()

    def _ended(self, unit: int) -> None:
        for bucket in self._of_units[unit]:
            bucket.missing -= 1
        if self._is_armed and not self.per_plan:
            self._launch_ready()

    def _launch(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters if self._set_aside else ():
            parameter.grad = self._set_aside.pop(parameter)
        super()._launch(bucket)
        self._on_the_way.append(bucket)
        if len(self._on_the_way) > _ON_THE_WAY:
            first = self._on_the_way.popleft()
            first.share()
            first.land()

    def _run_dummy(self, run: Callable[[], None]) -> None:
        whole = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._set_aside = {parameter: parameter.grad for parameter in whole}
        for parameter in whole:
            parameter.grad = None
        run()
        for parameter, gradient in self._set_aside.items():
            parameter.grad = gradient
        self._set_aside = {}
        self._forget_calls()

    def _forget_calls(self) -> None:
        for bucket in self._buckets:
            bucket.missing = int(not isinstance(bucket, ShardBucket))  # numbers wait until all passes are over

    def _clear(self, dealing: Dealing | None) -> None:
        super()._clear(dealing)
        self._forget_calls()
        self._set_aside = {}
        self._on_the_way.clear()

    def _summed(self, values: Sequence[float]) -> list[float]:
        if self.per_plan:
            return super()._summed(values)
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


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < 4


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
    items = [one for item in outermost for one in with_forward(item) if any(map(cuttable, one.parameters()))]
    uses = _uses(module)
    return [item for item in items if all(uses[key] == count for key, count in _uses(item).items())]


def with_forward(item: nn.Module) -> Iterator[nn.Module]:
    """The module, or the modules inside a container without a forward."""
    if type(item).forward is not nn.Module.forward:
        yield item
        return
    for child in item.children():
        yield from with_forward(child)


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
    """True for a parameter that ranks can hold parts of."""
    return parameter.ndim > 0 and parameter.numel() > 0 and not getattr(parameter, "stays_whole", False)
