"""Matrix instructions: D = A x B + C. CDNA4 ISA, chapter 7.

Assumption, since the order of hardware's sums is not public: products and scales are exact, their
sum is taken in float64, and the sum with C is rounded to float32 once, to nearest even. For
problems whose partial sums are representable, any order gives the same bits. Denormals count.
EXEC plays no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import Operand
from ..state import LANES, WaveState
from . import numerics
from .numerics import F32, F64, I8, I32, I64, U16, U32, Array
from .operands import words
from .table import Binder, Decoding, Run, chapter

Matrix = Callable[[WaveState], Array]
"""Reads an operand of the selected waves: float64 [count, rows, K]."""

_BLOCK = 32
"""Elements of K that share a scale."""

_PAIRS = numerics.E2M1.values[np.arange(256)[:, None] >> np.array([0, 4]) & 15].view(np.complex128)
"""The two e2m1 values of each byte, float64, as one item to look up."""

_SHAPE = re.compile(r"v_mfma_(?:scale_)?[fi]32_(\d+)x(\d+)x(\d+)_")


def _registers(operand: Operand) -> Callable[[WaveState], Array]:
    """Reads consecutive registers: uint32 [count, 64, registers]."""
    first, last = operand.index, operand.index + operand.count

    def read(state: WaveState) -> Array:
        return np.ascontiguousarray(np.moveaxis(state.vector[first:last, state.selected], 0, 2))

    return read


# Values of a lane's registers, uint32 [count, 64, registers] -> float64 [count, 64, k of the lane].
_VALUES: dict[str, Callable[[Array], Array]] = {
    "f32": lambda x: x.view(F32).astype(F64),
    "f16": lambda x: x.view(np.float16).astype(F64),
    "i8": lambda x: x.view(I8).astype(F64),
    "bf16": lambda x: (x.view(U16).astype(U32) << U32(16)).view(F32).astype(F64),
    "fp8": lambda x: numerics.E4M3.values.take(x.view(np.uint8)),
    "bf8": lambda x: numerics.E5M2.values.take(x.view(np.uint8)),
    "fp4": lambda x: _PAIRS.take(x.view(np.uint8)).view(F64),
}


def _matrix(
    decoding: Decoding, place: int, element: str, rows: int, depth: int, chunks: int
) -> Matrix:
    """Reads A, or B transposed, whose lanes hold `rows` rows times 64 / `rows` groups of k.

    A lane holds `chunks` runs of consecutive k; run c of group g is run c * groups + g of K.
    """
    operand = decoding.operand(place, "v")
    groups = LANES // rows
    convert, read = _VALUES[element], _registers(operand)
    bits = {"f32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "fp4": 4}[element]
    if operand.count * 32 < depth // groups * bits:
        raise decoding.unknown(f"{depth // groups * bits // 32} registers of {element}", operand)

    def matrix(state: WaveState) -> Array:
        values = convert(read(state))[..., : depth // groups]
        split = values.reshape(state.count, groups, rows, chunks, -1)
        return split.transpose(0, 2, 3, 1, 4).reshape(state.count, rows, depth)

    return matrix


def _scaled(matrix: Matrix, decoding: Decoding, place: int, byte: int, rows: int) -> Matrix:
    """Multiplies each 32-block of a row by the E8M0 scale that the block's lane holds.

    Lane g * rows + r holds the scale of block g of row r, in the byte that op_sel picks.
    """
    operand = decoding.operand(place, "vc")
    if operand.kind == "c":  # an inline constant's exponent
        shift, read = U32(23), words(operand)
    else:
        shift, read = U32(8 * byte), words(operand)
    groups = LANES // rows

    def scaled(state: WaveState) -> Array:
        codes = np.broadcast_to((read(state) >> shift) & U32(255), (state.count, LANES))
        scales = numerics.SCALES[codes].reshape(state.count, groups, rows).transpose(0, 2, 1)
        values = matrix(state)
        blocks = values.reshape(state.count, rows, groups, _BLOCK) * scales[..., None]
        return np.asarray(blocks.reshape(values.shape))

    return scaled


def _accumulate(decoding: Decoding, rows: int, first: Matrix, second: Matrix) -> Run:
    """D = A x B + C.

    Lane group g holds rows 4 * (groups * i + g) + j of C and D in registers 4 * i + j; columns are
    the lanes of the group.
    """
    groups, count = LANES // rows, rows * rows // LANES
    target, addend = decoding.destination(), decoding.operand(3, "vc")
    if decoding.operands[0].count != count or (addend.kind == "v" and addend.count != count):
        raise decoding.unknown(f"{count} registers of C and D", decoding.operands[0])
    whole = "_i32_" in decoding.name  # integers wrap around
    kind = I32 if whole else F32
    if whole and addend.kind == "c" and addend.count == 0:
        raise decoding.unknown("no inline float as int32", addend)
    constant = np.array(addend.index & 0xFFFFFFFF, U32).view(kind)

    def rounded(sums: Array) -> Array:
        return sums.astype(I64).astype(I32) if whole else sums.astype(F32)

    def run(machine: Any) -> None:
        state = machine.state
        product = np.matmul(first(state), second(state).transpose(0, 2, 1))
        product = product.reshape(state.count, count // 4, groups, 4, rows)
        product = product.transpose(1, 3, 0, 2, 4).reshape(count, state.count, LANES)
        if addend.kind == "v":
            registers = state.vector[addend.index : addend.index + count, state.selected]
            product += registers.view(kind)
        else:
            product += constant
        state.vector[target : target + count, state.selected] = rounded(product).view(U32)

    return run


def _plain(decoding: Decoding) -> Run:
    """v_mfma_f32_MxNxK_a_b, v_mfma_i32_MxNxK_i8: types in the name, a lane's k consecutive."""
    rows, depth = _shape(decoding)
    elements = decoding.name.rsplit("x", 1)[1].split("_")[1:3]
    first, second = (
        _matrix(decoding, 1 + k, elements[k % len(elements)], rows, depth, 1) for k in range(2)
    )
    return _accumulate(decoding, rows, first, second)


