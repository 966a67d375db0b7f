"""Matrices of experts in NVFP4, MXFP8 and INT4 by meaning, and how containers store them.

Packing is written number by number from the published formulas, without mxpert's codecs: readers
are compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mxpert

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""OCP MX 1.0, table of E2M1; codes 8 to 15 are the same with a sign."""
Tensors = dict[str, torch.Tensor]


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float64 values of codes 0 to 15."""
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0).to(torch.float64)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] of codes [N, K]: the low nibble is the even k."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def codes_of(bytes_: torch.Tensor) -> torch.Tensor:
    """int64 [N, K], the inverse of `packed`."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2).to(torch.int64)


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [R, C/8] of codes [R, C]: nibble i of word j is column 8 j + order[i]."""
    eight = codes.to(torch.int64).unflatten(1, (-1, 8))
    word = torch.zeros(eight.shape[:2], dtype=torch.int64)
    for nibble, column in enumerate(order):
        word |= eight[..., column] << 4 * nibble
    return (word - (word >> 31 << 32)).to(torch.int32)  # two's complement


@dataclass(frozen=True)
class NvfpMatrix:
    """NVFP4: codes 0 to 15 [N, K], scales e4m3 [N, K/16], and one number.

    A divisor is 1/`factor` in float32; values are those of the float32 next to its reciprocal.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    is_divisor: bool

    @property
    def rows_factor(self) -> torch.Tensor:
        return 1.0 / self.factor if self.is_divisor else self.factor

    @property
    def values(self) -> torch.Tensor:
        scale = self.scale.to(torch.float64).repeat_interleave(16, dim=1)
        return e2m1(self.codes) * scale * self.rows_factor.to(torch.float64)

    @property
    def parts(self) -> Tensors:
        rows = self.rows_factor.repeat(len(self.codes))
        return {
            "qdata": packed(self.codes),
            "scale": self.scale.view(torch.uint8),
            "row_scale": rows,
        }

    @classmethod
    def random(
        cls, generator: torch.Generator, rows: int, columns: int, *, is_divisor: bool
    ) -> NvfpMatrix:
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        codes[0, :16] = 8  # a block of zeros
        scale = torch.randint(0x20, 0x7E, (rows, columns // 16), generator=generator)
        factor = 1 / 300 + torch.rand((), generator=generator) / 9
        factor = 1 / factor if is_divisor else factor
        e4m3 = scale.to(torch.uint8).view(torch.float8_e4m3fn)
        return cls(codes, e4m3, factor, is_divisor)

    @classmethod
    def of(cls, weight: torch.Tensor, *, is_divisor: bool) -> NvfpMatrix:
        made = mxpert.formats.quantize_weight(weight, "nvfp4")
        factor = made.row_scale[0]
        scale = made.scale.view(torch.float8_e4m3fn)
        return cls(codes_of(made.qdata), scale, 1 / factor if is_divisor else factor, is_divisor)

    @property
    def modelopt(self) -> Tensors:
        return {
            "weight": packed(self.codes),
            "weight_scale": self.scale,
            "weight_scale_2": self.factor,
            "input_scale": torch.tensor(0.25),
        }

    @property
    def compressed(self) -> Tensors:
        return {
            "weight_packed": packed(self.codes),
            "weight_scale": self.scale,
            "weight_global_scale": self.factor.reshape(1),
        }


@dataclass(frozen=True)
class Mxfp8Matrix:
    """MXFP8: e4m3 [N, K], exponents of the blocks of 32 [N, K/32]."""

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """OCP MX 1.0, section 6.1: element times ``2^(byte - 127)``; torch knows e4m3."""
        scale = torch.exp2(self.exponents.to(torch.float64)).repeat_interleave(32, dim=1)
        return self.codes.to(torch.float64) * scale

    @property
    def e8m0(self) -> torch.Tensor:
        return (self.exponents + 127).to(torch.uint8)

    @property
    def parts(self) -> Tensors:
        return {"qdata": self.codes.view(torch.uint8), "scale": self.e8m0}

    @classmethod
    def random(cls, generator: torch.Generator, rows: int, columns: int) -> Mxfp8Matrix:
        codes = torch.randint(0, 256, (rows, columns), generator=generator)
        codes[codes & 0x7F == 0x7F] = 0x7E  # no NaN
        codes[0, :32] = 0x80  # a block of zeros
        exponents = torch.randint(-7, 0, (rows, columns // 32), generator=generator)
        return cls(codes.to(torch.uint8).view(torch.float8_e4m3fn), exponents)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Mxfp8Matrix:
        made = mxpert.quantize(weight, "mxfp8", scale_rule="rceil")
        return cls(made.qdata.view(torch.float8_e4m3fn), made.scale.to(torch.int64) - 127)

    def stored(self, scale: str) -> Tensors:
        return {"weight": self.codes, scale: self.e8m0}


@dataclass(frozen=True)
class Int4Matrix:
    """INT4: codes 0 to 15 [N, K], zero points [N, K/g] or None for 8, scales [N, K/g]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def _zeros(self) -> torch.Tensor:
        return torch.full(self.scale.shape, 8) if self.zeros is None else self.zeros

    @property
    def values(self) -> torch.Tensor:
        """(q - z) s.

        compressed-tensors 0.20, ``_dequantize``; AutoAWQ, ``awq/utils/packing_utils.py``,
        ``dequantize_gemm``: ``(iweight - izeros) * scales``; GPTQModel, ``dequantize_weight``: the
        same.
        """
        spread = [each.repeat_interleave(self.group, 1) for each in (self._zeros, self.scale)]
        return (self.codes - spread[0]).to(torch.float64) * spread[1].to(torch.float64)

    @property
    def parts(self) -> Tensors:
        zeros = {} if self.zeros is None else {"zero_point": self.zeros.to(torch.uint8)}
        return {"qdata": packed(self.codes), "scale": self.scale, **zeros}

    @classmethod
    def random(
        cls,
        generator: torch.Generator,
        rows: int,
        columns: int,
        *,
        group: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        has_zeros: bool = False,
        lowest: int = 0,
    ) -> Int4Matrix:
        blocks = (rows, columns // group)
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        scale = (torch.rand(blocks, generator=generator) + 0.01).to(dtype)
        zeros = torch.randint(lowest, 16, blocks, generator=generator) if has_zeros else None
        codes[0, :group] = 8 if zeros is None else zeros[0, 0]  # a block of zeros
        return cls(codes, scale, zeros)

    @classmethod
    def of(cls, weight: torch.Tensor, *, has_zeros: bool = False) -> Int4Matrix:
        made = mxpert.formats.quantize_weight(weight, "int4_g32")
        zeros = torch.full(made.scale.shape, 8) if has_zeros else None
        return cls(codes_of(made.qdata), made.scale, zeros)

    @property
    def pack_quantized(self) -> Tensors:
        """compressed-tensors ``pack_to_int32``: along K, zero points along N."""
        zeros = {}
        if self.zeros is not None:
            zeros = {"weight_zero_point": words(self.zeros.t()).t()}
        return {
            "weight_packed": words(self.codes),
            "weight_scale": self.scale,
            "weight_shape": torch.tensor(self.codes.shape),
            **zeros,
        }

    @property
    def awq(self) -> Tensors:
        """AutoAWQ, ``WQLinear_GEMM.from_linear``: ``order_map = [0, 2, 4, 6, 1, 3, 5, 7]``."""
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(self.codes.t(), order),
            "qzeros": words(self._zeros.t(), order),
            "scales": self.scale.t(),
        }

    def gptq(self, *, less: int = 1) -> Tensors:
        """AutoGPTQ, ``QuantLinear.pack``: weights along K; zero points less 1 (v1) along N."""
        columns = torch.arange(self.codes.shape[1], dtype=torch.int32)
        return {
            "qweight": words(self.codes).t(),
            "qzeros": words(self._zeros.t() - less),
            "scales": self.scale.t(),
            "g_idx": columns // self.group,
        }
