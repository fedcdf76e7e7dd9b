"""The files of a run folder, read without ever failing: what can't be read becomes a sentence.

What their content means is for others.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from evenstep.errors import clause

T = TypeVar("T")

MAX_COUNT = 2**53  # the script of the page counts in floats


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one run folder.

    Args:
        problems: a sentence for each thing that could not be read.
    """

    folder: Path
    problems: list[str] = field(default_factory=list[str])

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
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

    def parsed(self, name: str, parse: Callable[[dict[str, object]], T | None], consequence: str) -> T | None:
        """What `parse` makes of a file that is one JSON object; None where it is not, or lacks what is needed."""
        content = self.json_object(name, consequence)
        found = parse(content)
        if found is None and content:
            self.problems.append(f"`{name}` lacks fields: {consequence}.")
        return found

    def lines(self, name: str) -> Iterator[tuple[int, dict[str, object]]]:
        """The lines of a file of JSON objects that have an update."""
        bad: list[int] = []
        try:
            with (self.folder / name).open(encoding="utf-8", errors="replace") as file:
                for position, line in enumerate(file, start=1):
                    content = _parse(line)
                    update = content.get("update") if content else None
                    if content is not None and type(update) is int and 0 <= update <= MAX_COUNT:
                        yield update, content
                    elif line.strip():
                        bad.append(position)
        except FileNotFoundError:
            self.problems.append(f"`{name}` is missing.")
        except OSError as error:
            self.problems.append(f"`{name}` cannot be read: {error.strerror}.")
        if bad:
            which = f"Line {bad[0]}" if len(bad) == 1 else f"Line {bad[0]} and {len(bad) - 1} others"
            self.problems.append(f"{which} of `{name}` cannot be read as a JSON object with an update: passed over.")

    def rows(self, name: str) -> Iterator[tuple[int, str, float]]:
        """The rows of a table (update, name, value, …)."""
        try:
            with (self.folder / name).open(encoding="utf-8", errors="replace", newline="") as file:
                for position, row in enumerate(csv.reader(file), start=1):
                    try:
                        update, metric, value = int(row[0]), row[1], float(row[2])
                    except (ValueError, IndexError):
                        if position > 1:  # the heading
                            self.problems.append(f"Line {position} of `{name}` cannot be read: passed over.")
                    else:
                        yield update, metric, value
        except (OSError, csv.Error) as error:
            self.problems.append(f"`{name}` cannot be read: {clause(str(error))}.")


def _parse(text: str) -> dict[str, object] | None:
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", content) if isinstance(content, dict) else None
