"""Puts the examples of docstrings into code blocks: Markdown would take their `>>>` for quotations."""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences every run of lines that begins with `>>>` and ends with a blank line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of `obj`, before it is rendered."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """`text` with its examples in code blocks.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2\\n\\nMore.").replace("`", "'"))
    Add.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    <BLANKLINE>
    More.
    """
    lines: list[str] = []
    within = False
    for line in [*text.splitlines(), ""]:
        if not within and line.lstrip().startswith(">>> "):
            lines.append("```pycon")
            within = True
        elif within and not line.strip():
            lines.append("```")
            within = False
        lines.append(line)
    return "\n".join(lines[:-1])
