"""Faults of numbers: ambient state, ids and offsets, infinities, routing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planting import Fault

import mxpert
from mxpert import GateUpOrder, GroupScore, Scoring
from mxpert.core import calls
from mxpert.core import ops as library
from mxpert.formats import codec, token
from mxpert.grouped import op as grouped_gemm
from mxpert.grouped import reference as grouped
from mxpert.modules import PreparedExperts, quantize_weights
from mxpert.quantize import dual_op as quantize_dual
from mxpert.routing import reference as routing
from mxpert.training import MXMoE

E, H, F, T = 4, 64, 32, 6
_DRAW = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=_DRAW).bfloat16()
WEIGHTS = quantize_weights(
    torch.randn(E, 2 * F, H, generator=_DRAW),
    torch.randn(E, H, F, generator=_DRAW),
    gate_up_order=GateUpOrder.CONCATENATED,
)
LOGITS = torch.randn(50, 32, generator=_DRAW)
ROUTING = mxpert.route_topk(LOGITS[:T, :E], 2)
OFFSETS = torch.tensor([2, 3, 3, 4, 5])


def layer(x: torch.Tensor = X, **options: Any) -> torch.Tensor:
    return mxpert.fused_moe(x, WEIGHTS, *ROUTING, activation=mxpert.SiLU(), **options)


def experts(*call: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = PreparedExperts(WEIGHTS, mxpert.SiLU()).eval()(*call)
    return result


def refused(call: Callable[[], object]) -> None:
    """Raise unless the call is refused."""
    with contextlib.suppress(ValueError, TypeError, mxpert.UnsupportedError):
        call()
        raise AssertionError("not refused")


def within(
    state: contextlib.AbstractContextManager[object], call: Callable[[], torch.Tensor]
) -> None:
    """Raise unless the call has the same bits inside of the state."""
    expected = call()
    with state:
        assert torch.equal(call(), expected)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def precision_inside() -> None:
    """The reference kernels compute with the highest precision, whatever the process's."""
    seen = []
    sound = grouped._values

    def values(*operands: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return sound(*operands)

    torch.set_float32_matmul_precision("medium")
    grouped._values = values
    try:
        mxpert.grouped_gemm(X, torch.ones(E, 8, H).bfloat16(), OFFSETS)
    finally:
        grouped._values = sound
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}, seen


