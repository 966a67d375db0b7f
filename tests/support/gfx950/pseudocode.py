"""An interpreter of the pseudocode in AMD's CDNA4 manual, as tinygrad's wheel carries it.

It works on one lane at a time, on integers, and shares no code with the executor. `PSEUDOCODE` has
the text of each mnemonic, `Program` runs one.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

PSEUDOCODE: dict[str, str] = {}
for _operation, _text in PCODE.items():
    _name = re.sub(r"_e(32|64)$", "", _operation.name.lower())
    PSEUDOCODE.setdefault(_name, _text)


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """Bits with a type: kind "u", "i", "f", "bf", "fp" (of 8 or 4 bits), "b", or "n": a literal
    that takes the other operand's type."""

    kind: str
    width: int
    bits: int

    @property
    def number(self) -> Any:
        if self.kind == "f":
            return decode_float(self.bits, self.width)
        if self.kind == "bf" and self.width == 16:
            return decode_float(self.bits << 16, 32)
        if self.kind in ("i", "n"):
            return self.bits - ((self.bits >> (self.width - 1) & 1) << self.width)
        return self.bits

    @property
    def truth(self) -> bool:
        return bool(self.bits)


def decode_float(bits: int, width: int) -> float:
    code, integer = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}[width]
    return struct.unpack("<" + code, struct.pack("<" + integer, bits))[0]


def make(kind: str, width: int, number: Any) -> Value:
    """A value from a Python number, rounded to nearest even if it is a float."""
    if kind == "f":
        return Value(kind, width, encode_float(number, width))
    return Value(kind, width, int(number) & ((1 << width) - 1))


def encode_float(number: float, width: int) -> int:
    if math.isnan(number):
        return {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}[width]
    code, integer = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}[width]
    try:
        return struct.unpack("<" + integer, struct.pack("<" + code, number))[0]
    except OverflowError:
        sign = 1 << (width - 1) if math.copysign(1, number) < 0 else 0
        return sign | encode_float(math.inf, width)


DENORMAL = object()
"""What a value equals that is denormal (``S1.f32 == DENORM.f32``)."""


def _is_denormal(value: Value) -> bool:
    exponent, fraction = {32: (8, 23), 64: (11, 52)}[value.width]
    return (
        value.bits >> fraction & ((1 << exponent) - 1) == 0
        and value.bits & ((1 << fraction) - 1) != 0
    )


# -- functions -------------------------------------------------------------------------------------


def _exponent(x: Value) -> Value:
    return Value("i", 32, x.bits >> 23 & 255)


