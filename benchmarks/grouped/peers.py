"""Peers of grouped/run.py: torch's own grouped GEMMs, and DeepGEMM from a directory of its own.

DeepGEMM wants groups that begin at multiples of 128 rows: where they do not, its operands are
padded before the clock runs, and only real rows count as work. torch's wgrad gets multiples of 16.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.grouped.cells import BALANCES, Operands, Part, Shape, pick, sample
from benchmarks.grouped.ours import Variant, check
from benchmarks.moe.peers import add_to_path

E4M3_MAX = 448.0
DEEPGEMM_OPS = {"fp8_1x128": ("forward", "dgrad", "wgrad_accumulate"), "bf16": ("forward",)}
DEEPGEMM_ROWS, TORCH_ROWS = 128, 16
SLAB_ROWS = 8192
"""Rows quantised at once, for the memory of the float32 between."""
COMPILE_WORKERS = 6
QUIET_SECONDS = 30.0
"""A compiler that finishes nothing for so long hangs."""


@dataclass(frozen=True)
class Job:
    """What became of one DeepGEMM kernel: compiled, with the depth padded or not, or why not."""

    pad_depth: bool = False
    error: str = ""


Jobs = dict[tuple[Shape, str, str], Job]
"""By (shape, mode, op)."""


class Padded:
    """Groups moved to multiples of `unit` rows; `index` [M] is where each row went."""

    def __init__(self, data: Operands, unit: int) -> None:
        self.sizes = [-(-size // unit) * unit for size in data.sizes]
        device = data.x.device
        sizes = torch.tensor(data.sizes, device=device)
        starts = torch.tensor([0, *self.sizes], device=device).cumsum(0)
        self.ends = starts[1:].to(torch.int32)
        group = torch.repeat_interleave(torch.arange(len(data.sizes), device=device), sizes)
        rows = torch.arange(data.x.shape[0], device=device)
        self.index = starts[group] + rows - data.group_offsets.long()[group]
        self.group = torch.full((sum(self.sizes),), -1, dtype=torch.int32, device=device)
        self.group[self.index] = group.int()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x with zeros between the groups."""
        if len(self.group) == len(x):
            return x
        out = x.new_zeros(len(self.group), x.shape[1])
        out[self.index] = x
        return out

    def pick(self, parts: Sequence[Part], op: str, result: torch.Tensor) -> torch.Tensor:
        """The sampled rows of a padded result."""
        if op.startswith("wgrad"):
            return pick(parts, op, result)
        return torch.cat([result[self.index[part.rows]] for part in parts])


def torch_variants(data: Operands) -> dict[str, Callable[[], Variant]]:
    """torch._grouped_mm in bfloat16, all three GEMMs alone and together, and its fp8 forward."""
    x, weight, grad, ends = data.x, data.weight, data.grad, data.group_offsets[1:]
    padded = Padded(data, TORCH_ROWS)
    grad_columns, rows = padded.rows(grad).T, padded.rows(x)

    def forward() -> torch.Tensor:
        return torch._grouped_mm(x, weight.mT, offs=ends)

    def dgrad() -> torch.Tensor:
        return torch._grouped_mm(grad, weight, offs=ends)

    def wgrad() -> torch.Tensor:
        return torch._grouped_mm(grad_columns, rows, offs=padded.ends)

    calls = {
        "forward": forward,
        "dgrad": dgrad,
        "wgrad": wgrad,
        "forward+backward": lambda: (forward(), dgrad(), wgrad()),
    }
    made = {
        f"torch/bf16/{op}": functools.partial(Variant, "torch", "bf16", op, False, call)
        for op, call in calls.items()
    }
    return made | {"torch/fp8_row/forward": lambda: _torch_fp8(data)}


