"""quantize_dual bit for bit, offsets, argument checks, and the ops as torch.library ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.configs import GemmConfig, MoEConfig
from mxpert.core import registry
from mxpert.core.describe import describe
from mxpert.core.problem import Op
from mxpert.core.schema import Operand, kind_of
from mxpert.formats.tensor import Layout
from mxpert.routing.plan import group_bounds
from mxpert.testing.numerics import assert_exact
from mxpert.testing.validate import validate_group_offsets
from mxpert.training import grouped_linear
from tests.grouped.oracle import GROUPS, Groups

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2")
K, N = 96, 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- quantize_dual ------------------------------------------------------------------------------


def test_special_values_stay_in_their_blocks():
    x = normal(64, 64)
    x[3, 40], x[50, 7] = torch.nan, torch.inf
    row, col = mxpert.quantize_dual(x, group_offsets=Groups((40, 24)).offsets(torch.int64))
    assert (row.scale == 255).nonzero().tolist() == [[3, 1], [50, 0]]
    # Row 50 is row 10 of the group at column 64.
    assert (col.scale == 255).nonzero().tolist() == [[7, 2], [40, 0]]


# --- offsets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    "groups", [*GROUPS.values(), Groups((33,) * 9)], ids=[*GROUPS, "most-padding"]
)
def test_padded_offsets(groups, dtype):
    offsets = groups.offsets(dtype)
    have = mxpert.padded_group_offsets(offsets)
    assert have.dtype is torch.int32
    want = [0]
    for size in groups.sizes:
        want.append(want[-1] + (size + 31) // 32 * 32)
    assert have.tolist() == want
    assert want[-1] <= mxpert.padded_capacity(groups.rows, len(groups.sizes))
    assert group_bounds(offsets, groups.rows).tolist() == groups.starts
    validate_group_offsets(offsets, groups.rows)


BAD_OFFSETS = {
    "first-not-0": [2, 5, 9],
    "negative": [0, -4, 9],
    "decreasing": [0, 8, 3],
    "beyond-the-rows": [0, 4, 1 << 40],
}


@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
def test_bad_offsets_are_named_and_harmless(offsets):
    """Only offsets that decrease are refused: other results mean little, but nothing outside is
    touched."""
    decreasing = offsets != sorted(offsets)
    offsets = torch.tensor(offsets)
    with pytest.raises(ValueError, match=r"validate_group_offsets: group_offsets\[\d\] — need"):
        validate_group_offsets(offsets, 10)
    bounds = group_bounds(offsets, 10)
    assert bounds.diff().ge(0).all()
    assert bounds.max() <= 10
    assert int(mxpert.padded_group_offsets(bounds)[-1]) <= mxpert.padded_capacity(10, 2)
    x = normal(10, K)
    if decreasing:
        with pytest.raises(ValueError, match="need offsets that do not decrease"):
            mxpert.quantize_dual(x, group_offsets=offsets)
        offsets = bounds
    row, col = mxpert.quantize_dual(x, group_offsets=offsets)
    weight_row, _ = mxpert.quantize_dual(normal(2, N, K))
    assert mxpert.grouped_gemm(row, weight_row, offsets).isfinite().all()
    assert mxpert.grouped_wgrad(col, col, offsets).isfinite().all()


COUNTS = torch.tensor([4, 2, 4])
A, B = normal(10, 32).bfloat16(), normal(3, 32, 32).bfloat16()


@pytest.mark.parametrize(
    "call",
    [
        lambda: mxpert.quantize_dual(normal(10, 32), group_offsets=COUNTS),
        lambda: mxpert.grouped_gemm(A, B, COUNTS),
        lambda: mxpert.grouped_gemm(A, B, COUNTS.sort().values),
        lambda: mxpert.grouped_wgrad(A, A, COUNTS),
        lambda: mxpert.grouped_wgrad(
            A, A, COUNTS.sort().values, accumulate_into=torch.zeros(3, 32, 32)
        ),
        lambda: grouped_linear(A, B, COUNTS.sort().values),
    ],
    ids=["dual", "gemm", "gemm-by-shape", "wgrad", "wgrad-by-shape", "linear"],
)
def test_counts_are_refused_with_the_remedy(call):
    with pytest.raises(ValueError, match=r"counts become offsets by .*cumsum") as caught:
        call()
    remedy = str(caught.value).rpartition("offsets by ")[2]
    made = eval(remedy, {"torch": torch, "counts": COUNTS})
    assert made.tolist() == [0, 4, 6, 10]
    mxpert.grouped_gemm(A, B, made)


# --- checks -------------------------------------------------------------------------------------


GROUPED = GROUPS["mixed"]
OFFSETS = GROUPED.offsets()
G, M = len(GROUPED.sizes), GROUPED.rows
X, W, DOUT = normal(M, K), normal(G, N, K, seed=1), normal(M, N, seed=2)
ROW, COL = mxpert.quantize_dual(X, group_offsets=OFFSETS)
W_ROW, W_COL = mxpert.quantize_dual(W)
GRAD_ROW, GRAD_COL = mxpert.quantize_dual(DOUT, group_offsets=OFFSETS)
FP4 = mxpert.quantize(X, "mxfp4")
PREPARED = replace(
    ROW,
    layout=Layout.HOPPER_FRAGMENT,
    logical_shape=tuple(ROW.shape),
    reference=torch.full(ROW.shape[:1], 127, dtype=torch.uint8),
)
META_OFFSETS = OFFSETS.to("meta")
dual, gemm, wgrad = mxpert.quantize_dual, mxpert.grouped_gemm, mxpert.grouped_wgrad

ERRORS = [
    (dual, (X.int(),), {}, "x.dtype — need float32"),
    (dual, (X.tolist(),), {}, "x — need a torch.Tensor"),
    (dual, (X[0],), {}, "x.dim() — need 2"),
    (dual, (X[:, :33],), {"group_offsets": OFFSETS}, "x.shape[-1] — need a multiple of 32"),
    (dual, (X[:33],), {}, "x.shape[-2] — need a multiple of 32, got 33; pad with zeros, or pass"),
    (dual, (X, "mxfp4"), {"group_offsets": OFFSETS}, "format — need mxfp8"),
    (dual, (X, "fp8"), {"group_offsets": OFFSETS}, "format — need one of"),
    (dual, (X,), {"group_offsets": OFFSETS, "scale_rule": "up"}, "scale_rule — need"),
    (dual, (W,), {"group_offsets": OFFSETS}, "group_offsets — need None for weights"),
    (dual, (X,), {"group_offsets": OFFSETS.float()}, "group_offsets.dtype — need int32 or int64"),
    (dual, (X,), {"group_offsets": OFFSETS[:1]}, "group_offsets.shape — need [G + 1], one group"),
    (dual, (X,), {"group_offsets": OFFSETS[None]}, "group_offsets.shape — need [*]"),
    (dual, (X,), {"group_offsets": META_OFFSETS}, "group_offsets.device — need cpu"),
    (dual, (X,), {"group_offsets": OFFSETS[::2]}, "group_offsets — need a contiguous tensor"),
    (
        dual,
        (torch.empty(1 << 30, 32, device="meta"),),
        {"group_offsets": META_OFFSETS},
        "rows — need at most 1073741824",
    ),
    (gemm, (X, W.bfloat16(), OFFSETS), {}, "a.dtype — need bfloat16"),
    (gemm, (ROW, W.bfloat16(), OFFSETS), {}, "b — need an MXTensor as a, got bfloat16"),
    (gemm, (X.bfloat16(), W_ROW, OFFSETS), {}, "b — need bfloat16 as a, got an MXTensor"),
    (gemm, (FP4, W_ROW, OFFSETS), {}, "a.format — need mxfp8"),
    (gemm, (PREPARED, W_ROW, OFFSETS), {}, "a.layout — need"),
    (gemm, (mxpert.quantize(X[:32], "mxfp8", axis=0), W_ROW, OFFSETS), {}, "a.axis — need -1"),
    (gemm, (ROW, W_ROW, OFFSETS), {"trans_b": False}, "b.axis — need -2, got -1"),
    (gemm, (ROW, W_ROW[0], OFFSETS), {}, "b.dim() — need 3"),
    (gemm, (ROW, W_COL, OFFSETS), {}, "b.shape — need K = 96 as in a"),
    (gemm, (ROW, W_ROW, OFFSETS[:-1].clone()), {}, "group_offsets.shape — need [G + 1] = [8]"),
    (gemm, (ROW, W_ROW, OFFSETS), {"out_dtype": torch.int32}, "out_dtype — need"),
    (gemm, (ROW, W_ROW, OFFSETS), {"trans_b": 1}, "trans_b — need a bool"),
    (gemm, (ROW, W_ROW.to("meta"), OFFSETS), {}, "b.device — need cpu"),
    (wgrad, (DOUT.bfloat16(), X[1:].bfloat16(), OFFSETS), {}, f"a.shape[0] — need {M}"),
    (wgrad, (GRAD_COL, ROW, OFFSETS), {}, "a.shape[1] — need"),
    (wgrad, (GRAD_COL, X.bfloat16(), OFFSETS), {}, "a — need an MXTensor as grad"),
    (wgrad, (GRAD_ROW, GRAD_ROW, OFFSETS), {}, "grad.shape[1] — need padded_capacity(M, G)"),
    (
        wgrad,
        (GRAD_COL, COL, OFFSETS),
        {"accumulate_into": torch.zeros(G, N, K).bfloat16()},
        "accumulate_into.dtype — need float32",
    ),
    (
        wgrad,
        (GRAD_COL, COL, OFFSETS),
        {"accumulate_into": torch.zeros(G, K, N)},
        f"accumulate_into.shape — need [{G}, {N}, {K}]",
    ),
    (wgrad, (GRAD_COL, COL, OFFSETS), {"out_dtype": torch.uint8}, "out_dtype — need"),
]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "text"),
    ERRORS,
    ids=[f"{op.__name__}-{text.split(' — ')[0]}-{i}" for i, (op, _, _, text) in enumerate(ERRORS)],
)
def test_bad_input_is_named(op, args, kwargs, text):
    with pytest.raises((TypeError, ValueError)) as error:
        op(*args, **kwargs)
    assert text in str(error.value)
    assert str(error.value).startswith(op.__name__)


# --- dispatch and torch.library -----------------------------------------------------------------


def test_problems_describe_the_arguments():
    problem = describe(dual, X, group_offsets=OFFSETS)
    assert (problem.op, problem.shape, problem.num_groups, problem.grouped_rows) == (
        Op.QUANTIZE_DUAL,
        (M, K),
        G,
        True,
    )
    weights = describe(dual, W, "mxfp8_e5m2")
    assert (weights.num_groups, weights.grouped_rows) == (G, False)
    assert describe(dual, X[:32]).num_groups == 0
    forward = describe(gemm, ROW, W_ROW, OFFSETS)
    assert (forward.num_rows, forward.num_groups, forward.n, forward.k, forward.trans_b) == (
        M,
        G,
        N,
        K,
        True,
    )
    assert forward.formats == "mxfp8_e4m3xmxfp8_e4m3"
    dgrad = describe(gemm, DOUT.bfloat16(), W.bfloat16(), OFFSETS, trans_b=False)
    assert (dgrad.n, dgrad.k, dgrad.formats) == (K, N, "bf16xbf16")
    for grad, a, rows in ((GRAD_COL, COL, COL.shape[1]), (DOUT.bfloat16(), X.bfloat16(), M)):
        problem = describe(wgrad, grad, a, OFFSETS, accumulate_into=torch.zeros(G, N, K))
        assert (problem.num_rows, problem.n, problem.k, problem.accumulate, problem.out_dtype) == (
            rows,
            N,
            K,
            True,
            torch.float32,
        )
    assert {hash(p) for p in (weights, forward, dgrad, problem)}  # hashable: they key caches


def test_explain_names_the_backend():
    for explanation in (
        mxpert.explain(dual, X, group_offsets=OFFSETS),
        mxpert.explain(gemm, ROW, W_ROW, OFFSETS),
        mxpert.explain(wgrad, GRAD_COL, COL, OFFSETS, out_dtype=torch.float32),
    ):
        assert explanation.resolution.kernel.backend == "reference"
        assert explanation.problem.op.value in str(explanation)


def test_a_pinned_tile_reaches_a_grouped_gemm_alone():
    tile = GemmConfig(64, 64, 64)
    problem = describe(gemm, ROW, W_ROW, OFFSETS)
    assert registry._stage_config(problem, tile) is tile
    assert registry._stage_config(problem, MoEConfig(64, tile, tile)) is None
    assert registry._stage_config(describe(dual, W), tile) is None


@pytest.mark.parametrize(
    ("x", "offsets"),
    [(X, OFFSETS), (X[:0], OFFSETS), (X[:64], None), (W, None)],
    ids=["groups", "groups-of-no-rows", "matrix", "weights"],
)
@pytest.mark.parametrize("seed", [None, torch.tensor([3])], ids=["nearest", "stochastic"])
def test_quantize_dual_opcheck(x, offsets, seed):
    arguments = ("rceil", "mxfp8_e4m3", ["auto", "span128"], x, offsets, seed)
    torch.library.opcheck(torch.ops.mxpert.quantize_dual, arguments)


@pytest.mark.parametrize(
    ("a", "b", "grad", "columns"),
    [(ROW, W_ROW, GRAD_COL, COL), (X.bfloat16(), W.bfloat16(), DOUT.bfloat16(), X.bfloat16())],
    ids=["mxfp8", "bf16"],
)
def test_gemm_opcheck(a, b, grad, columns):
    ops = torch.ops.mxpert
    flat = kind_of(Operand).flatten
    torch.library.opcheck(
        ops.grouped_gemm, (torch.float16, True, None, *flat(a), *flat(b), OFFSETS)
    )
    operands = (torch.bfloat16, None, *flat(grad), *flat(columns), OFFSETS)
    torch.library.opcheck(ops.grouped_wgrad, (*operands, None))
    torch.library.opcheck(ops.grouped_wgrad_accumulate, (*operands, torch.ones(G, N, K)))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_training_step_compiles_into_one_graph(dynamic):
    def step(x, w, grad, offsets, total):
        row, col = dual(x, group_offsets=offsets)
        w_row, w_col = dual(w)
        grad_row, grad_col = dual(grad, "mxfp8_e5m2", group_offsets=offsets)
        wgrad(grad_col, col, offsets, accumulate_into=total)
        plain = wgrad(grad.bfloat16(), x.bfloat16(), offsets)
        return (
            gemm(row, w_row, offsets),
            gemm(grad_row, w_col, offsets),
            total,
            plain,
            gemm(grad.bfloat16(), w.bfloat16(), offsets, trans_b=False),
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tail in (0, 5):
        x, grad = X[: M - tail], DOUT[: M - tail]
        totals = torch.ones(2, G, N, K)
        have = compiled(x, W, grad, OFFSETS, totals[0])
        for i, want in enumerate(step(x, W, grad, OFFSETS, totals[1])):
            assert_exact(have[i], want, f"output {i}")
        assert totals[0].ne(1).any()


def test_fake_tensors_carry_shapes_and_dtypes():
    with torch._subclasses.FakeTensorMode():
        offsets = torch.empty(G + 1, dtype=torch.int32)
        row, col = dual(torch.empty(M, K), group_offsets=offsets)
        w_row, w_col = dual(torch.empty(G, N, K))
        out = gemm(row, w_row, offsets, out_dtype=torch.float32)
        dw = wgrad(col, col, offsets)
    assert (row.shape, col.shape, w_col.shape) == (ROW.shape, COL.shape, W_COL.shape)
    assert (out.shape, out.dtype) == ((M, N), torch.float32)
    assert (dw.shape, dw.dtype) == ((G, K, K), torch.bfloat16)
