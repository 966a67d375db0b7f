"""The grouped GEMMs and the functions of training, with their results by definition in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from fuzz_arguments import ACTIVATIONS, FLOATS, MXFP8_NAMES, groups, randn, recipes
from special_case import WIDE, Arguments, Case, Results, act, bounds, exact_gemm

import mxpert
from mxpert import ScaleSpan
from mxpert.training import MXFP8Recipe, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation
from mxpert.training.rows import op as rows


def _gemm(rng: random.Random, size: int) -> Arguments:
    total, offsets = groups(rng)
    a, b = randn(rng, total, 64 * size), randn(rng, len(offsets) - 1, 32 * size, 64 * size)
    kind = rng.choice(("bf16", "block", "row"))
    if kind == "bf16":
        left, right = a.bfloat16(), b.bfloat16()
    elif kind == "block":
        left, right = (mxpert.quantize(x, rng.choice(MXFP8_NAMES)) for x in (a, b))
    else:
        _spoil_floats(rng, a), _spoil_floats(rng, b)
        left, right = (mxpert.quantize_dual(x, scale_span=ScaleSpan.ROW)[0] for x in (_whole(a), b))
        left = replace(left, qdata=left.qdata[:total], scale=left.scale[:total])
    return dict(a=left, b=right, group_offsets=offsets, out_dtype=rng.choice(FLOATS))


def _whole(a: torch.Tensor) -> torch.Tensor:
    """Rows padded to a multiple of 32."""
    return torch.nn.functional.pad(a, (0, 0, 0, -len(a) % 32))


def _spoil_floats(rng: random.Random, x: torch.Tensor) -> None:
    if x.numel() and rng.random() < 0.5:
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((torch.nan, torch.inf, -torch.inf, 3e38))


def _linear(rng: random.Random, size: int) -> Arguments:
    total, offsets = groups(rng)
    count, width = len(offsets) - 1, 64 * size
    return dict(
        x=randn(rng, total, 32 * size, dtype=(dtype := rng.choice(FLOATS))),
        weight=randn(rng, count, width, 32 * size),
        grad=randn(rng, total, width, dtype=dtype),
        group_offsets=offsets,
        bias=randn(rng, count, width) if rng.random() < 0.5 else None,
        recipe=recipes(rng),
    )


def _with_gradients(
    function: Callable[..., torch.Tensor], a: Arguments, names: tuple[str, ...]
) -> Results:
    leaves = {name: a[name].detach().requires_grad_() for name in names if a[name] is not None}
    others = {name: value for name, value in a.items() if name != "grad"}
    y = function(**(others | leaves))
    y.backward(a["grad"])
    return [y.detach(), *(leaf.grad for leaf in leaves.values())]


def _exact_linear(a: Arguments) -> Results:
    x, weight, grad, bias = a["x"].double(), a["weight"].double(), a["grad"].double(), a["bias"]
    y, dx = (torch.zeros_like(each) for each in (grad, x))
    dweight = torch.zeros_like(weight)
    dbias = torch.zeros(weight.shape[:2], dtype=WIDE)
    for g, part in bounds(a["group_offsets"]):
        y[part] = x[part] @ weight[g].T + (0 if bias is None else bias[g].double())
        dx[part], dweight[g] = grad[part] @ weight[g], grad[part].T @ x[part]
        dbias[g] = grad[part].sum(0)
    return [y, dx, dweight, *([] if bias is None else [dbias])]


def _outer(rng: random.Random, size: int) -> Arguments:
    total, offsets = groups(rng)
    dtype, offs = rng.choice(FLOATS), offsets[1:].int()
    return dict(
        a=randn(rng, 32 * size, total, dtype=dtype),
        b=randn(rng, total, 64 * size, dtype=dtype),
        grad=randn(rng, len(offs), 32 * size, 64 * size, dtype=dtype),
        offs=offs,
        recipe=rng.choice((MXFP8Recipe(), MXFP8Recipe(enabled=False), MXFP8Recipe.hybrid())),
    )


def _exact_outer(a: Arguments) -> Results:
    left, right, grad = (a[name].double() for name in ("a", "b", "grad"))
    out, da, db = (torch.zeros_like(each) for each in (grad, left, right))
    for g, part in bounds(torch.nn.functional.pad(a["offs"], (1, 0))):
        out[g] = left[:, part] @ right[part]
        da[:, part], db[part] = grad[g] @ right[part].T, left[:, part].T @ grad[g]
    return [out, da, db]


def _activated(rng: random.Random, size: int) -> Arguments:
    dtype = rng.choice(FLOATS)
    return dict(
        gate_up=randn(rng, 3, 8 * size, dtype=dtype),
        grad=randn(rng, 3, 4 * size, dtype=dtype),
        activation=rng.choice(ACTIVATIONS),
    )


def _exact_activated(a: Arguments) -> Results:
    """The derivatives come from autograd, which gives 0 beyond a limit."""
    gate_up = a["gate_up"].double().requires_grad_()
    y = act(a["activation"], *gate_up.chunk(2, dim=-1))
    return [y.detach(), None]


def _combined(rng: random.Random, size: int) -> Arguments:
    return dict(
        rows=randn(rng, 6, 5 * size, dtype=rng.choice(FLOATS)),
        row_ids=torch.tensor([[0, 1], [5, 7], [3, 2]]),
        weights=randn(rng, 3, 2),
        out_dtype=rng.choice(FLOATS),
    )


def _exact_combined(a: Arguments) -> Results:
    padded = torch.nn.functional.pad(a["rows"].double(), (0, 0, 0, 2))
    factors = a["weights"].double().masked_fill(a["row_ids"] > 5, 1)
    return [(padded[a["row_ids"]] * factors[..., None]).sum(1)]


GROUPED = (
    Case("grouped_gemm", _gemm, lambda a: [mxpert.grouped_gemm(**a)], exact_gemm, ("a", "b"), "a"),
    Case(
        "grouped_linear",
        _linear,
        lambda a: _with_gradients(grouped_linear, a, ("x", "weight", "bias")),
        _exact_linear,
        ("x", "weight", "bias", "grad"),
    ),
    Case(
        "grouped_mm",
        _outer,
        lambda a: _with_gradients(grouped_mm, a, ("a", "b")),
        _exact_outer,
        ("a", "b", "grad"),
    ),
    Case(
        "gated_activation",
        _activated,
        lambda a: _with_gradients(gated_activation, a, ("gate_up",)),
        _exact_activated,
        ("gate_up",),
    ),
    Case(
        "combine_rows",
        _combined,
        lambda a: [rows.combine_rows(**a)],
        _exact_combined,
        ("rows", "weights"),
    ),
)
