"""What errors say is read by people."""

import ast
import re
from pathlib import Path

from evenstep.config.load import all_keys

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
ERRORS = ("error", "raised", "second")


def _is_error(node: ast.expr) -> bool:
    match node:
        case ast.FormattedValue(value=value):
            return _is_error(value)
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return _is_error(value)
        case ast.Name(id=name):
            return name in ERRORS
    return False


def _doubled(text: ast.JoinedStr) -> bool:
    """Whether an error is followed by what ends a sentence or a part of one, though its own text may end so."""
    return any(
        _is_error(one) and isinstance(then, ast.Constant) and str(then.value)[:1] in tuple(".;,:")
        for one, then in zip(text.values, text.values[1:], strict=False)
    )


def test_no_message_puts_a_stop_after_the_text_of_another_error() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) and _doubled(node)
    ]
    assert not found, f"`clause(error)` leaves its own full stop out: {found}"


def test_what_messages_say_to_write_in_a_run_file_are_keys_of_run_files() -> None:
    said = {
        key
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in re.findall(r"in a run\s+file,? `([a-z_]+\.[a-z_.]+)", node.value)
    }
    assert said and said <= set(all_keys())
