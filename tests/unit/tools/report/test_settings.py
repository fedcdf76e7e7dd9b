"""Settings beside their defaults, and beside those of other runs."""

from evenstep.tools.report.settings import between, from_defaults


def test_what_is_as_by_default_or_says_where_the_run_is_is_left_out() -> None:
    config = 'name = "a"\nruns = "there"\nseed = 1\nhooks = []\n[log]\nevery_updates = 10\nwriters = ["csv"]'
    defaults = 'runs = "runs"\nseed = 42\n[log]\nevery_updates = 10\nwriters = ["console", "jsonl"]'
    assert from_defaults(config, defaults) == [
        ("seed", ("1", "42")),
        ("log.writers", ('["csv"]', '["console", "jsonl"]')),
    ]


def test_where_either_is_missing_or_broken_nothing_is_claimed() -> None:
    assert from_defaults("seed = 1", "") is None
    assert from_defaults("", "seed = 1") is None
    assert from_defaults("seed = ", "seed = 1") is None


def test_runs_differ_in_what_not_all_say_alike() -> None:
    assert between(["seed = 1\n[a]\nb = 2", "seed = 1", "not toml ="]) == [
        ("seed", ("1", "1", "")),
        ("a.b", ("2", "", "")),
    ]
    assert between(["seed = 1", "seed = 1"]) == []
