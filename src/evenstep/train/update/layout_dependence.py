"""Says, once, what of a run depends on how it is cut, on how many ranks, or on being resumed.

Parameters don't, but a model or a task may hold or do something that no engine can keep from it: buffers of its own
that its forwards move, randomness that could not be keyed, what a task remembers of its rank's micro-batches. It is
found out by looking at what the first passes have done, and told as an incident with names. It changes nothing. Numbers
in plain attributes are found by `changed_attributes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from evenstep.arguments import first_of
from evenstep.errors import TaskError
from evenstep.events import Incident
from evenstep.names import LEARNED
from evenstep.parallel.replicas import bits, is_compared
from evenstep.train.buffers import Buffers
from evenstep.train.frozen import TrainedWrites
from evenstep.train.randomness import Randomness
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.tasks import values_by_place
from evenstep.train.update.execution import Execution


@final
@dataclass(slots=True, kw_only=True)
class Dependence:
    """Looks at what passes leave behind.

    Args:
        unkeyed: what randomness is not keyed by layer though it would be in stages, for people; or "".
        tasks: those that remember something (`Task.state_dict`).
    """

    buffers: Buffers
    randomness: Randomness
    unkeyed: str
    execution: Execution
    report: Callable[[Incident], None]
    tasks: Mapping[str, Task]
    writes: TrainedWrites
    _looked: bool = False
    _has_told: bool = False

    def begin(self, update: int) -> None:
        """An update's passes begin."""
        if self._compares(update):
            self.writes.begin()

    def _compares(self, update: int) -> bool:
        """Whether ranks compare what is to be the same on all, which is about to be trained together."""
        reducers = self.execution.reducers
        return reducers.together.ranks > 1 and reducers.alone is None and is_compared(update)

    def look(self, update: int) -> None:
        """After an update's passes, while its buffers have not been shared or judged; all ranks call it together."""
        if self._compares(update):
            self._refuse_writes()
        if self.execution.reducers.together.ranks > 1 and is_compared(update):
            self.look_at_tasks(update)
        if self._looked and not self.randomness.found and not self.buffers.found:
            return
        if self.randomness.found:
            self._say(update, _LATE.format(what=self.randomness.found, update=update))
            self.randomness.found = ""
        if self.execution.reducers.rank == 0:
            if self._looked:
                messages = [self._of_buffers(self.buffers.found)]
            else:
                messages = [self.unkeyed, self._of_buffers(self._moved()), self._of_temporary()]
            for message in filter(None, messages):
                self._say(update, message)
        self._looked = True

    def _refuse_writes(self) -> None:
        """Raise TaskError on all ranks where their forwards have written other numbers to a trained parameter."""
        together = self.execution.reducers.together
        written = sorted(set[str]().union(*together.gather(self.writes.names())))
        if not written:
            return
        mine = [int(bits(self.writes.parameters[name])) if name in self.writes.parameters else 0 for name in written]
        for name, *values in zip(written, *together.gather(mine), strict=True):
            if others := [rank for rank, value in enumerate(values) if value != values[0]]:
                raise TaskError(
                    f"forwards write to the parameter `{name}`, which is trained, and rank "
                    f"{', '.join(map(str, others))} has other numbers in it than rank 0, as it has seen other samples: "
                    f"replicas would drift apart. Compute with a changed copy (`normalize(self.weight)`), or change it "
                    f"once per update in `before_update` of the task or of a hook, alike on all ranks."
                )

    def look_at_tasks(self, update: int) -> None:
        """Say which of the things that tasks remember are not the same on all ranks, once."""
        if not self.tasks:
            return
        mine = {} if self._has_told else values_by_place(self.tasks)
        everybody = self.execution.reducers.group.gather((self._has_told, mine))
        self._has_told = any(has_told for has_told, _ in everybody)  # also where this rank has come since
        first = {} if self._has_told else everybody[0][1]
        if names := [name for name in first if any(theirs.get(name) != first[name] for _, theirs in everybody)]:
            self._has_told = True
            if self.execution.reducers.rank == 0:
                self._say(update, _OF_TASKS.format(names=", ".join(f"`{name}`" for name in names[:5])))

    def _say(self, update: int, message: str) -> None:
        rank = self.execution.group.rank
        self.report(Incident(kind="dependence", update=update, message=message, rank=rank))

    def _moved(self, *, only_temporary: bool = False) -> list[str]:
        names = self.buffers.moved_names(only_temporary=only_temporary)
        # those are written once per update, by what combines the tasks' gradients
        return [name for name in names if name.partition(".")[0] not in LEARNED]

    def _of_buffers(self, names: list[str]) -> str:
        if not names:
            return ""
        when = "in each update" if self.execution.reducers.alone is None else "when they synchronise"
        shared = (
            f" All ranks take them, {when}, from the first rank that has moved them, so they depend on the number of "
            f"ranks as well."
            if self.execution.reducers.ranks > 1
            else " On several ranks each micro-batch would see those of its rank."
        )
        return (
            f"forwards change {self._listed(names)}, of which only the model knows what it means. It moves with every "
            f"micro-batch, so what the model makes of it depends on how the global batch is cut.{shared} What is to "
            f"move once per update, such as a teacher, is moved in `after_update` of the task or of a hook."
        )

    def _of_temporary(self) -> str:
        names = self._moved(only_temporary=True)
        if not names:
            return ""
        return (
            f"forwards change {self._listed(names)}, which no checkpoint holds (`persistent=False`): a run that is "
            f"resumed begins with what the model was built with. Register it as persistent if the output depends on it."
        )

    def _listed(self, names: list[str]) -> str:
        kinds = {"frozen parameter" if name in self.buffers.frozen else "buffer": None for name in names}
        what = " and ".join(f"{kind}s" if len(names) > 1 else kind for kind in kinds)
        return f"the {what} {first_of([f'`{name}`' for name in names], 5)}"


_OF_TASKS = (
    "what a task remembers (`state_dict`) is not the same on all ranks: {names}. Each rank has seen its own "
    "micro-batches only, so losses that depend on it differ from those of another number of ranks, and a checkpoint "
    "holds that of the first rank. Where losses depend on it, change it once per update by what all ranks have seen: "
    "`torch.distributed.all_reduce` in `after_update`."
)
_LATE = (
    "forwards, losses, the step or hooks draw from {what}, as was noticed in update {update} only: before, they did "
    "not, or not where it was looked. From now on that is keyed; up to here other runs may have drawn other numbers."
)
