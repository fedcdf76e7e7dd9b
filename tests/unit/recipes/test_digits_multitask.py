import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "recipes" / "digits_multitask"
FILES = ("compare", "digits", "model", "tasks")


@pytest.fixture
def recipe() -> Iterator[Any]:
    """The files of the recipe, importable as they import each other."""
    sys.path.insert(0, str(FOLDER))
    try:
        import compare  # type: ignore[import-not-found]

        yield compare
    finally:
        while str(FOLDER) in sys.path:
            sys.path.remove(str(FOLDER))
        for name in FILES:
            sys.modules.pop(name, None)


def test_each_task_has_labels_for_other_images_and_all_are_tested_alike(recipe: Any) -> None:
    train = {label: recipe.digits("train", label) for label in ("class", "parity", "box")}
    assert all(400 < len(one) < 560 for one in train.values())
    assert len({one.fingerprint for one in train.values()}) == 3
    assert [len(recipe.digits("test", label)) for label in train] == [347] * 3
    labels = torch.stack([train["parity"][n][1] for n in range(len(train["parity"]))])
    assert 0.4 < float((labels == -1).float().mean()) < 0.6
    assert recipe.Classify("parity").weight((None, labels)) == int((labels != -1).sum())


def test_the_box_is_that_of_the_image_as_it_was_moved(recipe: Any) -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 2:5, 3:7] = 1.0
    box = sys.modules["digits"].box_of
    assert (box(image) * 8).tolist() == [2, 5, 3, 7]
    data = recipe.digits("train", "box", max_shift=1)
    for _ in range(5):
        moved, label = data[0]
        assert torch.equal(label, box(moved))
