"""requantize_ on a GPU: the offline path's bits, at addresses that captured graphs read."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, Layout, MoEWeights
from mxpert.modules import quantize_weights, requantize_
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT
from mxpert.testing.numerics import is_exact

E, H, F = 5, 416, 352
"""Neither is a multiple of a unit of 64 rows or 128 codes."""

DEVICE = torch.device("cuda")


def dense(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = (E, 2 * F, H), (E, H, F)
    gate_up, down = (
        torch.randn(*size, generator=generator, device=DEVICE).bfloat16() / 16 for size in sizes
    )
    return gate_up, down


def offline(seed: int, layout: Layout | None = None) -> MoEWeights:
    order = GateUpOrder.INTERLEAVED
    made = quantize_weights(*dense(seed), gate_up_order=order)
    return made.prepare(device=DEVICE, layout=layout)


LAYOUTS = [None, *(each for each in Layout if not each.name.startswith("HOPPER_GROUPS"))]
"""Those that hold MXFP4."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_and_addresses(layout: Layout | None) -> None:
    weights, wanted = offline(0, layout), offline(1, layout)
    addresses = [t.data_ptr() for n, t in weights.state_dict().items() if n.endswith("_proj.qdata")]
    requantize_(weights, *dense(1))
    for name, tensor in wanted.state_dict().items():
        if name != "_extra_state":
            assert torch.equal(weights.state_dict()[name], tensor), name
    assert addresses == [
        t.data_ptr() for n, t in weights.state_dict().items() if n.endswith("_proj.qdata")
    ]


def test_packing_on_the_gpu_has_the_cpus_bits() -> None:
    t = mxpert.quantize(torch.randn(3, 200, 288, device=DEVICE), "mxfp4")
    rows = torch.randperm(200, device=DEVICE)
    there, here = (
        HOPPER_FRAGMENT.pack(t, None, rows),
        HOPPER_FRAGMENT.pack(t.to("cpu"), None, rows.cpu()),
    )
    for name in ("qdata", "scale", "reference"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


def test_captured_graphs_compute_with_the_new_weights() -> None:
    weights, wanted = offline(0), offline(1)
    x = torch.randn(7, H, device=DEVICE).bfloat16()
    routing = mxpert.route_topk(torch.randn(7, E, device=DEVICE), top_k=2)

    def layer(held: MoEWeights) -> torch.Tensor:
        return mxpert.fused_moe(x, held, *routing, activation=mxpert.SiLU())

    for _ in range(3):
        layer(weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(weights)
    graph.replay()
    before = y.clone()
    requantize_(weights, *dense(1))
    graph.replay()
    assert not torch.equal(y, before)
    assert is_exact(y, layer(wanted))
