"""What users find at the top level, in the types and in the errors of natural mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import configs
from mxpert.testing.problems import MoEShape, random_moe_problem

LAYER = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
ROUTED = (LAYER.topk_weights, LAYER.topk_ids)
GATE_UP, DOWN = torch.randn(4, 64, 64), torch.randn(4, 64, 32)
HEAVY = ("rich", "transformers", "triton", "mxpert.integrations.models.convert", "mxpert.training")
"""What a layer does not need, and `import mxpert` does not import."""


def test_top_level_names() -> None:
    names = {"quantize_weights", "restore", "load_expert_weights", "evaluate", "ExpertParallel"}
    assert names <= set(mxpert.__all__)
    assert not set(configs.__all__) & set(mxpert.__all__)
    from mxpert.integrations.checkpoints.load import load_expert_weights
    from mxpert.integrations.models import convert, evaluation

    assert mxpert.restore is convert.restore
    assert mxpert.convert is convert.convert
    assert mxpert.evaluate is evaluation.evaluate
    assert mxpert.load_expert_weights is load_expert_weights
    assert mxpert.ExpertParallel is mxpert.distributed.ExpertParallel


def test_the_import_is_light_and_the_names_are_there() -> None:
    code = f"""
import sys, mxpert
print([name for name in {HEAVY} if name in sys.modules])
assert mxpert.training.MXMoE and mxpert.integrations and mxpert.restore and mxpert.evaluate
from mxpert import convert, load_expert_weights
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("name", configs.__all__)
def test_configs_have_moved(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"mxpert\.{name} is now mxpert\.configs\.{name}"):
        assert getattr(mxpert, name) is getattr(configs, name)
    assert name not in dir(mxpert)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mxpert' has no attribute 'fused_mlp'"):
        mxpert.fused_mlp  # noqa: B018


USER = """
import torch, mxpert
from mxpert.distributed import ExpertParallel
from mxpert.training import MXFP8Recipe
w = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32), gate_up_order="{order}")
x = torch.ones(2, 32, dtype=torch.bfloat16)
y = mxpert.fused_moe(
    x, w, *mxpert.route_topk(torch.ones(2, 4), 2, scoring="{scoring}"), activation="{activation}",
    activation_format="{format}", combine="{combine}", scale_rule="{rule}")
q = mxpert.quantize(x, "{mx}", scale_rule="{rule}")
recipe = MXFP8Recipe(forward_format="mxfp8", scale_span="{span}")
ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=8, transport="{transport}")
weights = mxpert.MoEWeights(q, q, gate_up_order="{order}")
options = mxpert.TopKOptions("{scoring}")
reveal_type(mxpert.convert(torch.nn.Linear(1, 1)))
reveal_type(mxpert.MoE(w, x, top_k=2, activation="{activation}")(x))
reveal_type(q.clone())
reveal_type(mxpert.evaluate)
"""
RIGHT = dict(
    order="concatenated",
    scoring="sigmoid",
    activation="silu",
    format="a8w4-token",
    combine="atomic",
    rule="floor",
    mx="mxfp8",
    span="auto",
    transport="gather",
)
WRONG = {name: f"{value}9" for name, value in RIGHT.items()}


