"""One suite for every executor, and tests of the portable kernels.

Files of `SUITE` run in every process; their tests without an executor are tests of the comparisons
and run in the first one. The other files need Triton's interpreter, whose numerics are patched
before the first test (``TRITON_INTERPRET=1 pytest tests/conformance``), or ``--gfx950``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import executors

SUITE = (
    "test_exchange.py",
    "test_grouped.py",
    "test_moe.py",
    "test_quantize.py",
    "test_routing.py",
)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if _INTERPRETED:
    from support.interpreter import install

    install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that this process would skip."""
    test = collection_path.name.startswith("test_") and collection_path.name not in SUITE
    return True if test and not (_INTERPRETED or config.getoption("--gfx950")) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    executors.parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_kernels = _INTERPRETED or config.getoption("--gfx950")
    of_the_first_process = []
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            anywhere = item.path.name in SUITE
            if _INTERPRETED or not anywhere:
                item.add_marker(pytest.mark.interpreted)
            if not (has_kernels or anywhere):
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
            if has_kernels and anywhere and "executor" not in getattr(item, "fixturenames", ()):
                of_the_first_process.append(item)
    config.hook.pytest_deselected(items=of_the_first_process)
    left = set(of_the_first_process)
    items[:] = [item for item in items if item not in left]
