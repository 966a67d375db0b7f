"""Experts as checkpoints store them, one layer, and what the layer computes in float64.

What every engine must do with them is the same: create its parameters, fill them through its own
loader, and compute with exactly the stored values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import silu

import mxpert
from mxpert.formats.codec import dequantize_blocks, quantize_blocks
from mxpert.formats.spec import MXFP8_E4M3
from mxpert.integrations.checkpoints.expert_matrices import MatrixFormat
from mxpert.integrations.serving import stored_layers
from mxpert.integrations.serving.stored_layers import StoredLayer
from mxpert.testing.numerics import assert_close_relative, assert_exact, end_to_end_tolerance
from support.expert_containers import (
    EXACT_NVFP4,
    KINDS,
    Experts,
    Kind,
    awq,
    gptq,
    pack_quantized,
    random_experts,
    tensors_of,
)

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 128, 256, 4, 2, 128
PREFIX = "model.layers.0.mlp.experts"
SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

MODELOPT, COMPRESSED = "ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized"


def _stated(kind: Kind, **weights: Any) -> Kind:
    """A compressed-tensors kind with more entries of its weights."""
    config = dict(kind.config["quantization_config"])
    group = dict(config["config_groups"]["group_0"])
    group["weights"] = group["weights"] | weights
    config["config_groups"] = {"group_0": group}
    return replace(kind, config={"quantization_config": config})


_TENSOR_GROUP = dict(strategy="tensor_group", symmetric=True, dynamic=False)
CASES: dict[str, Kind] = {
    "compressed-tensors MXFP4": KINDS["compressed-tensors mxfp4-pack-quantized"],
    "Quark": KINDS["Quark OCP MX"],
    "ModelOpt NVFP4": EXACT_NVFP4[MODELOPT],
    "ModelOpt cast": KINDS[MODELOPT],
    "compressed-tensors NVFP4": _stated(EXACT_NVFP4[COMPRESSED], **_TENSOR_GROUP),
    "compressed-tensors cast": _stated(KINDS[COMPRESSED], **_TENSOR_GROUP),
    "ModelOpt MXFP8": KINDS["ModelOpt MXFP8"],
    "MiniMax MXFP8": KINDS["MiniMax MXFP8"],
    "compressed-tensors MXFP8": _stated(
        KINDS["compressed-tensors mxfp8-quantized"], scale_dtype="torch.uint8"
    ),
    "compressed-tensors INT4 g32": pack_quantized(32),
    "compressed-tensors INT4 g128": pack_quantized(128, torch.float16),
    "compressed-tensors INT4 zero points": pack_quantized(64, has_zeros=True),
    "AWQ g128": awq(128),
    "AWQ g32": awq(32),
    "GPTQ g128": gptq(128, sym=True),
    "GPTQ v2 g32": gptq(32, sym=True, v2=True),
}
"""Kinds of experts with the config that a checkpoint states."""

CONTAINERS = {
    "compressed-tensors MXFP4": "compressed-tensors mxfp4-pack-quantized",
    "Quark": "Quark OCP MX",
    "ModelOpt NVFP4": MODELOPT,
    "compressed-tensors NVFP4": COMPRESSED,
    "ModelOpt MXFP8": "ModelOpt MXFP8",
    "MiniMax MXFP8": "MiniMax MXFP8",
    "compressed-tensors MXFP8": "compressed-tensors mxfp8-quantized",
    "compressed-tensors INT4 g32": "compressed-tensors pack-quantized",
    "AWQ g128": "AWQ",
    "GPTQ g128": "GPTQ",
}
"""The container of one case each."""

NVFP4 = ("ModelOpt NVFP4", "compressed-tensors NVFP4")
"""Cases that `weight_rounding` rounds."""

NOT_IN_SGLANG = ("ModelOpt MXFP8",)
"""SGLang's config of ModelOpt's MXFP8 alone is none of the plugin's."""

