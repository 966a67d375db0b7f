"""Writes converted_experts.json: what compressed-tensors makes of checkpoints that were converted.

    pip install compressed-tensors==0.20.0
    PYTHONPATH=.:tests python tests/integrations/checkpoints/converted_experts_fixture.py

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

from mxpert.integrations.checkpoints.change_container import convert_checkpoint
from support.converted_experts import MATRICES, SOURCES, write_source
from support.written_experts import state_of


def main() -> None:
    written: dict[str, object] = {"version": compressed_tensors.__version__}
    for name in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            target, _ = write_source(Path(folder) / "in", name)
            convert_checkpoint(Path(folder) / "in", Path(folder) / "out", container=target)
            state = state_of(Path(folder) / "out")
            config = json.loads((Path(folder) / "out" / "config.json").read_text("utf-8"))
        parsed = QuantizationConfig.model_validate(config["quantization_config"])
        (scheme,) = parsed.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(parsed.format)
        assert compressor.can_compress(torch.nn.Linear, scheme)
        decoded = {}
        for matrix in MATRICES:
            stored = {
                key.removeprefix(f"{matrix}."): tensor
                for key, tensor in state.items()
                if key.startswith(f"{matrix}.")
            }
            assert set(stored) == set(compressor.compression_param_names(scheme)), matrix
            weight = compressor.decompress(stored, scheme)["weight"].contiguous()
            data = bytes(weight.view(torch.uint8).flatten().tolist()).hex()
            decoded[matrix] = {"dtype": str(weight.dtype), "bytes": data}
        written[name] = {
            "entry": config["quantization_config"],
            "parsed": json.loads(parsed.model_dump_json()),
            "decoded": decoded,
        }
    target_file = Path(__file__).with_name("converted_experts.json")
    target_file.write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
