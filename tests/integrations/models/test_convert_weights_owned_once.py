"""`convert(model, recipe=…)` leaves one owner of the experts' weights.

Run as a script, this file is one rank of the FSDP2 test.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mxpert
from mxpert.integrations.models.convert import restore
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe
from support.mixtral import tiny_mixtral

IDS = torch.arange(12)[None]
RANKS = 2
ROOT = Path(__file__).resolve().parents[3]


def mixtral() -> Any:
    torch.manual_seed(0)
    return tiny_mixtral(num_hidden_layers=2)


def refs_of(model: torch.nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to the experts' parameters."""
    found = [
        weakref.ref(parameter)
        for name, parameter in model.named_parameters()
        if ".experts." in name
    ]
    assert len(found) == 4
    return found


def alive(refs: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


def rank_of_a_sharded_step(rank: int, store: str) -> None:
    """Shard a converted model over two ranks, take one step, compare with the unsharded model."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = mxpert.convert(mixtral(), recipe=MXFP8Recipe())
    whole = copy.deepcopy(model)
    refs = refs_of(model)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    left = alive(refs)
    assert left == 0, f"{left} full weights are alive on rank {rank}"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().numel() <= -(-parameter.shape[0] // RANKS) * (
            parameter.numel() // parameter.shape[0]
        ), name
    loss, expected = (m(IDS, labels=IDS).loss for m in (model, whole))
    assert_exact(loss.detach(), expected.detach(), "loss")
    loss.backward()
    expected.backward()
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-5, atol=1e-7)
    dist.destroy_process_group()


def test_fsdp2_keeps_a_shard_of_the_experts_on_each_rank(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        outcomes = [(process.communicate(timeout=200)[1], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for text, code in outcomes:
        assert code == 0, text[-3000:]


@pytest.mark.parametrize("after", ["", "restore"])
def test_assigned_weights_replace_the_old_ones(after: str) -> None:
    model = mxpert.convert(mixtral(), recipe=MXFP8Recipe())
    refs = refs_of(model)
    new = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    assert alive(refs) == 0
    if after:
        restore(model)
    for name, parameter in model.named_parameters():
        assert_exact(parameter.detach(), new[name], name)


def test_a_failed_conversion_leaves_one_owner_too() -> None:
    model = mxpert.convert(mixtral(), recipe=MXFP8Recipe())
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj — need finite"):
        mxpert.convert(model, progress=False)
    refs = refs_of(model)
    model.load_state_dict(mixtral().state_dict(), assign=True)
    assert alive(refs) == 0
    assert model(IDS, labels=IDS).loss.isfinite()


def test_a_recipe_may_follow_a_recipe() -> None:
    model = mixtral()
    before = dict(model.named_parameters())
    hybrid = mxpert.convert(
        mxpert.convert(model, recipe=MXFP8Recipe()), recipe=MXFP8Recipe.hybrid()
    )
    assert hybrid.model.layers[0].mlp.experts.recipe == MXFP8Recipe.hybrid()
    assert all(parameter is before[name] for name, parameter in hybrid.named_parameters())


if __name__ == "__main__":
    rank_of_a_sharded_step(int(sys.argv[1]), sys.argv[2])
