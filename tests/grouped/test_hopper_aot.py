"""The training kernels of the Hopper backend compiled without a GPU: instructions, spills, stores.

The tests record launches on meta tensors with the heuristic's config, specialise them as the JIT
does, and compile them. Formats, spans, dtypes and ops are combined pairwise (`latin`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.core.problem import DualProblem, GemmConfig, GroupedProblem, Op, Target
from mxpert.formats import MXTensor, ScaleRule, ScaleSpan
from mxpert.formats.spec import get_format
from mxpert.routing.plan import padded_capacity
from support.aot import SHARED_MEMORY_LIMIT, TRITON_RELEASE, CompiledKernel, let_specialize
from support.hopper_launches import H200, Launch
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.launches import recorded_launches
from support.pairwise import latin
from support.sass import register_operands, reused_barriers
from support.without_data import empty

KERNEL_OF = kernels_of("hopper")
BLOCK, SPAN128, ROW, AUTO = ScaleSpan.BLOCK, ScaleSpan.SPAN128, ScaleSpan.ROW, ScaleSpan.AUTO
FORMATS = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "mixed": ("mxfp8_e4m3", "mxfp8_e5m2"),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2"),
}
SPANS = {"row": (ROW, ROW), "span128": (SPAN128, ROW), "exact": (BLOCK, BLOCK)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MOST_SPILLS = 4
"""Local-memory instructions allowed with ACCUMULATE into float32, which keeps old and new values in
registers at once. All other variants have none."""

COPIES = {"UTMALDG.2D": 2}
"""TMA loads of a stage: one of each operand."""

PROMOTED_SPILLS = {Op.GROUPED_GEMM: 73} if TRITON_RELEASE >= (3, 9) else {}
"""As measured, where not 0: sums of more than 8192 values."""

MOST_DUAL_SPILLS = {("block", 0, torch.float16): 4} if TRITON_RELEASE >= (3, 9) else {}
"""Of dual quantisation, as measured, where not 0."""

THREADS = 384
"""Threads of two consumer warpgroups and the producer's warpgroup."""
SM_REGISTERS = 65536
FULL_TILE, LAST_COLUMNS = 256, 128
"""Column widths of the two main loops: a full tile, and a last tile with at most 128 columns."""

OPS = (Op.GROUPED_GEMM, Op.GROUPED_WGRAD)
spans = pytest.mark.parametrize("mode", SPANS)
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)


class Sizes(NamedTuple):
    """Rows, groups and both other sizes of a grouped GEMM."""

    m: int = 8192
    groups: int = 8
    n: int = 2880
    k: int = 2880


def operand(fmt: str, span: ScaleSpan, *size: int, axis: int = -1) -> torch.Tensor | MXTensor:
    if fmt == "bf16":
        return empty(*size, dtype=torch.bfloat16)
    scales = list(size)
    scales[axis] //= 32
    wide = empty(1, dtype=torch.int32) if span is AUTO else None
    return MXTensor(
        empty(*size), empty(*scales), get_format(fmt), axis, scale_span=span, wide_blocks=wide
    )


def launches_of(
    op: Op,
    pair: tuple[str, str],
    pair_spans: tuple[ScaleSpan, ScaleSpan],
    out_dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes = Sizes(),
    *,
    accumulate: bool = False,
    config: GemmConfig | None = None,
    trans_b: bool = True,
    target: Target = H200,
) -> list[Launch]:
    """All launches of one grouped GEMM."""
    m, groups, n, k = sizes
    forward = op is Op.GROUPED_GEMM
    length = m if forward else padded_capacity(m, groups)
    b_shape = (groups, n, k) if trans_b else (groups, k, n)
    shapes = ((m, k), b_shape) if forward else ((n, length), (k, length))
    first, second = (
        operand(fmt, span, *shape, axis=axis)
        for fmt, span, shape, axis in zip(
            pair, pair_spans, shapes, (-1, -1 if trans_b else -2), strict=True
        )
    )
    problem = GroupedProblem(
        op,
        target,
        length,
        groups,
        n,
        k,
        *pair,
        forward and trans_b,
        out_dtype,
        accumulate,
        *pair_spans,
    )
    kernel = KERNEL_OF[op]
    assert kernel.unsupported(problem) is None
    offsets = empty(groups + 1, dtype=torch.int32)
    into = empty(groups, n, k, dtype=torch.float32) if accumulate else None
    arguments = (
        {"a": first, "b": second}
        if forward
        else {"grad": first, "a": second, "accumulate_into": into}
    )
    with recorded_launches() as launches:
        kernel.launch(
            problem,
            config or kernel.heuristic(problem),
            INPUTS[problem.op](group_offsets=offsets, **arguments),
        )
    return [Launch(*each) for each in launches]


