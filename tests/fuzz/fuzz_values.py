"""Wrong and unusual arguments: what the fuzz puts in place of a right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch

import mxpert
from mxpert.formats import MXFP4, Layout, MXTensor


class Subclass(torch.Tensor):
    """A tensor whose class a library has not seen."""


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.cat((tensor.new_zeros(7), tensor.reshape(-1), tensor.new_zeros(5)))
    return flat[7 : 7 + tensor.numel()].view(tensor.shape)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else _strided(tensor)


def _requires_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _negated_view(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


SAME_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": _strided,
    "offset": _offset,
    "transposed": _transposed,
    "requires_grad": _requires_grad,
    "negated view": _negated_view,
    "subclass": lambda tensor: tensor.clone().as_subclass(Subclass),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
}
"""Tensors of the same values: an op answers as for the plain tensor, or refuses."""


def _filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        limits = (
            (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype)
            if not tensor.dtype.is_complex and tensor.dtype != torch.bool
            else None
        )
        if limits is None:
            return tensor.clone()
        if tensor.is_floating_point():
            return torch.full_like(tensor, value)
        bound = {math.inf: limits.max, -math.inf: limits.min}.get(value, 3)
        return torch.full_like(tensor, bound if value == value else limits.min)

    return fill


def _some(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if tensor.numel():
            tensor.view(-1)[tensor.numel() // 2] = _filled(value)(tensor.new_empty(1))[0]
        return tensor

    return put


SAME_GEOMETRY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": _filled(math.nan),
    "one NaN": _some(math.nan),
    "inf": _filled(math.inf),
    "-inf": _filled(-math.inf),
    "one inf": _some(math.inf),
    "3": _filled(3.0),
    "one -inf": _some(-math.inf),
    "flipped": lambda tensor: tensor.flip(0) if tensor.dim() else tensor,
}
"""Tensors of other values: an op answers with the same shapes and dtypes, or refuses."""


def _nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor])


OTHER: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        f"to {dtype}": lambda tensor, dtype=dtype: tensor.to(dtype)
        for dtype in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    },
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "csr": lambda tensor: tensor.to_sparse_csr(),
    "nested": _nested,
    "conjugate": lambda tensor: tensor.to(torch.complex64).conj(),
    "empty": lambda tensor: tensor[:0] if tensor.dim() else tensor.new_empty(0),
    "no columns": lambda tensor: tensor[..., :0],
    "one row": lambda tensor: tensor[:1],
    "longer": lambda tensor: torch.cat((tensor, tensor)),
    "wider": lambda tensor: torch.cat((tensor, tensor), -1),
    "narrower": lambda tensor: tensor[..., :-1],
    "turned": lambda tensor: tensor.mT,
    "unsqueezed": lambda tensor: tensor.unsqueeze(0),
    "flat": lambda tensor: tensor.reshape(-1),
    "scalar": lambda tensor: tensor.reshape(-1)[0],
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "expanded columns": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "numpy": lambda tensor: tensor.float().numpy(),
    "list": lambda tensor: tensor.tolist(),
    "MXTensor": lambda tensor: Q4,
}
"""Other tensors and what looks like one."""

_WEIGHT = mxpert.quantize(torch.ones(2, 64, 32), "mxfp4")
Q4, Q8 = mxpert.quantize(torch.ones(4, 32), "mxfp4"), mxpert.quantize(torch.ones(4, 32), "mxfp8")
WEIGHTS = mxpert.MoEWeights(
    _WEIGHT,
    mxpert.quantize(torch.ones(2, 32, 32), "mxfp4"),
    gate_up_order=mxpert.GateUpOrder.CONCATENATED,
)
PLAN = mxpert.make_routing_plan(
    torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), num_experts=2, routing_block_m=16
)
AUTO = mxpert.quantize_dual(torch.ones(32, 32), scale_span=mxpert.ScaleSpan.AUTO)[0]

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    -7,
    32,
    64,
    2**31,
    2**63,
    2**64,
    10**30,
    -(10**30),
    0.0,
    0.5,
    -1.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    1j,
    "",
    "cpu",
    "cuda",
    "cuda:99",
    "xla",
    "mxfp4",
    "mxfp8",
    "mxfp8_e5m2",
    "nvfp4",
    "bf16",
    "a8w4",
    "fp8_token",
    "silu",
    "reference",
    "a\0b",
    "é" * 50,
    b"cpu",
    (),
    [],
    {},
    [1],
    (1, 2),
    {"a": 1},
    {1},
    object(),
    len,
    int,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.device("cpu"),
    torch.device("meta"),
    torch.Size([2]),
    torch.strided,
    *mxpert.Combine,
    *mxpert.ScaleRule,
    *mxpert.ScaleSpan,
    *mxpert.Scoring,
    *mxpert.GateUpOrder,
    *Layout,
    mxpert.SiLU(),
    mxpert.SwiGLU(),
    mxpert.SiLU,
    mxpert.SiTUv2(),
    MXFP4,
    Q4,
    Q8,
    AUTO,
    WEIGHTS,
    PLAN,
    mxpert.configs.GemmConfig(16, 16, 32),
    mxpert.configs.HopperGemmConfig(mxpert.configs.HopperKernel.DECODE, 8, 5),
    mxpert.configs.Cdna4GemmConfig(mxpert.configs.Cdna4Kernel.DECODE, 16, 256),
    mxpert.configs.ReferenceConfig(),
    numpy.float32(1.0),
    numpy.int64(3),
    numpy.ones(3),
    torch.ones(3),
    torch.zeros(2, 2, dtype=torch.int32),
    torch.nn.Linear(2, 2),
    replace(Q8, axis=-1),
)
"""Values for any argument. Sizes are small or absurd: those between would only take memory."""


def tensor_parts(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tensor ("": itself) or of an aggregate."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, (MXTensor, mxpert.RoutingPlan)):
        return {
            name: part
            for name, part in value.__getstate__().items()
            if isinstance(part, torch.Tensor)
        }
    if isinstance(value, mxpert.MoEWeights):
        return {
            f"{name}.{part}": tensor
            for name in ("gate_up_proj", "down_proj")
            for part, tensor in tensor_parts(getattr(value, name)).items()
        } | {
            name: getattr(value, name)
            for name in ("gate_up_bias", "down_bias")
            if getattr(value, name) is not None
        }
    return {}


def with_part(value: Any, name: str, part: Any) -> Any:
    """The value with one of its tensors exchanged; the constructor may refuse."""
    if name == "":
        return part
    head, _, tail = name.partition(".")
    return replace(value, **{head: with_part(getattr(value, head), tail, part) if tail else part})


def plain(value: Any) -> Any:
    """The same values in contiguous plain tensors."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return value
        return (
            value.detach()
            .as_subclass(torch.Tensor)
            .resolve_neg()
            .resolve_conj()
            .clone(memory_format=torch.contiguous_format)
        )
    for name, part in tensor_parts(value).items():
        value = with_part(value, name, plain(part))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def describe(value: Any) -> str:
    """One line of what an argument is."""
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout is torch.strided and not value.is_nested else "-"
        shape = "nested" if value.is_nested else list(value.shape)
        return (
            f"{type(value).__name__}({str(value.dtype)[6:]} {shape} strides {stride} "
            f"{value.device})"
        )
    text = repr(value).replace("\n", " ")
    return text if len(text) < 120 else f"{text[:117]}..."
