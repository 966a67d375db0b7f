"""Checkpoints that `quantize_checkpoint` wrote as compressed-tensors, decoded by formulas.

Nothing here calls mxpert's own codecs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FORMATS = ("mxfp8", "int4_g32", "nvfp4")
SUFFIXES = {
    "mxfp8": ("weight", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
}
"""Names of a matrix' tensors, after compressed-tensors 0.20."""

State = dict[str, torch.Tensor]


def state_of(directory: Path) -> State:
    """All tensors of a checkpoint."""
    state: State = {}
    for file in directory.glob("*.safetensors"):
        state |= load_file(file)
    return state


def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """bfloat16 [rows, columns] that no library's random numbers decide; some rows are larger."""
    index = torch.arange(rows * columns, dtype=torch.int64) + 7919 * seed
    mixed = (index * 2654435761) % 65521
    fraction = (mixed.double() / 32768 - 1).reshape(rows, columns)
    return (fraction * torch.exp2(torch.arange(rows) % 5 - 6.0)[:, None]).to(torch.bfloat16)


def write_dense(
    directory: Path,
    *,
    hidden: int = 32,
    intermediate: int = 32,
    experts: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> State:
    """A checkpoint of one layer with dense experts, an attention matrix and norms.

    Returns:
        Its tensors.
    """
    directory.mkdir(parents=True)
    state = {
        "model.embed_tokens.weight": values(64, hidden, 1),
        "model.layers.0.self_attn.q_proj.weight": values(hidden, hidden, 2),
        "model.layers.0.mlp.gate.weight": values(experts, hidden, 3),
        "model.norm.weight": values(1, hidden, 4)[0],
    }
    for expert in range(experts):
        for index, part in enumerate(("gate", "up", "down")):
            sizes = (hidden, intermediate) if part == "down" else (intermediate, hidden)
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            state[name] = values(*sizes, 10 + 3 * expert + index).to(dtype)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"hidden_size": hidden, "num_experts": experts}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return state


def _nibbles(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """int64 codes along K of integers with `width` nibbles, the lowest one first."""
    words = tensor.to(torch.int64).unsqueeze(-1)
    return (words >> (4 * torch.arange(width)) & 15).flatten(-2)


def _e4m3(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype == torch.float8_e4m3fn
    code = tensor.view(torch.uint8).to(torch.int64)
    exponent, mantissa = code >> 3 & 15, (code & 7).double() / 8
    normal = (1 + mantissa) * torch.exp2((exponent - 7).double())
    return torch.where(exponent == 0, mantissa * 2.0**-6, normal) * (1 - 2 * (code >> 7))


def codes_of(state: State, name: str, format: str) -> torch.Tensor:
    """Codes [N, K] of a matrix: bytes of e4m3, 0 to 15 of the others."""
    if format == "mxfp8":
        return state[f"{name}.weight"].view(torch.uint8).to(torch.int64)
    packed = state[f"{name}.weight_packed"]
    return _nibbles(packed, 2 if format == "nvfp4" else 8)


def steps_of(state: State, name: str, format: str) -> torch.Tensor:
    """float64 [N, groups]: what a code of 1 stands for."""
    scale = state[f"{name}.weight_scale"]
    if format == "mxfp8":
        assert scale.dtype == torch.uint8
        return torch.exp2(scale.double() - 127)
    if format == "nvfp4":
        divisor = state[f"{name}.weight_global_scale"]
        assert (divisor.dtype, divisor.shape) == (torch.float32, (1,))
        return _e4m3(scale) / divisor.double()
    return scale.double()


def decoded(state: State, name: str, format: str) -> torch.Tensor:
    """float64 [N, K] of a matrix."""
    codes, steps = codes_of(state, name, format), steps_of(state, name, format)
    if format == "mxfp8":
        plain = _e4m3(state[f"{name}.weight"])
    elif format == "nvfp4":
        exponent, mantissa = codes >> 1 & 3, (codes & 1).double() / 2
        normal = (1 + mantissa) * torch.exp2((exponent - 1).double())
        plain = torch.where(exponent == 0, mantissa, normal) * (1 - 2 * (codes >> 3))
    else:
        assert state[f"{name}.weight_packed"].dtype == torch.int32
        assert state[f"{name}.weight_shape"].dtype == torch.int64
        assert state[f"{name}.weight_shape"].tolist() == list(codes.shape)
        plain = (codes - 8).double()
    return plain * steps.repeat_interleave(plain.shape[1] // steps.shape[1], dim=1)


def check_near(state: State, name: str, format: str, dense: torch.Tensor) -> None:
    """Check that a matrix is its dense weights [N, K], but for one rounding.

    MXFP8 (rceil: no value saturates) errs by half a unit of 3 mantissa bits, or half of its
    smallest step, 2^-9. NVFP4 errs by half of the gap from 4 to 6 (at 5, where four roundings to
    float32 decide on a side: 5 · 4 · 2^-24 more), or by what its scale, rounded to 3 bits, cuts off
    above 6 (6 · 2^-4). INT4 errs by half a step, and where bfloat16 rounds the
    scale down, by the 7.5 · 2^-8 steps that lie above 7.5 as well.
    """
    found, dense = decoded(state, name, format), dense.double()
    assert found.shape == dense.shape
    steps = steps_of(state, name, format)
    steps = steps.repeat_interleave(dense.shape[1] // steps.shape[1], dim=1)
    if format == "mxfp8":
        bound = torch.maximum(dense.abs() * 2.0**-4, steps * 2.0**-10)
    else:
        bound = steps * (1 + 2.0**-19 if format == "nvfp4" else 0.5 + 7.5 * 2.0**-8)
    assert bool(((found - dense).abs() <= bound).all()), f"{name} is not what it was made of"
