"""Tests of serving. Those that need vLLM are skipped without it; `make test-serving` has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_NEEDS_VLLM = ("test_vllm_configs.py", "test_vllm_layers.py", "test_vllm_serves.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="needs vLLM: make test-serving")
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name in _NEEDS_VLLM:
                item.add_marker(skip)