def loss_of_default(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    with default_dtype(torch.float32):
        module = MXMoE(H, F, E, 2)
    with default_dtype(dtype):
        module(X.float())
    assert module.aux_loss is not None
    return module.aux_loss.detach()


def same_loss() -> None:
    assert torch.equal(loss_of_default(torch.bfloat16), loss_of_default(torch.float32))


def balance(self: MXMoE, probabilities: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`MXMoE._balance` with a quotient of integers."""
    fraction = offsets.diff() / (len(probabilities) * self.top_k)
    mean = probabilities.sum(dim=0) / len(probabilities)
    return self.aux_loss_coef * self.num_experts * (fraction * mean).sum()


def no_finite_infinity(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = X.clone()
        x[1, 40] = bad
        assert not make(x)[1, 40].isfinite()


def finite_scale(patch: pytest.MonkeyPatch) -> None:
    """A finite scale and the largest code."""
    saturating(patch)
    sound = codec.block_scale
    patch.setattr(
        codec,
        "block_scale",
        lambda amax, *rest: torch.where(amax.isinf(), 254, sound(amax, *rest)).to(torch.uint8),
    )


def saturating(patch: pytest.MonkeyPatch) -> None:
    sound = codec.encode

    def encode(values: torch.Tensor, element: Any) -> torch.Tensor:
        bound = torch.where(values.isinf(), values.sign() * element.max_value, values)
        return sound(bound, element)

    patch.setattr(codec, "encode", encode)
    patch.setattr("mxpert.formats.spans.encode", encode)


def rebased_infinity() -> None:
    tensor = mxpert.quantize(torch.ones(1, 64), "mxfp8_e5m2")
    tensor.qdata[0, 3] = 0x7C
    assert not mxpert.formats.rebase(tensor, mxpert.ScaleSpan.ROW).dequantize()[0, 3].isfinite()


def finite_block(patch: pytest.MonkeyPatch) -> None:
    """An infinity saturates ahead of the GEMM, as it did on Hopper."""
    sound = codec.quantize_blocks
    patch.setattr(
        "mxpert.moe.reference.quantize_blocks", lambda x, *rest: sound(x.clamp(-1e4, 1e4), *rest)
    )


def finite_token_scale(patch: pytest.MonkeyPatch) -> None:
    sound = token.quantize_token_rows

    def quantize(x: torch.Tensor) -> token.TokenRows:
        return sound(x.clamp(-1e4, 1e4))

    patch.setattr("mxpert.moe.reference.quantize_token_rows", quantize)


def bad_token(a_format: str) -> Callable[[], None]:
    """A token with an infinity has no finite result; the other tokens keep their bits."""

    def check() -> None:
        x = X.clone()
        x[1, 40] = torch.inf
        found, clean = (layer(each, activation_format=a_format) for each in (x, X))
        assert not found[1].isfinite().any()
        others = [0, *range(2, T)]
        assert torch.equal(found[others], clean[others])

    return check


def rows_of_no_group() -> None:
    out = mxpert.grouped_gemm(X, torch.ones(E, 8, H).bfloat16(), OFFSETS)
    assert not out[:2].any()
    assert not out[5:].any()


def uninitialised(patch: pytest.MonkeyPatch) -> None:
    sound = grouped.GROUPED_GEMM.launch

    def launch(problem: Any, config: Any, inputs: Any) -> torch.Tensor:
        out = sound(problem, config, inputs)
        out[: int(inputs.group_offsets[0])] = torch.nan
        return out

    patch.setattr(grouped.GROUPED_GEMM, "launch", launch, raising=False)


def best_of_groups() -> None:
    options = dict(scoring=Scoring.SIGMOID, num_groups=8, top_groups=2, group_score="max")
    ids = mxpert.route_topk(LOGITS, 2, **options)[1]  # type: ignore[arg-type]
    best = LOGITS.view(50, 8, 4).amax(-1).topk(2, dim=-1).indices
    for row, groups in zip(ids.tolist(), best.tolist(), strict=True):
        assert {expert // 4 for expert in row} <= set(groups)


def always_top2(patch: pytest.MonkeyPatch) -> None:
    sound = routing._limit_to_groups
    patch.setattr(
        routing,
        "_limit_to_groups",
        lambda rank, ranked, options: sound(
            rank, ranked, replace(options, group_score=GroupScore.TOP2)
        ),
    )


def sqrt_of_softplus() -> None:
    weights, ids = mxpert.route_topk(LOGITS, 4, scoring=Scoring.SQRTSOFTPLUS)
    scores = (1 + LOGITS.double().exp()).log().sqrt().gather(1, ids.long())
    error = (weights - scores / scores.sum(-1, keepdim=True)).abs().max()
    assert error < 1e-6, error


def clamped_rows() -> None:
    logits = LOGITS.clone()
    logits[3] = torch.nan
    weights, ids = mxpert.route_topk(logits, 4, clamp_nan=True)
    assert not weights[3].any()
    assert ids[3].tolist() == [0, 1, 2, 3]


def unguarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calls, "isolated", lambda _: contextlib.nullcontext())


def unread(patch: pytest.MonkeyPatch) -> None:
    for module in (grouped_gemm, quantize_dual):
        patch.setattr(module, "refuse_counts", nothing)


def nothing(*_: object) -> None:
    pass


FAULTS = (
    Fault(
        "autocast reaches the kernels",
        unguarded,
        lambda: within(
            torch.autocast("cpu", torch.bfloat16), lambda: layer(out_dtype=torch.float32)
        ),
    ),
    Fault("the matmul precision reaches the kernels", unguarded, precision_inside),
    Fault(
        "a loss in the default dtype",
        lambda patch: patch.setattr(MXMoE, "_balance", balance),
        same_loss,
    ),
    Fault(
        "torch.func gives zeros",
        lambda patch: patch.setattr(library, "refuse_transforms", nothing),
        lambda: refused(lambda: torch.func.grad(lambda x: layer(x).sum())(X)),
    ),
    Fault(
        "exchanged buffers are ignored",
        lambda patch: patch.setattr(PreparedExperts, "_refuse_exchanged_buffers", nothing),
        lambda: refused(
            lambda: torch.func.functional_call(
                PreparedExperts(WEIGHTS, mxpert.SiLU()).eval(),
                {"down_proj_scale": torch.zeros_like(WEIGHTS.down_proj.scale)},
                (X, *ROUTING),
            )
        ),
    ),
    Fault(
        "rows of another width are cut to the experts'",
        lambda patch: patch.setattr(
            PreparedExperts,
            "forward",
            lambda self, x, *routing: layer(x.reshape(-1, H)).view(x.shape),
        ),
        lambda: refused(lambda: experts(X.view(1, 3, 2 * H), *ROUTING)),
    ),
    Fault("rows before the first group are uninitialised", uninitialised, rows_of_no_group),
    Fault(
        "counts are taken for offsets",
        unread,
        lambda: refused(lambda: mxpert.quantize_dual(X, group_offsets=torch.tensor([3, 1, 2]))),
    ),
    *(
        Fault(
            f"{name} makes a finite number of an infinity",
            finite_scale,
            lambda name=name: no_finite_infinity(
                lambda x: mxpert.quantize(x, name).dequantize(torch.float64)
            ),
        )
        for name in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")
    ),
    Fault("rebase makes a finite number of an infinity", saturating, rebased_infinity),
    Fault("mxfp8 makes a finite row of an infinity", finite_block, bad_token("mxfp8")),
    Fault(
        "fp8_token makes a finite row of an infinity", finite_token_scale, bad_token("fp8_token")
    ),
    Fault("groups are scored by their best two", always_top2, best_of_groups),
    Fault(
        "sqrtsoftplus has no square root",
        lambda patch: patch.setattr(
            routing, "_scores", lambda logits, _: torch.nn.functional.softplus(logits)
        ),
        sqrt_of_softplus,
    ),
    Fault(
        "clamp_nan is ignored",
        lambda patch: patch.setattr(
            routing.TOPK,
            "launch",
            lambda problem, *rest, sound=routing.TOPK.launch, **inputs: sound(
                replace(problem, options=replace(problem.options, clamp_nan=False)), *rest, **inputs
            ),
            raising=False,
        ),
        clamped_rows,
    ),
)
