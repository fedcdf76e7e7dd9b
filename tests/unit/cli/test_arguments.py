import pytest

from evenstep.cli.arguments import split


@pytest.mark.parametrize(
    ("arguments", "own", "settings"),
    [
        (["train", "a.toml", "--x.y", "1"], ["train", "a.toml"], ["--x.y", "1"]),
        (["train", "--x.y", "1", "a.toml"], ["train", "a.toml"], ["--x.y", "1"]),
        (["train", "--x.y=1", "a.toml"], ["train", "a.toml"], ["--x.y=1"]),
        (["train", "a.toml", "--x.y", "-1"], ["train", "a.toml"], ["--x.y", "-1"]),
        (["train", "a.toml", "--x.y", "--traceback"], ["train", "a.toml", "--traceback"], ["--x.y"]),
        (["--version"], ["--version"], []),
        (["train", "-h"], ["train", "-h"], []),
    ],
)
def test_settings_are_told_from_the_commands_own_arguments(
    arguments: list[str], own: list[str], settings: list[str]
) -> None:
    assert split(arguments) == (own, settings)
