"""Functions that round weights to formats with other scales than powers of two, and from them."""

from __future__ import annotations

from fuzz_arguments import randn
from fuzz_target import Target

from mxpert import formats as mx

ROUNDED = [
    Target(
        "quantize_weight",
        mx.quantize_weight,
        lambda r: dict(weight=randn(r, 2, 3, 64), format=r.choice((mx.NVFP4, "int4_g64"))),
    ),
    Target(
        "round_to_e4m3",
        mx.round_to_e4m3,
        lambda r: dict(t=mx.quantize_weight(randn(r, 2, 3, 64), "nvfp4")),
    ),
]
