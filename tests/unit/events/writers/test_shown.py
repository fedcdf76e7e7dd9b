"""What writers make of texts, images and histograms, of a run's configuration and of its end."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

from evenstep import Checkpointing, Hook, Logging, Loss, MapData, Task, Trainer
from evenstep.events import (
    Histogram,
    Image,
    JsonlWriter,
    Shown,
    TensorBoardWriter,
    Text,
    TrainEvent,
    UpdateEvent,
)

PIXELS = torch.tensor([[0.0, 0.2], [0.4, 1.0]])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "shown.jsonl").read_text().splitlines()]


def test_the_run_folder_has_all_that_was_shown(tmp_path: Path) -> None:
    writer = JsonlWriter()
    writer.open(tmp_path, 0)
    values = {"text": Text("a\nb"), "valid/image": Image(PIXELS, "grey"), "counts": Histogram([0.0, 1.0, 1.0], bins=2)}
    for name, value in values.items():
        writer.event("shown", Shown(update=3, name=name, value=value))
    writer.close()
    file = "shown/valid/image/00000003.png"
    histogram = {"edges": [0.0, 0.5, 1.0], "counts": [1, 2], "num_not_finite": 0}
    assert lines(tmp_path) == [
        {"update": 3, "name": "text", "kind": "text", "text": "a\nb"},
        {"update": 3, "name": "valid/image", "kind": "image", "file": file, "caption": "grey"},
        {"update": 3, "name": "counts", "kind": "histogram", **histogram},
    ]
    assert np.asarray(Pillow.open(tmp_path / file)).tolist() == [[0, 51], [102, 255]]


def test_after_a_resume_what_is_shown_again_is_there_once(tmp_path: Path) -> None:
    for begins, updates in ((0, (1, 2, 3)), (2, (3, 4))):
        writer = JsonlWriter()
        writer.open(tmp_path, begins)
        for update in updates:
            writer.event("shown", Shown(update=update, name="it", value=Text(f"{begins}")))
        writer.close()
    assert [(line["update"], line["text"]) for line in lines(tmp_path)] == [(1, "0"), (2, "0"), (3, "2"), (4, "2")]


def test_tensorboard_shows_it_with_the_configuration_and_the_last_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter()
    writer.open(tmp_path, 0)
    config: Any = {"train": {"updates": 3}}
    writer.event("train_begin", TrainEvent(update=0, updates=3, resumed=False, config=config))
    writer.event("shown", Shown(update=3, name="text", value=Text("once")))
    writer.event("shown", Shown(update=3, name="image", value=Image(PIXELS)))
    writer.event("shown", Shown(update=3, name="counts", value=Histogram([0.0, 1.0, 1.0], bins=2)))
    end = TrainEvent(update=3, outcome="done", reason="", error=None, metrics={"valid/loss": 0.5})
    writer.event("train_end", end)
    writer.close()
    read = EventAccumulator(str(tmp_path / "events")).Reload()
    image = read.Images("image")[0]
    assert np.asarray(Pillow.open(io.BytesIO(image.encoded_image_string)))[..., 0].tolist() == [[0, 51], [102, 255]]
    bins = read.Tensors("counts")[0] if "counts" in read.Tags()["tensors"] else read.Histograms("counts")[0]
    assert (bins.step, bins.histogram_value.num) == (3, 3)
    text = read.Tensors("text/text_summary")[0].tensor_proto.string_val[0]
    assert text == b"once"
    plugin = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"train.updates" in plugin


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        x, y = batch
        text = f"{'update' if self.now.is_training else 'evaluation'} {self.now.update}, x {x[0].item():.0f}"
        return Loss(((output - y) ** 2).sum(), shown={"first": Text(text)})


class Weights(Hook):
    def after_update(self, event: UpdateEvent) -> None:
        weight = self.trainer.model.get_parameter("weight")
        self.trainer.storage.show("weights", Histogram(weight), update=event.update)


def test_hooks_and_tasks_show_and_the_writers_hear_of_the_configuration(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Hears(JsonlWriter.__base__):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__("heard.txt")

        def lines(self, records: Any) -> str:
            return ""

        def update_of(self, line: str) -> int:
            return 0

        def event(self, name: str, event: Any) -> None:
            heard.append(event)

    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(4)]
    model = nn.Linear(1, 1)
    trainer = Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(pairs, global_batch_size=4, micro_batch_size=2, shuffle=False),
        evaluations=MapData(pairs, global_batch_size=2, shuffle=False),
        updates=2,
        device="cpu",
        hooks=Weights(),
        folder=tmp_path,
        log=Logging(writers=["jsonl", Hears()]),
        checkpoint=Checkpointing(config={"seed": 42}),
    )
    trainer.train()
    assert [(line["update"], line["name"], line.get("text")) for line in lines(tmp_path)] == [
        (1, "train/first", "update 1, x 0"),
        (1, "weights", None),
        (1, "valid/first", "evaluation 1, x 0"),
        (2, "train/first", "update 2, x 0"),
        (2, "weights", None),
        (2, "valid/first", "evaluation 2, x 0"),
    ]
    begin, end = (one for one in heard if isinstance(one, TrainEvent))
    assert begin.config == {"seed": 42}
    assert end.metrics["valid/loss"] == pytest.approx(trainer.storage.latest("valid/loss").value)
