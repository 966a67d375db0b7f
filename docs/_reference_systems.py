"""Writes the tables of docs/reference-systems.md: `python docs/_reference_systems.py`.

They come from docs/reference_systems.toml. tests/test_reference_systems.py fails if a file, a name
or a test that it gives does not exist, or if the page has other tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("reference-systems.md")
DATA = Path(__file__).with_name("reference_systems.toml")
BLOB = "https://github.com/mxpert/mxpert/blob/main/"
WORKS = "works"
STATES = (WORKS, "different", "not applicable")
BEGIN = "<!-- capabilities: python docs/_reference_systems.py -->"
END = "<!-- end of capabilities -->"


@dataclass(frozen=True)
class Capability:
    """One thing that a reference system does.

    Args:
        source: number of the pull request. name: what it does.
        where: "file: name, name" of what does it here. tests: the same of the tests.
        backends: that have it. state: of `STATES`. reason: for any other than `WORKS`.
    """

    source: str
    name: str
    where: Sequence[str]
    tests: Sequence[str]
    backends: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault that tests plant in the kernels: its name, the tests, and what they look at."""

    name: str
    tests: Sequence[str]
    sees: str


def faults() -> list[Fault]:
    """All of them, in the order of the page."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return [Fault(**each) for each in data["fault"]]


def sections() -> dict[str, list[Capability]]:
    """Title → capabilities, in the order of the page."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return {each["title"]: [Capability(**row) for row in each["row"]] for each in data["section"]}


def entries(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each file and its names.

    >>> entries(["a.py: f, g", "b.py: h"])
    [('a.py', ['f', 'g']), ('b.py', ['h'])]
    """
    parts = [text.partition(": ") for text in texts]
    return [(path, names.split(", ")) for path, _, names in parts]


def _links(texts: Sequence[str]) -> str:
    """Files as links, with their names behind them."""
    return "; ".join(
        f"[{Path(path).name}]({BLOB}{path}): " + ", ".join(f"`{name}`" for name in names)
        for path, names in entries(texts)
    )


def table(rows: Sequence[Capability]) -> str:
    """The table of one section."""
    lines = ["| from | capability | what does it | test | backends | state |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        state = f"{row.state}: {row.reason}" if row.reason else row.state
        cells = row.source, row.name, _links(row.where), _links(row.tests), row.backends, state
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fault_table() -> str:
    """The table of planted faults."""
    lines = ["| planted fault | what sees it | test |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.sees} | {_links(each.tests)} |" for each in faults()]
    return "\n".join(lines)


def counts(rows: Sequence[Capability]) -> str:
    """How many there are of each state."""
    found = [row.state for row in rows]
    words = {WORKS: "work"} | {state: f"are {state}" for state in STATES[1:]}
    parts = [f"{found.count(state)} {words[state]}" for state in STATES]
    return f"{len(rows)} capabilities: {', '.join(parts)}."


def with_tables(text: str) -> str:
    """The page's text with today's tables between their markers."""
    before, found, rest = text.partition(BEGIN)
    assert found, f"{PAGE}: need {BEGIN}"
    groups = sections()
    parts = [counts([row for rows in groups.values() for row in rows])]
    parts += [f"## {title}\n\n{table(rows)}" for title, rows in groups.items()]
    parts.append(f"## Faults that the tests are shown to see\n\n{fault_table()}")
    body = "\n\n".join(parts)
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
