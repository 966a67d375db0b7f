"""Measurements of others on an MI355X, and where they are published.

`LADDER`, `TILES` and `SKINNY` calibrate the model, and `SUSTAINED` bounds it: they are AMD's, in
ROCm/gfx950-gluon-tutorials and its article. `STAGES` stand beside our modelled kernels: pull
requests of the reference systems, each figure with the shape that it was measured on. Those of
grouped GEMMs are in `grouped/published.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mxpert.testing.problems import MoEShape

TUTORIALS = "ROCm/gfx950-gluon-tutorials"


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder and its measured MFMA efficiency in the hot loop.

    Args:
        folder: of its matmul_kernel.py below kernels/. bits: of an element.
        percent: measured. source: page with the figure, below the repository.
        waves: of a workgroup.
    """

    name: str
    folder: str
    bits: int
    percent: float
    source: str
    waves: int = 4


_INTRA, _INTER = "gemm/intra_wave/a16w16", "gemm/inter_wave"
LADDER = (
    Rung("fp16 v0, 4 waves", f"{_INTRA}/v0_naive", 16, 25.0, f"{_INTRA}/README.md"),
    Rung("fp16 v3, 4 waves", f"{_INTRA}/v3_lds", 16, 41.66, f"{_INTRA}/v3_lds/README.md"),
    Rung(
        "fp16 v4, 4 waves",
        f"{_INTRA}/v4_global_prefetch",
        16,
        51.87,
        f"{_INTRA}/v4_global_prefetch/README.md",
    ),
    Rung(
        "fp16 v5, 4 waves",
        f"{_INTRA}/v5_local_prefetch",
        16,
        57.67,
        f"{_INTRA}/v5_local_prefetch/README.md",
    ),
    Rung("fp16 v8, 4 waves", f"{_INTRA}/v8_sliceMN", 16, 68.92, "gemm/a16w16/report.md"),
    Rung("fp16, 8 waves", f"{_INTER}/a16w16", 16, 99.84, f"{_INTER}/README.md", 8),
    Rung("bf8, 8 waves", f"{_INTER}/a8w8", 8, 96.22, f"{_INTER}/README.md", 8),
    Rung("mxfp4 v2, 8 waves", f"{_INTER}/a4w4/v2_mfma32x32x64", 4, 93.8, f"{_INTER}/README.md", 8),
)
"""Kernels that Triton 3.9 compiles without AMD's plugins, and without spills."""

TILES = {
    (256, 256): 96.0,
    (256, 128): 83.0,
    (128, 256): 84.0,
    (128, 128): 69.0,
    (256, 64): 55.0,
    (64, 256): 57.0,
    (128, 64): 47.0,
    (64, 128): 47.0,
}
"""(rows, columns) of the fp16 v9 kernel's tile → percent of MFMA efficiency
(docs/tcp_bound_tile_model.md, section 3)."""

SKINNY_FOLDER = "memory_bound/gemm"
SKINNY = {
    32: 1529.0,
    64: 2864.0,
    96: 4067.0,
    128: 4580.0,
    160: 4828.0,
    192: 5628.0,
    224: 6198.0,
    256: 6442.0,
}
"""Workgroups, one a compute unit → GB/s of weights (kernels/memory_bound/gemm/README.md)."""

PEAK_TFLOPS = {"bf16": 2517.0, "fp8": 5033.0, "fp4": 10066.0}
"""256 compute units × 4 matrix cores × 2.4 GHz × (16 × 16 × 128 × 2 / 64, 32 or 16)."""

SUSTAINED = {"bf16": (1489.0, 98.75), "fp8": (3257.0, 99.72), "fp4": (5255.0, 92.41)}
"""Operands of MFMA → TFLOP/s and MFMA efficiency of AMD's best dense GEMM of 4096 × 4096
(rocm.blogs.amd.com, "gluon-gemm-tutorial").

The matrix cores are busy for 92 to 99.7 % of the cycles, and still deliver 0.52 to 0.65 of
`PEAK_TFLOPS`: under this load the chip is at its power limit, 1.4 kW, and lowers its clock."""

BOARD_WATTS = 1400
"""Power limit of an MI355X (AMD's data sheet)."""