def test_a_type_checker_catches_a_wrong_name(tmp_path: Path) -> None:
    files = {tmp_path / "right.py": RIGHT, tmp_path / "wrong.py": WRONG}
    for path, names in files.items():
        path.write_text(USER.format(**names), encoding="utf-8")
    # The options and the cache of `make lint`, which has read torch.
    command = [sys.executable, "-m", "mypy", *map(str, files)]
    root = Path(mxpert.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    right = "".join(line for line in done.stdout.splitlines(True) if "right.py" in line)
    wrong = "".join(line for line in done.stdout.splitlines(True) if "wrong.py" in line)
    assert "error" not in right, right
    evaluate = "def (model: torch.nn.modules.module.Module, token_ids: "
    for revealed in ("linear.Linear", "Tensor", "MXTensor", evaluate):
        assert re.search(f'Revealed type is "[^"]*{re.escape(revealed)}', right), right
    for value in WRONG.values():
        assert f"Literal['{value}']" in wrong or f'"{value}"' in wrong, (value, wrong)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "vllm": (
        lambda: mxpert.fused_moe(LAYER.x, GATE_UP, DOWN, *ROUTED),
        TypeError,
        r"need fused_moe\(x, weights, topk_weights, topk_ids, activation=.*quantize_weights",
    ),
    "vllm, by name": (
        lambda: mxpert.fused_moe(LAYER.x, GATE_UP, DOWN, *ROUTED, activation="silu"),
        TypeError,
        r"got 5 by position, as vLLM's fused_experts\(x, w1, w2",
    ),
    "vllm, all by position": (
        lambda: mxpert.fused_moe(LAYER.x, GATE_UP, DOWN, *ROUTED, False, "silu"),  # type: ignore[arg-type]
        TypeError,
        "got 7 by position",
    ),
    "dense weights": (
        lambda: mxpert.fused_moe(LAYER.x, GATE_UP, *ROUTED, activation="silu"),  # type: ignore[arg-type]
        TypeError,
        r"weights — need MoEWeights, got Tensor; mxpert\.quantize_weights",
    ),
    "no activation": (
        lambda: mxpert.fused_moe(LAYER.x, LAYER.weights, *ROUTED),
        TypeError,
        "activation — need an activation object: .*'silu'.*, got None",
    ),
    "raw blocks": (
        lambda: mxpert.MoEWeights(
            torch.zeros(4, 64, 32, dtype=torch.uint8),  # type: ignore[arg-type]
            LAYER.weights.down_proj,
            gate_up_order="interleaved",
        ),
        TypeError,
        r"MXTensor\(qdata, scale, 'mxfp4'\).*mxpert\.load_expert_weights reads a checkpoint",
    ),
    "dense in weights": (
        lambda: mxpert.MoEWeights(GATE_UP, DOWN, gate_up_order="interleaved"),  # type: ignore[arg-type]
        TypeError,
        r"got a float32 Tensor \[4, 64, 64\]; mxpert\.quantize_weights takes both",
    ),
    "a result explained": (
        lambda: mxpert.explain(torch.zeros(999)),
        ValueError,
        r"^.{0,300}got a Tensor, which may be an op's result; pass the op .{0,90}$",
    ),
    "a name converted": (
        lambda: mxpert.convert("mixtral"),  # type: ignore[type-var]
        TypeError,
        r"need a Module.*got 'mixtral'; load it first: AutoModelForCausalLM\.from_pretrained",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_natural_mistake_is_told_the_remedy(case: str) -> None:
    call, error, text = MISTAKES[case]
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["x", "topk_weights"])
def test_a_backward_pass_says_that_the_layer_is_for_inference(source: str) -> None:
    inputs = {"x": LAYER.x, "topk_weights": LAYER.topk_weights}
    inputs[source] = inputs[source].clone().requires_grad_()
    y = mxpert.fused_moe(
        inputs["x"], LAYER.weights, inputs["topk_weights"], LAYER.topk_ids, activation="silu"
    )
    with pytest.raises(
        mxpert.UnsupportedError, match=r"fused_moe: backward — .* train with mxpert\.training"
    ):
        (y + 1).sum().backward()


def test_the_stages_refuse_a_backward_pass() -> None:
    plan = mxpert.make_routing_plan(*ROUTED, num_experts=4, routing_block_m=16)
    x = LAYER.x.clone().requires_grad_()
    h: Any = mxpert.moe_gate_up(x, LAYER.weights, plan, activation="silu")
    with pytest.raises(mxpert.UnsupportedError, match="moe_gate_up: backward"):
        h.sum().backward()
    y = mxpert.moe_down(h.detach().requires_grad_(), LAYER.weights, plan)
    with pytest.raises(mxpert.UnsupportedError, match="moe_down: backward"):
        y.sum().backward()


def test_without_gradients_nothing_is_added() -> None:
    y = mxpert.fused_moe(LAYER.x, LAYER.weights, *ROUTED, activation="silu")
    assert y.grad_fn is None
    x, out = LAYER.x.clone().requires_grad_(), torch.empty_like(LAYER.x)
    with torch.no_grad():
        assert not mxpert.fused_moe(x, LAYER.weights, *ROUTED, activation="silu").requires_grad
    assert mxpert.fused_moe(x, LAYER.weights, *ROUTED, activation="silu", out=out) is out
