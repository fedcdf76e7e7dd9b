"""Rules between keys: each broken rule is one fault, which begins with its key."""

from collections.abc import Callable

import pytest

Faults = Callable[..., list[str]]

BROKEN = [
    (["--train.epochs", "1"], "train.updates"),
    (["--data.global_batch_tokens", "10"], "data.global_batch_size"),
    (["--data.micro_batch_size", "auto", "--data.micro_batch_tokens", "8"], "data.micro_batch_size"),
    (["--task", "none"], "task"),
    (["--parallel.shard_ranks", "2"], "parallel.shard_ranks"),
    (["--train.precision", '{kind = "bf16-mixed", initial = 8}'], "train.precision.initial"),
    (["--evaluation.every_updates", "8"], "evaluation"),
    (["--optimizer.groups.a", '{patterns = ["*"], options = {a = 1}}'], "optimizer.groups.a.options"),
    (["--reset", "optimizer"], "reset"),
    (["--resume", "nowhere"], "resume"),
    (["--launch.lost_rank", "continue", "--parallel.strategy", "fsdp", "--launch.ranks", "2"], "launch.lost_rank"),
    (["--lr_schedule.kind", "listed"], "lr_schedule.factors"),
]


@pytest.mark.parametrize(("arguments", "key"), BROKEN, ids=[key for _, key in BROKEN])
def test_broken_rule_is_one_fault(faults: Faults, arguments: list[str], key: str) -> None:
    found = faults(*arguments)
    assert [fault.startswith(f"`{key}`") for fault in found] == [True], found


def test_allowed_combinations_have_no_faults(faults: Faults) -> None:
    assert faults("--train.precision", '{kind = "16-mixed", initial = 8}') == []
    assert faults("--data.reading.skip_failing", "true", "--failures.max_skipped_samples", "8") == []
