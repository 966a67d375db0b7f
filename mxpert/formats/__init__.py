"""Microscaling formats, NVFP4 and INT4: descriptors, tensors, exact codecs, the FP4-to-FP8 fold."""

from __future__ import annotations

from .codec import (
    block_scale,
    decode,
    decode_scale,
    dequantize_blocks,
    encode,
    pack_codes,
    quantize_blocks,
    unpack_codes,
)
from .folding import FoldCertificate, fold, fold_certificate, unfold
from .spans import count_wide_blocks, quantize_spans, rebase
from .spec import (
    E2M1,
    E4M3,
    E5M2,
    E8M0_BIAS,
    E8M0_MAX,
    E8M0_NAN,
    FORMATS,
    MX_BLOCK_SIZE,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    ElementFormat,
    MXFormat,
    ScaleRule,
    ScaleSpan,
    get_format,
)
from .tensor import Layout, MXTensor
from .token import FP8_TOKEN, TokenRows, quantize_token_rows
from .weight_quantize import quantize_weight
from .weight_rounding import RoundingCertificate, round_to_e4m3
from .weight_tensor import INT4_G32, INT4_G64, INT4_G128, NVFP4, WeightFormat, WeightTensor

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0_BIAS",
    "E8M0_MAX",
    "E8M0_NAN",
    "FORMATS",
    "FP8_TOKEN",
    "INT4_G128",
    "INT4_G32",
    "INT4_G64",
    "MXFP4",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MX_BLOCK_SIZE",
    "NVFP4",
    "ElementFormat",
    "FoldCertificate",
    "Layout",
    "MXFormat",
    "MXTensor",
    "RoundingCertificate",
    "ScaleRule",
    "ScaleSpan",
    "TokenRows",
    "WeightFormat",
    "WeightTensor",
    "block_scale",
    "count_wide_blocks",
    "decode",
    "decode_scale",
    "dequantize_blocks",
    "encode",
    "fold",
    "fold_certificate",
    "get_format",
    "pack_codes",
    "quantize_blocks",
    "quantize_spans",
    "quantize_token_rows",
    "quantize_weight",
    "rebase",
    "round_to_e4m3",
    "unfold",
    "unpack_codes",
]
