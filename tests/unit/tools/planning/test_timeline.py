"""One update, timed action by action, and nothing changed by it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep import Hook, Logging, Loss, MapData, Task, Trainer
from evenstep.errors import HookError
from evenstep.events import TrainBegin
from evenstep.options import Training
from evenstep.pipeline import PipelineModel
from evenstep.tools.planning.timeline import Timeline
from refused import refused

PAIRS = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(((output - batch[1]) ** 2).sum())


def trainer_of(
    folder: Path | None, *hooks: Hook, model: nn.Module | None = None, task: Task | None = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    layers = model or nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    return Trainer(
        model=layers,
        task=task or Line(),
        optimizer=torch.optim.SGD(layers.parameters(), lr=0.01),
        data=MapData(PAIRS, global_batch_size=4, micro_batch_size=2),
        updates=4,
        device="cpu",
        folder=folder,
        hooks=list(hooks),
        log=Logging(writers=()),
        **options,
    )


def computed(folder: Path) -> list[dict[str, Any]]:
    events = json.loads((folder / "timeline" / "rank-00000.json").read_text())["traceEvents"]
    return [one for one in events if one.get("cat") in ("FORWARD", "BACKWARD")]


def test_the_actions_of_one_update_are_timed_in_their_order(tmp_path: Path) -> None:
    trainer_of(tmp_path, Timeline(update=3)).train()
    events = computed(tmp_path)
    assert [one["name"] for one in events] == ["0F0", "0B0", "0F1", "0B1"]
    times = [one["ts"] for one in events]
    assert times == sorted(times)
    assert all(one["dur"] > 0 for one in events)


def test_a_model_in_stages_tells_the_stages(tmp_path: Path) -> None:
    model = PipelineModel([nn.Linear(1, 4), nn.Linear(4, 1)], stages_per_rank=2)
    trainer_of(tmp_path, Timeline(update=2), model=model).train()
    assert {one["name"][0] for one in computed(tmp_path)} == {"0", "1"}


def test_the_parameters_are_those_of_a_run_that_is_not_timed(tmp_path: Path) -> None:
    timed, plain = trainer_of(tmp_path, Timeline(update=2)), trainer_of(None)
    for trainer in (timed, plain):
        trainer.train()
    theirs = plain.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in timed.model.state_dict().items())
    assert not any("_time" in repr(act) for stage in timed.stages.values() for act in stage.acts.values())


def test_of_an_update_that_is_tried_again_only_the_last_try_counts(tmp_path: Path) -> None:
    class Again(Line):
        tries = 0

        def loss(self, output: Any, batch: Any) -> Loss:
            self.tries += self.now.is_training
            if self.tries == 2:  # the second micro-batch of the first update
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().loss(output, batch)

        def split(self, batch: Any) -> list[Any]:
            return [[column[:1] for column in batch], [column[1:] for column in batch]]

    trainer_of(tmp_path, Timeline(update=1), task=Again(), train=Training(check_loss=False)).train()
    forwards = [one["name"] for one in computed(tmp_path) if one["cat"] == "FORWARD"]
    assert len(forwards) == len(set(forwards))


def test_without_a_folder_it_is_refused() -> None:
    trainer = trainer_of(None, hook := Timeline())
    with refused(HookError, "Timeline"):
        hook.before_train(TrainBegin(update=0, updates=4, resumed=False))
    assert trainer.folder is None
