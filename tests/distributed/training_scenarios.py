"""What ranks do in test_expert_parallel_ranks.py of tests/training; each function runs on all.

The judge is one process with all experts, which runs the tokens of every rank one after the other.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mxpert.distributed import ExpertParallel, Placement, Transport
from mxpert.distributed import autograd as exchange
from mxpert.errors import PeerLostError
from mxpert.formats.spec import ScaleSpan
from mxpert.testing.numerics import is_exact, relative_l2, sqnr_db
from mxpert.training import (
    MXFP8Recipe,
    MXMoE,
    clip_grad_norm_,
    local_expert_parameters,
    permute,
    prepare_for_ddp,
)
from mxpert.training.permute import PermuteRows
from support.poison import nan_filled_scratch
from support.training import bf16_floor_db, layer_floor_db

PLAIN = MXFP8Recipe(enabled=False)
HIDDEN, FFN, EXPERTS, TOP_K = 64, 96, 5, 2  # five experts do not divide by the ranks
UNEVEN = (7, 0, 12, 3)
"""Tokens of each rank: they differ, and rank 1 has none."""

MANY = (48, 40, 32, 24)
FLOAT64 = 1e-12
"""Far above the rounding of sums of some hundred float64 products, far below any error."""

TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)

FLOAT32 = 1e-6
"""The contract of a float32 wire."""

BUSY_S = 5.0
"""What a busy machine may add to a time-out."""

EXACT_SCALES = MXFP8Recipe(scale_span=ScaleSpan.BLOCK)
"""One scale for 32 values on every device."""

Step = dict[str, torch.Tensor]


@dataclass
class Place:
    """Where the ranks compute; tests on several GPUs change it."""

    device: torch.device
    group: Any = None


HERE = Place(torch.device("cpu"))


def parallel(group: Any = None, **changes: Any) -> ExpertParallel:
    options: dict[str, Any] = dict(
        num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, max_tokens=64, device=HERE.device
    )
    options["transport"] = Transport.ALL_TO_ALL
    return ExpertParallel(HERE.group if group is None else group, **options | changes)


def build(ep: ExpertParallel | None, **options: Any) -> MXMoE:
    """A block in the same random state on every rank; without `ep` the one with all experts."""
    torch.manual_seed(0)
    options = {"device": HERE.device} | options
    return MXMoE(HIDDEN, FFN, EXPERTS, TOP_K, expert_parallel=ep, **options)


def tokens_of(
    rank: int, dtype: torch.dtype, counts: tuple[int, ...], one_sided: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, H] of a rank, all positive if `one_sided`, and the gradient of their results."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, grad = torch.randn(2, counts[rank], HIDDEN, generator=generator, dtype=torch.float64)
    x = x.abs() if one_sided else x
    return x.bfloat16().to(HERE.device, dtype), grad.bfloat16().to(HERE.device, dtype)


def loss_of(moe: MXMoE, y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    assert moe.aux_loss is not None
    return (y.double() * grad.double()).sum() + 100 * moe.aux_loss.double()


def own_step(moe: MXMoE, x: torch.Tensor, grad: torch.Tensor) -> Step:
    """Results and gradients of this rank, before any average."""
    x = x.detach().clone().requires_grad_()
    moe.zero_grad()
    y = moe(x)
    loss_of(moe, y, grad).backward()
    gradients = {name: value.grad.clone() for name, value in moe.named_parameters()}
    return {"y": y.detach(), "aux_loss": moe.aux_loss.detach(), "x": x.grad, **gradients}


def whole_step(whole: MXMoE, rank: int, size: int, experts: tuple[int, ...], *inputs: Any) -> Step:
    """What `own_step` of `rank` has to give: the experts' gradients are means over the ranks."""
    dtype = whole.router.dtype
    steps = [own_step(whole, *tokens_of(each, dtype, *inputs)) for each in range(size)]
    wanted = dict(steps[rank])
    for name in wanted:
        if "proj" in name:
            wanted[name] = sum(step[name] for step in steps)[list(experts)] / size
    return wanted


