"""Parser of the pseudocode in AMD's manuals."""

from __future__ import annotations

import functools
import re
from typing import Any

from gfx950_support.values import Value, make

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
TYPE = re.compile(r"(bf|fp|[uifb])(\d+)")


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
