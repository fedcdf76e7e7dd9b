"""Parameters, gradients and optimizer state in shards: what torch's FSDP2 needs to sum exactly, for any cut.

FSDP2 gathers a unit's parameters where they are used and frees them afterwards, so all ranks must run the same
passes: a rank with fewer micro-batches runs some again, whose gradients are replaced by zeros before anyone adds them.
A rank that runs out of memory follows its peers in the same way until they reduce, and all begin the update anew. FSDP2
averages by default; here every reduction is a SUM. Parameters that are single numbers stay whole on every rank. How
gradients are reduced is the variants' (`fsdp`, `ordered_fsdp`); nothing of FSDP2 itself is rewritten.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError, OutOfMemoryError
from evenstep.memory import give_back, is_out_of_memory
from evenstep.parallel.buffers import Before, SharedBuffers
from evenstep.parallel.group import Group
from evenstep.parallel.internals import at_end_of_backward, choose_formats, forget_order, has_begun, parts, record
from evenstep.parallel.replicas import CHECKED_EVERY_UPDATES, check_equal, synchronise
from evenstep.parallel.shardable import check_shardable, check_steppable, cuttable, explained
from evenstep.parallel.spoken import Spoken
from evenstep.parallel.strategy import Spoiled, Strategy, mapped

T = TypeVar("T")


class Sharded(Strategy):
    """Shards of a module that FSDP2 gathers where they are used.

    Args:
        group: the ranks, of a `Processes`.
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
        gather_dtype: the number format in which parameters are gathered and used; their own by default. Gradients
            are always reduced in float32 at least.
        offload: whether shards wait in the CPU's memory; needs an accelerator.

    Raises:
        ArgumentError: `shard_ranks` does not divide the ranks, or there is no accelerator to offload from.
    """

    in_turn = True
    divides = "elements"

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        gather_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(group)
        self._shard_ranks = shard_ranks or group.ranks
        if group.ranks % self._shard_ranks:
            raise ArgumentError(
                f"`shard_ranks` must divide the {group.ranks} data-parallel ranks, but is {shard_ranks}; set a "
                f"divisor, or leave it out to shard over all."
            )
        if offload and group.device.type == "cpu":
            raise ArgumentError("`offload` keeps shards in the CPU's memory, where they are already; leave it out.")
        # where every rank holds all, FSDP2 sums in a way that can't be followed
        self.cuts_alone = self._shard_ranks > 1 or group.ranks == 1
        self._gather_dtype = gather_dtype
        self._offload = offload
        self.options: dict[str, Any] = {"shard_ranks": shard_ranks, "gather_dtype": gather_dtype, "offload": offload}
        self._module: Any = None
        self._buffers = SharedBuffers(nn.Module(), self.group)
        self._old: dict[int, nn.Parameter] = {}  # the parameters' shards by what the optimizer was built with
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._numbers: list[nn.Parameter] = []  # which can't be cut
        self._present: list[bool] = []  # whether a parameter has a gradient: of the shards, then of the numbers
        self._watched: set[int] = set()  # whose gradients are seen
        self._muted = False
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._spoken = Spoken(group)
        self._follow: partial[bool] = partial(bool)  # runs a pass that counts nowhere
        self._halved: dict[str, Any] = {}  # a part of a micro-batch of each kind of which a whole one did not fit
        self._lost = False  # whether such a pass has taken gradients along when it broke off
        self._passes = 0  # of all ranks, in this update or evaluation

    def wrap(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        units = self._units(module)
        check_shardable(module, units)
        self._numbers = [parameter for parameter in module.parameters() if not cuttable(parameter)]
        synchronise(module, self.group)
        before = dict(module.named_parameters(remove_duplicate=False))
        mesh = self.group.mesh(self._shard_ranks)
        policy = MixedPrecisionPolicy(param_dtype=self._gather_dtype, reduce_dtype=self._reduce_dtype())
        for unit in (*units, module):
            fully_shard(
                unit,
                mesh=mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._offload else OffloadPolicy(),
                ignored_params=set(self._numbers),
            )
        after = dict(module.named_parameters(remove_duplicate=False))
        self._old = {id(parameter): after[name] for name, parameter in before.items()}
        self._module = module
        self._buffers = SharedBuffers(module, self.group)
        self._prepare()
        return module

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        check_steppable(self._numbers, optimizer)
        whole: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group in optimizer.param_groups:  # of which some may belong to other stages
            group["params"] = [self._old.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in whole:  # some optimizers make their state when they are built
            cut = self._old.get(id(parameter), parameter)
            if cut is not parameter and parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state.pop(parameter)
                optimizer.state[cut] = mapped(state, partial(self.part, cut))

    @property
    def part_held(self) -> tuple[int, int]:
        return self.rank % self._shard_ranks, self._shard_ranks

    @property
    def retries_alone(self) -> bool:
        return False

    def begin(self, module: Callable[..., Any]) -> None:
        self._lost = False

    def match(
        self,
        work: Sequence[T],
        run: Callable[[T], None],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        self._spoken.finish()
        here = [0.0] * (2 * self.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.rank], here[self.ranks + self.rank] = len(work), float(example is not None)
        said = self.group.sum_floats(here)
        counts, have = said[: self.ranks], said[self.ranks :]
        self._passes = int(max(counts))
        self._spoken.start(kind)
        if not self._passes:  # the only one with such work has failed before it
            return
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if self.rank == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        self._follow = partial(self._run_unseen, kind, self._halved.get(kind, example), run, halve)
        missing = self._passes - len(work)
        owed = backward and last and not work and missing > 0
        accumulated = any(self._present)  # by other kinds
        for _ in range(missing - owed):
            broke_off = self._follow()
            self._lost = self._lost or (accumulated and broke_off)
            if not accumulated:  # else zeros have been added
                self._forget_gradients()
        if owed:
            self._owe()

    @abstractmethod
    def _owe(self) -> None:
        """This rank has no micro-batch: `_follow` must take the place of its last backward, in which others reduce."""

    def _run_unseen(self, kind: str, example: T, run: Callable[[T], None], halve: Callable[[T], T | None]) -> bool:
        """Run a pass whose gradients are zeros; where memory runs out, half the samples go on where it broke off.

        Returns:
            Whether it has broken off, and with it what was in gradients before.
        """
        broke_off = False
        while True:
            self._muted = True
            try:
                run(example)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                half = halve(example)
                if half is None:
                    raise OutOfMemoryError(
                        f"rank {self.rank} has no memory even for the smallest part of a micro-batch, with which it "
                        f"was to take part in what the other ranks do. Use a smaller model, shorter samples, or more "
                        f"ranks to shard over."
                    ) from error
                example = self._halved[kind] = half
                broke_off = True
            else:
                return broke_off
            finally:
                self._muted = False
            self._break_off()

    def _break_off(self) -> None:
        """A pass has ended in the midst; the next one takes its place: what was said to the peers is not said again."""
        self._reset()
        give_back()
        self._spoken.go_on()

    def _follow_to_the_end(self, before_last: Callable[[], None]) -> None:
        """After a failure: take part in the passes that the peers still make, with half of what failed."""
        kind, example, run, halve = self._follow.args
        half = halve(example)
        self._follow = partial(self._run_unseen, kind, example if half is None else half, run, halve)
        self._break_off()
        while self._spoken.passes < self._passes or self._spoken.broken:
            if self._spoken.passes + (not self._spoken.broken) == self._passes:
                before_last()
            self._follow()
        self._spoken.finish()
        self._reset()

    def follow(self) -> None:
        self._follow_to_the_end(nothing)

    def any_failed(self, failed: bool) -> bool:
        if failed:
            self.follow()
        self._spoken.finish()
        return self.group.sum_floats([float(failed)])[0] > 0

    def explained(self, error: Exception) -> Exception:
        return explained(error, dict(self._module.named_parameters(remove_duplicate=False)))

    def facing(self, gradient: Tensor) -> Tensor:
        if not hasattr(gradient, "_local_tensor") and self.rank:  # which every rank has whole
            return torch.zeros_like(gradient)
        return getattr(gradient, "_local_tensor", gradient)

    def over_shards(self, products: Tensor) -> None:
        if self.rank >= self._shard_ranks:  # other copies hold the same shards
            products.zero_()
        self.group.sum(products)()

    def share_buffers(self, before: Before) -> None:
        self._buffers.share(before)

    def after_update(self, update: int) -> None:
        if update % CHECKED_EVERY_UPDATES == 0:
            check_equal(self._module, self.group, update, replica_ranks=self._shard_ranks)

    def abandon(self) -> None:
        self._spoken.start()
        self._reset()
        self._lost = False
        self._buffers.look_anew()

    def whole(self, tensor: Tensor) -> Tensor:
        full = getattr(tensor.to(self.group.device), "full_tensor", None)
        return tensor if full is None else full().to(tensor.device)

    def part(self, live: Tensor, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(live, DTensor) or live.shape != whole.shape:
            return whole
        # No rank is the source: each takes its part of what it has.
        return distribute_tensor(whole.to(live.device), live.device_mesh, live.placements, src_data_rank=None)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        """What is gathered at once, beside what is left over."""
        return units(module)

    def _reduce_dtype(self) -> torch.dtype | None:
        """In which FSDP2 sums gradients; None for their own."""
        return self._gather_dtype and torch.float32

    def _parts(self) -> list[Any]:
        """The `FSDPModule`s, the outermost first."""
        return [part for _, part in parts(self._module)]

    def _prepare(self) -> None:
        """Set what makes FSDP2 sum, and watch which gradients appear."""
        self._shards = []
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)
            part.unshard()  # makes the parameters that autograd sees
            part.reshard()
            self._shards += getattr(record(part), "fsdp_params", ())
        if self.in_turn:
            self._listen()
        self._present = [False] * (len(self._shards) + len(self._numbers))
        self._watched = set()
        self._watch()

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        check_shardable(self._module, [cast("nn.Module", part) for part in self._parts() if part is not self._module])
        self._spoken.forget()
        for part in self._parts():
            choose_formats(part)
        for shard in self._shards:  # as FSDP2 would when it next gathers it
            shard.unsharded_param.requires_grad_(shard.sharded_param.requires_grad)
        self._watch()

    def _watch(self) -> None:
        """Learn of the gradients of what is trained and was not yet."""
        watched = [*(shard.unsharded_param for shard in self._shards), *self._numbers]
        for number, parameter in enumerate(watched):
            if parameter.requires_grad and number not in self._watched:
                parameter.register_hook(partial(self._seen, number))
                self._watched.add(number)

    def _listen(self) -> None:
        """Let passes say the same to the other ranks, whatever each of them runs."""
        before: Any = None
        for name, part in parts(self._module):
            # By itself FSDP2 gathers ahead, in a backward, what went forward before on this rank: each its own.
            part.set_modules_to_backward_prefetch([before or part])
            at_end_of_backward(part, self._spoken.through)
            if (of_part := record(part)) is not None:
                self._spoken.listen(part, of_part, name, alone=self._shard_ranks == 1)
            if self.group.device.type != "cpu":  # there, nothing is gathered while something is computed
                before = part
        if before is not None:
            self._module.set_modules_to_backward_prefetch([before])
        # FSDP2's own hooks are not compiled either
        self._module.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)
        self._module.register_forward_hook(torch.compiler.disable(self._end_forward))

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        if self._muted:
            return torch.zeros_like(gradient)
        self._present[number] = True
        return gradient

    def _begin_pass(self, *_: Any) -> None:
        """Let all passes be alike: what FSDP2 remembers of those before would make it gather at other times."""
        self._spoken.begin()
        forget_order(self._module)

    def _end_forward(self, *_: Any) -> None:
        self._spoken.turn()

    def _reset(self) -> None:
        """Forget what passes have left behind."""
        if has_begun(self._module):
            self._module.reset_iter_state()
        self._forget_gradients()
        self._present = [False] * len(self._present)

    def _complete_sums(self) -> None:
        """Let no part hold sums beside nothing: FSDP2 takes zeros in the gathered format for what has no gradient.

        It then fails where sums are kept in a wider one (https://github.com/pytorch/pytorch/issues/196996).
        """
        for part in self._parts():
            shards = getattr(record(part), "fsdp_params", ())
            if all(shard.unsharded_accumulated_grad is None for shard in shards):
                continue
            for shard in shards:
                if shard.unsharded_accumulated_grad is None and shard.unsharded_param.requires_grad:
                    shard.unsharded_accumulated_grad = torch.zeros_like(shard.unsharded_param, dtype=shard.reduce_dtype)

    def _forget_gradients(self) -> None:
        for shard in self._shards:
            shard.unsharded_accumulated_grad = None
            shard.unsharded_param.grad = None
        for number in self._numbers:
            number.grad = None

    def _present_anywhere(self, *, spoiled: bool) -> list[bool]:
        """Which parameters have a gradient on any rank; others must stay None, or an idle head's state would move.

        Raises:
            Spoiled: this rank or another says so.
        """
        *flags, bad = self.group.sum_floats([*map(float, self._present), float(spoiled)])
        self._present = [False] * len(self._present)
        if bad:
            raise Spoiled
        return [flag > 0 for flag in flags]

    def _finish(self, present: Sequence[bool]) -> None:
        """After the shards' gradients were summed: take away those that no rank has, and sum the single numbers'."""
        for shard, has in zip(self._shards, present, strict=False):
            if not has:
                shard.sharded_param.grad = None
        self._sum_numbers(present[len(self._shards) :])

    def _sum_numbers(self, present: Sequence[bool]) -> None:
        """Sum over all ranks the gradients of the single numbers that have one on any of them."""
        having = [number for number, has in zip(self._numbers, present, strict=True) if has]
        for number in self._numbers:
            number.grad = number.grad if any(number is one for one in having) else None
        for number in having:
            if not number.numel():
                number.grad = torch.zeros_like(number)
        having = [number for number in having if number.numel()]
        if not having:
            return
        total = torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in having])
        self.group.sum(total)()
        for number, gradient in zip(having, total, strict=True):
            number.grad = gradient.to(number.dtype)


def nothing() -> None:
    """Do nothing."""


def _called(item: nn.Module) -> Iterator[nn.Module]:
    """The item, or what it holds, where it is a container that nobody can call."""
    if type(item).forward is not nn.Module.forward:
        yield item
        return
    for child in item.children():
        yield from _called(child)


def units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the items of each `nn.ModuleList` and `nn.Sequential` that hold parameters.

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
    items = [one for item in outermost for one in _called(item) if any(True for _ in one.parameters())]
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(item: nn.Module) -> bool:
        own: dict[int, int] = {}
        for _, parameter in item.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        return all(uses[key] == count for key, count in own.items())

    return [item for item in items if alone(item)]
