"""Writes the table of GPUs between the markers of README.md and docs/*.md: `python docs/_gpus.py`.

tests/core/test_support.py fails if a page has another table than `mxpert.core.support`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mxpert.core.support import markdown_table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table of GPUs: python docs/_gpus.py -->", "<!-- end of the table of GPUs -->"


def pages() -> Iterator[Path]:
    """Every page that has the markers."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if BEGIN in page.read_text(encoding="utf-8"):
            yield page


def with_table(text: str) -> str:
    """The page's text with today's table between the markers."""
    table = f"{BEGIN}\n\n{markdown_table()}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table, text, flags=re.S)


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
