"""save_quantized: a model that was trained in MXFP8 becomes a checkpoint in MXFP4."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from mxpert.integrations.models.convert import mx_experts
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    bf16_output_tolerance,
    relative_l2,
)
from mxpert.training import MXFP8Recipe
from tests.integrations.families import build

FAMILIES = ["mixtral", "gpt_oss"]
IDS = torch.arange(12)[None] % 32


def trained(family: str) -> Any:
    """A tiny model after two steps of training in MXFP8."""
    torch.manual_seed(0)
    model = mxpert.convert(build(family).train(), recipe=MXFP8Recipe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(24).view(2, 12) % 32
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder, "test")
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_restore_and_quantize(family: str, tmp_path: Path) -> None:
    model = trained(family)
    before = copy.deepcopy(model.state_dict())
    report = mxpert.save_quantized(model, tmp_path / "deep" / "ours")
    assert report.verified
    assert report.destination == str(tmp_path / "deep" / "ours")
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["ours"]
    assert model.training
    for name, value in model.state_dict().items():
        assert_exact(value, before[name], name)

    mxpert.restore(model).save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "theirs")
    ours, theirs = stored(tmp_path / "deep" / "ours"), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert any(name.endswith("gate_up_proj_blocks") for name in ours)


@pytest.mark.parametrize("weight_format", ["mxfp8", "nvfp4", "int4_g32"])
def test_other_formats_have_the_bits_of_quantize(weight_format: Any, tmp_path: Path) -> None:
    model = trained("mixtral")
    report = mxpert.save_quantized(model, tmp_path / "ours", weight_format=weight_format)
    assert report.verified
    assert report.weight_format.startswith(weight_format)
    mxpert.restore(model).save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "theirs", weight_format=weight_format)
    ours, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    ((_, weights), *_) = mxpert.load_expert_weights(tmp_path / "ours")
    assert weights.weight_format == report.weight_format
    with pytest.raises(ValueError, match="scale_rule — need none for nvfp4, got even"):
        mxpert.save_quantized(
            trained("mixtral"), tmp_path / "no", weight_format="nvfp4", scale_rule="even"
        )
    with pytest.raises(ValueError, match=r"^save_quantized: weight_format — need one of"):
        mxpert.save_quantized(model, tmp_path / "no", weight_format="fp8")  # type: ignore[arg-type]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_experts_that_convert_makes(family: str, tmp_path: Path) -> None:
    model = trained(family)
    mxpert.save_quantized(model, tmp_path / "saved", scale_rule="even")
    loaded = type(model).from_pretrained(tmp_path / "saved", experts_implementation="mxpert").eval()
    with torch.no_grad():
        dense = model.eval()(IDS).logits
    reference = mxpert.convert(model, scale_rule="even", progress=False)
    pairs = list(zip(mx_experts(loaded), mx_experts(reference), strict=True))
    assert pairs
    for one, other in pairs:
        other_state = other.state_dict()
        for name, value in one.state_dict().items():
            assert_exact(value, other_state[name].to(value.dtype), name)
    with torch.no_grad():
        found, expected = (each(IDS).logits for each in (loaded, reference))
    # Sums in float32 may differ in order. At worst that turns every rounding to bfloat16 of a layer
    # the other way: of its input, its activation and its result.
    bound = 3 * model.config.num_hidden_layers * bf16_output_tolerance(expected.numel())
    assert_close_relative(found, expected, bound, "logits")
    assert relative_l2(dense, expected) > bound  # so that the bound tells MXFP4 from dense experts


def test_bad_input_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = trained("mixtral")
    (tmp_path / "there").mkdir()
    served = mxpert.convert(build("mixtral"), progress=False)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(each for name, each in broken.named_parameters() if "down_proj" in name)[0] = torch.nan
    cases: list[tuple[Any, str, type[Exception], str]] = [
        (build("mixtral"), "new", ValueError, "need experts that train in MXFP8, got none; call"),
        (served, "new", ValueError, "got experts in MXFP4; model.save_pretrained"),
        (model, "there", ValueError, "there — need a folder that does not exist"),
        (broken, "new", ValueError, "finite"),
        ("model", "new", TypeError, "model — need a Module"),
    ]
    for given, name, error, words in cases:
        with pytest.raises(error, match=words) as raised:
            mxpert.save_quantized(given, tmp_path / name)
        assert "\n" not in str(raised.value)
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