def _torch_fp8(data: Operands) -> Variant:
    x, x_scale = scaled(data.x, data.x.abs().amax(-1, keepdim=True))
    weight, weight_scale = scaled(data.weight, data.weight.abs().amax(-1, keepdim=True))
    call = functools.partial(
        torch._scaled_grouped_mm,
        x,
        weight.mT,
        x_scale[:, 0],
        weight_scale[..., 0],
        offs=data.group_offsets[1:],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return Variant("torch", "fp8_row", "forward", False, call)


def scaled(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of x, and the float32 scales that multiply them, in the shape of amax.

    >>> codes, scale = scaled(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0]]))
    >>> (codes.float() * scale).tolist()
    [[1.0, 2.0]]
    """
    scale = amax.float().clamp(min=1e-12) / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn), scale


def scaled_blocks(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x [M, K] and scales of blocks of rows × columns; ragged blocks count as padded.

    >>> codes, scale = scaled_blocks(torch.ones(2, 130), 1, 128)
    >>> codes.shape, scale.shape
    (torch.Size([2, 130]), torch.Size([2, 2]))
    """
    parts = [_scaled_slab(slab, rows, columns) for slab in x.split(SLAB_ROWS)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return codes, scales


def _scaled_slab(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    height, width = x.shape
    padded = pad(x, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [M/r, r, K/c, c]
    codes, scale = scaled(blocks, blocks.abs().amax((1, 3), keepdim=True))
    return codes.flatten(2).flatten(0, 1)[:height, :width], scale[:, 0, :, 0]


class DeepGemm:
    """DeepGEMM on one set of operands; every variant makes the operands that it needs."""

    def __init__(self, data: Operands) -> None:
        self.library = importlib.import_module("deep_gemm")
        self.data, self.padded = data, Padded(data, DEEPGEMM_ROWS)

    def variants(self, jobs: Jobs) -> dict[str, Callable[[], Variant]]:
        """Those that were compiled; the others say why they were not."""
        return {
            f"deepgemm/{mode}/{op}": functools.partial(self._compiled, mode, op, jobs)
            for mode, ops in DEEPGEMM_OPS.items()
            for op in ops
        }

    def _compiled(self, mode: str, op: str, jobs: Jobs) -> Variant:
        job = jobs.get((self.data.shape, mode, op), Job(error="it was not compiled"))
        if job.error:
            raise RuntimeError(job.error)
        return self.variant(mode, op, job.pad_depth)

    def variant(self, mode: str, op: str, pad_depth: bool = False) -> Variant:
        """One call with its operands; `pad_depth` pads what is summed over to 128."""
        accumulator = None
        if op == "wgrad_accumulate":
            call, accumulator = self._wgrad()
        elif mode == "bf16":
            call = self._bf16_forward()
        else:
            call = self._fp8_rows(op, pad_depth)
        return Variant(
            "deepgemm", mode, op, False, call, accumulator=accumulator, pick=self.padded.pick
        )

    def _fp8_rows(self, op: str, pad_depth: bool) -> Callable[[], Any]:
        """Forward and dgrad: 1×128 scales on the rows, 128×128 on the weights."""
        backward = op == "dgrad"
        rows = self.padded.rows(self.data.grad if backward else self.data.x)
        weights = self.data.weight.mT if backward else self.data.weight
        missing = -rows.shape[1] % 128 if pad_depth else 0
        a, a_scale = scaled_blocks(pad(rows, (0, missing)), 1, 128)
        blocks = [scaled_blocks(pad(weight, (0, missing)), 128, 128) for weight in weights]
        b, b_scale = (torch.stack(each) for each in zip(*blocks, strict=True))
        align = getattr(self.library, "get_mn_major_tma_aligned_tensor", torch.Tensor.contiguous)
        aligned = align(a_scale)
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        gemm = functools.partial(
            self.library.m_grouped_fp8_gemm_nt_contiguous, disable_ue8m0_cast=True
        )
        operands = (a, aligned), (b, b_scale), out, self.padded.group
        return self._into(out, functools.partial(gemm, *operands))

    def _bf16_forward(self) -> Callable[[], Any]:
        a = self.padded.rows(self.data.x)
        out = a.new_empty(a.shape[0], self.data.shape.N)
        gemm, group = self.library.m_grouped_bf16_gemm_nt_contiguous, self.padded.group
        return self._into(out, functools.partial(gemm, a, self.data.weight, out, group))

    def _wgrad(self) -> tuple[Callable[[], Any], torch.Tensor]:
        """128×1 scales on both sides, added to float32 [G, N, K], the one form that there is."""
        operands = []
        for rows in (self.data.grad, self.data.x):
            codes, scale = scaled_blocks(self.padded.rows(rows), 128, 1)
            parts = [part.T.flatten() for part in codes.split(self.padded.sizes)]
            operands.append((torch.cat(parts), scale.T))
        shape, sizes = self.data.shape, self.padded.sizes
        out = torch.zeros(shape.G, shape.N, shape.K, device=self.data.x.device)
        on_device = torch.tensor(sizes, dtype=torch.int32, device=out.device)
        call = functools.partial(
            self.library.k_grouped_fp8_gemm_nt_contiguous, *operands, out, sizes, on_device, out
        )
        return self._into(out, call), out

    @staticmethod
    def _into(out: torch.Tensor, call: Callable[[], Any]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            call()
            return out

        return run


def compile_one(folder: Path, shape: Shape, mode: str, op: str) -> bool:
    """Let DeepGEMM compile what a shape needs, in a process of its own; its cache is on disk.

    Returns:
        Whether the depth has to be padded to 128 for a right result.
    """
    add_to_path(folder)
    data = Operands.random(shape, BALANCES[0], torch.device("cuda"))
    try:
        return find_padding(DeepGemm(data), mode, op)
    finally:
        del data
        torch.cuda.empty_cache()


def find_padding(library: DeepGemm, mode: str, op: str) -> bool:
    """Run one kernel as it is, and, where that is wrong, with the depth padded."""
    parts = sample(library.data)
    try:
        check(library.variant(mode, op), library.data, parts)
        return False
    except Exception:
        if mode == "bf16" or op == "wgrad_accumulate":
            raise
        check(library.variant(mode, op, pad_depth=True), library.data, parts)
        return True


class Compiler:
    """DeepGEMM's kernels, compiled side by side before anything is timed."""

    def __init__(self, folder: Path, shapes: Sequence[Shape]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(COMPILE_WORKERS, mp_context=context)
        self.futures = {
            (shape, mode, op): self.pool.submit(compile_one, folder, shape, mode, op)
            for shape in shapes
            for mode, ops in DEEPGEMM_OPS.items()
            for op in ops
        }

    def wait(self, deadline: float) -> Jobs:
        """What is ready by then, or when nothing more gets ready; the rest is given up."""
        pending = set(self.futures.values())
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = concurrent.futures.wait(
                pending, min(left, QUIET_SECONDS), concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                break
        jobs = {key: _outcome(future) for key, future in self.futures.items()}
        workers = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # a compiler that hangs is ended with its process
            worker.kill()
        return jobs


def _outcome(future: concurrent.futures.Future[bool]) -> Job:
    if not future.done() or future.cancelled():
        return Job(error="its compiler was not ready in time")
    error = future.exception()
    if error is None:
        return Job(pad_depth=future.result())
    return Job(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