def gemm(*request: Any, **options: Any) -> Launch:
    """The GEMM launch among `launches_of`, which may also convert operands to bfloat16."""
    (only,) = (each for each in launches_of(*request, **options) if "grouped_gemm" in each.name)
    return only


def dual(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    pair_spans: tuple[ScaleSpan, ScaleSpan],
    groups: int = 0,
    fmt: str = "mxfp8_e4m3",
) -> list[Launch]:
    """All launches of one dual quantisation with `groups` groups of rows (0: no groups)."""
    problem = DualProblem(
        Op.QUANTIZE_DUAL,
        H200,
        shape,
        dtype,
        get_format(fmt),
        ScaleRule.RCEIL,
        groups or (shape[0] if len(shape) == 3 else 0),
        groups > 0,
        *pair_spans,
    )
    kernel = KERNEL_OF[Op.QUANTIZE_DUAL]
    assert kernel.unsupported(problem) is None
    with recorded_launches() as launches:
        kernel.launch(
            problem,
            kernel.heuristic(problem),
            INPUTS[problem.op](
                x=empty(*shape, dtype=dtype),
                group_offsets=empty(groups + 1, dtype=torch.int32) if groups else None,
            ),
        )
    return [Launch(*each) for each in launches]


def multiplications(kernel: CompiledKernel) -> dict[str, int]:
    return {name: count for name, count in kernel.metrics.instructions.items() if "GMMA" in name}


def check_gemm(
    kernel: CompiledKernel, types: str, *, spills: int = 0, copies: dict[str, int] = COPIES
) -> None:
    """Check that operands are loaded by TMA, all wgmma have the given types, and resources fit."""
    metrics = kernel.metrics
    names = multiplications(kernel)
    assert names
    assert all(name.endswith(types) for name in names), names
    assert register_operands(kernel.listing) == 0, "both operands are read from shared memory"
    assert {
        name: count for name, count in metrics.instructions.items() if name.startswith("UTMALDG")
    } == copies
    assert metrics.spills <= spills
    assert metrics.shared_memory <= SHARED_MEMORY_LIMIT["sm_90"] == 227 * 1024
    assert metrics.registers * THREADS <= SM_REGISTERS
    assert not reused_barriers(kernel.listing)
    assert set(metrics.global_stores) == {128}, "ragged rows in whole 16 bytes"


# --- grouped_gemm and grouped_wgrad -------------------------------------------------------------


@pytest.mark.parametrize("op, pair, mode", latin(OPS, FORMATS, ("row", "span128")))
def test_fp8_operands_reach_the_fp8_tensor_core(op: Op, pair: str, mode: str) -> None:
    kernel = gemm(op, FORMATS[pair], SPANS[mode]).compile()
    check_gemm(kernel, "F32." + ".".join(name[-4:].upper() for name in FORMATS[pair]))
    widths = {int(name.split("x")[1]) for name in multiplications(kernel)}
    assert widths == ({FULL_TILE, LAST_COLUMNS} if mode == "row" else {LAST_COLUMNS})


@pytest.mark.parametrize("pair", [*FORMATS, "bf16"])
@ops
def test_exact_operands_are_bfloat16(op: Op, pair: str) -> None:
    """MX values of every format are exact in bfloat16, so one binary serves all of them."""
    if pair == "bf16" and op is Op.GROUPED_WGRAD:
        pytest.skip("has its reduction along the rows: another backend's")
    kernel = gemm(op, FORMATS.get(pair, ("bf16", "bf16")), SPANS["exact"]).compile()
    check_gemm(kernel, "x16.F32.BF16")


@pytest.mark.parametrize("mode, out_dtype, op", latin(SPANS, DTYPES, OPS), ids=str)
def test_results_of_every_type(op: Op, mode: str, out_dtype: torch.dtype) -> None:
    launch = gemm(op, FORMATS["e4m3"], SPANS[mode], out_dtype)
    kernel = launch.compile()
    check_gemm(kernel, "BF16" if mode == "exact" else "E4M3.E4M3")
    assert kernel.metrics.instructions["UTMASTG.2D"] > 0, "full tiles are stored by TMA"


