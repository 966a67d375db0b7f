"""pytest plugin of ``--gfx950``: tests of the portable kernels on gfx950 code, executed on the CPU.

The tests of tests/conformance are taken as they are. Each case gets a schedule of the waves:
"lowest", or "random" with a seed that depends on the case's name. To keep the suite short,

* a function with one case runs in both schedules,
* of more cases each runs in one; which one follows the Thue-Morse sequence, so that neither
  schedule falls together with a parameter,
* of more than `MOST_CASES` cases that many are taken, evenly spaced.

Each executor of a test (a backend on gfx950), and each group of its cases, counts as a function of
its own.

``--gfx950-all`` runs every case in both schedules. At the end the plugin prints what was executed,
and fails the session if a kernel of the package ran in one schedule only.
"""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mxpert
from gfx950emu import Report
from mxpert.testing.gfx950 import Emulation, emulate

NOT_GFX950 = {
    "test_interpreter_patch.py": "tests the interpreter",
    "test_spans.py": "tests Hopper's kernels",
    "test_wide_operands.py": "tests Hopper's kernels",
    "test_warm_up.py": "several processes, which run the interpreter",
}
"""Files of tests/conformance that are left out, and why."""

OWN_PROCESSES = ("test_exchange.py", "test_exchange_protocol.py")
"""Files of tests/conformance whose processes emulate by themselves."""

SCHEDULES = ("lowest", "random")
MOST_CASES = 16
"""Cases of one test function that are run without ``--gfx950-all``."""


@functools.cache
def package_functions() -> frozenset[str]:
    """Names of all functions of the package; tests have kernels of their own beside them."""
    sources = Path(mxpert.__file__).parent.rglob("*.py")
    found = (re.findall(r"^def (\w+)", path.read_text("utf-8"), re.M) for path in sources)
    return frozenset(itertools.chain.from_iterable(found))


def seed_of(name: str) -> int:
    """Seed of a test case, from its node id."""
    return zlib.crc32(name.encode()) % 1000


def chosen(count: int) -> dict[int, tuple[str, ...]]:
    """Case → schedules in which it runs, of a test function with `count` cases.

    >>> chosen(1)
    {0: ('lowest', 'random')}
    >>> chosen(3)
    {0: ('lowest',), 1: ('random',), 2: ('random',)}
    """
    if count == 1:
        return {0: SCHEDULES}
    taken = min(count, MOST_CASES)
    return {place * count // taken: (SCHEDULES[place.bit_count() % 2],) for place in range(taken)}


def select(items: Iterable[pytest.Function]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Items to run and items to leave out, of functions that are parametrised with ``schedule``."""
    functions: dict[tuple[Any, ...], dict[tuple[int, ...], list[pytest.Function]]] = {}
    for item in items:
        params = {**item.callspec.params}
        del params["schedule"]
        group = item.get_closest_marker("group")
        name = item.originalname if group is None else (item.originalname, *group.args)
        cases = functions.setdefault((item.path, item.cls, name, params.get("executor")), {})
        # Both schedules of a case have the same objects; pytest's indices count them apart.
        cases.setdefault(tuple(map(id, params.values())), []).append(item)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for cases in functions.values():
        schedules = chosen(len(cases))
        for place, variants in enumerate(cases.values()):
            for item in variants:
                runs = item.callspec.params["schedule"] in schedules.get(place, ())
                (kept if runs else left).append(item)
    return kept, left


class Executed:
    """Wave-instructions by kernel and schedule, of this process and of its workers."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, kernel: str, schedule: str, instructions: int) -> None:
        """Count one launch."""
        self.counts[kernel, schedule] += instructions

    def plain(self) -> list[list[Any]]:
        """As lists and numbers, to send between processes."""
        return [[*key, count] for key, count in self.counts.items()]

    def merge(self, plain: Iterable[list[Any]]) -> None:
        """Add another process's counts."""
        for kernel, schedule, count in plain:
            self.add(kernel, schedule, count)

    @property
    def kernels(self) -> set[str]:
        """Names of all kernels."""
        return {kernel for kernel, _ in self.counts}

    @property
    def one_sided(self) -> list[str]:
        """Kernels that ran in one schedule only."""
        pairs = itertools.product(self.kernels, SCHEDULES)
        return sorted(
            {kernel for kernel, schedule in pairs if (kernel, schedule) not in self.counts}
        )


class Plugin:
    """The hooks; one object for each process of the suite."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.executed = config, Executed()
        execute = Emulation.run

        def counted(emulation: Emulation, *launch: Any) -> Report:
            report = execute(emulation, *launch)
            schedule = emulation.options.get("schedule", SCHEDULES[0])
            self.executed.add(report.kernel, schedule, report.instructions)
            return report

        patch = mock.patch.object(Emulation, "run", counted)
        patch.start()
        config.add_cleanup(patch.stop)

    @staticmethod
    def is_portable(path: Path) -> bool:
        """Whether a file has tests of kernels that run on gfx950."""
        others = NOT_GFX950.keys() | OWN_PROCESSES
        return path.parent.name == "conformance" and path.name not in others

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each of the tests in every schedule; `pytest_collection_modifyitems` selects."""
        if self.is_portable(metafunc.definition.path):
            metafunc.parametrize("schedule", SCHEDULES, indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out other kernels' tests and what the module's rule leaves out."""
        left: list[pytest.Item] = [item for item in items if item.path.name in NOT_GFX950]
        if not self.config.getoption("--gfx950-all"):
            functions = [item for item in items if isinstance(item, pytest.Function)]
            left += select(item for item in functions if self.is_portable(item.path))[1]
        without = set(left)
        items[:] = [item for item in items if item not in without]
        self.config.hook.pytest_deselected(items=left)

    @pytest.fixture(autouse=True)
    def schedule(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Execute the test's kernels as gfx950 code, with its waves in one of `SCHEDULES`."""
        schedule = getattr(request, "param", None)
        if schedule is None:
            yield
            return
        with emulate(schedule=schedule, seed=seed_of(request.node.nodeid)):
            yield

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist has executed."""
        self.executed.merge(getattr(node, "workeroutput", {}).get("gfx950", []))

    @property
    def _one_sided(self) -> list[str]:
        """The package's kernels that ran in one schedule only, if all portable tests were asked."""
        narrowed = self.config.option.keyword or self.config.option.markexpr
        whole = any(Path(each).name == "conformance" for each in self.config.args)
        found = self.executed.one_sided if whole and not narrowed else []
        return [kernel for kernel in found if kernel in package_functions()]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the counts to the main process, or judge them there."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["gfx950"] = self.executed.plain()
        elif self._one_sided and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what was executed."""
        counts = self.executed.counts
        terminalreporter.write_line(
            f"gfx950: {len(self.executed.kernels)} kernels, {counts.total():,} wave-instructions"
        )
        for kernel in self._one_sided:
            terminalreporter.write_line(f"FAILED {kernel} ran in one of {SCHEDULES} only")