def worst(found: Step, wanted: Step) -> float:
    """Largest relative L2 of any result or gradient; NaN if there is one."""
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in wanted.items()
    }
    errors = torch.tensor([relative_l2(found[name], wanted[name]) for name in wanted])
    return errors.max().item()


def compared(
    ep: ExpertParallel, dtype: torch.dtype, *inputs: Any, **options: Any
) -> tuple[Step, Step]:
    """`own_step` with parameters and tokens of `dtype`, and the judge's in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = dict(recipe=PLAIN, bias=True) | options
    moe, whole = build(ep, dtype=dtype, **options), build(None, dtype=dtype, **options)
    judge = build(None, **options | dict(recipe=PLAIN, dtype=torch.float64))
    judge.load_state_dict(whole.state_dict())
    wanted = whole_step(judge, rank, size, ep.local_experts, *inputs)
    return own_step(moe, *tokens_of(rank, dtype, *inputs)), wanted


def gather_equals_one_rank_in_float64() -> None:
    assert worst(*compared(parallel(transport=Transport.GATHER), torch.float64, UNEVEN)) < FLOAT64


def all_to_all_equals_one_rank_in_float64() -> None:
    ep = parallel(transport=Transport.ALL_TO_ALL)
    assert worst(*compared(ep, torch.float64, UNEVEN)) < FLOAT64


def one_rank_gets_every_token() -> None:
    """All tokens choose experts 0 and 1, which lie on rank 0."""
    for transport in TRANSPORTS:
        ep = parallel(transport=transport)
        rank, size = dist.get_rank(), dist.get_world_size()
        moe, whole = (build(each, recipe=PLAIN, dtype=torch.float64) for each in (ep, None))
        for block in (moe, whole):
            with torch.no_grad():
                block.router[:2] = block.router[:2].abs() + 1
        inputs = MANY, True
        wanted = whole_step(whole, rank, size, ep.local_experts, *inputs)
        rows: list[int] = []

        def count(_: Any, given: Any, rows: list[int] = rows) -> None:
            rows.append(len(given[0]))

        moe.down_proj.register_forward_pre_hook(count)
        found = own_step(moe, *tokens_of(rank, torch.float64, *inputs))
        assert worst(found, wanted) < FLOAT64
        if transport is Transport.ALL_TO_ALL:  # no row more than there are pairs
            assert rows == [sum(MANY[:size]) * TOP_K if rank == 0 else 0]
        if rank:
            assert not any(value.any() for name, value in found.items() if "proj" in name)


def unused_slots_are_not_read() -> None:
    for transport in TRANSPORTS:
        ep = parallel(transport=transport)
        with nan_filled_scratch():
            found, wanted = compared(ep, torch.float64, UNEVEN)
        assert worst(found, wanted) < FLOAT64
        for recipe in (PLAIN, EXACT_SCALES):
            moe = build(ep, bias=True, recipe=recipe)
            given = tokens_of(dist.get_rank(), torch.bfloat16, UNEVEN)
            wanted = own_step(moe, *given)
            with nan_filled_scratch():
                found = own_step(moe, *given)
            for name, value in wanted.items():
                assert value.isfinite().all(), name
                assert is_exact(found[name], value), name


def any_placement_gives_the_same() -> None:
    size = dist.get_world_size()
    maps = torch.full((size, EXPERTS), -1, dtype=torch.int32)
    for expert in range(EXPERTS):  # experts in turn
        maps[expert % size, expert] = expert // size
    for transport in TRANSPORTS:
        ep = parallel(transport=transport, placement=Placement(maps))
        assert ep.local_experts == tuple(range(dist.get_rank(), EXPERTS, size))
        assert worst(*compared(ep, torch.float64, UNEVEN)) < FLOAT64


def float32_keeps_the_contract() -> None:
    """`combine_dtype` is bfloat16 by default and narrows nothing that is wider."""
    for transport in TRANSPORTS:
        assert worst(*compared(parallel(transport=transport), torch.float32, MANY)) < FLOAT32


def bf16_and_mxfp8_keep_their_floors() -> None:
    for transport in TRANSPORTS:
        for recipe, floor in ((PLAIN, bf16_floor_db), (MXFP8Recipe(), layer_floor_db)):
            ep = parallel(transport=transport)
            found, wanted = compared(ep, torch.bfloat16, MANY, recipe=recipe)
            least = floor(MANY[dist.get_rank()] * HIDDEN, exchanged=True)
            for name, value in wanted.items():
                snr = sqnr_db(found[name], value)
                assert snr >= least, f"{recipe}: {name} {snr:.1f} dB, floor {least:.1f}"


def mxfp8_wire_gives_the_same_results() -> None:
    """Codes of MXFP8 rows are found again when rows are quantised a second time; wgrad is not."""
    rank = dist.get_rank()
    for transport in TRANSPORTS:
        plain = parallel(transport=transport)
        narrow = parallel(transport=transport, wire_format="mxfp8")
        options = dict(recipe=EXACT_SCALES, dtype=torch.bfloat16)
        x, _ = tokens_of(rank, torch.bfloat16, MANY)
        assert is_exact(build(narrow, **options)(x), build(plain, **options)(x))
        found, wanted = compared(narrow, torch.bfloat16, MANY, recipe=EXACT_SCALES)
        least = layer_floor_db(x.numel(), exchanged=True, mxfp8_wire=True)
        for name, value in wanted.items():
            snr = sqnr_db(found[name], value)
            assert snr >= least, f"{name} {snr:.1f} dB, floor {least:.1f}"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def the_comparison_sees_planted_errors() -> None:
    ep = parallel(transport=Transport.GATHER)
    right = exchange._combined

    def own_rows(ep: Any, rows: torch.Tensor, route: Any) -> torch.Tensor:
        """The combine forgets the other ranks."""
        rows = rows.view(ep.size, -1, rows.shape[1]).clone()
        rows[1 - ep.rank :: 2] = 0
        return right(ep, rows.flatten(0, 1), route)

    def no_weight_gradient(ep: Any, rows: torch.Tensor, route: Any) -> torch.Tensor:
        return right(ep, rows if rows.shape[1] == HIDDEN else torch.zeros_like(rows), route)

    class NoFactor(PermuteRows):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
            return PermuteRows.forward(ctx, *arguments[:4])

    for owner, name, wrong in (
        (exchange, "_combined", own_rows),
        (exchange, "_combined", no_weight_gradient),
        (permute, "PermuteRows", NoFactor),
    ):
        with replaced(owner, name, wrong):
            found, wanted = compared(ep, torch.float64, MANY)
        assert not worst(found, wanted) < 1e-3, wrong.__name__


def first_weights_are_a_slice() -> None:
    ep, after = parallel(), dict[str, float]()
    for dtype in (torch.float32, torch.bfloat16):
        moe, whole = (build(each, bias=True, dtype=dtype) for each in (ep, None))
        wanted = whole.state_dict()
        for reset in (False, True):
            if reset:
                for block in (moe, whole):
                    torch.manual_seed(5)
                    block.reset_parameters()
            for name, value in moe.state_dict().items():
                part = wanted[name]
                part = part[list(ep.local_experts)] if "proj" in name else part
                assert is_exact(value, part), name
    for block in (moe, whole):  # the random state goes on as it would in one process
        torch.manual_seed(5)
        block.reset_parameters()
        following = torch.rand(1, device=HERE.device).item()
        assert following == after.setdefault("reset", following)


def state_dicts_load_whole_or_local() -> None:
    ep = parallel()
    torch.manual_seed(1)
    whole = MXMoE(HIDDEN, FFN, EXPERTS, TOP_K, bias=True)
    full = torch.nn.Sequential(torch.nn.Identity(), whole).state_dict()
    model = torch.nn.Sequential(torch.nn.Identity(), build(ep, bias=True))
    before = {name: value.shape[0] for name, value in full.items()}
    for assign in (False, True):
        assert not any(model.load_state_dict(full, assign=assign))
        for name, value in model.state_dict().items():
            part = full[name][list(ep.local_experts)] if "proj" in name else full[name]
            assert is_exact(value, part), name
    assert {name: value.shape[0] for name, value in full.items()} == before
    again = torch.nn.Sequential(torch.nn.Identity(), build(ep, bias=True))
    again.load_state_dict(model.state_dict())
    for name, value in model.state_dict().items():
        assert is_exact(again.state_dict()[name], value)
    cut = {name: value[:1] if "proj" in name else value for name, value in full.items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(cut)


def repeats_checkpoints_and_main_grad_give_the_same_bits() -> None:
    for transport in TRANSPORTS:
        ep = parallel(transport=transport)
        moe = build(ep, bias=True)
        x, grad = tokens_of(dist.get_rank(), torch.bfloat16, UNEVEN)
        first = own_step(moe, x, grad)
        again = own_step(moe, x, grad)
        assert all(is_exact(again[name], value) for name, value in first.items())
        moe.zero_grad()
        for layer_of in (moe.gate_up_proj, moe.down_proj):
            weight = layer_of.weight
            weight.main_grad = torch.zeros(weight.shape, device=weight.device)
        leaf = x.clone().requires_grad_()
        y = checkpoint(moe, leaf, use_reentrant=False)
        loss_of(moe, y, grad).backward()
        assert is_exact(y, first["y"])
        assert is_exact(leaf.grad, first["x"])
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(moe, name).weight
            assert weight.grad is None
            assert is_exact(weight.main_grad, first[f"{name}.weight"])


def what_does_not_fit_is_refused() -> None:
    size = dist.get_world_size()
    ep = parallel()
    moe = build(ep)
    with pytest.raises(ValueError, match="at most max_tokens = 64 tokens a rank, got 65"):
        moe(torch.zeros(65, HIDDEN))
    with pytest.raises(TypeError, match="MXMoE: expert_parallel — need an ExpertParallel"):
        build("ep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_parallel: hidden_size — need 32, got 64"):
        MXMoE(32, FFN, EXPERTS, TOP_K, expert_parallel=ep)
    with pytest.raises(ValueError, match="expert_parallel: top_k — need 1, got 2"):
        MXMoE(HIDDEN, FFN, EXPERTS, 1, expert_parallel=ep)
    copies = Placement(torch.arange(EXPERTS, dtype=torch.int32).expand(size, -1).contiguous())
    with pytest.raises(ValueError, match="placement — need each expert on one rank"):
        build(parallel(placement=copies))
    turned = Placement.contiguous(EXPERTS, size).expert_maps.clone()
    turned[0, :2] = torch.tensor([1, 0])  # of rank 0 alone; every rank refuses it
    with pytest.raises(ValueError, match="placement — need ascending experts on every rank"):
        build(parallel(placement=Placement(turned)))
    narrow = parallel(wire_format="mxfp8")
    for recipe in (PLAIN, MXFP8Recipe(forward_format="mxfp8_e5m2")):
        with pytest.raises(ValueError, match="wire_format"):
            build(narrow, recipe=recipe)


def a_rank_dies_before_backward() -> None:
    """Rank 1 ends between forward and backward; rank 0 gets an error in time, not a hang."""
    seconds = 5.0
    moe = build(parallel(timeout_s=seconds))
    x, grad = tokens_of(dist.get_rank(), torch.bfloat16, MANY)
    loss = loss_of(moe, moe(x), grad)
    if dist.get_rank() == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        loss.backward()
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started < seconds + BUSY_S
    assert all(parameter.grad is None for parameter in moe.gate_up_proj.parameters())


class Net(torch.nn.Module):
    """A dense layer, then the experts."""

    def __init__(self, ep: ExpertParallel | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.moe = build(ep, recipe=PLAIN, bias=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.moe(self.dense(x))
        return y


def net_gradients(net: torch.nn.Module, moe: MXMoE, rank: int) -> None:
    x, grad = tokens_of(rank, torch.float64, MANY)
    loss_of(moe, net(x), grad).backward()


def wanted_gradients(ep: ExpertParallel) -> Step:
    """Of the mean of all ranks' losses, from one process."""
    whole = Net(None)
    for rank in range(dist.get_world_size()):
        net_gradients(whole, whole.moe, rank)
    gradients = {
        name: parameter.grad / dist.get_world_size() for name, parameter in whole.named_parameters()
    }
    return {
        name: value[list(ep.local_experts)] if "proj" in name else value
        for name, value in gradients.items()
    }


