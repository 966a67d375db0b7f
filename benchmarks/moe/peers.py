"""Peers through their public interfaces, imported from a directory that is not part of this tree.

Every peer answers `prepare` with the calls of a cell, as `ours.Ours` does. A `*_gemm` call is its
GEMM kernel on ready operands; a stage adds the glue that it needs (quantisation, activation,
weighting and sum); a layer starts from logits. What a peer fuses into its GEMM stays in both.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import mxpert
from benchmarks.moe.cells import PEER_WIDTHS, WIDTHS, Cell, Inputs, Model
from benchmarks.moe.ours import ACTIVATION
from mxpert.errors import message
from mxpert.moe.weights import MoEWeights
from mxpert.routing.plan import TOKEN_BITS, TOKEN_MASK

Call = Callable[[], object]
Variants = dict[str, dict[str, list[Call]]]
"""variant → stage → calls; where a peer offers several, its fastest counts. "steps", where a peer
has them, gives `peer_gate.Steps`."""

_PROGRAMS = "humming/_native/*/nvrtc_compile"
"""What a peer runs as a process of its own; looked at first, not minutes into a comparison."""


PEERS = ("triton_kernels", "marlin", "humming", "flashinfer")
PEER_KEYS = (
    ("triton_kernels", "bf16"),
    ("marlin", "bf16"),
    ("humming", "bf16"),
    ("humming", "fp8_token"),
    ("humming", "fp8_group"),
    ("flashinfer", "bf16"),
    ("flashinfer", "fp8_token"),
)


class Peer(Protocol):
    """An implementation of the layer other than ours."""

    impl: str
    activation: str
    same_weights: bool

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        """Calls of every stage, one for each batch."""


def by_stage(calls: Sequence[dict[str, Call]]) -> dict[str, list[Call]]:
    """Calls of several batches, gathered by stage."""
    return {stage: [each[stage] for each in calls] for stage in calls[0]}


class TritonKernels:
    """triton_kernels: gather, bias and SwiGLU, or weighting, inside the GEMM; sum after scatter."""

    impl, activation, same_weights = "triton_kernels", "bf16", True

    def __init__(self, model: Model, weights: MoEWeights) -> None:
        self.model = model
        self.ogs = importlib.import_module("triton_kernels.matmul_ogs")
        self.tensor = importlib.import_module("triton_kernels.tensor")
        self.topk = importlib.import_module("triton_kernels.topk").topk
        swiglu = importlib.import_module("triton_kernels.swiglu").swiglu_fn
        self.gate_up, self.gate_up_precision = self._projection(weights.gate_up_proj)
        self.down, self.down_precision = self._projection(weights.down_proj)
        device = weights.device
        self.gate_up_bias = torch.zeros(model.E, 2 * model.F, device=device)
        self.down_bias = torch.zeros(model.E, model.H, device=device)
        specs = self.ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit"), reduction_n=2)
        self.swiglu = self.ogs.FusedActivation(specs, (ACTIVATION.alpha, ACTIVATION.limit))

    def _projection(self, projection: Any) -> tuple[Any, Any]:
        """Codes and scales in the layouts that the peer's own helpers choose for this GPU."""
        layouts = importlib.import_module("triton_kernels.tensor_details.layout")
        flex = importlib.import_module("triton_kernels.numerics").InFlexData()
        value_layout, value_options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = layouts.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=8
        )
        values = self.tensor.wrap_torch_tensor(
            projection.qdata.transpose(-2, -1), dtype=self.tensor.FP4
        )
        scales = self.tensor.wrap_torch_tensor(projection.scale.transpose(-2, -1))
        scales = self.tensor.convert_layout(scales, scale_layout, **scale_options)
        precision = self.ogs.PrecisionConfig(
            weight_scale=scales, flex_ctx=self.ogs.FlexCtx(rhs_data=flex)
        )
        return self.tensor.convert_layout(values, value_layout, **value_options), precision

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        return {"": by_stage([self._calls(inputs) for inputs in batches])}

    def _route(self, logits: torch.Tensor) -> tuple[Any, Any, Any]:
        sparse = self.topk(logits, self.model.k, apply_softmax=True)
        rows = sparse.mask_metadata.row_sorted_indx
        columns = sparse.mask_metadata.col_sorted_indx
        ragged = self.tensor.make_ragged_tensor_metadata(
            sparse.mask_metadata.col_sum, rows.shape[0]
        )
        data = self.ogs.RoutingData(
            sparse.vals.flatten()[columns], ragged.slice_sizes, self.model.E, self.model.k, ragged
        )
        return data, self.ogs.GatherIndx(columns, rows), self.ogs.ScatterIndx(rows, columns)

    def _first(self, x: torch.Tensor, routed: tuple[Any, Any, Any]) -> Any:
        return self.ogs.matmul_ogs(
            x,
            self.gate_up,
            self.gate_up_bias,
            routed[0],
            gather_indx=routed[1],
            precision_config=self.gate_up_precision,
            fused_activation=self.swiglu,
        )

    def _second(self, h: Any, routed: tuple[Any, Any, Any], combine: bool = True) -> Any:
        return self.ogs.matmul_ogs(
            h,
            self.down,
            self.down_bias,
            routed[0],
            scatter_indx=routed[2] if combine else None,
            precision_config=self.down_precision,
            gammas=routed[0].gate_scal,
        )

    def _layer(self, inputs: Inputs) -> Any:
        routed = self._route(inputs.logits)
        return self._second(self._first(inputs.x, routed), routed)

    def _calls(self, inputs: Inputs) -> dict[str, Call]:
        routed = self._route(inputs.logits)
        h = self._first(inputs.x, routed)
        first = functools.partial(self._first, inputs.x, routed)
        return {
            "gate_up_gemm": first,
            "gate_up": first,
            "down_gemm": functools.partial(self._second, h, routed, False),
            "down": functools.partial(self._second, h, routed),
            "layer": functools.partial(self._layer, inputs),
        }


