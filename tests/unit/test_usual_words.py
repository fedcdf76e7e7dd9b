"""Words of other trainers: each is answered with a key and an argument that exist."""

import inspect
import re
from typing import Any

import pytest

import evenstep
from evenstep.config.load import all_keys
from evenstep.errors import ArgumentError
from evenstep.usual_words import ARGUMENTS, KEYS
from refused import refused


def test_each_word_has_a_key_that_exists() -> None:
    known = {*all_keys(), "resume"}
    assert {key for key in KEYS.values() if key not in known and not key.startswith("optimizer.args.")} == set()


def test_each_word_has_an_argument_that_exists() -> None:
    known = {*inspect.signature(evenstep.Trainer).parameters, "trainer"}
    assert {re.split(r"\W", text)[0] for text in ARGUMENTS.values()} <= known


def test_trainer_refuses_unknown_arguments() -> None:
    trainer: Any = evenstep.Trainer
    with refused(ArgumentError, "max_epochs"):
        trainer(model=None, task=None, optimizer=None, data=None, max_epochs=3)


def test_package_names_our_class_for_a_usual_one() -> None:
    with pytest.raises(AttributeError, match=r"evenstep\.EarlyStop"):
        _ = evenstep.EarlyStopping  # pyright: ignore[reportAttributeAccessIssue]