def two_by_two() -> tuple[DeviceMesh, ExpertParallel]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    return mesh, parallel(mesh["ep"], transport=Transport.ALL_TO_ALL)


def ddp_averages_each_gradient_over_its_ranks() -> None:
    mesh, ep = two_by_two()
    net = Net(ep)
    assert set(local_expert_parameters(net)) == {
        f"moe.{name}_proj.{kind}" for name in ("gate_up", "down") for kind in ("weight", "bias")
    }
    prepare_for_ddp(net, mesh["dp"].get_group())
    wrapped = DistributedDataParallel(net)
    for step in range(2):  # the second is added to the first
        net_gradients(wrapped, net.moe, dist.get_rank())
        found = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
        wanted = {name: (step + 1) * value for name, value in wanted_gradients(ep).items()}
        assert worst(found, wanted) < FLOAT64
    norm = whole_norm(wanted, ep)
    for limit in (norm / 2, 2 * norm):
        before = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
        clipped = clip_grad_norm_(net, limit, expert_parallel_group=ep.group)
        factor = min(1.0, limit / norm)
        assert clipped.item() == pytest.approx(norm, rel=1e-5)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad, factor * before[name])
        norm *= factor


def _clipped(net: torch.nn.Module, ep: ExpertParallel, limit: float) -> float:
    return clip_grad_norm_(net, limit, expert_parallel_group=ep.group).item()


