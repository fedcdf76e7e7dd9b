import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

TEXT = "it was the best of times, it was the worst of times, " * 8

Load = Callable[[str], ModuleType]


@pytest.fixture
def corpus(recipe_file: Load) -> ModuleType:
    return recipe_file("shakespeare/corpus.py")


def small(recipe_file: Load) -> torch.nn.Module:
    torch.manual_seed(0)
    return recipe_file("shakespeare/model.py").CharGPT(characters=9, layers=2, width=8, heads=2, context=6)


def test_both_splits_hold_all_of_the_text_but_the_ends(corpus: ModuleType):
    train = corpus.Characters(TEXT, split="train", context=5, stride=1)
    valid = corpus.Characters(TEXT, split="valid", context=5, stride=5)
    border = int(len(TEXT) * 0.9)
    assert len(train) == border - 5
    assert all(train.decode(train[number][0]) == TEXT[number : number + 5] for number in range(len(train)))
    assert all(train.decode(train[number][1]) == TEXT[number + 1 : number + 6] for number in range(len(train)))
    read = "".join(valid.decode(valid[number][0]) for number in range(len(valid)))
    assert TEXT[border:].startswith(read)
    assert len(TEXT) - border - len(read) <= 5
    assert train.alphabet == valid.alphabet == "".join(sorted(set(TEXT)))


def test_layers_in_their_order_are_the_model(recipe_file: Load):
    model = small(recipe_file)
    inputs = torch.tensor([[1, 2, 3, 4, 5, 6]])
    passed = inputs
    for layer in model.layers():
        passed = layer.build(passed)
    assert torch.equal(passed, model(inputs))


def test_the_loss_is_the_sum_over_characters(recipe_file: Load, monkeypatch: pytest.MonkeyPatch):
    for name in ("corpus", "model"):
        monkeypatch.setitem(sys.modules, name, recipe_file(f"shakespeare/{name}.py"))  # as a run finds them, by name
    task = recipe_file("shakespeare/task.py").NextCharacter()
    scores, targets = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    loss = task.loss(scores, (targets, targets))
    by_hand = -sum(F.log_softmax(scores, -1)[row, place, targets[row, place]] for row in range(2) for place in range(6))
    torch.testing.assert_close(loss.sum, by_hand)
    assert task.weight((targets, targets)) == 12
