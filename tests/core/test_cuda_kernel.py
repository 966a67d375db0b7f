"""Kernels in CUDA C++: what is compiled, what is kept, what a missing compiler says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cuda.core
import pytest
from triton import knobs

from mxpert.core import cuda_compiler
from mxpert.core.cuda_kernel import CudaKernel
from support.launches import without_device

SOURCE = """
extern "C" __global__ void fill(float *out, int count, float value, void *, void *) {
    for (int i = threadIdx.x; i < count; i += 32) out[i] = value * FACTOR;
}
"""
OPTIONS = {"num_warps": 1, "shared": 0, "enable_fp_fusion": True}


@pytest.fixture(autouse=True)
def _device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    with without_device(record=False):
        yield


def kernel(folder: Path, source: str = SOURCE) -> CudaKernel:
    path = folder / "fill.cu"
    path.write_text(source)
    types = {"out": "*fp32", "count": "i32", "value": "fp32"}
    return CudaKernel([path], "fill", "sm_90a", types)


def test_macros_select_the_binary(tmp_path: Path) -> None:
    fill = kernel(tmp_path)
    one = fill.compile({"out": None, "count": 3, "FACTOR": 2, **OPTIONS})
    assert fill.compile({"out": None, "count": 4, "FACTOR": 2, **OPTIONS}) is one
    other = fill.compile({"out": None, "count": 3, "FACTOR": 3, **OPTIONS})
    assert other.cubin != one.cubin
    assert fill.binaries == {one.cubin, other.cubin}
    assert one.packed_metadata == (1, 1, 0)
    assert "registers" in one.log


def test_a_binary_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel(tmp_path).compile({"FACTOR": 2, **OPTIONS})

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda.core, "Program", fail)
    again = kernel(tmp_path).compile({"FACTOR": 2, **OPTIONS})
    assert (again.cubin, again.log) == (first.cubin, first.log)
    with pytest.raises(AssertionError, match="compiled again"):
        kernel(tmp_path, SOURCE + "// other").compile({"FACTOR": 2, **OPTIONS})


def test_an_error_in_the_source_is_shown(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="FACTOR"):  # cuda.core's own error
        kernel(tmp_path).compile(OPTIONS)


def test_a_missing_or_old_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.7.0")
    cuda_compiler.missing_compiler.cache_clear()
    with pytest.raises(RuntimeError, match=r"cuda-core 1\.0 or newer"):
        kernel(tmp_path).compile({"FACTOR": 2, **OPTIONS})
    monkeypatch.undo()
    cuda_compiler.missing_compiler.cache_clear()
    assert cuda_compiler.missing_compiler() is None