@spans
def test_accumulation_spills_little(mode: str) -> None:
    launch = gemm(Op.GROUPED_WGRAD, FORMATS["e4m3"], SPANS[mode], torch.float32, accumulate=True)
    kernel = launch.compile()
    check_gemm(kernel, "BF16" if mode == "exact" else "E4M3.E4M3", spills=MOST_SPILLS)
    assert kernel.metrics.global_loads[128] == kernel.metrics.global_stores[128]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@ops
def test_long_sums_are_promoted(op: Op, out_dtype: torch.dtype) -> None:
    """Sums of more than 8192 values are promoted to float32 every 256: more wgmma, few spills."""
    short = gemm(op, FORMATS["e4m3"], SPANS["row"], out_dtype)
    sizes = Sizes(k=8448) if op is Op.GROUPED_GEMM else Sizes(m=8448 * 8)
    long = gemm(op, FORMATS["e4m3"], SPANS["row"], out_dtype, sizes)
    assert short.binary != long.binary
    kernel = long.compile()
    check_gemm(kernel, "E4M3.E4M3", spills=PROMOTED_SPILLS.get(op, 0))
    assert {int(name.split("x")[1]) for name in multiplications(kernel)} == {LAST_COLUMNS}


@spans
@ops
def test_every_config_compiles(op: Op, mode: str) -> None:
    """The tuner may choose any config; the heuristic's is one of them."""
    problem = GroupedProblem(
        op,
        H200,
        8192,
        8,
        2880,
        2880,
        *FORMATS["e4m3"],
        op is Op.GROUPED_GEMM,
        torch.bfloat16,
        False,
        *SPANS[mode],
    )
    configs = list(KERNEL_OF[op].configs(problem))
    assert KERNEL_OF[op].heuristic(problem) in configs
    assert len(set(configs)) == len(configs) > 1
    for config in configs:
        check_gemm(
            gemm(op, FORMATS["e4m3"], SPANS[mode], config=config).compile(),
            "BF16" if mode == "exact" else "E4M3.E4M3",
        )


def test_what_is_refused() -> None:
    """The backend refuses these problems with a reason."""
    problem = GroupedProblem(
        Op.GROUPED_GEMM, H200, 64, 2, 64, 64, "bf16", "bf16", True, torch.bfloat16
    )
    wgrad = replace(problem, op=Op.GROUPED_WGRAD, trans_b=False)
    for bad, reason in (
        (replace(problem, target=replace(H200, arch="sm_80")), "sm_90"),
        (replace(problem, out_dtype=torch.float64), "float64"),
        (replace(problem, n=36), "36 columns"),
        (replace(problem, k=36), "K = 36"),
        (wgrad, "contiguous"),
    ):
        said = KERNEL_OF[bad.op].unsupported(bad)
        assert said is not None
        assert reason in said
    assert KERNEL_OF[Op.GROUPED_GEMM].unsupported(problem) is None


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", [*FORMATS, "bf16"])
def test_b_that_is_not_transposed(pair: str, out_dtype: torch.dtype) -> None:
    """TMA reads [G, K, N] in copies of 64 columns, and the tensor core transposes it."""
    launch = gemm(
        Op.GROUPED_GEMM,
        FORMATS.get(pair, ("bf16", "bf16")),
        SPANS["exact"],
        out_dtype,
        trans_b=False,
    )
    kernel = launch.compile()
    check_gemm(kernel, "x16.F32.BF16", copies={"UTMALDG.2D": 1, "UTMALDG.3D": 4})
    assert kernel.count(r"\bHGMMA\S* .*\.tnspB") == kernel.count(r"\bHGMMA") > 0


WITH_AUTO = {"auto": (AUTO, AUTO), "row-auto": (ROW, AUTO), "auto-row": (AUTO, ROW)}


