"""The form of all messages: ``function: argument — need X, got Y; remedy``."""

from __future__ import annotations


def message(function: str, argument: str, need: object, got: object, remedy: str = "") -> str:
    """Compose ``function: argument — need X, got Y; remedy``."""
    text = f"{function}: {argument} — need {need}, got {got}"
    return f"{text}; {remedy}" if remedy else text


def require(
    condition: bool, function: str, argument: str, *, need: object, got: object, remedy: str = ""
) -> None:
    """Raise a ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(message(function, argument, need, got, remedy))