def whole_norm(own: Step, ep: ExpertParallel) -> float:
    """The norm of a model's gradients with the experts of all ranks."""
    parts: list[Step] = [{} for _ in range(ep.size)]
    dist.all_gather_object(parts, own, group=ep.group)
    shared = [value for name, value in own.items() if "proj" not in name]
    owned = [value for part in parts for name, value in part.items() if "proj" in name]
    return sum(value.square().sum().item() for value in shared + owned) ** 0.5


def ddp_alone_would_mix_experts() -> None:
    """Without `prepare_for_ddp` gradients of different experts are averaged."""
    maps = torch.full((2, 4), -1, dtype=torch.int32)
    maps[0, :2] = maps[1, 2:] = torch.arange(2, dtype=torch.int32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    ep = parallel(mesh["ep"], num_experts=4, placement=Placement(maps))
    torch.manual_seed(0)
    moe = MXMoE(HIDDEN, FFN, 4, TOP_K, expert_parallel=ep, recipe=PLAIN, dtype=torch.float64)
    plain = copy.copy(moe)
    wrapped = DistributedDataParallel(plain)
    net_gradients(wrapped, plain, dist.get_rank())
    others = [torch.empty_like(moe.down_proj.weight) for _ in range(4)]
    dist.all_gather(others, moe.down_proj.weight.grad)
    assert is_exact(others[0], others[3])  # two ranks whose experts differ


def fsdp2_averages_each_gradient_over_its_ranks() -> None:
    mesh, ep = two_by_two()
    net = Net(ep)
    for experts in (net.moe.gate_up_proj, net.moe.down_proj):
        fully_shard(experts, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh)
    net_gradients(net, net.moe, dist.get_rank())
    found = {}
    for name, parameter in net.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        found[name] = parameter.grad.full_tensor()
    wanted = wanted_gradients(ep)
    assert worst(found, wanted) < FLOAT64
    norm = whole_norm(wanted, ep)
    assert _clipped(net, ep, norm / 2) == pytest.approx(norm, rel=1e-5)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), found[name] / 2)
    with pytest.raises(ValueError, match="initialise before fully_shard"):
        net.moe.reset_parameters()
