"""Tiers of the test suite, and fixtures for all folders.

`cpu` (default) runs anywhere. `gpu` needs one device; files named test_*_gpu.py have this marker.
`multi_gpu` needs two devices. Under TRITON_INTERPRET=1 kernels cannot be compiled: only conformance
runs there.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HERE = Path(__file__).parent
CONFORMANCE = _HERE / "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--race-repeats",
        type=int,
        default=200,
        metavar="N",
        help="repeats of each variant in the race hunt (20000 for the long one)",
    )
    parser.addoption(
        "--fuzz-calls",
        type=int,
        default=1200,
        metavar="N",
        help="random calls of public functions (6000 for the long run)",
    )
    parser.addoption(
        "--all-targets",
        action="store_true",
        help="compile every portable kernel for every GPU, not each GPU's part of the cases",
    )
    parser.addoption(
        "--gfx950",
        action="store_true",
        help="run tests/conformance on gfx950 code, executed on the CPU",
    )
    parser.addoption(
        "--gfx950-all",
        action="store_true",
        help="with --gfx950: every case in every schedule, and every mutant",
    )
    parser.addoption(
        "--stock-triton",
        action="store_true",
        help="compile without the patches of support/triton_speed.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Torch, Triton and thousands of cases are millions of objects that stay: by default they are
    # searched for garbage again and again while they are made, a tenth of the suite's time.
    gc.set_threshold(50_000, 20, 20)
    is_stock = config.getoption("--stock-triton") or INTERPRETED
    if importlib.util.find_spec("triton") and not is_stock:
        from support import triton_speed

        triton_speed.install()
    if config.getoption("--gfx950"):
        from support.gfx950_suite import Plugin  # needs Triton

        config.pluginmanager.register(Plugin(config), "gfx950")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        several = item.get_closest_marker("multi_gpu") is not None
        if item.path.stem.endswith("_gpu") and not several:
            item.add_marker(pytest.mark.gpu)
        needed = 2 if several else 1
        if not (item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")):
            item.add_marker(pytest.mark.cpu)
        elif devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {devices}"))
        if INTERPRETED and not item.path.is_relative_to(CONFORMANCE):
            item.add_marker(pytest.mark.skip(reason="not interpreted: unset TRITON_INTERPRET"))


@pytest.fixture
def device() -> torch.device:
    """The device of this run's kernels: the GPU, or the CPU under the interpreter."""
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    return torch.device("cuda" if on_gpu else "cpu")


@pytest.fixture
def nan_scratch() -> Iterator[None]:
    """New memory is NaN, so that no result depends on its contents."""
    from support.poison import nan_filled_scratch  # imports the package

    with nan_filled_scratch():
        yield


@pytest.fixture
def hopper(device: torch.device) -> Iterator[None]:
    """The test is skipped unless the device can run the Hopper kernels, and waits for them."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    yield
    torch.cuda.synchronize(device)


@pytest.fixture
def only_hopper(hopper: None) -> Iterator[None]:
    """Only the Hopper backend serves calls."""
    import mxpert

    with mxpert.override(backend="hopper"):
        yield


@pytest.fixture
def replays() -> Iterator[list[object]]:
    """List of the kernel calls that were replayed."""
    from support.replays import watched_replays  # needs Triton

    with watched_replays() as seen:
        yield seen
