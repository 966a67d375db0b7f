"""Measurements of others on an MI355X, and where they are published.

`LADDER`, `TILES` and `SKINNY` calibrate the model: they are AMD's, in ROCm/gfx950-gluon-tutorials.
`REFERENCE` stands beside our modelled kernels: pull requests of the reference systems.
"""

from __future__ import annotations

from dataclasses import dataclass

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

FLYDSL = "FlyDSL, MoE GEMM pull requests"
PRIMUS = "Primus-Turbo, MXFP8 grouped GEMM pull request"
REFERENCE = {
    ("decode", "mxfp4", "down"): ("5.80 TB/s (95.6 µs)", FLYDSL),
    ("decode", "mxfp8", "down"): ("5.5 TB/s (100.7 µs)", FLYDSL),
    ("decode", "bf16", "down"): ("6.0 TB/s (aiter, 92.3 µs)", FLYDSL),
    ("decode", "mxfp4", "gate_up"): ("75–76 % of 8 TB/s (181 µs)", FLYDSL),
    ("decode", "mxfp8", "gate_up"): ("75–76 % of 8 TB/s (182.8 µs)", FLYDSL),
    ("prefill", "mxfp4"): ("MFMA 93.8 % (dense GEMM of AMD)", TUTORIALS),
    ("prefill", "bf16"): ("MFMA 99.84 % (dense fp16 GEMM of AMD)", TUTORIALS),
    ("prefill", "mxfp8"): ("MFMA 96.2–99.8 % (dense bf8 GEMM of AMD)", TUTORIALS),
    ("grouped", "forward", 4096, 7168): ("1327–2360 TFLOP/s", PRIMUS),
    ("grouped", "dgrad", 4096, 7168): ("1224–2165 TFLOP/s", PRIMUS),
    ("grouped", "wgrad", 4096, 7168): ("1708–2211 TFLOP/s", PRIMUS),
    ("grouped", "forward", 7168, 2048): ("918–1695 TFLOP/s", PRIMUS),
    ("grouped", "dgrad", 7168, 2048): ("1315–2279 TFLOP/s", PRIMUS),
    ("grouped", "wgrad", 7168, 2048): ("1717–2139 TFLOP/s", PRIMUS),
    ("grouped", "forward", 5760, 2880): ("1038–1822 TFLOP/s", PRIMUS),
    ("grouped", "dgrad", 5760, 2880): ("1064–2144 TFLOP/s", PRIMUS),
    ("grouped", "wgrad", 5760, 2880): ("1423–1835 TFLOP/s", PRIMUS),
}
"""Whole kernels, measured by their authors."""
