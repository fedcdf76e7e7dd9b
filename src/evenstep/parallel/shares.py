"""What ranks that step alone share, and when: means of their parameters, which give one step of the outer optimizer.

Settings are those of `Local`. It steps no parameter by itself between two shares, and it sums no gradient.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final
from zlib import crc32

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError, LostRankError, NonFiniteError, ReplicaError
from evenstep.names import named_buffers, named_parameters, plain
from evenstep.parallel.buffers import SharedBuffers
from evenstep.parallel.group import Group
from evenstep.parallel.means import MeanOverRanks
from evenstep.parallel.outer import fragments_of
from evenstep.parallel.reducer.local import Local
from evenstep.parallel.reducer.ordered import Ordered
from evenstep.parallel.replicas import bits, compare_replicas, first_numbers


class Inner(Protocol):
    """What a rank that steps alone steps with, as sharing must know it."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The float32 values, by name, of parameters of which the module holds rounded ones."""
        ...

    def rates(self, parameters: Sequence[nn.Parameter]) -> list[float]:
        """The learning rate of each parameter now."""
        ...

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the optimizer's state of these parameters be that of a new optimizer."""
        ...

    def follow_shared(self, update: int) -> None:
        """What ranks share is that after `update`: let an average follow it."""
        ...


@final
class Shares:
    """Shares what the modules of one rank have become, of all its stages; the settings are those of `Local`.

    Attributes:
        is_alone: whether the next update is this rank's own: its gradients, weights and verdict are summed with nobody
            but those that hold other stages of the same replica.
        is_torn: whether an error came while ranks shared, so that this one holds the state of no update.
        is_current: whether the module holds what the ranks share.
        shared_until: the last update after which all was shared that was due; ranks that are left redo what is not.
        momentum: v of the outer optimizer by name; empty where it keeps none.
        fragments: the names of the parameters of each fragment.
    """

    def __init__(self, strategy: Local) -> None:
        self.group, self._settings = strategy.group, strategy
        self._is_ordered = isinstance(strategy.replicas, Ordered)
        self._flight: dict[int, tuple[int, MeanOverRanks]] = {}  # on their way, with the update that sent each
        self.is_torn, self.is_current = False, True
        self.follow(0)

    def after_update(self, update: int) -> None:
        """`update` was committed: share what is due."""
        settings = self._settings
        since = update - settings.synchronous_updates
        if since <= 0:
            if not since:
                self.restart()
            self.shared_until = update
            return
        self.is_current = False
        self.is_torn = True
        for sent, mean in self._flight.values():
            if update - sent == settings.overlap_updates:
                mean.values()  # first, so that with the last word of a share it is made
        for number in self._due(update):
            self._send(number, update)
        for number, (sent, _) in list(self._flight.items()):
            if update - sent == settings.overlap_updates:
                self._arrive(number)
        self._inner.follow_shared(update)
        self.is_torn = False
        self.shared_until = update
        if self.is_current:
            compare_replicas(self.module, self.group, update)

    # --- what an update asks, where each rank steps by itself

    def attach(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        inner: Inner,
        *,
        pipeline: Group,
        aliases: Mapping[str, str],
        sizes: Mapping[str, int],
    ) -> None:
        """After `wrap`: share these parameters of this rank's module, which `inner` steps.

        Args:
            pipeline: the ranks that hold the other stages of this rank's replica.
            aliases: for each copy of a parameter that stages share the name of the first.
            sizes: how many numbers each parameter of all stages holds, in the model's order, without copies.
        """
        self.module, self._parameters, self._inner, self._pipeline = module, dict(parameters), inner, pipeline
        self._buffers = SharedBuffers(module, self.group)
        held = {id(one) for one in parameters.values()}
        others = {name: one for name, one in named_parameters(module).items() if id(one) not in held}
        self._unheld = {name: one for name, one in others.items() if type(one.data) is Tensor and one.numel()}
        if len(sizes) < self._settings.fragments:
            raise ArgumentError(
                f"`fragments` must be at most the {len(sizes)} parameters that are trained, but is "
                f"{self._settings.fragments}; lower it."
            )
        # copies of one parameter stand at other places of what is sent, where sums are rounded in another order
        self._is_ordered = self._is_ordered or bool(aliases)
        whole = list(sizes)
        number_of = {
            whole[place]: number
            for number, places in enumerate(fragments_of(list(sizes.values()), self._settings.fragments))
            for place in places
        }
        self.fragments: list[list[str]] = [[] for _ in range(self._settings.fragments)]
        for name in self._parameters:
            self.fragments[number_of[aliases.get(name, name)]].append(name)
        self._shared: dict[str, Tensor] = {}
        self._shared_buffers: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        if not self._settings.synchronous_updates:
            self.restart()

    def follow(self, update: int) -> None:
        """`update` updates are committed, or were loaded: be ready for the next."""
        self.shared_until = update
        self.is_alone = update >= self._settings.synchronous_updates

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way between the ranks, without which the state of this one is not whole."""
        return bool(self._flight)

    def owes_share(self, update: int) -> bool:
        """Whether the ranks have still to meet after committed update `update`, to share what is due."""
        return self.shared_until < update and bool(self._due(update))

    @contextmanager
    def shown(self) -> Generator[None]:
        """Inside, the module holds what ranks share, instead of what this one has made of it since."""
        if self.is_current:
            yield
            return
        live: dict[str, Tensor] = {**self._parameters, **self._live_buffers()}
        kept = {name: one.detach().clone() for name, one in live.items()}
        _put(live, {**self._shared, **self._shared_buffers})
        try:
            yield
        finally:
            _put(live, kept)

    def break_off(self) -> None:
        """The ranks' connections are about to be made anew, or were lost: what travels beside updates has not come."""
        for _, mean in self._flight.values():
            mean.break_off()

    # --- for those who save

    def restart(self) -> None:
        """Let what is shared be what the module holds, which is the same on all ranks, and the momentum 0."""
        self._shared = {name: self.value(name).clone() for name in self._parameters}
        self._shared_buffers = {name: one.detach().clone() for name, one in named_buffers(self.module).items()}
        kept = self._shared if self._settings.outer.has_momentum else {}
        self.momentum = {name: torch.zeros_like(one) for name, one in kept.items()}
        self._flight, self.is_current, self.is_torn = {}, True, False

    def value(self, name: str) -> Tensor:
        """This rank's own value of a parameter, in 32 bits or more; it may be the parameter itself."""
        value = self._inner.masters.get(name, self._parameters[name]).detach()
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

    @property
    def shared(self) -> dict[str, Tensor]:
        """What the ranks share, parameters and buffers, in 32 bits or more; what has several names is under each."""
        module, shared = self.module, {**self._shared, **self._shared_buffers}
        first = {id(one): name for name, one in {**self._parameters, **self._live_buffers()}.items()}
        every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {plain(name): shared[first[id(one)]] for name, one in every if id(one) in first}

    @property
    def own(self) -> dict[str, Tensor]:
        """What this rank has made of it since, by name; empty if that is the same."""
        if self.is_current:
            return {}
        return {**{name: self.value(name) for name in self._parameters}, **self._live_buffers()}

    def means(self, *, waits: bool = True) -> dict[str, dict[str, Any]]:
        """The means that wait to be used, by fragment.

        Args:
            waits: for those that have not come; then all ranks call it together.
        """
        flight = [(str(number), sent, mean) for number, (sent, mean) in self._flight.items() if waits or mean.has_come]
        return {number: {"sent": sent, "mean": mean.values()} for number, sent, mean in flight}

    def load(
        self,
        *,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        momentum: Mapping[str, Tensor],
        means: Mapping[str, Any],
    ) -> None:
        """Restore what these gave, after `restart` with what is shared."""
        with torch.no_grad():
            for name in self._shared.keys() & shared.keys():
                self._shared[name].copy_(shared[name])
            for name, value in momentum.items():
                self.momentum[name].copy_(value)
            for name, value in own.items():
                if name in self._parameters:
                    self._write(name, value)
            for name, buffer in self._live_buffers().items():
                if name in own and own[name].shape == buffer.shape:
                    buffer.copy_(own[name])
        self.is_current = not own
        for number, one in means.items():
            come = {name: value.to(self._shared[name].device) for name, value in one["mean"].items()}
            self._flight[int(number)] = one["sent"], MeanOverRanks.of(come)

    # --- for ranks that go on without a lost one

    @property
    def together_until(self) -> int:
        """After how many updates ranks step alone."""
        return self._settings.synchronous_updates

    @property
    def last_share(self) -> dict[str, dict[str, Tensor]]:
        """All that ranks have in common, for one that was kept from making the last share; see `take_share`."""
        return {"shared": self._shared, "buffers": self._shared_buffers, "momentum": self.momentum}

    def settle_means(self, *, before: int) -> None:
        """Let the means come that were sent before this update; those that go on call it together, in a group of them.

        One that has come to any of them, with what a lost rank has sent, is that of all. If it has come to none, it is
        that of what those that go on have sent.
        """
        flight = [(number, mean) for number, (sent, mean) in sorted(self._flight.items()) if sent < before]
        everybody = self.group.gather([mean.has_come for _, mean in flight])
        for (_, mean), come in zip(flight, zip(*everybody, strict=True), strict=True):
            if any(come):
                mean.take(self.group, come.index(True))
            else:
                mean.send()
                mean.values()

    def take_share(self, update: int, theirs: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Make the share of `update` with what it has come to on another rank, which `last_share` gave there."""
        due, since = self._due(update), update - self._settings.synchronous_updates
        late = self._settings.overlap_updates
        come = [number for number, (sent, _) in self._flight.items() if update - sent == late] if late else due
        if since == 0:
            self.restart()
        with torch.no_grad():
            for part, held in self.last_share.items():
                for name in held.keys() & theirs[part].keys() if due or come else ():
                    held[name].copy_(theirs[part][name])
            for name, buffer in self._live_buffers().items() if 0 in due else ():
                buffer.copy_(self._shared_buffers[name])
        if since > 0:
            self.is_current = False
            for number in due:
                self._flight[number] = update, self._mean(number)
            for number in come:
                del self._flight[number]
                self._adopt(number)
            self._inner.follow_shared(update)
        self.is_torn, self.shared_until = False, update

    # --- one share

    def _due(self, update: int) -> list[int]:
        """The fragments that are sent after `update`."""
        settings, since = self._settings, update - self._settings.synchronous_updates
        return [
            number
            for number in range(len(self.fragments))
            if since > 0
            and (since - settings.every_updates * number // settings.fragments) % settings.every_updates == 0
        ]

    def _send(self, number: int, update: int) -> None:
        """Begin to sum a fragment over the ranks."""
        names = self.fragments[number]
        own = {name: self.value(name) for name in names}
        self._agree(own, update)
        self._flight[number] = update, (mean := self._mean(number))
        mean.send()
        if not self._settings.overlap_updates:
            mean.values()  # a rank may be lost until buffers are shared as well; only then anything is changed
        if number == 0:
            self._share_buffers()

    def _mean(self, number: int) -> MeanOverRanks:
        """That of a fragment, of which this rank gives what it holds now."""
        own = {name: self.value(name) for name in self.fragments[number]}
        may_break = self._settings.overlap_updates > 0
        return MeanOverRanks(own, self.group, is_ordered=self._is_ordered, may_break=may_break)

    def _agree(self, own: Mapping[str, Tensor], update: int) -> None:
        """Raise, on all ranks alike, unless all parameters are finite and all ranks train the same."""
        group, rates = self.group, self._inner.rates(list(self._parameters.values()))
        flags = [one.requires_grad for one in self._parameters.values()]
        beside = [bits(first_numbers(one)) for one in self._unheld.values()]
        numbers = torch.stack(beside).tolist() if beside else []
        stamps = [float(crc32(repr(one).encode())) for one in ((rates, flags), numbers)]
        said = [0.0] * group.ranks + stamps
        said[group.rank] = float(not all(bool(one.isfinite().all()) for one in own.values()))
        *heard, trained, unheld = group.sum_floats(said)
        found = [float(one != group.sum_of_same(stamp)) for one, stamp in zip((trained, unheld), stamps, strict=True)]
        *faults, differs, moved = self._pipeline.sum_floats([*heard, *found])
        if moved:
            everybody = group.gather(numbers)
            names = (name for name, *values in zip(self._unheld, *everybody, strict=True) if len({*values}) > 1)
            raise ReplicaError(
                f"after update {update} the ranks hold different values of parameters that the optimizer does not "
                f"hold, which ranks that step alone don't share{_first(names)}: forwards or a hook have moved them by "
                f"what each rank has seen or trained. Give the optimizer all of `model.parameters()`: it leaves those "
                f"without a gradient as they are, and ranks share them. Or move a teacher by `ema` (`now.teacher`)."
            )
        if differs:
            raise ReplicaError(
                f"rank {group.rank} has trained other parameters, or at another learning rate, than another rank "
                f"until update {update}: `requires_grad` or the optimizer's `lr` was changed on some ranks only. "
                f"Change it on all of them at the same update; a hook that is `first_rank_only` runs on one."
            )
        ranks = [rank for rank, fault in enumerate(faults) if fault]
        if ranks:
            raise NonFiniteError(
                f"after update {update} {_which(self._pipeline)} {', '.join(map(str, ranks))} holds parameters that "
                f"are inf or NaN, so nothing was shared. Go on from the last checkpoint with a lower learning rate, or "
                f"clip gradients."
            )

    def _arrive(self, number: int) -> None:
        """Make the outer step of a fragment whose mean has come."""
        names = self.fragments[number]
        _, mean = self._flight[number]
        total, parameters = mean.values(), [self._parameters[name] for name in names]
        del self._flight[number]
        with torch.no_grad():
            for name, rate in zip(names, self._inner.rates(parameters), strict=True):
                self._settings.outer.step(self._shared[name], total[name], self.momentum.get(name), rate=rate)
        self._adopt(number)

    def _adopt(self, number: int) -> None:
        """Let this rank's own parameters of a fragment follow the outer step that was made."""
        settings, names = self._settings, self.fragments[number]
        with torch.no_grad():
            for name in names:
                shared = self._shared[name]
                self._write(name, shared.lerp(self.value(name), settings.own_share) if settings.own_share else shared)
        if settings.inner_state == "reset":
            self._inner.reset([self._parameters[name] for name in names])
        self.is_current = settings.fragments == 1 and not (settings.overlap_updates or settings.own_share)

    def _write(self, name: str, value: Tensor) -> None:
        """Let this rank's own parameter, and its master if it has one, be `value`."""
        master = self._inner.masters.get(name)
        if master is not None:
            master.copy_(value)
        self._parameters[name].copy_(value)

    def _share_buffers(self) -> None:
        """Make the buffers equal on all ranks, with the first fragment."""
        self._buffers.look_anew()
        live = self._live_buffers()
        before = {name: one.detach().clone() for name, one in live.items()}
        try:
            self._buffers.share(_SinceShare(live, self._shared_buffers))
        except LostRankError:  # those that are left share them anew, from where each was
            _put(live, before)
            raise
        _put({name: self._shared_buffers[name] for name in live}, live)

    def _live_buffers(self) -> dict[str, Tensor]:
        """This rank's own of those that ranks share; a table that forwards have made since, or enlarged, is none."""
        shared, live = self._shared_buffers, named_buffers(self.module)
        return {name: one for name, one in live.items() if name in shared and one.shape == shared[name].shape}


def _put(there: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into the tensors of the same names."""
    with torch.no_grad():
        for name, one in there.items():
            one.copy_(values[name])


def _first(names: Iterator[str]) -> str:
    """The first of them, for people; none where other stages have them."""
    return next((f", first of `{name}`" for name in names), "")


def _which(pipeline: Group) -> str:
    """What a data-parallel rank is called."""
    return "replica" if pipeline.ranks > 1 else "rank"


@final
class _SinceShare:
    """The buffers as of the last share."""

    def __init__(self, live: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        self._shared = {id(one): shared[name] for name, one in live.items()}

    def value(self, buffer: Tensor) -> Tensor:
        """What was in `buffer`."""
        return self._shared[id(buffer)]

    def moved(self, buffer: Tensor) -> bool:
        """Whether something has written to `buffer` since; no where ranks don't share it."""
        return id(buffer) in self._shared and not torch.equal(buffer, self._shared[id(buffer)])