FORMATS = {
    "MXFP4": "mxfp4",
    "Quark": "mxfp4",
    "cast": "mxfp4",
    "NVFP4": "nvfp4",
    "MXFP8": "mxfp8_e4m3",
    "g32": "int4_g32",
    "g128": "int4_g128",
    "points": "int4_g64",
}


def format_of(case: str) -> str:
    """What the layer of a case is loaded as."""
    return FORMATS[case.split()[-1]]


def experts_of(case: str, seed: int = 0) -> Experts:
    sizes = HIDDEN, INTERMEDIATE
    experts = random_experts(PREFIX, seed, CASES[case].draw, sizes)
    if case.endswith(" NVFP4"):  # gate and up have global scales of their own
        factors = {
            matrix.factor.item()
            for (expert, part), matrix in experts.matrices.items()
            if part != "down"
        }
        assert len(factors) == 2 * EXPERTS
    return experts


def stored_tensors(case: str, experts: Experts) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by their names; MiniMax's models rename theirs so as they load."""
    tensors = tensors_of(CASES[case], experts, ("gate_proj", "up_proj", "down_proj"))
    return {
        name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()
    }


def calls_of_loaders(
    tensors: dict[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor, str, int]]:
    """What a model of an engine makes of each tensor: parameter, tensor, shard, expert."""
    for name, tensor in tensors.items():
        expert, matrix, suffix = name.removeprefix(f"{PREFIX}.").split(".", 2)
        stem = "w2" if matrix == "down_proj" else "w13"
        yield f"{stem}_{suffix}", tensor, SHARDS[matrix], int(expert)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H] in bfloat16, and a routing."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    return x, *mxpert.route_topk(logits, TOP_K)