class MoEOps:
    """Routing ops of the library that ships Marlin: top-k, and alignment of blocks to experts."""

    def __init__(self, folder: Path, model: Model) -> None:
        torch.ops.load_library(str(folder / "_moe_C.abi3.so"))
        self.ops, self.model = torch.ops._moe_C, model

    def topk(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Renormalised softmax weights float32 and ids int32 [T, k]."""
        shape = (logits.shape[0], self.model.k)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids, sources = torch.empty((2, *shape), dtype=torch.int32, device=logits.device)
        self.ops.topk_softmax(weights, ids, sources, logits, True, None)
        return weights, ids

    def align(self, ids: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
        """Sorted row ids, expert of each block, rows in use."""
        rows, experts = ids.numel(), self.model.E
        padded = -(-(rows + experts * (block - 1)) // block) * block
        if rows < experts:
            padded = min(padded, rows * block)
        sorted_ids = torch.empty(padded, dtype=torch.int32, device=ids.device)
        expert_ids = torch.empty(-(-padded // block), dtype=torch.int32, device=ids.device)
        used = torch.empty(1, dtype=torch.int32, device=ids.device)
        self.ops.moe_align_block_size(ids, experts, block, sorted_ids, expert_ids, used, None)
        return sorted_ids, expert_ids, used


_MARLIN = {
    "mxfp4": ("float4_e2m1f", 4, 32, torch.float8_e8m0fnu),
    "nvfp4": ("float4_e2m1f", 4, 16, torch.float8_e4m3fn),
    "mxfp8_e4m3": ("float8_e4m3fn", 8, 32, torch.float8_e8m0fnu),
    "int4_g32": ("uint4b8", 4, 32, torch.bfloat16),
    "int4_g128": ("uint4b8", 4, 128, torch.bfloat16),
}
"""Weight format → Marlin's type, bits of a code, codes of a scale, dtype of the scales."""


class Marlin(MoEOps):
    """Marlin: bf16 tensor cores, weighting inside the second GEMM. Its packed weights are random,
    since the packer is in another library; sizes are padded to 128, which it needs."""

    impl, activation, same_weights = "marlin", "bf16", False

    def __init__(
        self, folder: Path, model: Model, device: torch.device, weight_format: str = "mxfp4"
    ) -> None:
        super().__init__(folder, model)
        name, self.bits, self.group, self.scales = _MARLIN[weight_format]
        types = importlib.import_module("scalar_type").scalar_types
        self.format = getattr(types, name).id
        self.hidden, self.inner = (-(-size // 128) * 128 for size in (model.H, model.F))
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.locks = torch.zeros(4 * sms, dtype=torch.int32, device=device)
        self.factor = None
        if weight_format == "nvfp4":
            self.factor = torch.ones(model.E, dtype=torch.float32, device=device)
        self.gate_up = self._random(2 * self.inner, self.hidden, device)
        self.down = self._random(self.hidden, self.inner, device)

    def _random(self, rows: int, depth: int, device: torch.device) -> tuple[Any, Any]:
        experts = self.model.E
        codes = torch.randint(
            -(2**31),
            2**31 - 1,
            (experts, depth // 16, rows * self.bits // 2),
            dtype=torch.int32,
            device=device,
        )
        size = experts, depth // self.group, rows
        if self.scales is torch.bfloat16:
            return codes, (torch.rand(size, device=device) / 64).bfloat16()
        scales = torch.randint(118, 124, size, dtype=torch.uint8, device=device)
        return codes, scales.view(self.scales)

    def _block(self, tokens: int) -> int:
        """The rule of the library that ships it."""
        average = tokens * self.model.k / self.model.E
        return next((block for block in (8, 16, 32, 48, 64) if average / block < 0.9), 64)

    def _multiply(
        self,
        rows: torch.Tensor,
        out: torch.Tensor,
        first: bool,
        routed: tuple[torch.Tensor, ...],
        block: int,
    ) -> torch.Tensor:
        codes, scales = self.gate_up if first else self.down
        weights, sorted_ids, expert_ids, used = routed
        return self.ops.moe_wna16_marlin_gemm(
            *(rows, out, codes, None, scales, None, self.factor, None, None, None, self.locks),
            *(sorted_ids, expert_ids, used, weights, block),
            *(self.model.k if first else 1, not first, self.format),
            *(rows.shape[0], out.shape[1], rows.shape[1]),
            *(True, False, True, False, -1, -1, -1),
        )

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        return {"": by_stage([self._calls(inputs) for inputs in batches])}

    def _calls(self, inputs: Inputs) -> dict[str, Call]:
        from benchmarks.moe.glue_kernels import sum_slots, swiglu_rows

        tokens, block = inputs.x.shape[0], self._block(inputs.x.shape[0])
        x = torch.nn.functional.pad(inputs.x, (0, self.hidden - self.model.H))
        weights, ids = self.topk(inputs.logits)
        ready = (weights, *self.align(ids, block))
        rows = tokens * self.model.k
        gate_up, h = x.new_empty(rows, 2 * self.inner), x.new_empty(rows, self.inner)
        parts, y = x.new_empty(rows, self.hidden), x.new_empty(tokens, self.hidden)
        first = functools.partial(self._multiply, x, gate_up, True, block=block)
        second = functools.partial(self._multiply, h, parts, False, block=block)

        def gate_up_stage(routed: tuple[torch.Tensor, ...]) -> None:
            first(routed)
            swiglu_rows(h, gate_up, alpha=ACTIVATION.alpha, limit=ACTIVATION.limit)

        def down_stage(routed: tuple[torch.Tensor, ...]) -> torch.Tensor:
            second(routed)
            sum_slots(y, parts, None)
            return y

        def layer() -> torch.Tensor:
            weights, ids = self.topk(inputs.logits)
            routed = (weights, *self.align(ids, block))
            gate_up_stage(routed)
            return down_stage(routed)

        gate_up_stage(ready)
        return {
            "gate_up_gemm": functools.partial(first, ready),
            "down_gemm": functools.partial(second, ready),
            "gate_up": functools.partial(gate_up_stage, ready),
            "down": functools.partial(down_stage, ready),
            "layer": layer,
        }


def aligned_rows(logits: torch.Tensor, model: Model, block: int) -> tuple[torch.Tensor, ...]:
    """Sorted ids ``token · k + slot`` (T · k for padding), expert of each block, rows in use: the
    form of an indexed GEMM, without spare capacity."""
    topk_weights, topk_ids = mxpert.route_topk(logits, model.k)
    plan = mxpert.make_routing_plan(
        topk_weights, topk_ids, num_experts=model.E, routing_block_m=block
    )
    used = plan.num_valid[:1].clone()
    count = int(used)
    packed = plan.sorted_token_ids[:count]
    token, slot = packed & TOKEN_MASK, packed >> TOKEN_BITS
    ids = torch.where(token < plan.num_tokens, token * model.k + slot, topk_ids.numel())
    return ids.to(torch.int32), plan.block_expert_ids[: count // block].contiguous(), used


def asked_peers(formats: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Those of `PEER_KEYS` with such a name and the width of one of our formats."""
    widths = {PEER_WIDTHS[WIDTHS[name]] for name in formats}
    return [key for key in PEER_KEYS if key[0] in names and WIDTHS[key[1]] in widths]


def make(
    key: tuple[str, str],
    folder: Path,
    model: Model,
    weights: MoEWeights,
    compiler: Any,
    seconds_left: Callable[[], float],
) -> Peer:
    """The peer of a key, with a model's weights.

    Args:
        compiler: Humming's, or why there is none. seconds_left: how long its kernels may take.
    """
    impl, activation = key
    if impl == "triton_kernels":
        return TritonKernels(model, weights)
    if impl == "marlin":
        return Marlin(folder, model, weights.device)
    if impl == "flashinfer":
        from benchmarks.moe.flashinfer import FlashInfer

        return FlashInfer(folder, model, weights, activation)
    from benchmarks.moe.humming import Humming

    if isinstance(compiler, str):
        raise RuntimeError(compiler)
    return Humming(folder, model, weights, activation, compiler, seconds_left)


def add_to_path(folder: Path) -> None:
    """Let `folder` answer imports first."""
    if not folder.is_dir():
        need = "a directory of unpacked peers"
        raise ValueError(message("compare", "--peers", need, folder))
    for program in folder.glob(_PROGRAMS):
        if not os.access(program, os.X_OK):
            got = "one that may not run (some unpackers forget it)"
            remedy = f"chmod +x {program}"
            raise ValueError(message("compare", "--peers", f"an executable {program}", got, remedy))
    sys.path.insert(0, str(folder.resolve()))
