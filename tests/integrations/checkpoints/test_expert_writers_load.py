"""Experts that `mxpert quantize` writes load again with the bits of `quantize_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert import GateUpOrder, quantize_weights
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from support.written_experts import FORMATS

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("naming", ["", "_stacked"], ids=["published", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_with_the_same_bits(
    family: str,
    naming: str,
    format: Any,
    sources: dict[str, Path],
    expert_truth: Any,
    tmp_path: Path,
) -> None:
    quantize_checkpoint(sources[family + naming], tmp_path / "out", weight_format=format)
    *_, (_, loaded) = load_expert_weights(tmp_path / "out")
    truth = expert_truth(family)
    wanted = quantize_weights(
        torch.cat((truth["gate"], truth["up"]), dim=1).to(torch.bfloat16),
        truth["down"].to(torch.bfloat16),
        gate_up_order="concatenated",
        weight_format=format,
    )
    assert loaded.gate_up_order is GateUpOrder.CONCATENATED
    for projection in ("gate_up_proj", "down_proj"):
        found, made = getattr(loaded, projection), getattr(wanted, projection)
        assert found.format == made.format
        assert torch.equal(found.qdata, made.qdata)
        assert torch.equal(found.scale, made.scale)
        if format == "nvfp4":  # 1 / (1 / g): two roundings to float32
            error = (found.row_scale.double() / made.row_scale.double() - 1).abs()
            assert float(error.max()) <= 2.0**-23 * (1 + 2.0**-24)
    biased = family == "gpt_oss"
    assert (loaded.gate_up_bias is not None, loaded.down_bias is not None) == (biased, biased)