@pytest.mark.parametrize(
    "result, mode, pair", latin(("gemm", "wgrad", "wgrad_into"), WITH_AUTO, ("e4m3", "hybrid"))
)
def test_auto_has_an_fp8_and_a_bf16_gemm(result: str, mode: str, pair: str) -> None:
    """Both GEMMs are this backend's: the portable kernel is not used for wide data."""
    op = Op.GROUPED_GEMM if result == "gemm" else Op.GROUPED_WGRAD
    accumulate = result == "wgrad_into"
    dtype = torch.float32 if accumulate else torch.bfloat16
    request: tuple[Any, ...] = (op, FORMATS[pair], WITH_AUTO[mode], dtype)
    launches = [
        launch
        for launch in launches_of(*request, accumulate=accumulate)
        if "padded_offsets" not in launch.name
    ]
    assert [launch.name for launch in launches] == [
        "_grouped_gemm_hopper_kernel",
        "_grouped_decode_if_wide_kernel",
        "_grouped_gemm_hopper_kernel",
    ]
    narrow, decode, wide = launches
    assert [narrow.arguments["IF_WIDE"], wide.arguments["IF_WIDE"]] == [False, True]
    for name in ("a_wide", "b_wide"):
        assert narrow.arguments[name] is wide.arguments[name]
    check_gemm(
        narrow.compile(),
        "F32." + ".".join(name[-4:].upper() for name in FORMATS[pair]),
        spills=MOST_SPILLS * accumulate,
    )
    check_gemm(wide.compile(), "x16.F32.BF16", spills=MOST_SPILLS * accumulate)
    metrics = decode.compile().metrics
    assert metrics.spills == metrics.scratch == 0
    assert metrics.global_stores.keys() == {128}
    assert metrics.global_loads.keys() <= {8, 32, 128}, "scales are bytes, counts words"


# --- quantize_dual ------------------------------------------------------------------------------

DUAL_SPANS = {
    "block": (BLOCK, BLOCK),
    "span128": (SPAN128, SPAN128),
    "row": (ROW, ROW),
    "span128-row": (SPAN128, ROW),
    "block-row": (BLOCK, ROW),
}


