"""What ranks do with the example and the guide; see training_scenarios.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mxpert.training import full_state_dict
from support.scripts import load_script
from tests.distributed.training_scenarios import PLAIN, worst

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests/training/text.txt"
AFTER_STEPS = 1e-9
"""Adam divides gradients by their size: it enlarges the rounding of those that nearly cancel."""


def the_example_learns_as_one_process() -> None:
    """The same losses in float64, whichever way the ranks share experts and batches."""
    world, steps = dist.get_world_size(), 4
    lm = load_script("examples/train_moe_lm.py")
    size = lm.SIZES["tiny"]
    data = lm.split(TEXT.read_bytes(), size.length)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "dp"))
    torch.set_default_dtype(torch.float64)
    try:
        model, found = lm.train(PLAIN, data, size, steps, 0, mesh=mesh)
        whole, wanted = lm.train(PLAIN, data, size, steps, 0, micro_batches=world)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found["losses"] == wanted["losses"]  # rounded to 1e-5
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["held_out"] == pytest.approx(wanted["held_out"], rel=AFTER_STEPS)
    state = full_state_dict(model, model.blocks[0].moe.expert_parallel)
    assert 0 < worst(state, whole.state_dict()) < AFTER_STEPS


def the_guide_runs() -> None:
    """The blocks of docs/training.md that need four ranks, in order."""
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "document"}
    for index, block in enumerate(blocks):
        exec(compile(block, f"<training.md, block {index}>", "exec"), namespace)
    assert namespace["ep"].size == 2
    assert all(isinstance(value.grad, DTensor) for value in namespace["moe"].parameters())
