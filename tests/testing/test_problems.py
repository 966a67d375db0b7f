"""Problems are reproducible and as documented, poison is in place, validation names errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

import mxpert
from mxpert.formats import dequantize_blocks
from mxpert.testing.problems import (
    MODEL_SHAPES,
    MoEShape,
    Routing,
    model_shape,
    random_moe_problem,
    random_mxfp4,
    random_routing,
    random_weight,
    scaled_shape,
)
from mxpert.testing.validate import validate_plan, validate_routing, validate_weights
from support.exact import exact_activation, exact_moe_problem
from support.poison import (
    PLANTED_ERRORS,
    nan_filled_scratch,
    poison_like,
    poison_tensor,
    swap_nibbles,
)

SMALL = MoEShape(64, 96, 6, 3, has_bias=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_reference_shapes() -> None:
    dimensions = {
        name: (s.hidden_size, s.intermediate_size, s.num_experts, s.top_k)
        for name, s in MODEL_SHAPES.items()
    }
    assert dimensions["gpt-oss-120b"] == (2880, 2880, 128, 4)
    assert dimensions["kimi-k2-tp4"] == (7168, 512, 384, 8)
    assert dimensions["kimi-k2-tp4-shared"] == (7168, 512, 385, 9)
    assert all(shape.about for shape in MODEL_SHAPES.values())
    assert (
        scaled_shape("gpt-oss-20b", hidden_size=64, intermediate_size=32, num_experts=3).activation
        == mxpert.SwiGLU()
    )
    with pytest.raises(ValueError, match="model_shape: shape — need one of"):
        model_shape("gpt-5")


ROOT = Path(__file__).parents[2]


def test_every_table_names_a_model_that_can_be_run() -> None:
    """Rows of the performance page and of the measured layers: one list, one shape a name."""
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!mxpert)([a-z0-9.-]+) a\d+w4 \|", page, re.MULTILINE)
    assert rows
    assert set(rows) <= set(MODEL_SHAPES)
    table = resources.files("mxpert.distributed.planner") / "measured_layers.json"
    measured = json.loads(table.read_text(encoding="utf-8"))
    columns = [measured["columns"].index(name) for name in ("model", "E", "k", "H", "F")]
    sizes = {tuple(row[column] for column in columns) for row in measured["layers"]}
    for name, *given in sizes:
        shape = MODEL_SHAPES[name]
        assert given == [
            shape.num_experts,
            shape.top_k,
            shape.hidden_size,
            shape.intermediate_size,
        ], name


@pytest.mark.parametrize("make", [random_moe_problem, exact_moe_problem])
def test_problems_are_reproducible(make) -> None:
    first, same, other = (make(SMALL, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, same.x)
    assert torch.equal(first.weights.down_proj.qdata, same.weights.down_proj.qdata)
    assert not torch.equal(first.weights.down_proj.qdata, other.weights.down_proj.qdata)
    validate_weights(first.weights)
    validate_routing(first.topk_weights, first.topk_ids, num_experts=6)


def test_random_weights_have_the_asked_size_and_spread() -> None:
    narrow, wide = (
        random_mxfp4((64, 4096), rms=0.02, scale_spread=spread, generator=generator())
        for spread in (0.0, 1.5)
    )
    assert narrow.scale.unique().numel() == 1
    assert wide.scale.float().std() == pytest.approx(1.5, rel=0.1)
    for tensor in (narrow, wide):
        assert 0.5 < dequantize_blocks(tensor).square().mean().sqrt() / 0.02 < 2


@pytest.mark.parametrize("routing", Routing, ids=lambda routing: routing.value)
def test_routing_kinds(routing) -> None:
    weights, ids = random_routing(400, 16, 3, generator=generator(), routing=routing)
    validate_routing(weights, ids, num_experts=16)
    assert torch.allclose(weights.sum(1), torch.ones(400))
    counts = torch.bincount(ids.flatten(), minlength=16)
    expected = {Routing.UNIFORM: 16, Routing.ZIPF: 16, Routing.HALF: 8, Routing.ONE_EXPERT: 3}
    assert int((counts > 0).sum()) == expected[routing]
    if routing is Routing.ZIPF:
        assert counts[0] > 3 * counts[12]


@pytest.mark.parametrize(
    "activation",
    [mxpert.SiLU(), mxpert.SwiGLU(), mxpert.ClampedSiLU(), mxpert.SiTUv2()],
    ids=lambda a: a.name,
)
def test_exact_x_survives_every_format_and_rule(activation) -> None:
    inputs = exact_moe_problem(replace(SMALL, activation=activation), 9)
    assert type(inputs.activation) is type(activation)
    assert inputs.activation == exact_activation(activation)
    for fmt in ("mxfp4", "mxfp8"):
        for rule in mxpert.ScaleRule:
            q = mxpert.quantize(inputs.x, fmt, scale_rule=rule)
            assert torch.equal(mxpert.dequantize(q, dtype=torch.bfloat16), inputs.x)
    assert inputs.weights.gate_up_proj.scale.unique().numel() >= 4
    assert dequantize_blocks(inputs.weights.gate_up_proj).count_nonzero() > 6 * 192 * 64 / 3


@pytest.mark.parametrize("scale", [254, 255])
def test_poisoned_storage_holds_the_values_and_poison_around_them(scale) -> None:
    tensor = random_moe_problem(SMALL, 1).weights.down_proj
    poisoned = poison_tensor(tensor, scale=scale)
    assert torch.equal(dequantize_blocks(poisoned), dequantize_blocks(tensor))
    wider = replace(
        poisoned,
        qdata=poisoned.qdata.as_strided((6, 65, 64), poisoned.qdata.stride()),
        scale=poisoned.scale.as_strided((6, 65, 4), poisoned.scale.stride()),
    )
    around = dequantize_blocks(wider)
    assert not around[:, 64].isfinite().any()
    assert not around[:, :, 96:].isfinite().any()


def test_scratch_and_copies_are_poisoned() -> None:
    with nan_filled_scratch():
        assert torch.empty(9).isnan().all()
        assert (torch.empty(9, dtype=torch.uint8) == 255).all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert poison_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    assert poison_like(torch.zeros(3, dtype=torch.int32)).tolist() == [2**31 - 1] * 3


@pytest.mark.parametrize("name", sorted(PLANTED_ERRORS))
def test_planted_errors_leave_the_sound_problem_alone(name) -> None:
    inputs, same = (random_moe_problem(SMALL, 5) for _ in range(2))
    wrong = PLANTED_ERRORS[name](inputs)
    for field in ("x", "topk_ids", "topk_weights"):
        assert torch.equal(getattr(inputs, field), getattr(same, field))
    assert torch.equal(inputs.weights.gate_up_proj.qdata, same.weights.gate_up_proj.qdata)
    assert torch.equal(inputs.weights.gate_up_proj.scale, same.weights.gate_up_proj.scale)
    assert wrong is not inputs


def test_swapping_nibbles_twice_is_the_identity() -> None:
    tensor = random_moe_problem(SMALL, 1).weights.down_proj
    assert torch.equal(swap_nibbles(swap_nibbles(tensor)).qdata, tensor.qdata)


@pytest.mark.parametrize(
    "ids, weights, match",
    [
        ([[0, 6]], None, r"topk_ids\[0, 1\] — need ids from 0 to 5, got 6"),
        ([[0, 1], [-1, 2]], None, r"topk_ids\[1, 0\] — need ids from 0 to 5, got -1"),
        ([[0, 1], [4, 4]], None, r"topk_ids\[1, 1\] — need distinct experts per token, got 4"),
        ([[0, 1]], [[0.5, float("nan")]], r"topk_weights\[0, 1\] — need finite weights, got nan"),
    ],
    ids=["too_large", "negative", "duplicate", "nan_weight"],
)
def test_bad_routing_is_named(ids, weights, match) -> None:
    ids = torch.tensor(ids, dtype=torch.int32)
    weights = None if weights is None else torch.tensor(weights)
    with pytest.raises(ValueError, match=match):
        validate_routing(weights, ids, num_experts=6)


def test_skipped_ids_may_be_allowed() -> None:
    ids = torch.tensor([[-1, 2, -1]], dtype=torch.int32)
    validate_routing(None, ids, num_experts=6, allow_skipped=True)


def plan(tokens: int = 9, **options) -> mxpert.RoutingPlan:
    weights, ids = random_routing(tokens, 6, 3, generator=generator())
    return mxpert.make_routing_plan(weights, ids, num_experts=6, routing_block_m=4, **options)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_sound_plans_pass(tokens) -> None:
    validate_plan(plan(tokens))
    validate_plan(plan(tokens, num_local_tokens=torch.tensor([tokens // 2], dtype=torch.int32)))


@pytest.mark.parametrize(
    "field, index, value, match",
    [
        ("num_valid", 0, 3, r"num_valid\[0\] — need a multiple of 4"),
        ("num_valid", 1, 99, r"num_valid\[1\] — need 0 to 9 tokens, got 99"),
        ("block_expert_ids", 0, 5, r"block_expert_ids\[1\] — need ascending experts"),
        ("block_expert_ids", -1, 2, r"need ascending experts in \d+ blocks, then -1, got 2"),
        ("sorted_token_ids", 0, 3 << 24 | 8, r"need slot << 24"),
        ("sorted_token_ids", 0, 3 << 24 | 9, r"sorted_weights\[0\] — need 0 in padding rows"),
        ("sorted_token_ids", 0, 8, r"need tokens ascending within an expert"),
        ("slot_rows", (0, 0), -1, r"slot_rows\[0, 0\] — need the row of each"),
    ],
)
def test_broken_plans_are_named(field, index, value, match) -> None:
    broken = plan()
    getattr(broken, field)[index] = value
    with pytest.raises(ValueError, match=match):
        validate_plan(broken)


def test_padding_before_a_token_is_named() -> None:
    broken = plan()
    broken.sorted_token_ids[0], broken.sorted_weights[0] = 3 << 24 | 9, 0
    with pytest.raises(ValueError, match="its padding last"):
        validate_plan(broken)


@pytest.mark.parametrize("scale, match", [(255, "no NaN scale"), (253, "bytes up to 252")])
def test_bad_scales_are_named(scale, match) -> None:
    weights = random_moe_problem(SMALL, 1).weights
    weights.down_proj.scale[2, 3, 1] = scale
    with pytest.raises(ValueError, match=rf"weights.down_proj.scale\[2, 3, 1\] — need {match}"):
        validate_weights(weights)


def test_bad_bias_is_named() -> None:
    weights = random_moe_problem(SMALL, 1).weights
    weights.gate_up_bias[1, 2] = float("inf")
    with pytest.raises(ValueError, match=r"weights.gate_up_bias\[1, 2\] — need finite values"):
        validate_weights(weights)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128"])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_weights_of_any_format_have_the_size_that_was_asked_for(format: str, spread: float) -> None:
    weight = random_weight((64, 4096), format, rms=0.02, scale_spread=spread, generator=generator())
    values = weight.dequantize(torch.float64)
    assert values.isfinite().all()
    assert 0.02 / 1.6 < values.square().mean().sqrt() < 0.02 * 1.6
