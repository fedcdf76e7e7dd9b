"""What docstrings say of arguments is of the arguments that there are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"


def described(docstring: str) -> Iterator[str]:
    """The names of a docstring's section `Args`."""
    section = re.search(r"^Args:\n(.*?)(?=\n\s*\n|\Z)", docstring, re.S | re.M)
    for line in section[1].split("\n") if section else ():
        if re.match(r" {4}\S", line):
            yield from (name.strip(" *") for name in line.split(":")[0].split(","))


def arguments(node: ast.FunctionDef | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Of a function, of a class's constructor, or the fields that a dataclass and its bases make one of."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")]
        if not made:
            own = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and hasattr(one.target, "id")}
            bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
            return own.union(*(arguments(base, classes) for base in bases))
        node = made[0]
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {one.arg for one in every if one is not None}


def definitions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Classes, functions and methods that others may call."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node)


def misnamed(*sources: str) -> list[str]:
    nodes = [node for source in sources for node in definitions(ast.parse(source))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    return [
        f"{node.name}: {name}"
        for node in nodes
        for name in described(ast.get_docstring(node) or "")
        if name not in arguments(node, classes)
    ]


def test_arguments_that_a_docstring_describes_are_those_of_the_signature() -> None:
    assert misnamed(*(path.read_text() for path in sorted(SOURCE.rglob("*.py")))) == []
