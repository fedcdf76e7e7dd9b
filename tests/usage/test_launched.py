"""The launching that the batteries stand on: results, errors and hangs are told apart."""

import signal
from pathlib import Path

import launched_programs as programs
from launched import Failed, on_ranks
from scripts import Script, started

import evenstep


def test_ranks_give_their_results_in_order() -> None:
    assert on_ranks(2, programs.add_up, 1.5) == [(0, 4.5), (1, 4.5)]


def test_short_values_of_all_ranks_are_gathered_in_one_message_and_long_ones_whole() -> None:
    given = (["a", "aa"], ["b", "b" * 1_001])
    assert on_ranks(2, programs.gather_short_and_long) == [given, given]


def test_a_rank_that_raises_or_hangs_or_dies_is_a_failure_with_its_reason() -> None:
    good, bad = on_ranks(2, programs.raise_on_rank_1)
    assert good == 0 and not isinstance(good, Failed)
    assert isinstance(bad, Failed) and bad == "ValueError: rank 1 does not like it"
    quick, hung = on_ranks(2, programs.sleep_on_rank_1, timeout_s=3)
    assert quick == 1 and isinstance(hung, Failed) and hung.startswith("hung")
    [dead] = on_ranks(1, programs.exit_at_once)
    assert isinstance(dead, Failed) and dead.startswith("exit 3")


SCRIPT = """
import os, sys, time
print(sys.argv[1:], os.environ.get("RANK"), os.environ["GIVEN"], __name__, os.path.basename(os.getcwd()), flush=True)
print("to the errors", file=sys.stderr)
if sys.argv[1] == "raises":
    raise ValueError("of the script")
if sys.argv[1] == "hangs":
    time.sleep(600)
sys.exit(7)
"""


def test_a_script_ends_as_one_of_a_fresh_interpreter_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("exits", "raises", "hangs")
    scripts = [started("script.py", word, 3, ranks=[1], world=2, GIVEN="a variable")[0] for word in words]
    ends = [script.ended(3 if word == "hangs" else 60) for word, script in zip(words, scripts, strict=True)]
    assert [end.code for end in ends] == [7, 1, -signal.SIGKILL]
    for word, end in zip(words, ends, strict=True):
        assert end.out.split() == f"['{word}', '3'] 1 a variable __main__ {tmp_path.name}".split()
        assert end.err.startswith("to the errors\n")
    assert ends[1].err.endswith("ValueError: of the script\n")
    module = Script("-m", "evenstep", "--version").ended()
    assert (module.code, module.out) == (0, f"evenstep {evenstep.__version__}\n")
