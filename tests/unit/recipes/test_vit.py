from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from evenstep.errors import ArgumentError

Load = Callable[[str], ModuleType]


def test_no_image_is_in_both_splits(recipe_file: Load):
    images = recipe_file("vit/images.py").images
    train, test = images("train"), images("test")
    assert len(train) + len(test) == 1797
    trained = {bytes(picture.numpy().tobytes()) for picture, _ in train}
    assert len(trained) > 1400
    assert not any(picture.numpy().tobytes() in trained for picture, _ in test)
    everything = torch.stack([picture for picture, _ in [*train, *test]])
    assert abs(float(everything.mean())) < 1e-3
    assert abs(float(everything.std()) - 1) < 1e-3
    with pytest.raises(ArgumentError):
        images("valid")


def test_layers_in_their_order_are_the_model(recipe_file: Load):
    model = recipe_file("vit/model.py").VisionTransformer(layers=2, width=8, heads=2)
    passed = pictures = torch.randn(3, 1, 8, 8)
    for layer in model.layers():
        passed = layer.build(passed)
    assert passed.shape == (3, 10)
    assert torch.equal(passed, model(pictures))


def test_a_patch_is_a_square_of_the_image(recipe_file: Load):
    patches = recipe_file("vit/model.py").Patches(8, 2, 5)
    picture = torch.zeros(1, 1, 8, 8)
    empty = patches(picture)
    picture[0, 0, 2:4, 4:6] = 1.0  # the second row of patches, the third of it
    moved = (patches(picture) != empty).any(-1)
    assert moved.flatten().nonzero().flatten().tolist() == [4 + 2]
