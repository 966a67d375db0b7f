"""Groups, agreement between ranks, and checks; each function runs on all ranks at the same time."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.device_mesh import init_device_mesh

import mxpert
from mxpert.core.describe import describe
from mxpert.core.problem import MoEProblem
from mxpert.distributed import ExpertParallel, Placement, Transport, choice, workspace
from mxpert.distributed.groups import Ranks
from mxpert.distributed.workspace import _peers
from mxpert.errors import UnsupportedError
from mxpert.testing.numerics import assert_close_relative, is_exact
from tests.distributed.ranked_layer import (
    FLOAT32,
    SHAPE,
    TRANSPORTS,
    judge,
    make,
    part_of,
    rank,
    refused,
    run,
    size,
    tokens,
    whole_layer,
)


def meshes_and_groups_are_accepted() -> None:
    weights = whole_layer()
    mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("ep",))
    for group in (mesh, mesh.get_group(), dist.group.WORLD):
        ep = make(group=group)
        given = tokens()
        assert (ep.rank, ep.size) == (rank(), size())
        assert ep.transport is Transport.GATHER
        actual = run(ep, part_of(weights, ep), given)
        assert_close_relative(actual, judge(weights, given), FLOAT32, repr(group))
        ep.close()


def one_dimension_of_a_mesh() -> None:
    """Four ranks as 2 × 2: two groups of two, at the same time."""
    weights = whole_layer()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with refused(r'2 dimensions.*; pass one of them, for example mesh\["dp"\]'):
        make(group=mesh)
    for name in ("ep", "dp"):
        ep = make(group=mesh[name])
        assert ep.size == 2
        given = tokens()
        actual = run(ep, part_of(weights, ep), given)
        assert_close_relative(actual, judge(weights, given), FLOAT32, name)
        ep.close()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with refused("a group that this process is in"):
        make(group=pair[1 - rank() // 2])


def ranks_agree_on_the_arguments() -> None:
    other = rank() == 1
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "num_experts": lambda: dict(num_experts=12 if other else 10),
        "top_k": lambda: dict(top_k=2 if other else 3),
        "max_tokens": lambda: dict(max_tokens=8 if other else 7),
        "wire_format": lambda: dict(wire_format="mxfp8" if other else "bf16"),
        "combine_dtype": lambda: dict(combine_dtype=torch.bfloat16 if other else torch.float32),
        "timeout_s": lambda: dict(timeout_s=20.0 if other else 30.0),
        "transport": lambda: dict(transport=TRANSPORTS[other]),
    }
    for name, changes in own.items():
        with refused(rf"ExpertParallel: {name} — need the same on every rank, got .* on rank 0"):
            make(**changes())
    placements = [Placement.contiguous(10, size()).expert_maps for _ in range(2)]
    placements[1] = placements[1].flip(1)
    with refused("placement — need the same on every rank"):
        make(placement=Placement(placements[other].contiguous()))


def an_error_of_one_rank_reaches_all() -> None:
    error, text = (TypeError, "top_k") if rank() == 1 else (ValueError, "rank 1 — .*top_k")
    with refused(text, error):
        make(top_k="two" if rank() == 1 else 3)
    patch = pytest.MonkeyPatch()
    if rank() == 1:
        patch.setattr(Placement, "contiguous", lambda *_: torch.empty(1 << 60))  # no memory
    error, text = (RuntimeError, "memory") if rank() == 1 else (ValueError, "rank 1 — .*memory")
    with patch.context(), refused(text, error):
        make()
    patch.undo()
    assert make().size == size()  # the group still works


def symmetric_memory_is_asked_for_together() -> None:
    """Every rank learns that one has no memory; else the addresses are those of the handle."""
    ranks, module = size(), "torch.distributed._symmetric_memory"
    handle = mock.Mock(spec=_SymmetricMemory)
    handle.get_buffer.side_effect = lambda peer, sizes, dtype: torch.empty(sizes, dtype=dtype)
    with (
        mock.patch("torch.cuda.synchronize"),
        mock.patch(f"{module}.empty", autospec=True) as made,
        mock.patch(f"{module}.rendezvous", autospec=True, return_value=handle) as joined,
    ):
        made.return_value = torch.ones(8, dtype=torch.uint8)
        workspace = _peers(dist.group.WORLD, 8, torch.device("cpu"))
        assert not workspace.own.any()
        assert len(workspace.addresses) == handle.get_buffer.call_count == ranks
        joined.assert_called_once_with(made.return_value, dist.group.WORLD)
        if rank() == 1:
            made.side_effect = torch.OutOfMemoryError("no memory\nat all")
        with refused("max_tokens — need 8 bytes .* rank 1: no memory;", UnsupportedError):
            _peers(dist.group.WORLD, 8, torch.device("cpu"))
        joined.assert_called_once()


def nothing_is_sent_before_the_checks() -> None:
    weights, given = whole_layer(), tokens(3)
    ep = make()
    mine = part_of(weights, ep)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("something was sent")

    patch = pytest.MonkeyPatch()
    patch.setattr(Ranks, "_run", fail)
    try:
        with refused("x.shape\\[0\\] — need at most max_tokens = 7 tokens a rank, got 8"):
            run(ep, mine, tokens(8))
        with refused("x.shape"):
            run(ep, mine, replace(given, x=given.x[:, :32]))
        with refused("x.dtype", TypeError):
            run(ep, mine, replace(given, x=given.x.float()))
        with refused("topk_ids.shape\\[1\\] — need 3, got 2"):
            run(ep, mine, replace(given, ids=given.ids[:, :2], weights=given.weights[:, :2]))
        with refused("topk_ids.dtype", TypeError):
            run(ep, mine, replace(given, ids=given.ids.short()))
        with refused("topk_weights.shape"):
            run(ep, mine, replace(given, weights=given.weights[:1]))
        with refused("topk_weights.dtype", TypeError):
            run(ep, mine, replace(given, weights=given.weights.double()))
        with refused(f"weights — need the {ep.num_local_experts} experts of rank {ep.rank}"):
            run(ep, weights, given)
        with refused("an MXTensor mxfp8_e4m3; make ExpertParallel with wire_format='mxfp8'"):
            quantised = mxpert.quantize(given.x, "mxfp8")
            run(ep, mine, replace(given, x=quantised), activation_format="mxfp8")
        with refused("expert_map — need None with expert_parallel"):
            run(ep, mine, given, expert_map=ep.expert_map)
        with refused("num_local_tokens — need None"):
            run(ep, mine, given, num_local_tokens=torch.tensor([1], dtype=torch.int32))
        with refused("out.shape"):
            run(ep, mine, given, out=torch.empty(4, SHAPE.hidden_size))
        with refused("out.dtype", TypeError):
            run(ep, mine, given, out=torch.empty(3, SHAPE.hidden_size, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="something was sent"):
            ep.dispatch(given.x, given.weights, given.ids)
    finally:
        patch.undo()
    dist.barrier()
    assert is_exact(ep.expert_map, ep.placement.expert_map(ep.rank))


def _asked(question: Callable[..., Any], ep: ExpertParallel) -> Any:
    """What `explain` or `describe` says of the layer over these ranks."""
    given = tokens()
    routed = given.x, part_of(whole_layer(), ep), given.weights, given.ids
    options = dict(activation=SHAPE.activation, expert_parallel=ep)
    return question(mxpert.fused_moe, *routed, **options)


def explain_names_transport_and_kernel() -> None:
    ep = make(transport=Transport.ALL_TO_ALL)
    text = str(_asked(mxpert.explain, ep))
    assert "backend: reference" in text
    assert "transport: all_to_all (asked for by name)" in text
    assert f"rank {rank()} of {size()}: {ep.num_local_experts} of 10 experts" in text
    ep.close()


def configs_follow_the_rows_that_are_expected() -> None:
    """GATHER brings every token; ALL_TO_ALL only those with an expert here, at least one each."""
    expected = {}
    for transport in (Transport.GATHER, Transport.ALL_TO_ALL):
        ep = make(transport=transport)
        problem = _asked(describe, ep)
        assert isinstance(problem, MoEProblem)
        assert problem.local_top_k == ep.local_top_k
        expected[transport] = ep.local_top_k
        ep.close()
    share = ep.num_local_experts / SHAPE.num_experts
    assert expected[Transport.GATHER] == pytest.approx(SHAPE.top_k * share)
    has_one = 1 - (1 - share) ** SHAPE.top_k
    assert expected[Transport.ALL_TO_ALL] == pytest.approx(SHAPE.top_k * share / has_one)
    assert expected[Transport.ALL_TO_ALL] >= 1


def a_transport_that_cannot_run_is_refused_everywhere() -> None:
    """One rank cannot: no rank takes it."""
    patch = pytest.MonkeyPatch()
    reason = "has no peer access" if rank() == 1 else None
    patch.setattr(choice, "unavailable", lambda *_: reason)
    try:
        with refused("SYMMETRIC: has no peer access \\(rank 1\\)", mxpert.UnsupportedError):
            make(transport=Transport.SYMMETRIC)
        ep = make()
        assert ep.transport is Transport.GATHER
        assert "not symmetric: has no peer access (rank 1)" in ep.explain()
        ep.close()
    finally:
        patch.undo()


def memory_that_is_too_small_is_named() -> None:
    """Rank 1's folder is full: every rank hears so, with the path and the sizes, and none dies."""
    full = OSError(errno.ENOSPC, "No space left on device")
    failing = mock.patch.object(workspace.os, "posix_fallocate", side_effect=full)
    nbytes = 1 << 20
    with failing if dist.get_rank() == 1 else contextlib.nullcontext():
        said = (
            rf"need {nbytes} bytes of /\S+ on every rank, got .* rank 1: /\S+ has \d+ of \d+ bytes"
        )
        with pytest.raises(UnsupportedError, match=said):
            workspace.make_workspace(dist.group.WORLD, nbytes, torch.device("cpu"))
    made = workspace.make_workspace(dist.group.WORLD, nbytes, torch.device("cpu"))
    assert not made.own.any()
    dist.barrier()