def _power(base: float, exponent: float) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _fma(a: Value, b: Value, c: Value, power: Value | None = None) -> Value:
    """a * b + c, times 2**power, with one rounding."""
    x, y, z = a.number, b.number, c.number
    if not all(map(math.isfinite, (x, y, z))):
        return make("f", 32, x * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return make("f", 32, x * y + z)
    return make("f", 32, _round(exact * Fraction(2) ** (power.number if power else 0)))


def _round(exact: Fraction) -> float:
    """A fraction as float32, nearest even."""
    size = abs(exact)
    estimate = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(estimate if size >= Fraction(2) ** estimate else estimate - 1, -126)
    steps = round(size / Fraction(2) ** (exponent - 23))  # round() is half to even
    result = steps * 2.0 ** (exponent - 23) if exponent < 200 else math.inf
    return math.copysign(result, 1 if exact > 0 else -1)


def _ldexp(x: Value, power: Value) -> Value:
    try:
        return make("f", 32, math.ldexp(x.number, max(power.number, -1000)))
    except OverflowError:
        return make("f", 32, math.copysign(math.inf, x.number))


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.nan if x < 0 else math.log2(x)


def _integer(low: int, high: int, kind: str) -> Any:
    def convert(x: Value) -> Value:
        number = x.number
        if math.isnan(number):
            return make(kind, 32, 0)
        return make(kind, 32, max(low, min(high, number if math.isinf(number) else int(number))))

    return convert


def _float8(kind: torch.dtype, code: int) -> float:
    return torch.tensor([code], dtype=torch.uint8).view(kind).double().item()


_DECODED = {
    "fp8": [_float8(torch.float8_e4m3fn, code) for code in range(256)],
    "bf8": [_float8(torch.float8_e5m2, code) for code in range(256)],
    "fp4": [sign * value for sign in (1.0, -1.0) for value in FP4],
}


def _nearest(name: str, x: float, saturate: bool) -> int:
    """The code whose value is nearest, ties to the even code; what is too large as FP16_OVFL says."""
    table = _DECODED[name]
    half = len(table) // 2
    finite = [code for code in range(half) if math.isfinite(table[code])]
    sign = half if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return (finite[-1] if name == "fp4" else half - 1) | sign
    top, step = table[finite[-1]], table[finite[-1]] - table[finite[-2]]
    if abs(x) >= top + step / 2 and not (saturate or name == "fp4"):
        return {"fp8": 0x7F, "bf8": 0x7C}[name] | sign
    distance = min(abs(table[code] - abs(x)) for code in finite) if abs(x) < top else None
    if distance is None:
        return finite[-1] | sign
    nearest = [code for code in finite if abs(table[code] - abs(x)) == distance]
    return min(nearest, key=lambda code: code & 1) | sign


def _scale(x: Value) -> float:
    return math.nan if x.bits & 255 == 255 else 2.0 ** ((x.bits & 255) - 127)


def _from_small(name: str, wide: str) -> Any:
    kind, width = {"f32": ("f", 32), "f16": ("f", 16), "bf16": ("bf", 16)}[wide]

    def convert(x: Value, scale: Value) -> Value:
        number = _DECODED[name][x.bits] * _scale(scale)
        if kind == "bf":
            return Value("bf", 16, _bf16(number))
        return make(kind, width, number)

    return convert


def _bf16(number: float) -> int:
    return torch.tensor([number], dtype=torch.bfloat16).view(torch.int16).item() & 0xFFFF


def _to_small(name: str, env: dict[str, Any]) -> Any:
    width = 4 if name == "fp4" else 8

    def convert(x: Value, scale: Value) -> Value:
        return Value("fp", width, _nearest(name, x.number / _scale(scale), env["FP16_OVFL"]))

    return convert


def _flush(x: Value) -> Value:
    return Value(x.kind, x.width, x.bits & 0x80000000) if _is_denormal(x) else x


def _is_nan(x: Value) -> bool:
    return math.isnan(x.number)


def _quiet(x: Value) -> bool:
    return bool(x.bits >> 51 & 1)


def _unary(function: Any) -> Any:
    return lambda x: make(x.kind, x.width, function(x.number))


def _guarded(function: Any) -> Any:
    """A function of floats that keeps NaN and infinity."""
    return _unary(lambda x: function(x) if math.isfinite(x) else x)


FUNCTIONS: dict[str, Any] = {
    "abs": lambda x: Value(x.kind, x.width, x.bits & ~(1 << (x.width - 1))),
    "cvtToQuietNAN": lambda x: x,
    "exponent": _exponent,
    "f32_to_bf16": lambda x: Value("bf", 16, _bf16(x.number)),
    "f32_to_f16": lambda x: make("f", 16, x.number),
    "f16_to_f32": lambda x: make("f", 32, x.number),
    "f32_to_i32": _integer(-(1 << 31), (1 << 31) - 1, "i"),
    "f32_to_u32": _integer(0, (1 << 32) - 1, "u"),
    "ceil": _guarded(lambda x: math.copysign(math.ceil(x), x)),
    "floor": _guarded(lambda x: math.copysign(math.floor(x), x)),
    "trunc": _guarded(lambda x: math.copysign(math.trunc(x), x)),
    "fract": _unary(lambda x: x - math.floor(x) if math.isfinite(x) else math.nan),
    "isEven": lambda x: make("u", 1, math.isfinite(x.number) and x.number % 2 == 0),
    "flush": _flush,
    "fma": _fma,
    "i32_to_f32": lambda x: make("f", 32, x.number),
    "u32_to_f32": lambda x: make("f", 32, x.number),
    "isNAN": lambda x: make("u", 1, _is_nan(x)),
    "isQuietNAN": lambda x: make("u", 1, _is_nan(x) and _quiet(x)),
    "isSignalNAN": lambda x: make("u", 1, _is_nan(x) and not _quiet(x)),
    "fma_scaled": _fma,
    "ldexp": _ldexp,
    "log2": _unary(lambda x: _log(x) if not math.isinf(x) or x < 0 else x),
    "pow": lambda x, y: make("f", 32, _power(x.number, y.number)),
    "sign": lambda x: Value("u", 1, x.bits >> (x.width - 1)),
    "signext": lambda x: make("i", 64, replace(x, kind="i").number),
    "signext_from_bit": lambda x, n: make(
        x.kind, x.width, Value("i", n.bits, x.bits & ((1 << n.bits) - 1)).number if n.bits else 0
    ),
    "sqrt": _unary(lambda x: math.sqrt(x) if x >= 0 else -0.0 if x == 0 else math.nan),
    **{
        f"{name}_to_{wide}_scale": _from_small(name, wide)
        for name in _DECODED
        for wide in ("f32", "f16", "bf16")
    },
}


# -- parser ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|[\d.]+)U?|\d+'[UIFB])"
    r"|(?P<number>0x[0-9a-fA-F]+(?:ULL|LL|U|L)?|\d+\.\d+F?|\d+(?:ULL|LL|U|L)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<symbol>\*\*|<<|>>|<>|<=|>=|==|!=|&&|\|\||\+=|-=|[-+*/%&|^~!<>=?:;,.(){}\[\]])"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_TYPE = re.compile(r"(bf|fp|[uifb])(\d+)")


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise SyntaxError(f"pseudocode: {text[place : place + 40]!r}")
        if match.lastgroup:
            found.append(match[0])
        place = match.end()
    return found


class _Parser:
    """Builds nested tuples: expressions and statements with their kind first."""

    def __init__(self, text: str) -> None:
        self.tokens, self.place = _tokens(text), 0

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def next(self, expected: str = "") -> str:
        token = self.peek()
        if expected and token != expected:
            raise SyntaxError(f"pseudocode: {expected!r} instead of {token!r}")
        self.place += 1
        return token

    def block(self, *ends: str) -> list[Any]:
        statements = []
        while self.peek() and self.peek() not in ends:
            if self.peek() == ";":
                self.next()
            else:
                statements.append(self.statement())
        return statements

    def statement(self) -> Any:
        word = self.peek()
        if word == "if":
            return self.condition()
        if word == "for":
            self.next()
            name = self.next()
            self.next("in")
            low = self.expression()
            self.next(":")
            high = self.expression()
            self.next("do")
            body = self.block("endfor")
            self.next("endfor")
            return ("for", name, low, high, body)
        if word == "declare":
            self.next()
            name = self.next()
            self.next(":")
            width = self.next()
            if self.peek() == "[":
                self.next()
                self.next()
                self.next("]")
                return ("declare", name, None)
            return ("declare", name, int(width.split("'")[0]))
        if word == "break":
            self.next()
            return ("break",)
        if word == "return":
            self.next()
            return ("return", self.expression())
        target = self.postfix()
        operator = self.next()
        if operator == "=" and self.peek() == "lambda":
            return self.function(target[1])
        value = self.expression()
        if operator in ("+=", "-="):
            return ("assign", target, ("binary", operator[0], target, value))
        if operator != "=":
            raise SyntaxError(f"pseudocode: statement with {operator!r}")
        return ("assign", target, value)

    def function(self, name: str) -> Any:
        self.next("lambda")
        self.next("(")
        parameters = [self.next()]
        while self.peek() == ",":
            self.next()
            parameters.append(self.next())
        self.next(")")
        self.next("(")
        body = self.block(")")
        self.next(")")
        return ("lambda", name, parameters, body)

    def condition(self) -> Any:
        self.next()
        test = self.expression()
        self.next("then")
        body = self.block("elsif", "else", "endif")
        if self.peek() == "elsif":
            return ("if", test, body, [self.condition()])
        other = []
        if self.peek() == "else":
            self.next()
            other = self.block("endif")
        self.next("endif")
        return ("if", test, body, other)

    def expression(self) -> Any:
        test = self.binary(0)
        if self.peek() != "?":
            return test
        self.next()
        yes = self.expression()
        self.next(":")
        return ("choose", test, yes, self.expression())

    def binary(self, level: int) -> Any:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            left = ("binary", self.next(), left, self.binary(level + 1))
        return left

    def unary(self) -> Any:
        if self.peek() in ("-", "~", "!", "+"):
            return ("unary", self.next(), self.unary())
        return self.postfix()

    def postfix(self) -> Any:
        node = self.primary()
        while self.peek() in (".", "[", "("):
            symbol = self.next()
            if symbol == ".":
                node = ("member", node, self.next())
            elif symbol == "(":
                node = ("call", node, self.list(")"))
            else:
                first = self.expression()
                if self.peek() == ":":
                    self.next()
                    node = ("slice", node, first, self.expression())
                else:
                    node = ("index", node, first)
                self.next("]")
        return node

    def list(self, end: str) -> list[Any]:
        items = []
        while self.peek() != end:
            items.append(self.expression())
            if self.peek() == ",":
                self.next()
        self.next(end)
        return items

    def primary(self) -> Any:
        token = self.next()
        if token == "(":
            node = self.expression()
            self.next(")")
            return node
        if token == "{":
            return ("concat", self.list("}"))
        if "'" in token:
            width, rest = token.split("'")
            if rest in ("U", "I", "F", "B"):
                return ("cast", rest.lower(), int(width))
            if "." in rest:
                return ("value", make("f", int(width), float(rest)))
            return ("value", Value("u", int(width), int(rest.rstrip("U"), 0)))
        if token[0].isdigit():
            return ("value", _literal(token))
        return ("name", token)


def _literal(token: str) -> Value:
    if "." in token and not token.startswith("0x"):
        return make("f", 32 if token.endswith("F") else 64, float(token.rstrip("F")))
    digits = token.rstrip("UL")
    suffix = token[len(digits) :]
    if not suffix:
        return Value("n", 64, int(digits, 0))
    return Value("u" if "U" in suffix else "i", 64 if "LL" in suffix else 32, int(digits, 0))


@functools.cache
def parse(text: str) -> list[Any]:
    """Statements of a pseudocode text."""
    return _Parser(text).block()


# -- interpreter -----------------------------------------------------------------------------------


class _Return(Exception):  # noqa: N818, control flow
    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


class _Break(Exception):  # noqa: N818, control flow
    pass


@dataclass
class Lane:
    """Runs pseudocode for one lane.

    Args:
        variables: registers and constants by name: values, dicts (``INST.NEG``), functions, or
            tables of values such as VGPR and MEM, which are indexed.
    """

    variables: dict[str, Any]
    functions: dict[str, Any] = field(default_factory=dict)

    def run(self, text: str) -> None:
        """Execute a text; results are in `variables`."""
        self._block(parse(text))

    def _block(self, statements: list[Any]) -> None:
        for statement in statements:
            getattr(self, "_do_" + statement[0])(*statement[1:])

    def _do_assign(self, target: Any, expression: Any) -> None:
        value = self.evaluate(expression)
        if target[0] == "name":
            old = self.variables.get(target[1])
            fixed = isinstance(old, Value) and target[1].isupper()
            self.variables[target[1]] = _converted(value, "b", old.width) if fixed else value
            return
        if target[0] == "concat":
            low = 0
            for part in reversed(target[1]):
                kind, width = _TYPE.fullmatch(part[2]).groups()
                self._store(part, 0, int(width), value.bits >> low)
                low += int(width)
            return
        if target[0] == "member" and (found := _TYPE.fullmatch(target[2])):
            value = _converted(value, found[1], int(found[2]))
            self._store(target[1], 0, value.width, value.bits)
            return
        if target[0] == "slice":
            high, low = (self.evaluate(node).bits for node in target[2:])
            self._store(target[1], low, high - low + 1, value.bits)
            return
        self._store(target, 0, self._width_of(target, value), value.bits)

    def _width_of(self, target: Any, value: Value) -> int:
        """Bits of an indexed target: a table's cell, or one bit."""
        table = self.evaluate(target[1])
        return value.width if isinstance(table, dict | list) else 1

    def _store(self, node: Any, low: int, width: int, bits: int) -> None:
        """Replace bits low … low + width − 1 of what a node names."""
        kind = node[0]
        if kind == "member":
            self._store(node[1], low, width, bits)
        elif kind == "slice":
            self._store(node[1], low + self.evaluate(node[3]).bits, width, bits)
        elif kind == "index":
            table = self.evaluate(node[1])
            place = self.evaluate(node[2]).bits
            if isinstance(table, dict | list):
                table[place] = _replaced(table[place], low, width, bits)
            else:
                self._store(node[1], low + place, width, bits)
        else:
            old = self.variables.get(node[1], Value("b", 64, 0))
            self.variables[node[1]] = _replaced(old, low, width, bits)

    def _do_if(self, test: Any, body: list[Any], other: list[Any]) -> None:
        self._block(body if self.evaluate(test).truth else other)

    def _do_for(self, name: str, low: Any, high: Any, body: list[Any]) -> None:
        for number in range(self.evaluate(low).bits, self.evaluate(high).bits + 1):
            self.variables[name] = Value("i", 32, number)
            try:
                self._block(body)
            except _Break:
                return

    def _do_declare(self, name: str, width: int | None) -> None:
        if width is None:
            self.variables[name] = [Value("b", 32, 0)] * 64
        elif name not in self.variables:
            self.variables[name] = Value("b", width, 0)

    def _do_break(self) -> None:
        raise _Break

    def _do_return(self, expression: Any) -> None:
        raise _Return(self.evaluate(expression))

    def _do_lambda(self, name: str, parameters: list[str], body: list[Any]) -> None:
        def call(*values: Value) -> Value:
            inner = Lane({**self.variables, **dict(zip(parameters, values, strict=True))})
            try:
                inner._block(body)
            except _Return as result:
                return result.value
            raise SyntaxError(f"pseudocode: {name} returns nothing")

        self.functions[name] = call

    def evaluate(self, node: Any) -> Any:
        """The value of an expression."""
        return getattr(self, "_get_" + node[0])(*node[1:])

    def _get_value(self, value: Value) -> Value:
        return value

    def _get_name(self, name: str) -> Any:
        constants = {"INF": math.inf, "UNDERFLOW_F32": 0.0, "OVERFLOW_F32": math.inf}
        if name in constants:
            return make("f", 64 if name == "INF" else 32, constants[name])
        return self.variables[name]

    def _get_member(self, inner: Any, name: str) -> Any:
        if inner == ("name", "DENORM"):
            return DENORMAL
        found = _TYPE.fullmatch(name)
        if inner in (("name", "NAN"), ("name", "INF")):
            return make("f", int(found[2]), math.nan if inner[1] == "NAN" else math.inf)
        value = self.evaluate(inner)
        if isinstance(value, dict):
            return value[name]
        width = int(found[2])
        return Value(found[1], width, value.bits & ((1 << width) - 1))

    def _get_slice(self, inner: Any, high: Any, low: Any) -> Value:
        first, last = self.evaluate(low).bits, self.evaluate(high).bits
        bits = self._raw(inner).bits
        if last < first:  # [0 : 31] reverses
            width = first - last + 1
            return Value(
                "b", width, sum((bits >> last + k & 1) << width - 1 - k for k in range(width))
            )
        width = last - first + 1
        return Value("b", width, bits >> first & ((1 << width) - 1))

    def _get_index(self, inner: Any, place: Any) -> Any:
        table = self._raw(inner)
        number = self.evaluate(place).bits
        if isinstance(table, dict | list):
            return table[number]
        return Value("b", 1, table.bits >> number & 1)

    def _raw(self, node: Any) -> Any:
        """What is sliced: types below say how to read the bits, not how many there are."""
        if node[0] == "member" and _TYPE.fullmatch(node[2]):
            return self._raw(node[1])
        return self.evaluate(node)

    def _get_choose(self, test: Any, yes: Any, no: Any) -> Value:
        return self.evaluate(yes if self.evaluate(test).truth else no)

    def _get_concat(self, parts: list[Any]) -> Value:
        bits = width = 0
        for value in map(self.evaluate, parts):
            bits, width = bits << value.width | value.bits, width + value.width
        return Value("b", width, bits)

    def _get_unary(self, operator: str, operand: Any) -> Value:
        value = self.evaluate(operand)
        if operator == "!":
            return make("u", 1, not value.truth)
        if operator == "~":
            return make(value.kind, value.width, ~value.bits)
        if operator == "-" and value.kind == "f":
            return Value("f", value.width, value.bits ^ 1 << (value.width - 1))
        return make(value.kind, value.width, -value.number) if operator == "-" else value

    def _get_binary(self, operator: str, left: Any, right: Any) -> Value:
        return _binary(operator, self.evaluate(left), self.evaluate(right))

    def _get_call(self, function: Any, arguments: list[Any]) -> Value:
        values = [self.evaluate(argument) for argument in arguments]
        if function[0] == "cast":
            return _converted(values[0], function[1], function[2])
        name = function[1]
        if name.startswith(("v_", "s_")):
            variables = {f"S{k}": value for k, value in enumerate(values)}
            inner = Lane({**self.variables, **variables, "D0": Value("b", 64, 0)})
            inner.run(PSEUDOCODE[name])
            return Value(values[0].kind, 32, inner.variables["D0"].bits & 0xFFFFFFFF)
        small = re.fullmatch(r"\w+_to_(fp8|bf8|fp4)_scale", name)
        if small:
            return _to_small(small[1], self.variables)(*values)
        known = self.functions.get(name) or self.variables.get(name) or FUNCTIONS[name]
        return known(*values)


def _replaced(old: Value, low: int, width: int, bits: int) -> Value:
    mask = (1 << width) - 1
    return Value("b", max(old.width, low + width), old.bits & ~(mask << low) | (bits & mask) << low)


def _converted(value: Value, kind: str, width: int) -> Value:
    """A cast: numbers keep their value, other bits are taken as they are."""
    if kind == "f" and value.kind == "f" and width != value.width:
        if math.isnan(value.number):
            return _converted_nan(value, width)
        return make("f", width, value.number)
    if kind != "f" and value.kind in ("i", "n"):
        return make(kind, width, value.number)
    return Value(kind, width, value.bits & ((1 << width) - 1))


def _converted_nan(value: Value, width: int) -> Value:
    sign, fraction = value.bits >> (value.width - 1), value.bits
    if width == 64:
        return Value("f", 64, sign << 63 | 0x7FF << 52 | (fraction & 0x7FFFFF) << 29)
    return Value("f", 32, sign << 31 | 0xFF << 23 | fraction >> 29 & 0x7FFFFF)


_COMPARISONS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<>": lambda a, b: a < b or a > b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_ARITHMETIC = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "%": lambda a, b: a % b,
}


