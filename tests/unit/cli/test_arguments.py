import pytest

from evenstep.cli.arguments import split


@pytest.mark.parametrize(
    ("arguments", "own", "settings"),
    [
        (["a.toml", "--x.y", "1"], ["a.toml"], ["--x.y", "1"]),
        (["--x.y", "1", "a.toml"], ["a.toml"], ["--x.y", "1"]),
        (["--x.y=1", "a.toml"], ["a.toml"], ["--x.y=1"]),
        (["a.toml", "--x.y", "-1"], ["a.toml"], ["--x.y", "-1"]),
        (["a.toml", "--x.y", "--depth", "2"], ["a.toml", "--depth", "2"], ["--x.y"]),
        (["-h"], ["-h"], []),
    ],
)
def test_settings_are_split_from_the_arguments_of_a_command(
    arguments: list[str], own: list[str], settings: list[str]
) -> None:
    assert split(arguments, ["--depth"]) == (own, settings)
