"""NaN, infinities, subnormals and the largest finite values in every tensor argument.

No result is finite where float64 has no finite number, and a token's special values change no bit
of another token's result. The long run: ``python tests/fuzz/special.py --cases 20000``; on a GPU
``--device cuda`` (test_special_gpu.py runs 5,000 cases there); one case again: ``--seed SEED
--cases 1``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_values
import torch
from seeds import Report, each_seed, long_run, parser
from special_case import Case
from special_cases import CASES, EXACT_OF_ROUTED

from mxpert import Combine, MXTensor, RoutingPlan, ScaleRule, ScaleSpan, SwiGLU

SCALES = (0, 1, 253, 254, 255)
"""Scale bytes: the smallest, the largest, NaN."""
CODES = (0x00, 0x01, 0x77, 0x7B, 0x7C, 0x7E, 0x7F, 0x80, 0xFC, 0xFF)
"""Codes: NaN of e4m3 and e5m2, infinities of e5m2, the largest and the smallest values."""


FEWER_KERNELS = {
    "rule": ScaleRule.RCEIL,
    "scale_rule": ScaleRule.RCEIL,
    "combine": Combine.REDUCE,
    "activation": SwiGLU(),
}
"""Choices on a GPU, where each of them compiles other kernels; REDUCE repeats its bits."""


def specials(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    values = [torch.inf, info.max, info.tiny, info.smallest_normal * info.eps]
    return [torch.nan, *values, *(-value for value in values)]


def spoil(rng: random.Random, value: Any) -> tuple[Any, set[int]]:
    """The value with special values in one of its tensors, and the rows (dimension 0) of them."""
    spans = value.scale_span if isinstance(value, MXTensor) else ScaleSpan.BLOCK
    parts = {
        name: part
        for name, part in fuzz_values.tensor_parts(value).items()
        if part.numel() and (part.is_floating_point() or spans is ScaleSpan.BLOCK)
    }
    if not parts:
        return value, set()
    name = rng.choice(list(parts))
    part = parts[name].clone()
    row = rng.randrange(len(part))
    flat = part[row].view(-1)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if part.is_floating_point():
            chosen = rng.choice(specials(part.dtype))
        else:
            chosen = rng.choice(SCALES if name.endswith("scale") else CODES)
        if rng.random() < 0.1:
            flat[:] = chosen
        else:
            flat[rng.randrange(len(flat))] = chosen
    return fuzz_values.with_part(value, name, part), {row}


def moved(value: Any, device: torch.device) -> Any:
    """The value on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, RoutingPlan):
        parts = fuzz_values.tensor_parts(value)
        return replace(value, **{name: part.to(device) for name, part in parts.items()})
    to = getattr(value, "to", None)
    return value if to is None or isinstance(value, (str, torch.dtype)) else to(device)


def call(case: Case, arguments: dict[str, Any], device: torch.device) -> list[Any]:
    found = case.call({name: moved(value, device) for name, value in arguments.items()})
    return [None if each is None else each.detach().cpu() for each in found]


def judge(case: Case, arguments: dict[str, Any], found: list[Any]) -> tuple[str | None, bool]:
    """What is wrong with the results, and whether float64 has a number that is not finite."""
    exact = case.exact(arguments)
    if case.name == "route_topk":
        exact = EXACT_OF_ROUTED(arguments, found[1].long())
    some = False
    for number, (result, bound) in enumerate(zip(found, exact, strict=True)):
        if bound is None or result is None:
            continue
        lost = ~bound.isfinite()
        some |= bool(lost.any())
        wrong = lost & result.isfinite()
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            return f"result {number} at {place}: {result[place]}, not {bound[place]}", some
    return None, some


def one(cases: Sequence[Case], seed: int, device: torch.device, size: int, report: Report) -> None:
    """One case."""
    rng = random.Random(seed)
    case = rng.choice(cases)
    torch.manual_seed(seed)
    clean = case.arguments(rng, size)
    if device.type != "cpu":
        clean |= {name: value for name, value in FEWER_KERNELS.items() if name in clean}
    names = [name for name in case.spoilt if clean.get(name) is not None]
    chosen = rng.sample(names, rng.choice((1, 1, len(names))))
    arguments, rows = dict(clean), set[int]()
    for name in chosen:
        arguments[name], rows = spoil(rng, clean[name])
    found = call(case, arguments, device)
    problem, some = judge(case, arguments, found)
    if problem is None and chosen == [case.rows] and rng.random() < 0.5:
        before = call(case, clean, device)[0]
        others = [row for row in range(len(before)) if row not in rows]
        same = torch.allclose(before[others], found[0][others], rtol=0, atol=0, equal_nan=True)
        if not same:
            problem = "special values of a row change another row"
    wrong = f"{case.name} with special {chosen}: {problem}" if problem else None
    report.add(seed, [case.name], counted=some, wrong=wrong)


def run(
    cases: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
    size: int = 1,
    functions: Sequence[Case] = CASES,
) -> Report:
    """Cases of consecutive seeds; `size` multiplies the widths. Lost numbers are counted."""
    device = torch.device(device)
    functions = [case for case in functions if device.type == "cpu" or case.on_gpu]
    return each_seed(
        lambda number, report: one(functions, number, device, size, report), cases, seed
    )


if __name__ == "__main__":
    command = parser(__doc__)
    command.add_argument("--device", default="cpu")
    command.add_argument("--size", type=int, default=1)
    given = command.parse_args()
    long_run(
        lambda: run(given.cases, given.seed, given.device, given.size),
        "special values",
        "not finite in float64",
    )
