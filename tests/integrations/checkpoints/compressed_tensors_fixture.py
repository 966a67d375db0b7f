"""Writes compressed_tensors.json: matrices as compressed-tensors itself packs and decodes them.

    pip install compressed-tensors==0.20.0
    python tests/integrations/checkpoints/compressed_tensors_fixture.py

The suite reads the file alone, so that compressed-tensors is no dependency of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

ROWS, COLUMNS = 4, 96
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
GROUPS_OF_16 = FLOAT4 | {"group_size": 16, "strategy": "tensor_group"}
CASTS: dict[str, tuple[str, dict[str, Any], int, float | None]] = {
    # name: format, arguments of the weights, values a scale, weight_global_scale
    "mxfp4": ("mxfp4-pack-quantized", FLOAT4 | {"group_size": 32, "strategy": "group"}, 32, None),
    "cast": ("nvfp4-pack-quantized", GROUPS_OF_16, 16, 16.0),
    "cast by 3": ("nvfp4-pack-quantized", GROUPS_OF_16, 16, 3.0),
}
INTEGERS: dict[str, tuple[int, torch.dtype, bool]] = {
    # name: group, dtype, whether it has zero points
    "int4 g32": (32, torch.bfloat16, False),
    "int4 g64, fp16": (64, torch.float16, False),
    "int4 g128, fp32": (128, torch.float32, False),
    "int4 g32 with zero points": (32, torch.bfloat16, True),
    "int4 g128 with zero points": (128, torch.float16, True),
}


def as_json(tensor: torch.Tensor) -> dict[str, Any]:
    data = bytes(tensor.flatten().contiguous().view(torch.uint8).tolist()).hex()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "bytes": data}


def written(format: str, options: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What compressed-tensors stores of a matrix, and what it decodes that to."""
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, scheme)
    decoded = compressor.decompress(packed, scheme)["weight"]
    return {
        "format": format,
        "weights": options,
        "shape": list(state["weight"].shape),
        "tensors": {name: as_json(tensor) for name, tensor in packed.items()},
        "decoded": as_json(decoded),
    }


def casts() -> dict[str, Any]:
    codes = torch.randint(0, 16, (ROWS, COLUMNS))
    codes[:, :16] = torch.arange(16)  # every code in every row
    exponents = torch.randint(-4, 4, (ROWS, COLUMNS // 32))
    values = MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    weight = values * torch.exp2(exponents.float()).repeat_interleave(32, dim=1)
    found = {}
    for name, (format, options, group, divisor) in CASTS.items():
        scale = torch.exp2(exponents.float()).repeat_interleave(32 // group, dim=1)
        state = {"weight": weight, "weight_scale": scale}
        if divisor is not None:
            state["weight_scale"] = scale * divisor
            state["weight_global_scale"] = torch.tensor([divisor])
        found[name] = written(format, options, state)
    return found


def exact() -> dict[str, Any]:
    weight = torch.randn(16, 128)
    found = {}
    for name, divisor in (("nvfp4", 437.25), ("nvfp4 by a power of two", 512.0)):
        scale = weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * divisor
        scale = scale.to(torch.float8_e4m3fn).float()
        state = {"weight": weight, "weight_scale": scale}
        state["weight_global_scale"] = torch.tensor([divisor])
        found[name] = written("nvfp4-pack-quantized", GROUPS_OF_16, state)
    for name, (group, dtype, has_zeros) in INTEGERS.items():
        options = {"num_bits": 4, "type": "int", "symmetric": not has_zeros}
        scale = (weight.unflatten(1, (-1, group)).abs().amax(-1) / 7).to(dtype)
        state = {"weight": weight.to(dtype), "weight_scale": scale}
        if has_zeros:
            state["weight_zero_point"] = torch.randint(-8, 8, scale.shape).to(torch.int8)
        options |= {"group_size": group, "strategy": "group"}
        found[name] = written("pack-quantized", options, state)
    return found


def main() -> None:
    torch.manual_seed(0)
    content = {"version": compressed_tensors.__version__, **casts(), **exact()}
    target = Path(__file__).with_name("compressed_tensors.json")
    target.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
