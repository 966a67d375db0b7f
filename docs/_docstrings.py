"""Griffe extension: brings docstrings into the form that the API reference can render.

Doctests become code blocks that can be copied and run: without prompts, with what they print as
comments. Several exceptions on one line become one entry each.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent) *\S.*)*", re.MULTILINE)
DIRECTIVE = re.compile(r" *# doctest:.*$")
RAISES = re.compile(r"^(?P<indent> *)Raises:\n(?P<body>(?:(?P=indent) +\S.*\n?)+)", re.MULTILINE)
NEXT_ERROR = re.compile(r"(?<=\.) (?=[A-Z]\w*Error(?:, \w+Error)*: )")


def copyable(example: str) -> list[str]:
    """Lines of a doctest as a program: no prompts, and a comment for each line that it prints.

    >>> copyable(">>> x = [1,  # doctest: +SKIP\\n... 2]\\n>>> x\\n[1, 2]")
    ['x = [1,', '2]', 'x', '# [1, 2]']
    """
    lines = []
    for line in textwrap.dedent(example).splitlines():
        is_code = line.startswith((">>>", "..."))
        lines.append(DIRECTIVE.sub("", line[4:]) if is_code else f"# {line}".rstrip())
    return lines


def fenced(text: str) -> str:
    """A docstring whose doctests stand in fences, indented as they were."""

    def block(found: re.Match[str]) -> str:
        lines = ["```python", *copyable(found[0]), "```"]
        return "\n".join(f"{found['indent']}{line}".rstrip() for line in lines)

    return DOCTEST.sub(block, text)


def one_error_a_line(text: str) -> str:
    """A docstring whose section Raises has one entry a line."""

    def entries(found: re.Match[str]) -> str:
        indent = found["indent"]
        lines: list[str] = []
        for line in found["body"].splitlines():
            if lines and not re.match(r"\s*\w+Error(, \w+Error)*:", line):
                lines[-1] += " " + line.strip()
            else:
                lines.append(line.strip())
        split = (entry for line in lines for entry in NEXT_ERROR.split(line))
        return "\n".join([f"{indent}Raises:", *(f"{indent}    {entry}" for entry in split), ""])

    return RAISES.sub(entries, text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring:
            obj.docstring.value = one_error_a_line(fenced(obj.docstring.value))