def share_of(experts: Experts, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 gate/up rows and down columns of a tensor-parallel rank."""
    mine = slice(rank * INTERMEDIATE // ranks, (rank + 1) * INTERMEDIATE // ranks)
    gate, up, down = (experts.stacked(part) for part in ("gate", "up", "down"))
    return torch.cat((gate[:, mine], up[:, mine]), 1), down[..., mine]


def float64_rows(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """[k, T, H] of decoded operands: bfloat16 x, an intermediate rounded to bfloat16, else exact.

    Their sum over k is the layer's result.
    """
    rows = []
    for slot in range(topk_ids.shape[1]):
        ids = topk_ids[:, slot].long()
        gate, up = torch.einsum("th,tfh->tf", x.double(), gate_up[ids]).chunk(2, 1)
        h = (silu(gate) * up).bfloat16().double()
        row = torch.einsum("tf,thf->th", h, down[ids])
        rows.append(topk_weights[:, slot, None].double() * row)
    return torch.stack(rows)


def bound_of(rows: torch.Tensor, ranks: int = 1) -> float:
    """The relative error of a layer; experts with zero points have rows that are no strangers."""
    sizes, y = (HIDDEN, INTERMEDIATE // ranks), rows.sum(0)
    cancellation = (rows.norm() / y.norm()).item()
    return end_to_end_tolerance(
        "bf16", torch.bfloat16, *sizes, top_k=TOP_K, numel=y.numel(), cancellation=cancellation
    )


def check_layer(
    weights: mxpert.MoEWeights, y: torch.Tensor, experts: Experts, rank: int = 0, ranks: int = 1
) -> None:
    """The loaded values are the checkpoint's, and the layer computes with them."""
    gate_up, down = share_of(experts, rank, ranks)
    found = weights.dequantize(torch.float64)
    assert_exact(found[0], gate_up, "gate_up_proj")
    assert_exact(found[1], down, "down_proj")
    rows = float64_rows(gate_up, down, *tokens())
    assert_close_relative(y, rows.sum(0), bound_of(rows, ranks), "layer")


def check_rounded(
    weights: mxpert.MoEWeights, y: torch.Tensor, experts: Experts, activation_format: Any
) -> None:
    """The checkpoint's NVFP4 values rounded to one e4m3 each; what that costs is certified."""
    assert weights.weight_format == "mxfp8_e4m3"
    found, wanted = weights.dequantize(torch.float64), share_of(experts, 0, 1)
    assert weights.rounding_certificates is not None
    for mine, exact, cost in zip(found, wanted, weights.rounding_certificates, strict=True):
        rounded = quantize_blocks(exact, MXFP8_E4M3, rule=mxpert.ScaleRule.RCEIL)
        assert_exact(mine, dequantize_blocks(rounded, torch.float64), "weights")
        noise = 10 * torch.log10(exact.square().sum() / (mine - exact).square().sum())
        assert cost.snr_db == pytest.approx(noise.item(), abs=1e-6)
    x, *routing = tokens()
    options: Any = dict(activation="silu", activation_format=activation_format)
    assert torch.equal(y, mxpert.fused_moe(x, weights, *routing, **options))


def check_sum(outputs: list[torch.Tensor], experts: Experts) -> None:
    """The sum of all ranks' outputs is the layer; their errors add up at most."""
    ranks, errors = len(outputs), 0.0
    for rank in range(ranks):
        rows = float64_rows(*share_of(experts, rank, ranks), *tokens())
        errors += bound_of(rows, ranks) * rows.sum(0).norm().item()
    want = float64_rows(*share_of(experts, 0, 1), *tokens()).sum(0)
    y = torch.stack(outputs).double().sum(0)
    # The whole layer rounds its intermediate at the same places: a rank has columns of its own.
    assert_close_relative(y, want, errors / want.norm().item(), "sum of the ranks")


def _swapped_nibbles(decode: Callable[..., Any], *parts: torch.Tensor) -> Any:
    matrix = decode(*parts)
    if not hasattr(matrix, "qdata"):
        return matrix
    return replace(matrix, qdata=matrix.qdata >> 4 | matrix.qdata << 4)


def _next_zero_point(decode: Callable[..., Any], *parts: torch.Tensor) -> Any:
    matrix = decode(*parts)
    zero = matrix.zero_point
    zero = torch.full(matrix.scale.shape, 8, dtype=torch.uint8) if zero is None else zero
    return replace(matrix, zero_point=zero + 1)


def _inverse_global(decode: Callable[..., Any], *parts: torch.Tensor) -> Any:
    *others, whole = parts
    return decode(*others, whole.reciprocal())


FAULTS: dict[str, Callable[..., Any] | None] = {
    "nibble order": _swapped_nibbles,
    "zero point off by one": _next_zero_point,
    "multiplier for divisor": _inverse_global,
    "gate's global for up": None,
}


def faults_of(case: str) -> list[str]:
    """The faults that the reader of a case can have."""
    if format_of(case).startswith("int4"):
        return ["nibble order", "zero point off by one"]
    if "NVFP4" in case or "cast" in case:
        return ["nibble order", "multiplier for divisor", "gate's global for up"]
    return []


PLANTED = [(case, fault) for case in CASES for fault in faults_of(case)]


def _with(wrapper: Callable[..., Any], stored: MatrixFormat | None) -> MatrixFormat | None:
    if stored is None:
        return None
    return replace(
        stored, decode=partial(wrapper, stored.decode), otherwise=_with(wrapper, stored.otherwise)
    )


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Layers are read with a fault inside the block."""
    wrapper, right = FAULTS[fault], StoredLayer.__init__
    share = stored_layers._share

    def wrong(self: StoredLayer, stored: MatrixFormat, *rest: str) -> None:
        assert wrapper is not None
        found = _with(wrapper, stored)
        assert found is not None
        right(self, found, *rest)

    def gates(part: Any, tensor: torch.Tensor, index: int, shares: int) -> torch.Tensor:
        return share(part, tensor, index if part.shape else 0, shares)

    with ExitStack() as stack:
        if wrapper is None:
            stack.enter_context(mock.patch.object(stored_layers, "_share", gates))
        else:
            stack.enter_context(mock.patch.object(StoredLayer, "__init__", wrong))
        yield
