"""Holds the house: budgets of its folders, and plain English in the lines that a change adds.

python tests/house.py          checks the working tree; the change is the last commit and all that is not committed
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "evenstep"
# Lines of a folder: the budget that a reader can hold in the head, and the most that a change may leave behind.
# A change that needs more raises the second number, and says why in its commit.
LINES = {
    "train": (7_200, 8_450),
    "parallel": (2_300, 2_570),
    "events": (2_800, 3_055),
    "data": (2_200, 2_480),
    "tools": (2_000, 2_150),
    "checkpoint": (2_100, 2_275),
    "contrib": (1_900, 2_125),
    "pipeline": (2_000, 2_085),
    "optim": (1_700, 1_760),
    "config": (1_000, 1_190),
    "cli": (1_200, 1_400),
    "root": (1_000, 1_390),
    "integrations": (900, 1_060),
    "internals": (350, 430),
    "precision": (300, 345),
}
FILES, CLASSES = (220, 220), (280, 346)
LONGEST_SENTENCE, LONGEST_SUBJECT, LONGEST_TEST_NAME = 35, 72, 80  # words, characters, characters
# Openings without a subject, nouns that are not there, and verbs of speech for messages between processes.
RIDDLES = {
    "begins with a clause": re.compile(r"^(What|Whether|Who|Whose|Why|Which|Whatever|Whoever)\b(?!.*\?$)"),
    "lacks its noun": re.compile(r"\b(of which|of those|such a one|so it does|whoever|one another's)\b", re.IGNORECASE),
    "speaks for a process": re.compile(r"\b(is|are|was|were|be|been) (said|told|heard|spoken of)\b", re.IGNORECASE),
}


def folder_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "root"


def over_budget() -> Iterator[str]:
    """Counts beyond the table."""
    files = sorted(SOURCE.rglob("*.py"))
    lines = Counter[str]()
    classes = 0
    for path in files:
        text = path.read_text()
        lines[folder_of(path)] += text.count("\n")
        classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))
    counts = [(f"lines of src/evenstep/{folder}", lines[folder], LINES.get(folder, (0, 0))) for folder in sorted(lines)]
    counts += [("files of src/evenstep", len(files), FILES), ("classes of src/evenstep", classes, CLASSES)]
    for what, count, (budget, most) in counts:
        if count > most:
            yield f"{count} {what}, but at most {most} (budget {budget}): make it smaller"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages of errors, each with its first line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc.partition("\n\n")[0]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
            yield node.lineno, " ".join(part for part in parts if isinstance(part, str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def faults_of(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.;:!?])\s+", " ".join(text.split())):
        if len(sentence.split()) > LONGEST_SENTENCE:
            yield f"has more than {LONGEST_SENTENCE} words in a sentence"
        yield from (fault for fault, pattern in RIDDLES.items() if pattern.search(sentence))


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout


def added_lines() -> dict[Path, set[int]]:
    """Lines of Python that the last commit and the working tree add; none without a commit before the last."""
    lines: dict[Path, set[int]] = {}
    file = ROOT
    for line in git("diff", "--unified=0", "HEAD~1", "--", "src/*.py", "tests/*.py").splitlines():
        if line.startswith("+++ "):
            file = ROOT / line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(file, set()).update(range(start, start + count))
    return {file: places for file, places in lines.items() if file.is_file()}


def riddles() -> Iterator[str]:
    """Sentences that a reader must puzzle over, in what the change adds."""
    for file, places in added_lines().items():
        where = file.relative_to(ROOT)
        for line, text in texts(file):
            if line in places:
                yield from (f"{where}:{line}: {fault}: {text[:90]!r}" for fault in faults_of(text))
        source = file.read_text().splitlines()
        for line in places:
            name = re.match(r"\s*def test_(\w+)", source[line - 1])
            if name and len(name[1]) > LONGEST_TEST_NAME:
                yield f"{where}:{line}: the name of the test has more than {LONGEST_TEST_NAME} characters"
    subject = git("log", "-1", "--format=%s").strip()
    if len(subject) > LONGEST_SUBJECT:
        yield f"the commit's subject has more than {LONGEST_SUBJECT} characters: {subject}"


def main() -> int:
    faults = [*over_budget(), *riddles()]
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
