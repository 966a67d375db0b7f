"""Statistics of MXFP4 checkpoints against counts that are known beforehand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxpert.formats import dequantize_blocks
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint

NAME = "model.layers.4.mlp.experts.down_proj"


def write(path: Path, scale_bytes: list[list[list[int]]], zero: tuple[int, ...] = ()) -> Path:
    """One tensor [E, N, K]; codes are 1.0, except in the flat block indices `zero`."""
    scales = torch.tensor(scale_bytes, dtype=torch.uint8)
    blocks = torch.full((*scales.shape, 16), 0x22, dtype=torch.uint8)
    for block in zero:
        blocks.view(-1, 16)[block] = 0x80  # zeros of both signs
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, path)
    return path


def test_counts_are_exact(tmp_path: Path) -> None:
    file = write(
        tmp_path / "one.safetensors",
        [[[127, 127, 127, 113]], [[130, 115, 130, 0]], [[255, 127, 125, 125]]],
        zero=(7,),
    )
    (entry,) = inspect_checkpoint(file)
    assert (entry.layer, entry.projection, entry.shape) == (4, "down_proj", (3, 1, 128))
    assert entry.blocks == 12
    assert entry.bytes == 12 * 17
    assert entry.zero_blocks == 1
    assert entry.nan_scales == 1
    assert entry.scale_histogram == {-14: 1, -12: 1, -2: 2, 0: 4, 3: 2}
    # Ten blocks in order: -14 -12 -2 -2 0 | 0 0 0 3 3; the lower median is the fifth.
    assert (entry.min_exponent, entry.median_exponent, entry.max_exponent) == (-14, 0, 3)
    assert entry.widest_span == 15  # the second row: 130 - 115; the first has 14 and folds
    assert (entry.blocks_outside, entry.rows_outside) == (2, 2)  # 115, and the NaN
    assert not entry.exact_fold
    assert (entry.sqnr_db, entry.relative_l2) == (None, None)


def test_all_zero_tensors_have_no_scales(tmp_path: Path) -> None:
    (entry,) = inspect_checkpoint(write(tmp_path / "z.safetensors", [[[127, 127]]], zero=(0, 1)))
    assert entry.zero_blocks == 2
    assert entry.scale_histogram == {}
    assert (entry.min_exponent, entry.median_exponent, entry.max_exponent) == (None, None, None)
    assert entry.exact_fold


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_sqnr_to_the_source_is_the_quantisers(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    report = quantize_checkpoint(sources[family], tmp_path / "out")
    entries = inspect_checkpoint(tmp_path / "out", source=sources[family])
    assert len(entries) == len(report.projections) == 4
    for entry, written in zip(entries, report.projections, strict=True):
        assert (entry.module, entry.projection) == (written.module, written.projection)
        assert entry.sqnr_db == pytest.approx(written.sqnr_db, abs=1e-9)
        assert entry.relative_l2 == pytest.approx(10 ** (-written.sqnr_db / 20), rel=1e-9)
    stacked = inspect_checkpoint(tmp_path / "out", source=sources[f"{family}_stacked"])
    assert [e.sqnr_db for e in stacked] == [e.sqnr_db for e in entries]


def test_a_stated_order_is_used(sources: dict[str, Path], tmp_path: Path) -> None:
    """The same codes with gate and up concatenated on disk and in the config: the same SQNR."""
    out = tmp_path / "out"
    quantize_checkpoint(sources["mixtral"], out)
    wanted = inspect_checkpoint(out, source=sources["mixtral"], layer=1)[0].sqnr_db
    (pair,) = load_expert_weights(out, layers=[1])
    projection, prefix = pair[1].gate_up_proj, "model.layers.1.block_sparse_moe.experts"
    rows = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    save_file(
        {
            f"{prefix}.gate_up_proj_blocks": projection.qdata[:, rows].unflatten(-1, (2, 16)),
            f"{prefix}.gate_up_proj_scales": projection.scale[:, rows].contiguous(),
        },
        out / "alone.safetensors",
    )
    wrong = inspect_checkpoint(out / "alone.safetensors", source=sources["mixtral"])[0].sqnr_db
    config = json.loads((out / "config.json").read_text("utf-8"))
    config["quantization_config"]["mxpert"]["gate_up_order"] = "concatenated"
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    right = inspect_checkpoint(out / "alone.safetensors", source=sources["mixtral"])[0].sqnr_db
    assert right == pytest.approx(wanted, abs=1e-9)
    assert wrong < 3  # unrelated rows


def test_a_representable_source_has_no_error(
    sources: dict[str, Path], copy_of: Any, rewrite: Any, tmp_path: Path
) -> None:
    quantize_checkpoint(sources["mixtral_stacked"], tmp_path / "out")
    source = copy_of(sources["mixtral_stacked"])
    for path, weights in load_expert_weights(tmp_path / "out"):
        down = dequantize_blocks(weights.down_proj, torch.bfloat16)
        rewrite(source, f"{path}.down_proj", lambda _, d=down: d)
    entries = inspect_checkpoint(tmp_path / "out", source=source)
    exact = [entry for entry in entries if entry.projection == "down_proj"]
    assert [(entry.sqnr_db, entry.relative_l2) for entry in exact] == [(None, 0.0)] * 2


def test_one_layer_can_be_chosen(demo: Path) -> None:
    assert {entry.layer for entry in inspect_checkpoint(demo)} == {0, 1}
    assert {entry.layer for entry in inspect_checkpoint(demo, layer=1)} == {1}
    with pytest.raises(ValueError, match=r"layer — need one of \[0, 1\], got 5"):
        inspect_checkpoint(demo, layer=5)


def test_bad_input_is_named(
    demo: Path, sources: dict[str, Path], copy_of: Any, rewrite: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"need tensors named \*_blocks with \*_scales, got none"):
        inspect_checkpoint(sources["mixtral"])
    with pytest.raises(ValueError, match="need the source's"):
        inspect_checkpoint(demo, source=sources["gpt_oss"])
    with pytest.raises(ValueError, match="need an existing checkpoint"):
        inspect_checkpoint(demo, source=tmp_path / "nowhere")
    directory = copy_of(demo)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(directory, f"{name}_scales", lambda tensor: tensor[:, :, :1].contiguous())
    with pytest.raises(ValueError, match=r"down_proj_scales.shape — need \[4, 64, 3\]"):
        inspect_checkpoint(directory)
    rewrite(directory, f"{name}_blocks", lambda tensor: tensor.flatten(-2))
    with pytest.raises(ValueError, match=r"down_proj_blocks.shape — need \[E, N, K/32, 16\]"):
        inspect_checkpoint(directory)
    file = tmp_path / "text.safetensors"
    file.write_text("no tensors")
    with pytest.raises(ValueError, match="need a complete safetensors file"):
        inspect_checkpoint(file)


def test_statistics_are_json(demo: Path) -> None:
    for entry in inspect_checkpoint(demo):
        parsed = json.loads(json.dumps(entry.as_json(), allow_nan=False))
        assert parsed["exact_fold"] is entry.exact_fold
        assert sum(parsed["scale_histogram"].values()) == (
            entry.blocks - entry.zero_blocks - entry.nan_scales
        )
        assert entry.blocks == math.prod(entry.shape) // 32
