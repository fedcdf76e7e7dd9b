from collections.abc import Callable
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def digits_file(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("digits/digits.py")


def test_every_image_is_in_one_split_and_about_a_fifth_are_tested(digits_file: ModuleType):
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    pixels, shown = sklearn_datasets.load_digits(return_X_y=True)
    train, test = digits_file.digits("train"), digits_file.digits("test")
    assert (len(train), len(test)) == (1450, 347)
    read = [part[index] for part in (train, test) for index in range(len(part))]
    both = sorted((int(digit), (image * 16).flatten().tolist()) for image, digit in read)
    assert both == sorted((int(digit), row.tolist()) for row, digit in zip(pixels, shown, strict=True))


def test_a_shifted_image_is_the_image_moved_by_at_most_so_many_pixels(digits_file: ModuleType):
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 3, 4] = 1.0
    shifted = digits_file.Digits(image, torch.tensor([5]), max_shift=1)
    torch.manual_seed(0)
    places = {tuple(shifted[0][0].nonzero()[0].tolist()) for _ in range(200)}
    assert places == {(0, row, column) for row in (2, 3, 4) for column in (3, 4, 5)}


def test_the_loss_is_summed_over_images(recipe_file: Callable[[str], ModuleType]):
    task = recipe_file("digits/task.py").Classify()
    logits = torch.zeros(4, 10)
    logits[0, 3] = 1.0
    batch = torch.zeros(4, 1, 8, 8), torch.tensor([3, 3, 0, 9])
    loss = task.loss(logits, batch)
    expected = torch.nn.functional.cross_entropy(logits.double(), batch[1]) * 4
    assert task.weight(batch) == 4
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (loss.metrics["accuracy"][0].item(), loss.metrics["accuracy"][1]) == (2, 4)
