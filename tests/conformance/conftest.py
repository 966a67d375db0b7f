"""Kernel tests in Triton's interpreter, whose numerics are patched before the first test.

The caller must set the variable before Triton is imported:
``TRITON_INTERPRET=1 pytest tests/conformance``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if _INTERPRETED:
    from support.interpreter import install

    install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.interpreted)
            if not _INTERPRETED and not config.getoption("--gfx950"):
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
