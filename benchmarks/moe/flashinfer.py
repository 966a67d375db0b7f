"""FlashInfer: Hopper's CUTLASS MoE with MXFP4 weights, bf16 or per-token e4m3 activations.

One call computes a layer from ids on, so that no stage of its own can be timed. `flashinfer_moe` is
a part of FlashInfer: its functions that prepare weights, and the module of its MoE. `NOTES` says
which of its kernels that module lacks; results repeat it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe.cells import Cell, Inputs, Model
from benchmarks.moe.ours import ACTIVATION
from benchmarks.moe.peers import MoEOps, Variants
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.weights import MoEWeights

_ALIGNMENT = 128
_SWIGLU = 3
_COMPENSATION = 64.0
"""What its epilogue expects in the factor of an expert, beside the common exponent."""
_ONE_GPU = (1, 0) * 3
"""Size and rank of tensor and expert parallelism and of clusters."""
_TUNING_REPEATS = 5


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def linear_first(rows: torch.Tensor) -> torch.Tensor:
    """Interleaved gate and up rows [E, 2F, ·] with all up rows first."""
    return torch.cat((rows[:, 1::2], rows[:, ::2]), 1)


def aligned(projection: WeightLike, is_gate_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, N, K/2] and scales [E, N, K/32] whose sizes are multiples of 128.

    Zero codes are added, with an expert's largest scale: they widen no expert's range of scales.
    """
    experts, _, depth = projection.shape
    scales = projection.scale.view(torch.uint8)
    largest = scales.flatten(1).amax(1)[:, None, None, None]

    def with_room(part: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        columns = part.shape[2]
        halves = linear_first(part).view(experts, 2, -1, columns) if is_gate_up else part[:, None]
        tall, wide = _padded(halves.shape[2]), columns * _padded(depth) // depth
        room = fill.expand(experts, halves.shape[1], tall, wide).contiguous()
        room[:, :, : halves.shape[2], :columns] = halves
        return room.view(experts, -1, wide)

    codes = projection.qdata.view(torch.uint8)
    return with_room(codes, torch.zeros_like(largest)), with_room(scales, largest)


class FlashInfer:
    """Both projections in its layout, and the runner that holds its kernels."""

    impl, same_weights = "flashinfer", True

    def __init__(self, folder: Path, model: Model, weights: MoEWeights, activation: str) -> None:
        self.model, self.activation = model, activation
        self.package: Any = importlib.import_module("flashinfer_moe")
        self.routing = MoEOps(folder, model)
        self.note: str = self.package.NOTES[activation]
        self.hidden = _padded(model.H)
        narrow = activation != "bf16"
        parts = [
            self._prepared(*aligned(projection, is_gate_up), narrow)
            for projection, is_gate_up in ((weights.gate_up_proj, True), (weights.down_proj, False))
        ]
        (self.gate_up, first, factor), (self.down, second, factor_2) = parts
        device = weights.device
        self.scales = [first, second]
        if narrow:
            unused = torch.ones((), device=device)
            self.scales = [first, factor, unused, second, factor_2]
        self.swiglu = [
            torch.full((model.E,), value, device=device)
            for value in (ACTIVATION.alpha, ACTIVATION.beta, ACTIVATION.limit)
        ]
        self.runner = self.package.init(narrow)

    def _prepared(
        self, codes: torch.Tensor, scales: torch.Tensor, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Weights, scales and factors in its layout; an expert at a time, to save memory."""
        if not narrow:
            made = self.package.interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4")
            folded = self.package.interleave_moe_scales_for_sm90_mixed_gemm(scales)
            return made, folded.view(torch.int32), None
        each = [
            self.package.preprocess_moe_weights_for_sm90_mixed_gemm_humming(
                codes[expert : expert + 1], scales[expert : expert + 1]
            )
            for expert in range(self.model.E)
        ]
        made, folded, factor = (torch.cat(part) for part in zip(*each, strict=True))
        return made, folded.view(torch.int32), factor * _COMPENSATION

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        tactics = self._tuned(cell.tokens)
        return {"": {"layer": [self._layer(inputs, tactics) for inputs in batches]}}

    def _tuned(self, tokens: int) -> list[int]:
        """The fastest kernel of each GEMM, by its own profiling call, as its tuner finds them."""
        x = torch.zeros(tokens, self.hidden, dtype=torch.bfloat16, device=self.gate_up.device)
        counts = [self.runner.get_gemm1_tactic_count(), self.runner.get_gemm2_tactic_count()]
        best = []
        for gemm, first in ((1, 0), (2, counts[0])):
            run = functools.partial(
                self.runner.run_gemm_profile,
                *(x, self.gate_up, None, self.down, None, self.model.k, *_ONE_GPU, False, False),
                gemm,
            )
            times: dict[int, float] = {}
            for tactic in range(first, first + counts[gemm - 1]):
                try:
                    if not times:  # a call that prepares also runs its kernel
                        run(tactic, True, True, _SWIGLU)
                    times[tactic] = self._seconds(
                        functools.partial(run, tactic, False, True, _SWIGLU)
                    )
                except RuntimeError:  # a kernel that was left out, or a tile that does not fit
                    continue
            if not times:
                raise RuntimeError(f"none of its kernels runs GEMM {gemm}")
            best.append(min(times, key=lambda tactic: times[tactic]))
        return best

    def _seconds(self, call: Any) -> float:
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_TUNING_REPEATS):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _layer(self, inputs: Inputs, tactics: list[int]) -> Any:
        model, out = self.model, inputs.x.new_empty(inputs.x.shape[0], self.hidden)

        def layer() -> torch.Tensor:
            weights, ids = self.routing.topk(inputs.logits)
            x = inputs.x
            if self.hidden != model.H:
                x = torch.nn.functional.pad(x, (0, self.hidden - model.H))
            self.runner.run_moe(
                *(out, x, ids, weights, self.gate_up, None, self.down, None, self.scales, None),
                *(*self.swiglu, None, None, None, False, *_ONE_GPU, False, False),
                *(tactics, True, _SWIGLU, None),
            )
            return out[:, : model.H]

        return layer
