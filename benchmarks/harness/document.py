"""The JSON of a benchmark: written after every cell, checked when read, resumed cell by cell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.faults import describe
from mxpert.cli.report import write_json
from mxpert.errors import message

Row = dict[str, Any]
Key = tuple[Any, ...]
Types = tuple[type, ...]
NUMBER: Types = (int, float)
OPTIONAL: Types = (int, float, type(None))
RUN = ("device", "commit", "protocol")
"""What two runs must have in common to stand in one document."""

FACTS = ("device", "clocks", "versions", "commit", "date")
"""Of the environment, where times are measured."""
META = (*FACTS, "protocol", "ceilings")


@dataclass(frozen=True)
class Section:
    """The rows of one list.

    Args:
        types: column → types of its values. key: columns that make a row unique.
        choices: column → allowed values, or a function of the row that gives them.
        time: the column that must be above 0.
    """

    types: Mapping[str, Types]
    key: Sequence[str]
    choices: Mapping[str, Any] = field(default_factory=dict)
    time: str = "us"

    def problems(self, row: Row) -> Iterable[tuple[str, object, object]]:
        """(column, what is needed, what is there) of a row."""
        if set(row) != set(self.types):
            yield "", ", ".join(self.types), ", ".join(row)
            return
        for name, types in self.types.items():
            is_bool = isinstance(row[name], bool)
            if not isinstance(row[name], types) or (is_bool and bool not in types):
                yield f".{name}", " or ".join(each.__name__ for each in types), repr(row[name])
                return
        for name, choice in self.choices.items():
            allowed = choice(row) if callable(choice) else choice
            if row[name] not in allowed:
                yield f".{name}", f"one of {list(allowed)}", repr(row[name])
        if row[self.time] <= 0:
            yield f".{self.time}", "more than 0", row[self.time]


@dataclass(frozen=True)
class Schema:
    """The form of one script's documents: `meta`, and lists of rows by name."""

    script: str
    sections: Mapping[str, Section]
    meta: Sequence[str] = META
    optional_meta: Sequence[str] = ()

    def validate(self, document: Any, source: str = "document") -> None:
        """Refuse a document of another form.

        Raises:
            ValueError: names the first key or row that is missing, unknown or of the wrong kind.
        """
        names = " and ".join(("meta", *self.sections))
        if not isinstance(document, dict) or set(document) != {"meta", *self.sections}:
            raise ValueError(message(source, "keys", names, list(document)))
        keys = set(document["meta"])
        if not set(self.meta) <= keys <= {*self.meta, *self.optional_meta}:
            raise ValueError(message(source, "meta", ", ".join(self.meta), sorted(keys)))
        for name, section in self.sections.items():
            seen: set[Key] = set()
            for index, row in enumerate(document[name]):
                place = f"{name}[{index}]"
                for column, need, got in section.problems(row):
                    raise ValueError(message(source, place + column, need, got))
                key = tuple(row[column] for column in section.key)
                if key in seen:
                    raise ValueError(message(source, place, "one row a cell", f"{key} twice"))
                seen.add(key)

    def load(self, path: Path) -> Row:
        """Read and check a document.

        Raises:
            ValueError: no such file, no JSON, or a document of another form.
        """
        try:
            document: Row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            need = f"the JSON of benchmarks.{self.script}"
            raise ValueError(message(str(path), "file", need, error)) from error
        self.validate(document, str(path))
        return document


@dataclass
class Document:
    """A run in the making, saved whole each time.

    Args:
        key: columns that make a row unique.
        blame: columns of a failure beside its "error"; without any, failures are saved as
            name → error.
        rows, failures: by key. left: what the time limit left out; saved if `saves_left`.
        sections: other parts, beside "meta" and "rows".
    """

    path: Path
    meta: Row
    key: Sequence[str]
    blame: Sequence[str] = ()
    rows: dict[Key, Row] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    saves_left: bool = True
    sections: Row = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows[tuple(row[name] for name in self.key)] = row

    def fail(self, where: Key, error: BaseException | str) -> str:
        """Note why something has no row; the error in one line."""
        text = self.failures[where] = error if isinstance(error, str) else describe(error)
        return text

    def is_done(self, key: Key) -> bool:
        """Whether a cell was measured, or failed and would fail again."""
        return key in self.rows or key in self.failures

    def resume(self, old: Row, kept: Sequence[str] = RUN) -> None:
        """Take over the rows of an earlier run.

        Raises:
            ValueError: it was of another device, commit or protocol: its times do not compare.
        """
        for name in kept:
            mine, theirs, place = self.meta[name], old["meta"][name], f"--resume {self.path}"
            if mine != theirs:
                text = message("resume", f"{place}: {name}", mine, theirs, "start a new run")
                raise ValueError(text)
        for row in old["rows"]:
            self.add(row)

    def keep_failures(self, old: Row) -> None:
        """Take over what failed in an earlier run: it would fail again."""
        for each in old["meta"].get("failures", []):
            self.fail(tuple(each[name] for name in self.blame), each["error"])

    def as_json(self) -> Row:
        """Everything so far."""
        failures: Any
        if self.blame:
            failures = [
                dict(zip(self.blame, where, strict=True)) | {"error": error}
                for where, error in self.failures.items()
            ]
        else:
            failures = {name: error for (name,), error in self.failures.items()}
        left = {"left": self.left} if self.saves_left else {}
        meta = self.meta | {"failures": failures} | left
        return {"meta": meta, "rows": list(self.rows.values()), **self.sections}

    def save(self) -> None:
        """Write everything so far; the file is whole at any moment."""
        write_json(self.path, self.as_json())
