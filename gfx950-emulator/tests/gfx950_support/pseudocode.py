"""An interpreter of the pseudocode in AMD's CDNA4 manual, as tinygrad's wheel carries it.

It works on one lane at a time, on integers, and shares no code with the executor. `PSEUDOCODE` has
the text of each mnemonic, `Lane` runs one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from gfx950_support.parser import TYPE, parse
from gfx950_support.values import (
    DENORMAL,
    FUNCTIONS,
    Value,
    bf16,
    is_denormal,
    make,
    power,
    same,
    to_small,
)

__all__ = ["PSEUDOCODE", "Lane", "Value", "same"]

PSEUDOCODE: dict[str, str] = {}
for _operation, _text in PCODE.items():
    _name = re.sub(r"_e(32|64)$", "", _operation.name.lower())
    # A zero with a sign stands for its bits: v_max_f32 tells +0.0 from -0.0.
    for _width, _suffix in ((16, "U"), (32, "U"), (64, "ULL")):
        _float = rf"S(\d)\.f{_width}" if _width == 64 else rf"64'F\(S(\d)\.f{_width}\)"
        for _zero, _bits in ((r"\+0\.0", 0), (r"-0\.0", 1 << (_width - 1))):
            _same = rf"S\1.u{_width} == {_bits:#x}{_suffix}"
            _text = re.sub(f"{_float} == {_zero}", _same, _text)
    PSEUDOCODE.setdefault(_name, _text)


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
            if isinstance(old, Value) and target[1].isupper():  # a register keeps its width
                value = _converted(value, "b", old.width)
            self.variables[target[1]] = value
            return
        if target[0] == "concat":
            low = 0
            for part in reversed(target[1]):
                width = int(part[2].lstrip("uib"))
                self._store(part, 0, width, value.bits >> low)
                low += width
            return
        if target[0] == "member" and (found := TYPE.fullmatch(target[2])):
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
        kind = name.rstrip("0123456789")
        width = int(name[len(kind) :] or 0)
        if inner in (("name", "NAN"), ("name", "INF")):
            return make("f", width, math.nan if inner[1] == "NAN" else math.inf)
        value = self.evaluate(inner)
        if isinstance(value, dict):
            return value[name]
        return Value(kind, width, value.bits & ((1 << width) - 1))

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
        if node[0] == "member" and TYPE.fullmatch(node[2]):
            return self._raw(node[1])
        return self.evaluate(node)

    def _get_choose(self, test: Any, yes: Any, no: Any) -> Any:
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

    def _get_call(self, function: Any, arguments: list[Any]) -> Any:
        values = [self.evaluate(argument) for argument in arguments]
        if function[0] == "cast":
            return _converted(values[0], function[1], function[2])
        name = function[1]
        if name.startswith(("v_", "s_")):
            variables = {f"S{k}": value for k, value in enumerate(values)}
            inner = Lane({**self.variables, **variables, "D0": Value("b", 64, 0)})
            inner.run(PSEUDOCODE[name])
            width = values[0].width
            return Value(values[0].kind, width, inner.variables["D0"].bits & ((1 << width) - 1))
        small = re.fullmatch(r"\w+_to_(fp8|bf8|fp4)_scale", name)
        if small:
            return to_small(small[1], self.variables)(*values)
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


_FRACTION = {16: 10, 32: 23, 64: 52}
"""Bits of a float's fraction."""


def _converted_nan(value: Value, width: int) -> Value:
    old, new = _FRACTION[value.width], _FRACTION[width]
    fraction = (value.bits & (1 << old) - 1) << 52 - old >> 52 - new
    exponent = (1 << width - 1 - new) - 1
    return Value(
        "f", width, value.bits >> value.width - 1 << width - 1 | exponent << new | fraction
    )


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
            return make("u", 1, is_denormal(a))
        return make("u", 1, _COMPARISONS[operator](a.number, b.number))
    if operator in ("&&", "||"):
        return make("u", 1, (a.truth and b.truth) if operator == "&&" else (a.truth or b.truth))
    if operator == "<<":
        return make(a.kind, a.width, a.bits << b.bits)
    if operator == ">>":
        return make(a.kind, a.width, a.number >> b.bits)
    kind, width = _common(a, b)
    if operator == "**":
        return make("f", width, power(a.number, b.number))
    if operator == "/":
        return (
            make("f", width, _quotient(a.number, b.number))
            if kind == "f"
            else make(kind, width, a.number // b.number)
        )
    if kind == "bf":
        return Value("bf", 16, bf16(_ARITHMETIC[operator](a.number, b.number)))
    if kind != "f":
        return make(kind, width, _ARITHMETIC[operator](a.number, b.number))
    return make("f", width, _float_arithmetic(operator, a.number, b.number))


def _float_arithmetic(operator: str, a: float, b: float) -> float:
    if operator == "*" and ((math.isinf(a) and b == 0) or (math.isinf(b) and a == 0)):
        return math.nan
    return float(_ARITHMETIC[operator](a, b))


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
