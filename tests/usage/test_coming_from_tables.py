"""The tables of docs/coming-from.md: every name of ours that they give is there, so a misspelt one fails.

In the last column a code span is a Python name, a call of one, a key of the run file, a value given to one, a command,
a target of the Makefile or a metric; there is no other kind.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import evenstep
from evenstep.cli.arguments import split
from evenstep.cli.entry import COMMANDS
from evenstep.config.keys import all_keys
from evenstep.config.schema import Config
from evenstep.events import MemoryUse, Statistics, Timer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
SYSTEMS = (
    *("Lightning", "ignite", "torchtnt", "fairseq", "LiBai", "HAT", "Megatron-LM"),
    *("Trainer of transformers and TRL", "Accelerate", "Composer"),
    *("mmengine and detectron2", "timm and ultralytics", "DeepSpeed"),
    *("torchft, torch's elastic launcher, DCP and orbax", "torchtitan, and torch's own parts"),
)
PACKAGES = ("", ".checkpoint", ".data", ".errors", ".events", ".optim", ".optim.schedules", ".parallel", ".pipeline")
PACKAGES += (".precision", ".train", ".hf", ".extras.planning.simulate", ".extras.quantization")
TABLE = re.compile(r"^\|(.*)\|$", re.MULTILINE)


def spans(column: int) -> list[tuple[str, str]]:
    """The code spans of one column of all tables, with the system whose table it is."""
    found: list[tuple[str, str]] = []
    for system, text in sections().items():
        for row in TABLE.findall(text):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
            assert len(cells) == 2, f"{system}: a row must have two columns: {row}"
            found += [(system, span) for span in re.findall(r"`([^`]+)`", cells[column])]
    return found


def sections() -> dict[str, str]:
    """The text below each headline."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def is_ours(span: str) -> bool:
    """Whether what a code span names is there."""
    if span.startswith("evenstep "):
        return is_command(span.split()[1:])
    if span.startswith("make "):
        words = span.split()
        return f"\n{words[1]}:" in (ROOT / "Makefile").read_text() and all("=" in word for word in words[2:])
    if "/" in span:
        return span in metrics()
    key, sign, value = span.partition(" = ")
    return is_key(key, value if sign else None) or (not sign and is_python(span))


def is_command(words: list[str]) -> bool:
    """Whether a command has these options; what else begins with `--` must be keys of the run file."""
    command = COMMANDS.get(words[0])
    if command is None:
        return False
    own, settings = split(words[1:], [f"--{option.name}" for option in command.options])
    known = {f"--{option.name}" for option in command.options}
    more = () if command.options_of is None else import_module(command.options_of).FIELDS
    given = [word for word in settings if word.startswith("--") and word not in more]
    wanted = [word for word in own if word.startswith("--")]
    return all(word in known for word in wanted) and all(is_key(word.removeprefix("--"), None) for word in given)


def is_key(key: str, value: str | None) -> bool:
    """Whether the run file has this key, and takes this value."""
    known = set(all_keys())
    named = re.sub(r"^(tasks|data\.evaluations|optimizer\.groups)\.[a-z]+", r"\1.NAME", key)
    if key not in known and named not in known:
        return False
    return value is None or takes(key, tomllib.loads(f"value = {value}")["value"])


def takes(key: str, value: object) -> bool:
    """Whether a configuration can have this value: what is wrong elsewhere in it does not count."""
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return all(one["type"] == "missing" for one in error.errors())
    return True


def is_python(span: str) -> bool:
    """Whether a name, or each argument of a call, is there."""
    try:
        node = ast.parse(span.replace("…", "..."), mode="eval").body
    except SyntaxError:
        return False
    call = node if isinstance(node, ast.Call) else None
    path = ast.unparse(node.func if call is not None else node).split(".")
    found = next((one for one in candidates(path[0]) if one is not None), None)
    if found is None or not all(part.isidentifier() for part in path):
        return False
    for part in path[1:]:
        found = member(found, part)
        if found is None:
            return False
    if call is None:
        return True
    names = inspect.signature(found).parameters
    return all(one.arg in names for one in call.keywords)


def candidates(name: str) -> Iterator[Any]:
    """What is called so in any of our packages."""
    for package in PACKAGES:
        module = import_module(f"evenstep{package}")
        if name == "evenstep" or hasattr(module, name):
            yield evenstep if name == "evenstep" else getattr(module, name)


def member(owner: Any, name: str) -> Any:
    """An attribute, also a field without a default and one that objects get when they are made."""
    if hasattr(owner, name):
        return getattr(owner, name) if getattr(owner, name) is not None else name
    if is_dataclass(owner):
        return name if name in {field.name for field in fields(owner)} else None
    made = isinstance(owner, type) and re.search(rf"\bself\.{name}\b", inspect.getsource(owner))
    return name if made else None


@cache
def metrics() -> set[str]:
    """What a run with the hooks that measure records."""

    class Line(evenstep.Task):
        unit = "tokens"

        def loss(self, output: Any, batch: Any) -> Any:
            return (output - batch[1]).square().sum()

    model = torch.nn.Linear(2, 1)
    pairs = [(torch.ones(2), torch.ones(1))] * 8
    trainer = evenstep.Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=evenstep.MapData(pairs, global_batch_size=4),
        evaluations=evenstep.MapData(pairs, global_batch_size=4, num_epochs=1),
        updates=2,
        device="cpu",
        precision="16-mixed",
        hooks=[Timer(every_updates=1), MemoryUse(every_updates=1), Statistics(every_updates=1)],
        train=evenstep.Training(clip_norm=1.0),
        log=evenstep.Logging(every_updates=1, writers=()),
    )
    trainer.train()
    return {*trainer.storage.names(), *(f"perf/memory_{name}_bytes" for name in ("peak", "reserved", "free"))}


def test_there_is_a_table_for_each_system_and_none_is_short() -> None:
    found = sections()
    assert set(SYSTEMS) <= set(found)
    assert all(len(TABLE.findall(found[system])) > 15 for system in SYSTEMS)


def test_every_name_of_ours_is_there() -> None:
    ours = spans(1)
    assert len(ours) > 200
    assert [f"{system}: {span}" for system, span in ours if not is_ours(span)] == []


@pytest.mark.parametrize(
    "span",
    [
        "Trainner",
        "Trainer.evalute",
        "Local(every_update=1)",
        "train.clipnorm",
        "failures.non_finite = \"skipp\"",
        "evenstep averge",
        "evenstep average --lost 5",
        "evenstep train --train.upates 5",
        "make proof",
        "train/los",
        "Hook.after_updat",
        "UpdateEnd.commited",
    ],
)  # fmt: skip
def test_a_misspelt_name_is_not_there(span: str) -> None:
    assert not is_ours(span)


@pytest.mark.parametrize(
    "span",
    [
        "Trainer",
        "Trainer.evaluate",
        "Local(every_updates=…)",
        "train.clip_norm",
        'failures.non_finite = "skip"',
        "evenstep average --last 5",
        "evenstep train --train.updates 5",
        "make prove ROWS=local",
        "train/loss",
        "Hook.after_update",
        "UpdateEnd.committed",
    ],
)
def test_what_is_there_is_found(span: str) -> None:
    assert is_ours(span)
