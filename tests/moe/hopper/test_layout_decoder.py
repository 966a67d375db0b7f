"""HOPPER_FRAGMENT: the PTX that decodes it, run by a small interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from mxpert.formats import dequantize_blocks
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT
from tests.formats import ocp
from tests.moe.hopper.test_layout import SPAN, folded_code, folding_weights

MASK = 0xFFFFFFFF


def prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """Generic byte permute: byte i of the result is byte ``selector nibble i`` of b:a; bit 3 of a
    nibble would replicate the sign."""
    source = torch.stack([x >> 8 * i & 255 for x in (a, b) for i in range(4)], -1)
    result = torch.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source.gather(-1, (nibble & 7)[..., None])[..., 0]
        byte = torch.where(nibble >= 8, torch.where(byte >= 128, 255, 0), byte)
        result |= byte << 8 * i
    return result


def shift_by(value: torch.Tensor, count: torch.Tensor, left: bool) -> torch.Tensor:
    """Shifts of PTX clamp their count at 32."""
    count = count.clamp(max=32)
    return (value << count if left else value >> count) & MASK


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    result = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            term = torch.full_like(a, MASK)
            for operand, place in ((a, 4), (b, 2), (c, 1)):
                term &= operand if index & place else ~operand & MASK
            result |= term
    return result


def halves(words: torch.Tensor) -> torch.Tensor:
    """Both float16 numbers of unsigned 32-bit words, as float64 [..., 2]."""
    signed = torch.where(words > MASK >> 1, words - MASK - 1, words).to(torch.int32)
    return signed[..., None].view(torch.float16).double()


def word_of(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `halves`; rounds values that float16 does not hold."""
    return values.half().view(torch.int32)[..., 0].long() & MASK


class Machine:
    """Runs the straight-line PTX of the decoder on vectors of unsigned 32-bit values."""

    def __init__(self, **registers: torch.Tensor) -> None:
        self.registers = dict(registers)
        self.like = next(iter(registers.values()))

    def value(self, name: str) -> torch.Tensor:
        if name in self.registers:
            return self.registers[name]
        return torch.full_like(self.like, int(name, 0) & MASK)

    def run(self, text: str) -> None:
        for line in text.replace("{", "").replace("}", "").split(";"):
            words = line.replace(",", " ").split()
            if not words or words[0].startswith("."):
                continue
            guard = self.registers[words.pop(0)[1:]] if words[0].startswith("@") else None
            name, target, *sources = words
            if name == "mov.b32" and len(sources) == 2:  # to two registers of 16 bits
                high, word = sources
                self.registers[high] = self.value(word) >> 16
                self.registers[target] = self.value(word) & 0xFFFF
                continue
            result = self.execute(name.split("."), [self.value(s) for s in sources])
            if guard is not None:
                result = torch.where(guard != 0, result, self.registers[target])
            self.registers[target] = result

    def execute(self, name: list[str], operands: list[torch.Tensor]) -> torch.Tensor:
        match name, operands:
            case ["shl", _], [a, b]:
                return shift_by(a, b, left=True)
            case ["shr", "u32"], [a, b]:
                return shift_by(a, b, left=False)
            case ["sub", _], [a, b]:
                return (a - b) & MASK
            case ["add", _], [a, b]:
                return (a + b) & MASK
            case ["min", "u32"], [a, b]:
                return torch.minimum(a, b)
            case ["and", _], [a, b]:
                return a & b
            case ["or", _], [a, b]:
                return a | b
            case ["mov", _], [a]:
                return a
            case ["not", _], [a]:
                return ~a & MASK
            case ["prmt", _], [a, b, c]:
                return prmt(a, b, c)
            case ["mul", "lo", "u32"], [a, b]:
                return (a * b) & MASK
            case ["mad", "lo", "u32"], [a, b, c]:
                return (a * b + c) & MASK
            case ["cvt", "rn", "f16x2", "e4m3x2"], [a]:
                codes = torch.stack((a & 255, a >> 8), -1).to(torch.uint8)
                return word_of(codes.view(torch.float8_e4m3fn))
            case ["mul", "rn", "f16x2"], [a, b]:
                return word_of(halves(a) * halves(b))
            case ["shfl", "sync", "idx", "b32"], [lanes, lane, _, _]:
                return lanes[lane & 31]
            case ["lop3", _], [a, b, c, table]:
                return lop3(a, b, c, int(table.flatten()[0]))
            case ["setp", compare, "u32"], [a, b]:
                return {
                    "ge": a >= b,
                    "eq": a == b,
                    "lt": a < b,
                    "le": a <= b,
                    "gt": a > b,
                    "ne": a != b,
                }[compare].long()
        raise NotImplementedError(".".join(name))


def lane_tables(assembly: str) -> list[torch.Tensor]:
    """Both words of the decode table, of 32 lanes."""
    machine = Machine(**{"%laneid": torch.arange(32)})
    machine.run(assembly)
    return [machine.registers["$0"], machine.registers["$1"]]


def run_decoder(
    words: torch.Tensor, shift: torch.Tensor, assembly: tuple[str, str]
) -> torch.Tensor:
    """int64 codes [..., 4 steps, 2 halves, 4 bytes] for words [..., 4] and shifts [...]."""
    first, second = lane_tables(assembly[0])
    machine = Machine(
        **{f"${8 + step}": words[..., step] for step in range(4)},
        **{f"${12 + copy}": shift for copy in range(16)},
        **{f"${28 + copy}": first for copy in range(16)},
        **{f"${44 + copy}": second for copy in range(16)},
    )
    machine.run(assembly[1])
    outputs = torch.stack([machine.registers[f"${i}"] for i in range(8)], -1)
    outputs = outputs.unflatten(-1, (2, 4)).transpose(-1, -2)
    return torch.stack([outputs >> 8 * j & 255 for j in range(4)], -1)


