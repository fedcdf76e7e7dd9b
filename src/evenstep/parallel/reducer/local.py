"""Ranks that step alone, and share their parameters every so many updates through one outer optimizer.

Between two shares each rank is a run of its own: its gradient is the mean over its own micro-batches, its norm, clip,
loss scale and verdict are its own, and nothing of the update is sent. In a share the mean m of the ranks' parameters
gives one step of `parallel.outer`, the same on all. Post-local SGD, BMUF, SlowMo, DiLoCo and streaming DiLoCo are
settings of this; there is no branch for any of them. It does not evaluate or save: those ask for what is `shown`.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, final

from torch import nn

from evenstep.arguments import require_number, require_object, require_whole, require_word, said
from evenstep.errors import ArgumentError
from evenstep.parallel.compression import Compression
from evenstep.parallel.group import Group
from evenstep.parallel.layout import OwnStates
from evenstep.parallel.outer import Outer
from evenstep.parallel.reducer.ddp import Ddp
from evenstep.parallel.reducer.ordered import Ordered
from evenstep.parallel.reducer.reducer import ChoosesTrained, Reducer
from evenstep.parallel.reducer.strategy import Strategy

InnerState = Literal["keep", "reset"]


@final
class Local(Strategy):
    """Every rank trains its own copy of the model, and the copies are averaged every `every_updates` updates.

    Between two averagings ranks send nothing: each sums the gradients of its own micro-batches, clips them by their own
    norm and makes its own optimizer step. So slow connections cost little, but the result depends on the number of
    ranks. Averaging is itself a step of an "outer" optimizer, from the last common parameters towards the mean of the
    ranks' parameters. With the defaults it simply takes the mean.

    With R ranks, θ_r the parameters of rank r, θ the common parameters, N = `synchronous_updates` and
    H = `every_updates`:

        u ≤ N:               as `replicas`: one gradient of all micro-batches, one step, the same on all ranks
        u > N:               θ_r ← Optimizer_r(θ_r, g_r),   g_r = Σ_{m on r} ∇S_m / Σ_{m on r} w_m, clipped by ‖g_r‖
        u = N + H, N + 2H …: m = Σ_r θ_r / R,  θ ← one step of `Outer` towards m,  θ_r ← θ

    Published methods are settings of it:

    - *local SGD* and *post-local SGD* (Lin et al. 2018, arXiv:1808.07217; number not checked): the defaults; for the
      latter set N to the number of ordinary updates at the beginning.
    - *BMUF* (Chen & Huo 2016; number not checked): `outer_lr` ζ, `outer_momentum` η. With G = m - θ: Δ ← η·Δ + ζ·G,
      θ ← θ + Δ. For its *Nesterov* form, where ranks start from θ + η·Δ, also set `nesterov`; its warm-up is N.
    - *SlowMo* (Wang et al. 2019, arXiv:1910.00643, algorithm 1, lines 6 to 8): `outer_lr` α, `outer_momentum` β,
      `by_inner_rate`. u ← β·u + (θ - m)/γ (its equation 2), θ ← θ - α·γ·u (3). What it does with the buffers of the
      base optimizer (line 2) is `inner_state`.
    - *DiLoCo* (Douillard et al. 2023, arXiv:2311.08105, algorithm 1, lines 12 and 14): `outer_lr=0.7`,
      `outer_momentum=0.9`, `nesterov`. It is the same as BMUF's Nesterov form: DiLoCo's θ is BMUF's θ + η·Δ.
    - *streaming DiLoCo* (Douillard et al. 2025, arXiv:2501.18512, algorithm 2, lines 6 to 12): the same with
      `fragments` P, `overlap_updates` τ and `own_share` α (line 12).

    With P fragments the parameters, in the model's order, are cut into P parts of nearly equal size, and part p is
    averaged at the updates u with u - N ≡ ⌊p·H/P⌋ modulo H. The mean m is of the parameters at that update; ranks go on
    training while it is computed, and τ updates later (with 0: at once) the outer step is made and each rank takes
    θ_r ← α·θ_r + (1 - α)·θ.

    A rank that has no micro-batch in an update makes no step in it. A rank whose gradient is not finite leaves out its
    own step and reports it. The update counts on all ranks. Parameters are averaged only if those of all ranks are
    finite. If ranks may be lost, the mean is over the remaining ones, also one that is on its way, unless a remaining
    rank has it already; a rank that joins starts from θ with a new optimizer state; and no rank applies an update
    before all have computed theirs. Replicas in stages do the same, each as one rank that holds all: a stage
    averages with the same stage of the others.
    Evaluations, predictions and checkpoints for other runs use θ, with the buffers of the last averaging; the model
    object of a rank holds θ_r.

    Args:
        replicas: how gradients are summed in the first `synchronous_updates` updates, and in which order parameters are
            averaged: `Ddp`, or `Ordered` for bits that do not depend on how ranks are connected.
        every_updates: the number of updates between two averagings.
        outer_lr: step size of the outer optimizer; 1 takes the mean.
        outer_momentum: momentum of the outer optimizer, in [0, 1).
        nesterov: whether that momentum is Nesterov's.
        by_inner_rate: whether the momentum is kept in units of the learning rate, as in SlowMo.
        synchronous_updates: the number of updates at the beginning that are made together, as with `replicas`.
        inner_state: what happens to each rank's optimizer state of averaged parameters: "keep" it, or "reset" it to
            that of a new optimizer.
        fragments: the number of parts that the parameters are cut into.
        overlap_updates: the number of updates that ranks make while a mean is computed, below `every_updates`.
        own_share: the share of its own parameters that each rank keeps, in [0, 1).

    Raises:
        ArgumentError: an argument out of its range.

    >>> Local(Ddp(Group()), every_updates=50, outer_lr=0.7, outer_momentum=0.9, nesterov=True).ranks
    1
    """

    def __init__(
        self,
        replicas: Strategy,
        *,
        every_updates: int = 16,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        by_inner_rate: bool = False,
        synchronous_updates: int = 0,
        inner_state: InnerState = "keep",
        fragments: int = 1,
        overlap_updates: int = 0,
        own_share: float = 0.0,
    ) -> None:
        require_object("replicas", replicas, Strategy, "`Local(Ddp(Processes(device)), every_updates=16)`")
        if not isinstance(replicas, Ddp | Ordered):
            raise ArgumentError(
                f"`replicas` must be a strategy whose ranks hold all, `Ddp` or `Ordered`, but is {said(replicas)}: "
                f"ranks that step alone need whole models; write `Local(Ddp(Processes(device)), every_updates=16)`."
            )
        if isinstance(replicas, Ddp) and type(replicas.compression) is not Compression:
            raise ArgumentError(
                "the `compression` of `replicas` is of gradients, but ranks that step alone send parameters, which "
                "must arrive as they are; leave it out."
            )
        require_whole("every_updates", every_updates, at_least=1, advice="16 to 500 is usual")
        require_whole("synchronous_updates", synchronous_updates, at_least=0, advice="0 begins alone")
        require_word("inner_state", inner_state, ("keep", "reset"))
        require_whole("fragments", fragments, at_least=1, advice="1 shares all parameters together")
        require_whole("overlap_updates", overlap_updates, at_least=0, advice="0 waits for the mean")
        require_number("own_share", own_share)
        if not 0 <= own_share < 1:
            raise ArgumentError(f"`own_share` must be in [0, 1), but is {own_share}; 0 takes what is shared.")
        for name, count in (("overlap_updates", overlap_updates), ("fragments", fragments - 1)):
            if count >= every_updates:
                raise ArgumentError(
                    f"`{name}` must be {'below' if name == 'overlap_updates' else 'at most'} the {every_updates} of "
                    f"`every_updates`, in which each fragment is shared once, but is {max(count, fragments)}; lower it."
                )
        super().__init__(replicas.group, OwnStates(replicas.group))
        self.replicas = replicas
        self.outer = Outer(
            outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov, by_inner_rate=by_inner_rate
        )
        self.every_updates, self.synchronous_updates = every_updates, synchronous_updates
        self.inner_state, self.own_share = inner_state, own_share
        self.fragments, self.overlap_updates = fragments, overlap_updates

    @property
    def settings(self) -> dict[str, Any]:
        outer = {
            name: getattr(self.outer, name) for name in ("outer_lr", "outer_momentum", "nesterov", "by_inner_rate")
        }
        own = ("every_updates", "synchronous_updates", "inner_state", "fragments", "overlap_updates", "own_share")
        return {"parallel.local": {**outer, **{name: getattr(self, name) for name in own}}}

    def say_last_mean(self, updates: int | None) -> None:
        """Say which updates of a run of so many, if known, come after the last mean: its model has nothing of them."""
        begin, period = self.synchronous_updates, self.every_updates
        if updates is None or updates <= begin or self.group.rank:
            return
        alone = max(updates - begin - self.overlap_updates, 0)  # of which a mean comes in time
        over, logger = alone % period, logging.getLogger("evenstep")
        if alone < period:
            logger.warning(
                f"ranks take no mean of what they learn after update {begin} in the run's {updates} updates, so it is "
                f"not in its model; lower `every_updates`, which is {period}, or let the run be longer."
            )
        elif over and self.fragments == 1:  # several take theirs one after the other
            logger.warning(
                f"ranks take their last mean after update {updates - over}, so what they learn in the last {over} of "
                f"the run's {updates} updates is not in its model; {updates - over + period} updates end with a mean."
            )

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return LocalReducer(module, self)


@final
class LocalReducer(Reducer, ChoosesTrained):
    """Sums a stage's gradients: over all ranks while these step together, over none while each steps alone."""

    def __init__(self, module: nn.Module, strategy: Local) -> None:
        super().__init__(module, strategy.group)
        replicas, ordered = strategy.replicas, isinstance(strategy.replicas, Ordered)
        self._together_until = strategy.synchronous_updates
        self._together = replicas.reducer(module)
        self._apart = Ordered().reducer(module) if ordered else Reducer(module, Group())
        self.collects = ordered
        self.follow(0)

    def follow(self, update: int) -> None:
        """`update` updates are committed, or were loaded: be ready for the next."""
        self._now = self._apart if update >= self._together_until else self._together

    def wrap(self) -> nn.Module:
        self._apart.wrap()
        return self._together.wrap()

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for one in (self._together, self._apart):
            if isinstance(one, ChoosesTrained):
                one.share(parameters)

    def begin(self) -> None:
        self._now.begin()

    def arm(self) -> None:
        self._now.arm()

    def collect(self, microbatch: int) -> None:
        self._now.collect(microbatch)

    def reduce(self, num_microbatches: int) -> None:
        self._now.reduce(num_microbatches)

    def after_update(self, update: int) -> None:
        self._now.after_update(update)
