"""The recipe for supervised fine-tuning: its samples, its rows, and its curve beside that of transformers' Trainer."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evenstep.integrations.hf import CausalLM


@pytest.fixture
def questions(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("sft/questions.py")


@pytest.fixture
def compare(
    recipe_file: Callable[[str], ModuleType], questions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "questions", questions)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with torch.random.fork_rng():
        yield recipe_file("sft/compare.py")


def test_only_the_answer_is_learned(questions: ModuleType) -> None:
    sample = questions.sample("1+2=", "3")
    assert bytes(sample["input_ids"]) == b"\x011+2=3\x02"
    assert sample["labels"] == [-100] * 5 + [*b"3\x02"]
    batch = questions.rows([sample, questions.sample("4+4=", "8")])
    assert batch["input_ids"].shape == (1, 14)
    assert int(CausalLM(packed=True).weight(batch)) == 4


def test_samples_are_the_same_everywhere_and_fit_into_a_row(questions: ModuleType) -> None:
    train, valid = questions.questions(split="train", count=500), questions.questions(split="valid", count=500)
    assert train == questions.questions(split="train", count=500)
    assert train != valid
    assert max(len(one["input_ids"]) for one in train) <= 128
    assert bytes(train[0]["input_ids"]) == FIRST


FIRST = b"\x0172+97=169\x02"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers, about itself
def test_some_updates_have_the_losses_of_transformers(compare: Any) -> None:
    wanted = compare.there(3)
    for name in ("2 micro-batches in rows of 128 tokens", "2 micro-batches, each sample with its padding"):
        assert compare.apart(compare.here(*compare.CUTS[name], 3), wanted) < 1e-6, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_each_cut_has_the_curve_of_transformers(compare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--updates", "30"]) == 0
    assert capsys.readouterr().out.count("apart") == len(compare.CUTS) + 1


def test_a_trained_run_is_exported_as_the_hub_has_models(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    from evenstep.checkpoint import read_checkpoint
    from evenstep.cli.entry import main

    run_file, threads = Path(__file__).parents[3] / "recipes/sft/run.toml", torch.get_num_threads()
    small = ["--train.updates", "2", "--lr_schedule.warmup_updates", "1", "--evaluation.every_updates", "2"]
    small += ["--log.every_updates", "2"]
    small += ["--data.train.args.count", "64", "--data.evaluations.valid.args.count", "8"]
    try:
        assert main(["train", str(run_file), *small]) == 0
        assert main(["export", "runs/sft", "--to", "model", "--layout", "hf"]) == 0
        assert main(["export", "runs/sft", "--to", "model", "--layout", "hg"]) == 2
        assert main(["export", "runs/sft", "--to", "model", "--tokenizer", "x"]) == 2
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert "model/config.json" in said.out
    assert "--layout" in said.err
    trained, read = read_checkpoint("runs/sft").state["model"], AutoModelForCausalLM.from_pretrained("model")
    assert all(torch.equal(one, trained[name]) for name, one in read.state_dict().items())
