import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from evenstep import Checkpointing, Evaluation, Hook, Logging, Loss, MapData, Task, Trainer
from evenstep.errors import ArgumentError
from evenstep.events import Image, Storage, Text, UpdateEvent, Writer
from refused import refused


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_png_is_the_image_bit_for_bit(shape: tuple[int, ...], kind: torch.dtype) -> None:
    levels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    values = levels.to(torch.uint8) if kind == torch.uint8 else (levels / 255).to(kind)
    expected = np.rint(values.float().numpy() * (1 if kind == torch.uint8 else 255))
    image = Image(values)
    values.fill_(0)  # the image keeps its pixels
    read = np.asarray(Pillow.open(io.BytesIO(image.png())))
    assert np.array_equal(read, expected.transpose(1, 2, 0) if shape[0] == 3 else expected.reshape(5, 7))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2),
        torch.zeros(4, 3, 2, 2),
        torch.zeros(4, 4, 3),
        torch.zeros(3, 0, 2),
        torch.full((2, 2), 1.5),
        torch.full((2, 2), float("nan")),
        torch.zeros(2, 2, dtype=torch.int64),
        "text",
    ],
)
def test_what_is_no_image_is_refused(values: Any) -> None:
    with refused(ArgumentError, "values"):
        Image(values)


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a b", "a/", "ä"])
def test_a_name_that_could_be_no_file_is_refused(name: str) -> None:
    with refused(ArgumentError, "name"):
        Storage().show(name, Text("x"), update=1)


def test_the_first_of_a_name_and_update_is_kept_and_aborted_updates_show_nothing() -> None:
    storage = Storage()
    for text in ("first", "second"):
        storage.show("train/it", Text(text), update=1)
    mark = storage.mark()
    storage.show("train/it", Text("a try"), update=2)
    storage.drop_after(mark)
    storage.show("valid/it", Text("evaluated"), update=2)
    storage.show("it", Text("given up"), update=3)
    storage.discard_from(3)
    shown = [(one.update, one.name, one.value) for one in storage.take_shown()]
    assert shown == [(1, "train/it", Text("first")), (2, "valid/it", Text("evaluated"))]
    assert storage.take_shown() == []


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        x, y = batch
        text = f"{'update' if self.now.is_training else 'evaluation'} {self.now.update}, x {x[0].item():.0f}"
        return Loss(((output - y) ** 2).sum(), shown={"first": Text(text)})


class Weights(Hook):
    def after_update(self, event: UpdateEvent) -> None:
        self.trainer.storage.show("weights", Text("light"), update=event.update)


def test_hooks_and_tasks_show_and_writers_get_the_configuration(tmp_path: Path) -> None:
    class Keeps(Writer):
        def write(self, records: Any) -> None: ...

        def event(self, name: str, event: Any) -> None:
            if name.startswith("train"):
                kept.append(event)

    kept: list[Any] = []
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(4)]
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(pairs, global_batch_size=4, micro_batch_size=2, shuffle=False),
        evaluations=MapData(pairs, global_batch_size=2, shuffle=False),
        evaluation=Evaluation(every_epochs=9),
        updates=2,
        device="cpu",
        hooks=Weights(),
        folder=tmp_path,
        log=Logging(writers=["jsonl", Keeps()]),
        checkpoint=Checkpointing(config={"seed": 42}),
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "shown.jsonl").read_text().splitlines()]
    assert [(line["update"], line["name"], line.get("text")) for line in lines] == [
        (1, "train/first", "update 1, x 0"),
        (1, "weights", "light"),
        (2, "train/first", "update 2, x 0"),
        (2, "weights", "light"),
        (2, "valid/first", "evaluation 2, x 0"),
    ]
    begin, end = kept
    assert begin.config == {"seed": 42}
    assert end.metrics["valid/loss"] == pytest.approx(trainer.storage.latest("valid/loss").value)
