"""The files of a run folder, read without ever failing: what can't be read becomes a sentence.

What their content means is for others.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

MAX_COUNT = 2**53  # the script of the page counts in floats


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one run folder."""

    folder: Path
    problems: list[str] = field(default_factory=list[str])

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def text(self, name: str) -> str | None:
        """The content of a file."""
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.problems.append(f"`{name}` is missing.")
        except OSError as error:
            self.problems.append(f"`{name}` cannot be read: {error.strerror}.")
        return None

    def json_object(self, name: str, consequence: str) -> dict[str, object]:
        """A file that is one JSON object; empty where it is not."""
        text = self.text(name)
        if text is None:
            return {}
        content = _parse(text)
        if content is None:
            self.problems.append(f"`{name}` is not a JSON object: {consequence}.")
        return content or {}

    def lines(self, name: str) -> Iterator[tuple[int, dict[str, object]]]:
        """The lines of a file of JSON objects that have an update."""
        passed_over = 0
        for line in (self.text(name) or "").split("\n"):
            content = _parse(line) or {}
            update = content.get("update")
            if type(update) is int and 0 <= update <= MAX_COUNT:
                yield update, content
            elif line.strip():
                passed_over += 1
        if passed_over:
            self.problems.append(f"`{name}` has lines that cannot be read, passed over: {passed_over}.")

    def rows(self, name: str) -> Iterator[tuple[int, str, float]]:
        """The rows of a table (update, name, value, …)."""
        for position, row in enumerate(csv.reader((self.text(name) or "").splitlines())):
            try:
                update, metric, value = row[:3]
                yield int(update), metric, float(value)
            except ValueError:
                if position:  # the heading
                    self.problems.append(f"Line {position + 1} of `{name}` cannot be read: passed over.")


def _parse(text: str) -> dict[str, object] | None:
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", content) if isinstance(content, dict) else None
