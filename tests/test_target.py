"""What a device is taken for, from the properties that torch tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mxpert import target
from mxpert.backends.triton.moe import config as heuristics
from mxpert.formats.tensor import Layout
from mxpert.problem import MoEOptions, MoEProblem, Op, SiLU, Target


@pytest.fixture(autouse=True)
def _no_target_is_remembered() -> Iterator[None]:
    target._gpu_target.cache_clear()
    yield
    target._gpu_target.cache_clear()


def device_with(monkeypatch: pytest.MonkeyPatch, hip: str | None, **properties: object) -> Target:
    """The target of a GPU with these properties, in a build of torch for CUDA or ROCm."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties)
    )
    return target.detect_target("cuda:0")


@pytest.mark.parametrize(
    "name, arch",
    [
        ("gfx950:sramecc+:xnack-", "gfx950"),
        ("gfx950", "gfx950"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc-:xnack+", "gfx90a"),
    ],
)
def test_amd_features_are_no_part_of_the_architecture(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = device_with(
        monkeypatch,
        "7.0.51831",
        gcnArchName=name,
        name="AMD Instinct MI355X",
        multi_processor_count=256,
    )
    assert found == Target("hip", arch, "AMD Instinct MI355X", 256, 160 * 1024)
    problem = MoEProblem(
        Op.FUSED_MOE, found, 16, 4, 32, 512, 512, MoEOptions(SiLU(), "mxfp8"), Layout.ROW_MAJOR
    )
    assert (heuristics.unsupported(problem) is None) is (arch == "gfx950")


def test_cuda_architecture_is_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    found = device_with(
        monkeypatch,
        None,
        major=9,
        minor=0,
        name="NVIDIA H200",
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
    )
    assert found == Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
