"""Writes written_experts.json: what compressed-tensors makes of checkpoints that mxpert writes.

    pip install compressed-tensors==0.20.0
    PYTHONPATH=.:tests python tests/integrations/checkpoints/written_experts_fixture.py

The suite reads the file alone, so that compressed-tensors is no dependency of it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match

from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from support.written_experts import FORMATS, state_of, write_dense

EXPERT = "model.layers.0.mlp.experts.1"


def main() -> None:
    written: dict[str, object] = {"version": compressed_tensors.__version__}
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "dense", Path(folder) / "out"
            names = write_dense(source)
            quantize_checkpoint(source, out, weight_format=format)
            state = state_of(out)
            config = json.loads((out / "config.json").read_text("utf-8"))
        entry = config["quantization_config"]
        parsed = QuantizationConfig.model_validate(entry)
        (scheme,) = parsed.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(parsed.format)
        assert compressor.can_compress(torch.nn.Linear, scheme)
        expected = set(compressor.compression_param_names(scheme))
        matrices = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"{EXPERT}.{part}."
            stored = {
                name.removeprefix(prefix): tensor
                for name, tensor in state.items()
                if name.startswith(prefix)
            }
            assert set(stored) == expected, (set(stored), expected)
            weight = compressor.decompress(stored, scheme)["weight"]
            data = weight.contiguous().view(torch.uint8).flatten().tolist()
            matrices[part] = {"dtype": str(weight.dtype), "bytes": bytes(data).hex()}
        linears = [name.removesuffix(".weight") for name in names if names[name].dim() == 2]
        module = torch.nn.Linear(1, 1)
        targets, ignored = scheme.targets, parsed.ignore
        written[format] = {
            "entry": entry,
            "parsed": json.loads(parsed.model_dump_json()),
            "quantized": sorted(
                name
                for name in linears
                if is_match(name, module, targets) and not is_match(name, module, ignored)
            ),
            "decoded": matrices,
        }
    target = Path(__file__).with_name("written_experts.json")
    target.write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
