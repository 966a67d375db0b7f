"""Writes compressed_tensors.json: matrices as compressed-tensors itself packs and decodes them.

    pip install compressed-tensors==0.20.0
    python tests/integrations/checkpoints/compressed_tensors_fixture.py

The suite reads the file alone, so that compressed-tensors is no dependency of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

ROWS, COLUMNS = 4, 96
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CASES: dict[str, tuple[str, dict[str, object], int, float | None]] = {
    # name: format, arguments of the weights, values a scale, weight_global_scale
    "mxfp4": ("mxfp4-pack-quantized", {"group_size": 32, "strategy": "group"}, 32, None),
    "cast": ("nvfp4-pack-quantized", {"group_size": 16, "strategy": "tensor_group"}, 16, 16.0),
    "cast by 3": ("nvfp4-pack-quantized", {"group_size": 16, "strategy": "tensor_group"}, 16, 3.0),
}


def hexadecimal(tensor: torch.Tensor) -> str:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()).hex()


def main() -> None:
    torch.manual_seed(0)
    written: dict[str, object] = {"version": compressed_tensors.__version__}
    codes = torch.randint(0, 16, (ROWS, COLUMNS))
    codes[:, :16] = torch.arange(16)  # every code in every row
    exponents = torch.randint(-4, 4, (ROWS, COLUMNS // 32))
    values = MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    weight = values * torch.exp2(exponents.float()).repeat_interleave(32, dim=1)
    for name, (format, options, group, divisor) in CASES.items():
        args = QuantizationArgs(num_bits=4, type="float", symmetric=True, **options)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        scale = torch.exp2(exponents.float()).repeat_interleave(32 // group, dim=1)
        state = {"weight": weight, "weight_scale": scale}
        if divisor is not None:
            state["weight_scale"] = scale * divisor
            state["weight_global_scale"] = torch.tensor([divisor])
        compressor = BaseCompressor.get_value_from_registry(format)
        packed = compressor.compress(state, scheme)
        decoded = compressor.decompress(packed, scheme)["weight"]
        written[name] = {
            "shape": [ROWS, COLUMNS],
            "weight_packed": hexadecimal(packed["weight_packed"]),
            "weight_scale": hexadecimal(packed["weight_scale"]),
            "weight_global_scale": divisor,
            "dtypes": {key: str(value.dtype) for key, value in packed.items()},
            "decoded": decoded.double().tolist(),
        }
    target = Path(__file__).with_name("compressed_tensors.json")
    target.write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
