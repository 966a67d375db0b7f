"""Replayed calls of the training ops: equal to ordinary calls, and limits on their host work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mxpert
from mxpert import MXTensor, ScaleRule, ScaleSpan
from mxpert.core import registry
from mxpert.core.launch import Launch
from mxpert.core.target import on_device
from mxpert.training import MXFP8Recipe, grouped_linear
from mxpert.training.rows import op as rows
from support.frames import count_frames
from support.launches import H200, count_launches, without_device
from support.replays import Launches, check_interleaved, check_replay

WIDTH, OUT, GROUPS = 256, 160, 5
SPANS = {
    "block": (ScaleSpan.BLOCK,) * 2,
    "row": (ScaleSpan.ROW,) * 2,
    "auto": (ScaleSpan.AUTO,) * 2,
    "span128": (ScaleSpan.SPAN128, ScaleSpan.ROW),
}
MOST_LAUNCHES = {"block": 15, "row": 15, "auto": 25, "span128": 15}
"""Launches of forward and backward: 3 GEMMs, one kernel that pads offsets, and 3 quantisations, two
of them with a block table. AUTO adds 4 that count wide blocks, and for each GEMM one that decodes
wide operands and a second GEMM that multiplies them."""

MOST_FRAMES = {"block": 155, "row": 155, "auto": 155, "span128": 155}
"""Python functions of this package that forward and backward enter, as many as today."""
MOST_FRAMES_WITHOUT_GRADIENTS = 75


@pytest.fixture(autouse=True)
def launches() -> Iterator[Launches]:
    with without_device() as made, on_device(H200):
        yield made


class Linear:
    """Arguments of the ops, in newly allocated memory."""

    def __init__(self, mode: str = "row", num_rows: int = 200) -> None:
        self.spans = SPANS[mode]
        self.x = torch.randn(num_rows, WIDTH).bfloat16()
        self.grad = torch.randn(num_rows, OUT).bfloat16()
        self.weight = torch.randn(GROUPS, OUT, WIDTH)
        self.plain_weight = self.weight.bfloat16()
        self.offsets = torch.linspace(0, num_rows, GROUPS + 1).int()
        self.total = torch.zeros(GROUPS, OUT, WIDTH)
        self.weights = torch.rand(num_rows // 2, 2)
        self.activated = self.x[:, : WIDTH // 2].contiguous()
        self.ids = torch.randperm(num_rows).view(-1, 2)
        self.x_row, self.x_col = self.dual()
        self.grad_row, self.grad_col = mxpert.quantize_dual(
            self.grad, group_offsets=self.offsets, scale_span=self.spans[0]
        )
        self.weight_row, self.weight_col = self.dual_weight()

    def dual(self, **options: Any) -> tuple[MXTensor, MXTensor]:
        return mxpert.quantize_dual(
            self.x, group_offsets=self.offsets, **{"scale_span": self.spans, **options}
        )

    def dual_weight(self) -> tuple[MXTensor, MXTensor]:
        return mxpert.quantize_dual(self.weight, scale_span=self.spans[1])

    def forward(self, **options: Any) -> torch.Tensor:
        return mxpert.grouped_gemm(self.x_row, self.weight_row, self.offsets, **options)

    def plain(self) -> torch.Tensor:
        return mxpert.grouped_gemm(self.x, self.plain_weight, self.offsets)

    def plain_dgrad(self) -> torch.Tensor:
        return mxpert.grouped_gemm(self.grad, self.plain_weight, self.offsets, trans_b=False)

    def wgrad(self, **options: Any) -> torch.Tensor:
        return mxpert.grouped_wgrad(self.grad_col, self.x_col, self.offsets, **options)

    def accumulate(self) -> torch.Tensor:
        return self.wgrad(accumulate_into=self.total)

    def plain_wgrad(self) -> torch.Tensor:
        return mxpert.grouped_wgrad(self.grad, self.x, self.offsets)

    def combine(self, *, weighted: bool = True) -> torch.Tensor:
        return rows.combine_rows(self.x, self.ids, self.weights if weighted else None)

    def combine_backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.combine_rows_backward(self.x[:100], self.x, self.ids, self.weights)

    def activate(self) -> torch.Tensor:
        return rows.activate_rows(self.x, mxpert.SwiGLU())

    def activate_backward(self) -> torch.Tensor:
        return rows.activate_rows_backward(self.activated, self.x, mxpert.SiLU())


OPS = (Linear.dual, Linear.dual_weight, Linear.forward, Linear.wgrad, Linear.accumulate)
CASES = {
    **{f"{op.__name__}-{mode}": (mode, op) for op, mode in itertools.product(OPS, SPANS)},
    **{
        op.__name__: ("row", op)
        for op in (
            Linear.plain,
            Linear.plain_dgrad,
            Linear.plain_wgrad,
            Linear.combine,
            Linear.combine_backward,
            Linear.activate,
            Linear.activate_backward,
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_launches_what_the_call_does(
    name: str, launches: Launches, replays: list[object]
) -> None:
    mode, run = CASES[name]
    check_replay(launches, replays, lambda: Linear(mode), run, is_first=False)


def test_what_decides_is_looked_at(launches: Launches, replays: list[object]) -> None:
    layers = [Linear(mode) for mode in SPANS]
    row, more = layers[1], Linear("row", 202)
    strided, wide = Linear("row"), Linear("row")
    strided.x = torch.zeros(200, 2 * WIDTH, dtype=torch.bfloat16)[:, :WIDTH]
    wide.offsets = wide.offsets.long()
    calls: list[tuple[object, Callable[[], Any]]] = [
        *(
            (layer, lambda layer=layer, op=op: op(layer))
            for layer in (*layers, more, wide)
            for op in OPS
        ),
        (strided, strided.dual),
        *(
            (row, lambda options=options: row.dual(**options))
            for options in (
                {"format": "mxfp8_e5m2"},
                {"scale_rule": ScaleRule.FLOOR},
                {"scale_span": ScaleSpan.BLOCK},
                {"scale_span": (ScaleSpan.BLOCK, ScaleSpan.AUTO)},
            )
        ),
        *(
            (row, lambda op=op, dtype=dtype: op(out_dtype=dtype))
            for op in (row.forward, row.wgrad)
            for dtype in (torch.float32, torch.float16)
        ),
        (row, row.plain),
        (row, lambda: row.combine(weighted=False)),
        (row, row.combine),
        (row, row.activate),
        (row, row.activate_backward),
    ]
    check_interleaved(launches, replays, calls)


def step_of(mode: str) -> Callable[[], object]:
    """Forward and backward of `grouped_linear`."""
    layer, recipe = Linear(mode), MXFP8Recipe(scale_span=SPANS[mode][0])
    x, weight = layer.x.requires_grad_(), layer.weight.requires_grad_()

    def step() -> object:
        y = grouped_linear(x, weight, layer.offsets, recipe=recipe)
        return torch.autograd.grad(y, (x, weight), layer.grad)

    return step


@pytest.mark.parametrize("mode", SPANS)
def test_a_warm_step_enters_few_functions(mode: str) -> None:
    step = step_of(mode)
    for _ in range(4):
        step()
    assert 0 < count_frames(step) <= MOST_FRAMES[mode]


def test_a_warm_forward_without_gradients_enters_few_functions() -> None:
    layer = Linear("row")
    with torch.no_grad():
        for _ in range(4):
            grouped_linear(layer.x, layer.weight, layer.offsets)
        frames = count_frames(lambda: grouped_linear(layer.x, layer.weight, layer.offsets))
    assert 0 < frames <= MOST_FRAMES_WITHOUT_GRADIENTS


@pytest.mark.parametrize("mode", SPANS)
def test_a_warm_step_only_replays(
    mode: str, replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm forward and backward replays all six op calls: nothing is resolved or looked up, and
    there are no more kernels than MOST_LAUNCHES."""
    step = step_of(mode)
    for _ in range(3):
        step()
    assert count_launches(step) == MOST_LAUNCHES[mode]
    misses = registry._resolve.cache_info().misses
    replays.clear()
    monkeypatch.setattr(Launch, "_bind", None)
    step()
    assert len(replays) == 6
    assert registry._resolve.cache_info().misses == misses


def test_a_result_that_is_an_argument_stays_it(replays: list[object]) -> None:
    layer = Linear()
    for _ in range(4):
        assert layer.accumulate() is layer.total
    other = torch.zeros_like(layer.total)
    assert layer.wgrad(accumulate_into=other) is other
    assert len(replays) == 3


def test_bad_input_is_refused_warm_as_cold() -> None:
    layer = Linear()
    for _ in range(3):
        layer.forward()
        layer.dual()
    with pytest.raises(TypeError, match="trans_b"):
        layer.forward(trans_b=1)
    with pytest.raises(TypeError, match="scale_span"):
        layer.dual(scale_span=["row"])
    with pytest.raises(ValueError, match=r"group_offsets.shape"):
        mxpert.grouped_gemm(layer.x_row, layer.weight_row, layer.offsets[:-1])
