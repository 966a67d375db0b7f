"""Full module paths, which name experts everywhere, and layer numbers as a short form of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import Checks

_NUMBER = re.compile(r"(?:^|\.)(\d{1,9})(?=\.|$)")


def layer_number(path: str) -> int:
    """The first number in a module path or tensor name; -1 without one.

    Example:
        >>> layer_number("model.layers.7.mlp.experts"), layer_number("transformer.h.0.moe.experts")
        (7, 0)
    """
    found = _NUMBER.search(path)
    return int(found[1]) if found else -1


def module_order(path: str) -> list[tuple[bool, int, str]]:
    """Key that sorts module paths with their numbers as numbers.

    Example:
        >>> sorted(["layers.10.experts", "layers.9.experts"], key=module_order)
        ['layers.9.experts', 'layers.10.experts']
    """
    return [
        (part.isdecimal(), int(part[:9]) if part.isdecimal() else 0, part)
        for part in path.split(".")
    ]


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """A name for each module path in a table: its layer number if no other has it, else the path.

    Example:
        >>> short_names(["layers.0.mlp.experts", "layers.1.a.experts", "layers.1.b.experts"])
        {'layers.0.mlp.experts': '0', 'layers.1.a.experts': 'layers.1.a.experts', \
'layers.1.b.experts': 'layers.1.b.experts'}
    """
    unique = list(dict.fromkeys(paths))
    numbers = [layer_number(path) for path in unique]
    return {
        path: str(number) if number >= 0 and numbers.count(number) == 1 else path
        for path, number in zip(unique, numbers, strict=True)
    }


def choose_modules(paths: Sequence[str], wanted: Iterable[int | str], op: str) -> list[str]:
    """The module paths that `wanted` names.

    Args:
        paths: all module paths.
        wanted: full paths, or layer numbers; a number must fit one path alone.
        op: name of the operation that error messages start with.

    Raises:
        TypeError: neither a string nor an int. ValueError: no such module, or a number that fits
            several.

    Example:
        >>> choose_modules(["layers.3.mlp.experts", "layers.4.mlp.experts"], [4], "load")
        ['layers.4.mlp.experts']
    """
    need = Checks(op)
    chosen = []
    for entry in wanted:
        if isinstance(entry, str):
            need(entry in paths, "layers", f"modules among {list(paths)}", repr(entry))
            chosen.append(entry)
            continue
        if not isinstance(entry, int) or isinstance(entry, bool):
            raise need.type_error("layers", "module paths or layer numbers", repr(entry))
        fitting = [path for path in paths if layer_number(path) == entry]
        need(
            bool(fitting),
            "layers",
            f"layers among {sorted({layer_number(path) for path in paths})}",
            entry,
        )
        need(
            len(fitting) == 1,
            "layers",
            "a layer with one experts module",
            f"{entry} with {fitting}",
            "name a module by its full path",
        )
        chosen += fitting
    return chosen


def match_modules(paths: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """The module of another checkpoint that each path stands for.

    It is the one of the same path, else the only one with the same layer number: Transformers
    renames parents, ``block_sparse_moe`` to ``mlp`` for example. Paths without such a module are
    left out.

    Example:
        >>> match_modules(["layers.3.mlp.experts"], ["layers.3.block_sparse_moe.experts"])
        {'layers.3.mlp.experts': 'layers.3.block_sparse_moe.experts'}
    """
    matched = {path: path for path in paths if path in others}
    for path in paths:
        same, fitting = (
            [name for name in names if layer_number(name) == layer_number(path)]
            for names in (paths, others)
        )
        if path not in matched and same == [path] and len(fitting) == 1:
            matched[path] = fitting[0]
    return matched
