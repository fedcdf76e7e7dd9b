"""One set of micro-batches on its way through a model in stages.

What enters the first stage, the randomness of each layer, and the loss of what leaves the last one; all of one
micro-batch, or of one of the pieces that it is cut into. For the plan each piece is a micro-batch with a number of its
own, so that a finer cut makes more and smaller ones of them. It knows neither plans nor other ranks.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

from torch import Tensor

from evenstep.data import Microbatch
from evenstep.pipeline import Section
from evenstep.train.cuts import Piece
from evenstep.train.passage import Passage
from evenstep.train.randomness import LOSS, branch_of


@final
class StagedPassage(Passage):
    """What the runner of stages asks for, by the plan's numbers; see `Passage` for its arguments."""

    _parts: dict[int, tuple[Microbatch, Piece]]
    _last: dict[int, int]

    def lay_out(self, microbatches: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of what goes through the plan: those of the micro-batches, or of all their pieces in order."""
        whole = [self._microbatches[number] for number in microbatches]
        pieces = [(one, self._cuts.pieces(self._way.tasks[one.task], one.data, one.known_samples)) for one in whole]
        if all(len(of_one) == 1 for _, of_one in pieces):
            self._parts = {one.index: (one, of_one[0]) for one, of_one in pieces}
        else:
            self._parts = dict(enumerate((one, piece) for one, of_one in pieces for piece in of_one))
        self._last = {one.index: number for number, (one, _) in self._parts.items()}
        if self._parts:  # memory may run out before anything is computed here
            self._do("transfer", next(iter(self._parts)))
        return tuple(self._parts)

    def completed(self, microbatch: int) -> int | None:
        """The number of the micro-batch whose gradients are complete with this one's backward; None: of none yet."""
        one, _ = self._parts[microbatch]
        return one.index if self._last[one.index] == microbatch else None

    def through(self, section: Section, received: Mapping[int, Any], microbatch: int) -> dict[int, Any]:
        """Apply one of several stages; each layer has randomness of its own, whatever stage it is in."""
        way, (one, piece) = self._way, self._parts[microbatch]
        if self._heard and microbatch not in self._open:
            self._begin(one, piece.data, microbatch)
        self._do("transfer", microbatch)
        batch = self._ready(one, piece) if section.takes_inputs else None
        self._do("forward", microbatch)
        with way.precision.forward(way.device), way.norms.of(one.task):
            inputs = way.tasks[one.task].inputs(batch) if section.takes_inputs else None
            return section(received, inputs, partial(self._seed_layer, microbatch))

    def loss(self, output: Any, microbatch: int) -> Tensor | None:
        """The loss of the last of several stages; where there is none, nothing goes back through any."""
        way, (one, piece) = self._way, self._parts[microbatch]
        task, batch = way.tasks[one.task], self._ready(one, piece)
        self._seed_layer(microbatch, LOSS)
        with way.precision.forward(way.device):
            output = task.postprocess(output, batch)
            loss = task.loss(output, batch)
        self._pieces[one.index] = piece
        total = self._taken(task, one, loss)
        if self._heard:
            self._seen[microbatch] = output, None if total is None else total.detach()
        return total

    def descend(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss."""
        self._do("backward", microbatch)
        self._descend(loss, self._parts[microbatch][0])

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Tell hooks of the backward of a stage that is not the last."""
        self._do("backward", microbatch)
        return self._going_back(self._parts[microbatch][0])

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to do with the micro-batch."""
        if self._heard:
            self._end(microbatch)

    def _do(self, phase: str, number: int) -> None:
        one, piece = self._parts[number]
        self.doing = phase, one.index, piece

    def _seed_layer(self, number: int, place: int) -> None:
        one, piece = self._parts[number]
        self._way.randomness.begin(self._way.device, branch_of(self._branch, one.index, piece.path), place)
