"""Plant every fault of this folder, and see that its check fails with it and passes without.

``python tests/planted/planting.py`` prints a line for each. Files ``of_*.py`` have a tuple FAULTS.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what goes wrong, as a phrase.
        plant: exchanges code of the library for code with the fault; undone afterwards.
        check: raises AssertionError where the library has the fault.
    """

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    check: Callable[[], None]


def all_faults() -> Iterator[Fault]:
    """The faults of every file."""
    sys.modules.setdefault("planting", sys.modules[__name__])
    for path in sorted(FOLDER.glob("of_*.py")):
        spec = importlib.util.spec_from_file_location(f"planted_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield from module.FAULTS


def judge(fault: Fault) -> str:
    """Whether the check sees the fault: "seen", "missed", or "wrong without it"."""
    try:
        fault.check()
    except AssertionError as error:
        return f"wrong without it: {error}"
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        try:
            fault.check()
        except AssertionError:
            return "seen"
    return "missed"


def main() -> None:
    verdicts = [(fault.name, judge(fault)) for fault in all_faults()]
    for name, verdict in verdicts:
        print(f"{name}: {verdict}")
    sys.exit(any(verdict != "seen" for _, verdict in verdicts))


if __name__ == "__main__":
    main()
