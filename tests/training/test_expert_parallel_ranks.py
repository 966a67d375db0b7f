"""MXMoE over several ranks against one rank with all experts: results, gradients, weights, DDP.

What the ranks do is in training_scenarios.py and example_scenarios.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mxpert.testing.numerics import is_exact
from mxpert.training import MXFP8Recipe, MXGroupedLinear
from support.ranks import run_once, scenario_tests
from support.scripts import load_script
from tests.distributed.example_scenarios import ROOT, TEXT
from tests.distributed.training_scenarios import MANY, build, own_step, parallel, tokens_of

MODULE = "tests.distributed.training_scenarios"
EXAMPLE = "tests.distributed.example_scenarios"
TWO = (
    "gather_equals_one_rank_in_float64",
    "all_to_all_equals_one_rank_in_float64",
    "one_rank_gets_every_token",
    "unused_slots_are_not_read",
    "float32_keeps_the_contract",
    "bf16_and_mxfp8_keep_their_floors",
    "mxfp8_wire_gives_the_same_results",
    "the_comparison_sees_planted_errors",
    "first_weights_are_a_slice",
    "state_dicts_load_whole_or_local",
    "repeats_checkpoints_and_main_grad_give_the_same_bits",
    "what_does_not_fit_is_refused",
    f"{EXAMPLE}.the_example_learns_as_one_process",
)
LAST = "a_rank_dies_before_backward"
FOUR = (
    "any_placement_gives_the_same",
    "ddp_averages_each_gradient_over_its_ranks",
    "ddp_alone_would_mix_experts",
    "fsdp2_averages_each_gradient_over_its_ranks",
    f"{EXAMPLE}.the_guide_runs",
    f"{EXAMPLE}.the_example_learns_as_one_process",
)


test_two_ranks = scenario_tests(MODULE, TWO, 2, then=(LAST,))
test_four_ranks = scenario_tests(MODULE, FOUR, 4)


def test_a_dead_rank_ends_training_with_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_once(tmp_path_factory, MODULE, (*TWO, LAST), 2).check(LAST, [0])


@pytest.mark.parametrize(
    "recipe", [MXFP8Recipe(), MXFP8Recipe(enabled=False)], ids=["mxfp8", "bf16"]
)
def test_one_rank_is_the_block_without_exchange(recipe: MXFP8Recipe) -> None:
    x, grad = tokens_of(0, torch.bfloat16, MANY)
    alone, plain = (own_step(build(ep, recipe=recipe), x, grad) for ep in (parallel(), None))
    for name, value in plain.items():
        assert is_exact(alone[name], value), name


def test_torch_compile_leaves_the_exchange_alone() -> None:
    x, grad = tokens_of(0, torch.bfloat16, MANY)
    plain, compiled = (build(parallel(), recipe=MXFP8Recipe()) for _ in range(2))
    compiled.compile(backend="aot_eager")
    wanted = own_step(plain, x, grad)
    for name, value in own_step(compiled, x, grad).items():
        assert is_exact(value, wanted[name]), name


@pytest.mark.parametrize(
    "group_ids, error",
    [
        pytest.param([1, 0], ValueError, id="descending"),
        pytest.param([0, 0], ValueError, id="twice"),
        pytest.param([], ValueError, id="none"),
        pytest.param([0, 4], ValueError, id="too-large"),
        pytest.param([-1, 0], ValueError, id="negative"),
        pytest.param(1, TypeError, id="an-int"),
        pytest.param([0.0], TypeError, id="floats"),
        pytest.param([True], TypeError, id="bools"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group_ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="MXGroupedLinear: group_ids — need"):
        MXGroupedLinear(4, 32, 32, group_ids=group_ids)


def test_every_group_in_its_order_is_the_whole_layer() -> None:
    torch.manual_seed(0)
    whole = MXGroupedLinear(4, 32, 32, bias=True)
    torch.manual_seed(0)
    same = MXGroupedLinear(4, 32, 32, bias=True, group_ids=range(4))
    for name, value in whole.state_dict().items():
        assert is_exact(same.state_dict()[name], value)
    assert "group_ids=[0, 1, 2, 3]" in repr(same)


FORMATS_CONTRACT = 0.02
"""What the example itself allows between two formats."""


@pytest.mark.timeout(200)
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    """Losses of both formats beside those of one process, and a checkpoint with all experts."""
    options = ["--size=tiny", "--device=cpu", f"--text={TEXT}", "--steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(ROOT / "examples/train_moe_lm.py"), "--expert-parallel=2", *options]
        + [f"--output={tmp_path}", f"--save={tmp_path / 'ranks'}"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("mxfp8: final loss") == 1, "one rank prints"
    found = json.loads((tmp_path / "loss.json").read_text())
    lm = load_script("examples/train_moe_lm.py")
    size = lm.SIZES["tiny"]
    data = lm.split(TEXT.read_bytes(), size.length)
    for name in ("bf16", "mxfp8"):
        model, wanted = lm.train(lm.RECIPES[name], data, size, 3, 0, micro_batches=2)
        losses = found["runs"][name]["losses"]
        assert losses == pytest.approx(wanted["losses"], rel=FORMATS_CONTRACT)
    assert found["meta"]["parameters"] == sum(value.numel() for value in model.parameters())
    lm.save_mixtral(model, tmp_path / "one")
    ranks, one = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "one"))
    assert {name: value.shape for name, value in ranks.items()} == {
        name: value.shape for name, value in one.items()
    }
    experts = [value for name, value in ranks.items() if ".experts." in name]
    assert len({value.double().sum().item() for value in experts}) == len(experts)


def test_the_example_says_how_to_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        load_script("examples/train_moe_lm.py").main(
            ["--expert-parallel=2", "--device=cpu", f"--text={TEXT}"]
        )