def run_float16_decoder(words: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """float64 values [..., 4 steps, 2 halves, 4 codes] for words [..., 4] and shifts [...]."""
    assembly = pytest.importorskip("mxpert.device.hopper_ptx", reason="needs Triton with Gluon")
    lanes = (shift & 31)[..., None].expand_as(words)
    tables = [table[lanes] for table in lane_tables(assembly._float16_table_assembly())]
    machine = Machine(**{"$4": words, "$5": tables[0], "$9": tables[1]})
    machine.run(assembly._float16_decode_assembly())
    outputs = torch.stack([machine.registers[f"${i}"] for i in range(4)], -1)
    return halves(outputs.unflatten(-1, (2, 2))).flatten(-2)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """32-bit words of codes [..., 2 halves, 4]."""
    words = torch.zeros(codes.shape[:-2], dtype=torch.int64)
    for half, j in itertools.product(range(2), range(4)):
        code = codes[..., half, j].long()
        words |= (code & 7) << (16 * half + 4 * j)
        words |= (code >> 3) << (8 * j + (3 if half else 7))
    return words


def decoder_assembly() -> tuple[str, str]:
    """PTX of the tables, and of the decoding."""
    assembly = pytest.importorskip("mxpert.device.hopper_ptx", reason="needs Triton with Gluon")
    return assembly._table_assembly(), assembly._decode_assembly()


def decoder_cases(shifts: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [S, 64, 4 steps, 2, 4]: every code at every place of a word, and random words."""
    generator = torch.Generator().manual_seed(11)
    codes = torch.randint(0, 16, (len(shifts), 64, 4, 2, 4), generator=generator)
    codes[:, :16] = torch.arange(16)[:, None, None, None]
    return codes, torch.tensor(list(shifts))[:, None].expand(-1, 64)


def test_decoder_gives_every_code_under_every_shift() -> None:
    codes, shift = decoder_cases(range(SPAN))
    decoded = run_decoder(pack_words(codes), shift, decoder_assembly())
    table = torch.tensor([[folded_code(code, s) for code in range(16)] for s in range(SPAN)])
    assert torch.equal(decoded, table[shift[:, :, None, None, None], codes])


def test_float16_decoder_gives_every_code_under_every_shift() -> None:
    codes, shift = decoder_cases(range(SPAN))
    decoded = run_float16_decoder(pack_words(codes), shift)
    values = torch.tensor(ocp.code_values("mxfp4"), dtype=torch.float64)[codes.long()]
    assert torch.equal(decoded, values * 2.0 ** (6 - shift[:, :, None, None, None]))


def test_float16_decoder_keeps_zero_blocks_zero() -> None:
    codes, shift = decoder_cases(range(256))
    codes &= 8
    assert not run_float16_decoder(pack_words(codes), shift).any()


def test_decoder_keeps_zero_blocks_zero() -> None:
    """Blocks of zeros may carry any scale byte, so any shift; their codes must stay zeros."""
    codes, shift = decoder_cases(range(256))
    codes &= 8
    decoded = run_decoder(pack_words(codes), shift, decoder_assembly())
    wrong = (decoded & 0x7F != 0).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"zero codes decode to other values under shifts {wrong}"


@pytest.mark.parametrize(
    "old, new",
    [
        ("0x6C686000", "0x6C686008"),
        ("0x7C787470", "0x7C787478"),
        ("0x0C080604", "0x0C080605"),
        ("0xEA", "0xFA"),
        (", 16;", ", 12;"),
        ("0xFFFFFF00", "0xFFFFFFFF"),
    ],
    ids=["low_table", "high_table", "last_table", "sign_logic", "second_half", "zero_mask"],
)
def test_planted_decoder_errors_are_caught(old: str, new: str) -> None:
    assembly = decoder_assembly()
    assert old in "".join(assembly)
    codes, shift = decoder_cases(range(SPAN))
    good = run_decoder(pack_words(codes), shift, assembly)
    table, decoder = (text.replace(old, new) for text in assembly)
    bad = run_decoder(pack_words(codes), shift, (table, decoder))
    assert not torch.equal(good, bad)


def test_decoder_reads_what_pack_hopper_stores() -> None:
    """Bytes of a packed tensor through the PTX, against the dequantised weights."""
    t = folding_weights((1, 64, 128), seed=13)
    packed = HOPPER_FRAGMENT.pack(t)
    words = packed.qdata.long().view(2, 4, 8, 4, 4, 4)  # r w g t q byte
    words = sum(words[..., i] << 8 * i for i in range(4))
    shift = packed.scale.long().view(4, 8, 4, 2).permute(3, 0, 1, 2).contiguous()
    decoded = run_decoder(words, shift % 256, decoder_assembly())  # r w g t q h j
    rows = decoded.permute(1, 2, 0, 3, 4, 5, 6).reshape(64, 128)
    e4m3 = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)
    assert packed.reference is not None
    values = e4m3[rows] * torch.exp2(packed.reference[0].double() - 133)[:, None]
    assert torch.equal(values, dequantize_blocks(t, torch.float64)[0])
