"""Dense weights to NVFP4 and INT4, as the libraries that publish such checkpoints quantise them."""

from __future__ import annotations

import torch

from ..errors import Checks
from .codec import encode, pack_codes
from .spec import E2M1, E4M3, FLOAT_DTYPES
from .weight_tensor import INT4_ZERO, NVFP4, WeightFormat, WeightTensor, get_weight_format

_INT4_STEPS = 7.5
"""Half of the steps between the codes -8 and 7."""


def quantize_weight(weight: torch.Tensor, format: WeightFormat | str) -> WeightTensor:
    """Quantise weights [..., N, K] along K to NVFP4 or symmetric INT4.

    NVFP4: each matrix has the factor ``g = amax / (448 · 6)``, each 16 weights the scale
    ``e4m3(amax / (6 g))``, and codes are the nearest e2m1 numbers. INT4: the scale is
    ``amax / 7.5`` in the dtype of `weight`, and codes are ``round(w / scale)`` from -8 to 7.
    A NaN or an infinity makes its group of INT4, and its matrix of NVFP4, NaN.

    Args:
        weight: float32, bfloat16 or float16 [..., N, K], K a multiple of the format's group.
        format: NVFP4, INT4_G32, INT4_G64, INT4_G128, or the name.

    Returns:
        WeightTensor [..., N, K].

    Raises:
        TypeError: no tensor of these dtypes.
        ValueError: an unknown format, or a K that the group does not divide.

    Source:
        ModelOpt (NVFP4), compressed-tensors 0.20 ``calculate_qparams`` (INT4).

    Example:
        >>> quantize_weight(torch.ones(2, 32), "nvfp4").dequantize().unique()
        tensor([1.])
    """
    need = Checks("quantize_weight")
    if not isinstance(format, WeightFormat):
        format = get_weight_format(format, need.op, "format")
    need.tensor(weight, "weight", dtype=FLOAT_DTYPES)
    group, width = format.group_size, weight.shape[-1] if weight.dim() else 0
    fits = weight.dim() > 1 and width % group == 0
    need(fits, "weight.shape", f"[..., N, K], K a multiple of {group}", list(weight.shape))
    groups = weight.detach().float().unflatten(-1, (width // group, group))
    amax = groups.abs().amax(-1)  # [..., N, K/group]
    if format == NVFP4:
        return _nvfp4(groups, amax)
    scale = (amax / _INT4_STEPS).to(weight.dtype)
    steps = groups / torch.where(scale == 0, 1.0, scale.float()).unsqueeze(-1)
    codes = (steps.round().clamp(-8, 7).nan_to_num(0.0) + INT4_ZERO).to(torch.uint8)
    scale = torch.where(amax.isfinite(), scale, float("nan"))
    return WeightTensor(pack_codes(codes.flatten(-2)), scale, format)


def _nvfp4(groups: torch.Tensor, amax: torch.Tensor) -> WeightTensor:
    """groups: float32 [..., N, K/16, 16]. amax: [..., N, K/16]."""
    sizes = *amax.shape[:-2], 1, 1
    largest = amax.amax((-2, -1), keepdim=True) if amax.numel() else amax.new_zeros(sizes)
    factor = largest / (E4M3.max_value * E2M1.max_value)
    factor = torch.where(factor == 0, 1.0, factor)
    scale = encode(amax / E2M1.max_value / factor, E4M3)
    used = scale.view(torch.float8_e4m3fn).float() * factor
    codes = encode(groups / torch.where(used == 0, 1.0, used).unsqueeze(-1), E2M1)
    codes = torch.where((used == 0).unsqueeze(-1), 0, codes)  # too small for the smallest scale
    factor = torch.where(largest.isfinite(), factor, float("nan"))
    rows = factor.squeeze(-1).expand(amax.shape[:-1]).contiguous()
    return WeightTensor(pack_codes(codes.flatten(-2)), scale, NVFP4, row_scale=rows)