def _binary(operator: str, a: Any, b: Any) -> Value:
    if operator in _COMPARISONS:
        if b is DENORMAL:
            return make("u", 1, _is_denormal(a))
        return make("u", 1, _COMPARISONS[operator](a.number, b.number))
    if operator in ("&&", "||"):
        return make("u", 1, (a.truth and b.truth) if operator == "&&" else (a.truth or b.truth))
    if operator == "<<":
        return make(a.kind, a.width, a.bits << b.bits)
    if operator == ">>":
        return make(a.kind, a.width, a.number >> b.bits)
    kind, width = _common(a, b)
    if operator == "**":
        return make("f", width, _power(a.number, b.number))
    if operator == "/":
        return (
            make("f", width, _quotient(a.number, b.number))
            if kind == "f"
            else make(kind, width, a.number // b.number)
        )
    if kind == "bf":
        return Value("bf", 16, _bf16(_ARITHMETIC[operator](a.number, b.number)))
    if kind != "f":
        return make(kind, width, _ARITHMETIC[operator](a.number, b.number))
    return make("f", width, _float_arithmetic(operator, a.number, b.number))


def _float_arithmetic(operator: str, a: float, b: float) -> float:
    if operator == "*" and (math.isinf(a) and b == 0 or math.isinf(b) and a == 0):
        return math.nan
    return _ARITHMETIC[operator](a, b)


def _quotient(a: float, b: float) -> float:
    if b == 0:
        negative = math.copysign(1, a) != math.copysign(1, b)
        return (
            math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, -1 if negative else 1)
        )
    return a / b


def _common(a: Value, b: Value) -> tuple[str, int]:
    """The type in which two operands meet."""
    for one, other in ((a, b), (b, a)):
        if one.kind == "n":
            return other.kind, other.width
        if one.kind in ("f", "bf"):
            return one.kind, max(a.width, b.width) if other.kind == "f" else one.width
    return ("i" if a.kind == b.kind == "i" else "u"), max(a.width, b.width)
