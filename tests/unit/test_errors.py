"""What errors say is read by people."""

import ast
import re
from pathlib import Path

from evenstep.config.load import all_keys

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"


def test_what_messages_say_to_write_in_a_run_file_are_keys_of_run_files() -> None:
    said = {
        key
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in re.findall(r"in a run\s+file,? `([a-z_]+\.[a-z_.]+)", node.value)
    }
    assert said and said <= set(all_keys())