@dataclass(frozen=True)
class PublishedStage:
    """One stage of an MoE layer with MXFP4 weights, on an MI355X.

    Args:
        source: the pull request. model: its name for the shape.
        stage: "gate_up" or "down". activation_format: of the layer.
        us: microseconds; None where our copy of the source has no time for the shape.
        ratio: what it says instead, or beside the time.
        sums: whether the kernel adds up the rows of each token (atomic stores), too, or may.
        whose: whose kernel was timed.
    """

    source: str
    model: str
    shape: MoEShape
    tokens: int
    activation_format: str
    stage: str
    us: float | None
    ratio: str = ""
    sums: bool = False
    whose: str = "FlyDSL"


GPT_OSS = MoEShape(2880, 2880, 128, 4)
"""Stored as 3072 × 3072 by FlyDSL, which skips the padding.

Its text confirms the sizes. 126 experts, as many as 512 random ids name of 128, have 554 MB of
down_proj: 95.6 µs are 5.80 TB/s, as it says. With 3072 × 3072, 181 µs for gate_up would be 7.0
TB/s, not "75–76 % of gfx950 peak HBM"."""
GPT_OSS_PADDED = MoEShape(3072, 3072, 128, 4)
DEEPSEEK_V3_TP4 = MoEShape(7168, 512, 257, 9)
"""With the shared expert: E257 in the text. It names only "t8192/7168,512" beside the times."""
EP_K6 = MoEShape(5120, 1536, 64, 6)
"""The text names only "t16384/5120,1536"; 64 experts and top 6 are those of FlyDSL's tests."""
KIMI_K25 = MoEShape(7168, 512, 385, 9)
DEEPSEEK_R1 = MoEShape(7168, 1024, 384, 8)

_OSS = ("#753", "gpt-oss-120b", GPT_OSS)
_DSV3 = ("#753", "deepseek-v3 TP4", DEEPSEEK_V3_TP4, 8192)
_EP = ("#753", "EP-K6", EP_K6, 16384)
_SLOWER, _CK = "slower than CK Tile", "4–30 % faster than CK Tile"
STAGES = (
    PublishedStage(*_OSS, 128, "mxfp4", "gate_up", 181.0),
    PublishedStage(*_OSS, 128, "mxfp8", "gate_up", 182.8),
    PublishedStage(*_OSS, 128, "bf16", "gate_up", 181.4, whose="aiter (CK Tile)"),
    PublishedStage(*_OSS, 128, "mxfp4", "down", 95.6),
    PublishedStage(*_OSS, 128, "mxfp8", "down", 100.7),
    PublishedStage(*_OSS, 128, "bf16", "down", 92.3, sums=True, whose="aiter (CK Tile)"),
    PublishedStage(*_OSS, 1024, "mxfp4", "gate_up", 192.0),
    PublishedStage(*_OSS, 2048, "mxfp4", "gate_up", 236.0),
    PublishedStage(*_OSS, 4096, "mxfp4", "gate_up", 309.0),
    PublishedStage(*_DSV3, "mxfp4", "gate_up", 736.0),
    PublishedStage(*_DSV3, "mxfp8", "gate_up", 870.0),
    PublishedStage(*_DSV3, "mxfp4", "down", 901.0, sums=True),
    PublishedStage(*_DSV3, "mxfp8", "down", 905.0, sums=True),
    PublishedStage(*_EP, "mxfp4", "gate_up", 2527.0),
    PublishedStage(*_EP, "mxfp8", "gate_up", 2643.0),
    PublishedStage(*_EP, "mxfp4", "down", 994.0, sums=True),
    PublishedStage(*_EP, "mxfp8", "down", 1070.0, sums=True),
    *(
        PublishedStage("#431", "gpt-oss padded", GPT_OSS_PADDED, t, "bf16", "down", None, text)
        for t, text in ((1, _SLOWER), (4, _SLOWER), (8, _CK))
    ),
    *(
        PublishedStage("#431", "deepseek-r1", DEEPSEEK_R1, t, "bf16", "down", None, text)
        for t, text in ((1, _SLOWER), (8, "1–21 % faster than CK Tile"))
    ),
    *(
        PublishedStage(
            "#660", "kimi-k2.5", KIMI_K25, t, "mxfp4", "down", None, f"{text} of HIP", sums=True
        )
        for t, text in (
            (4, "0.92×"),
            (16, "0.92×"),
            (32, "0.95×"),
            (64, "0.87–1.00×"),
            (256, "0.87–1.00×"),
            (16384, "0.87–1.00×"),
        )
    ),
)
"""Each shape of FlyDSL's pull requests 753, 431 and 660 whose sizes their text gives. Where several
times are given for one shape, the last that its authors keep as a result. Times of T = 1024 to 4096
name no format; those of T = 128 beside them are a4w4. The tables of 431 and 660 were not at hand,
only their ratios."""