@pytest.mark.parametrize(
    "mode, groups, dtype", latin(DUAL_SPANS, (0, 8, 1024), DTYPES, shift=1), ids=str
)
def test_dual(mode: str, groups: int, dtype: torch.dtype) -> None:
    """Values are loaded by TMA, codes stored in 16 bytes, nothing spills."""
    launches = dual((8192, 2880), dtype, DUAL_SPANS[mode], groups)
    passes = [launch for launch in launches if "quantize_dual" in launch.name]
    assert len(passes) == (1 if mode == "block" else 2), "a pass for the scales of long spans"
    for launch in launches:
        metrics = launch.compile().metrics
        most = MOST_DUAL_SPILLS.get((mode, groups, dtype), 0)
        assert metrics.spills <= most, launch.name
        assert metrics.scratch <= 2 * most, launch.name
        tile = 128 * 128 * dtype.itemsize if "quantize_dual" in launch.name else 0
        assert metrics.shared_memory <= tile + 1024
    stages = dtype.itemsize  # of 128 bytes in 128 columns
    for launch in passes:
        kernel = launch.compile()
        metrics = kernel.metrics
        assert not reused_barriers(kernel.listing)
        assert metrics.instructions["UTMALDG.2D"] == stages * (4 if groups else 1)
        assert metrics.global_loads.keys() <= {16, 32}, "scales and the table alone"
        assert metrics.registers <= 128, "four CTAs of four warps a multiprocessor"
        codes = metrics.global_stores.get(128, 0)
        assert codes == (16 // stages if launch.arguments["ENCODE"] else 0), "one stage's"
        assert metrics.global_stores.keys() <= {16, 32, 128}
        shuffles = sum(n for name, n in metrics.instructions.items() if name.startswith("SHFL"))
        assert shuffles <= 10, "one a maximum, and one a row for its word of scales"


WEIGHTS = ((8, 2880, 2880), (3, 96, 736), (32, 32))


@pytest.mark.parametrize(
    "shape, mode, fmt", latin(WEIGHTS, DUAL_SPANS, ("mxfp8_e4m3", "mxfp8_e5m2")), ids=str
)
def test_dual_of_weights(shape: tuple[int, ...], mode: str, fmt: str) -> None:
    for launch in dual(shape, torch.bfloat16, DUAL_SPANS[mode], fmt=fmt):
        metrics = launch.compile().metrics
        assert metrics.spills == 0, launch.name
        if "quantize_dual" in launch.name:
            assert metrics.instructions["UTMALDG.2D"] == 2
            conversion = fmt[-4:] if launch.arguments["ENCODE"] else "no codes"
            found = launch.compile().count(rf"cvt\.rn\.satfinite\.{conversion}x2\.f32", "ptx")
            assert bool(found) == launch.arguments["ENCODE"]


# --- binaries -----------------------------------------------------------------------------------

SHAPES = (
    Sizes(8192, 8, 2880, 2880),
    Sizes(1, 1, 32, 32),
    Sizes(777, 3, 5760, 2880),
    Sizes(8192, 16, 4096, 7168),
    Sizes(65536, 32, 7168, 2048),
    Sizes(300, 2, 2048, 1536),
    Sizes(31, 5, 1408, 2048),
    Sizes(4096, 8, 3072, 5120),
    Sizes(129, 128, 5120, 1536),
    Sizes(2048, 1, 736, 1056),
    Sizes(64, 7, 8, 160),
    Sizes(9999, 3, 352, 416),
)

MOST_DUAL_BINARIES = {
    "_quantize_dual_hopper_kernel": 9,
    "_block_table_kernel": 6,
    "_spread_scales_kernel": 8,
}
"""Largest number of binaries of each kernel. They differ by the number of scales of a row and of a
column per store (1, 2 or 4), by the groups rounded up to a power of two (32 … 1024), and by four
step widths, with or without groups."""


@pytest.mark.parametrize("mode", [*SPANS, "auto", "not_transposed"])
@ops
def test_one_binary_serves_all_shapes(op: Op, mode: str) -> None:
    """Rows, groups, N and K are run-time values: nothing recompiles from step to step."""
    if mode == "not_transposed" and op is Op.GROUPED_WGRAD:
        pytest.skip("both operands of wgrad have one order")
    seen: dict[tuple[str, bool], dict[str, Sizes]] = {}
    for sizes in SHAPES:
        for launch in launches_of(
            op,
            FORMATS["e4m3"],
            SPANS.get(mode, (AUTO, AUTO)),
            sizes=sizes,
            trans_b=mode != "not_transposed",
        ):
            if "grouped" in launch.name:
                key = launch.name, launch.arguments.get("IF_WIDE", False)
                seen.setdefault(key, {}).setdefault(launch.binary, sizes)
    assert len(seen) == (3 if mode == "auto" else 1)
    for users in seen.values():
        assert len(users) == 1, f"several binaries, the first user of each: {list(users.values())}"


@pytest.mark.parametrize("mode", DUAL_SPANS)
def test_few_binaries_quantise_all_shapes(mode: str) -> None:
    seen: dict[tuple[str, ...], set[str]] = {}
    for m, groups, _, k in SHAPES:
        for launch in dual((m, k), torch.bfloat16, DUAL_SPANS[mode], groups):
            parts = [
                str(launch.arguments[key])
                for key in ("CHOOSE", "ENCODE", "ROW_WHOLE")
                if key in launch.arguments
            ]
            seen.setdefault((launch.name, *parts), set()).add(launch.binary)
    counts = {key: len(binaries) for key, binaries in seen.items()}
    assert all(count <= MOST_DUAL_BINARIES[key[0]] for key, count in counts.items()), counts


@pytest.mark.parametrize("mode", ["row", "span128"])
def test_changing_rows_keep_the_binaries(mode: str) -> None:
    """Only the number of rows changes between training steps: one binary of each kernel."""
    seen: dict[tuple[object, ...], set[str]] = {}
    for rows in (1, 31, 777, 8191, 8192):
        for place, launch in enumerate(dual((rows, 2880), torch.bfloat16, DUAL_SPANS[mode], 8)):
            seen.setdefault((place, launch.name), set()).add(launch.binary)
    counts = {key: len(binaries) for key, binaries in seen.items()}
    assert max(counts.values()) <= 4, counts  # 1, 2 or 4 scales of a column in a store; widths


def test_a_specialised_argument_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: if num_n is specialised, multiples of 16 have their own binary."""
    found = set()
    for n in (2880, 2888):
        launch = gemm(Op.GROUPED_GEMM, FORMATS["e4m3"], SPANS["row"], sizes=Sizes(n=n))
        let_specialize(monkeypatch, launch.kernel, "num_n")
        found.add(launch.binary)
    assert len(found) == 2
