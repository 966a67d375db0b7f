"""Data that reaches every branch of block quantisation, and a comparison with the exact codec.

Tests in Triton's interpreter and tests on a GPU use the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mxpert.errors import message
from mxpert.formats.codec import dequantize_blocks, quantize_blocks
from mxpert.formats.spec import MX_BLOCK_SIZE, MXFormat, ScaleRule, ScaleSpan
from mxpert.formats.tensor import MXTensor


def _uniform_bits(blocks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random float32 bit patterns without NaN: exponents over the whole range."""
    bits = torch.randint(-(2**31), 2**31, blocks.shape, generator=generator).to(torch.int32)
    return torch.nan_to_num(bits.view(torch.float32), nan=1.0)


def _near_ties(blocks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Multiples of 1/32 up to 8, some moved by one ulp: ties of e2m1 at every scale."""
    exact = torch.randint(-256, 257, blocks.shape, generator=generator).float() / 32
    step = torch.randint(-1, 2, blocks.shape, generator=generator).float()
    return torch.nextafter(exact, exact + step)


def _with(value: float) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    def make(blocks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        place = torch.randint(0, blocks.shape[1], blocks.shape[:1], generator=generator)
        return blocks.index_put((torch.arange(len(blocks)), place), torch.tensor(value))

    return make


_KINDS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "normal": lambda b, g: b,
    "heavy-tailed": lambda b, g: b / torch.rand(b.shape, generator=g) ** 3,
    "powers of two": lambda b, g: torch.exp2(torch.randint(-12, 12, b.shape, generator=g)),
    "subnormal": lambda b, g: b * 2.0**-130,
    "huge": lambda b, g: (b * 2.0**126).clamp(-3.4e38, 3.4e38),
    "any bits": _uniform_bits,
    "near ties": _near_ties,
    "zero": lambda b, g: b * 0.0,  # of both signs
    "nan": _with(float("nan")),
    "infinite": _with(float("inf")),
    "minus infinite": _with(float("-inf")),
    "nan and infinite": lambda b, g: _with(float("nan"))(_with(float("inf"))(b, g), g),
}


def block_cases(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype, *, seed: int = 0
) -> torch.Tensor:
    """CPU tensor whose blocks of 32 along `axis` cycle through every kind of data in `_KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    moved = list(shape)
    moved.append(moved.pop(axis))
    blocks = torch.randn(*moved, generator=generator).reshape(-1, MX_BLOCK_SIZE)
    for i, make in enumerate(_KINDS.values()):
        blocks[i :: len(_KINDS)] = make(blocks[i :: len(_KINDS)], generator)
    return blocks.reshape(moved).movedim(-1, axis).to(dtype).contiguous()


def square_cases(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """CPU tensor whose 32 × 32 squares cycle through every kind of data in `_KINDS`."""
    *leading, rows, columns = shape
    across, down = -(-columns // MX_BLOCK_SIZE), -(-rows // MX_BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    count = max(len(_KINDS), math.prod(leading) * across * down)
    squares = torch.randn(count, MX_BLOCK_SIZE**2, generator=generator)
    for i, make in enumerate(_KINDS.values()):
        squares[i :: len(_KINDS)] = make(squares[i :: len(_KINDS)], generator)
    squares = squares[: math.prod(leading) * across * down]
    tiles = squares.view(*leading, down, across, MX_BLOCK_SIZE, MX_BLOCK_SIZE).transpose(-3, -2)
    whole = tiles.reshape(*leading, down * MX_BLOCK_SIZE, across * MX_BLOCK_SIZE)
    return whole[..., :rows, :columns].to(dtype).contiguous()


def every_bfloat16_amax() -> torch.Tensor:
    """[65536, 32] bf16: each bf16 value once, as the first and largest of its block."""
    first = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ratio = torch.rand(1 << 16, MX_BLOCK_SIZE, generator=generator).bfloat16()
    ratio[:, 0] = 1
    return torch.where(first.isfinite()[:, None], first[:, None] * ratio, first[:, None])


def assert_quantizes_exactly(
    actual: MXTensor,
    x: torch.Tensor,
    fmt: MXFormat,
    axis: int,
    rule: ScaleRule,
    span: ScaleSpan = ScaleSpan.BLOCK,
) -> None:
    """Check that codes and scales equal those of the codec, byte for byte."""
    expected = quantize_blocks(x, fmt, axis, rule, span=span)
    have, want = ((each.format, each.axis, each.scale_span) for each in (actual, expected))
    if have != want:
        raise AssertionError(message("quantize", "result", want, have))
    torch.testing.assert_close(actual.scale.cpu(), expected.scale.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(actual.qdata.cpu(), expected.qdata.cpu(), rtol=0, atol=0)


def every_code_and_scale(fmt: MXFormat, axis: int) -> MXTensor:
    """[256, 256] MX tensor with every code byte under every scale byte; transposed for axis -2."""
    byte = torch.arange(256, dtype=torch.uint8)
    groups = 256 // (MX_BLOCK_SIZE // fmt.codes_per_byte)  # scale bytes beside 256 code bytes
    qdata, scale = byte.expand(256, 256), byte[:, None].expand(256, groups)
    if axis == -2:
        qdata, scale = qdata.T, scale.T
    return MXTensor(qdata.contiguous(), scale.contiguous(), fmt, axis)


def assert_dequantizes_exactly(actual: torch.Tensor, tensor: MXTensor) -> None:
    """Check that values equal the codec's bit for bit; any two NaN count as equal."""
    expected = dequantize_blocks(tensor, actual.dtype).cpu()
    actual = actual.cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan()
    )