def _shape(decoding: Decoding) -> tuple[int, int]:
    """Rows (and columns) of the result, and K."""
    found = _SHAPE.match(decoding.name)
    if found is None or found[1] != found[2]:
        raise decoding.unknown("a square matrix instruction", decoding.name)
    return int(found[1]), int(found[3])


_FORMATS = {0: "fp8", 1: "bf8", 4: "fp4"}
"""Element formats of CBSZ (A) and BLGP (B). fp6 and bf6 (2 and 3) are not supported."""


def _mixed(decoding: Decoding) -> Run:
    """v_mfma_f32_*_f8f6f4 and v_mfma_scale_f32_*_f8f6f4.

    A lane holds 32 k: fp4 consecutive ones, fp8 and bf8 two runs of 16. Without a scale it is 1.
    """
    rows, depth = _shape(decoding)
    matrices = []
    for place, name in ((1, "cbsz"), (2, "blgp")):
        code = decoding.integer(name)
        if code not in _FORMATS:
            raise decoding.unknown(f"{name} in {sorted(_FORMATS)}", code)
        element = _FORMATS[code]
        chunks = 1 if element == "fp4" else 2
        matrices.append(_matrix(decoding, place, element, rows, depth, chunks))
    if "_scale_" in decoding.name:
        zeros = (0, 0, 0)
        low, high = (decoding.integers(name, zeros) for name in ("op_sel", "op_sel_hi"))
        matrices = [
            _scaled(matrix, decoding, 4 + k, low[k] + 2 * high[k], rows)
            for k, matrix in enumerate(matrices)
        ]
    return _accumulate(decoding, rows, *matrices)


_SHAPES_OF: dict[str, tuple[str, ...]] = {
    "f32": ("16x16x4", "32x32x2"),
    "f16": ("16x16x16", "16x16x32", "32x32x8", "32x32x16"),
    "bf16": ("16x16x16", "16x16x32", "32x32x8", "32x32x16"),
    **{f"{a}_{b}": ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}

_ENTRIES: dict[str, Binder] = {
    f"v_mfma_f32_{shape}_{elements}": _plain
    for elements, shapes in _SHAPES_OF.items()
    for shape in shapes
}
_ENTRIES |= {
    f"v_mfma_i32_{shape}_i8": _plain for shape in ("16x16x32", "16x16x64", "32x32x16", "32x32x32")
}
_ENTRIES |= {
    f"v_mfma_{scale}f32_{shape}_f8f6f4": _mixed
    for scale in ("", "scale_")
    for shape in ("16x16x128", "32x32x64")
}
chapter(_ENTRIES)
