"""Griffe extension: brings docstrings into the form that the API reference can render.

Doctests become code blocks, and several exceptions on one line become one entry each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent) *\S.*)*", re.MULTILINE)
RAISES = re.compile(r"^(?P<indent> *)Raises:\n(?P<body>(?:(?P=indent) +\S.*\n?)+)", re.MULTILINE)
NEXT_ERROR = re.compile(r"(?<=\.) (?=[A-Z]\w*Error(?:, \w+Error)*: )")


def fenced(text: str) -> str:
    """A docstring whose doctests stand in fences, indented as they were."""
    return DOCTEST.sub(
        lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text
    )


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
