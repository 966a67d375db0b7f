"""Cases of MoE layers and of their stages. Sizes are no multiples of the tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from mxpert import Combine, GateUpOrder, ScaleRule
from mxpert.core.problem import GELU, ClampedSiLU, OwnFormat, ReLU2, SiLU, SiTUv2, SwiGLU
from mxpert.testing.problems import Routing
from tests.conformance.cases.moe_case import SWIGLU, MoECase, Sizes

FORMATS: tuple[OwnFormat, ...] = ("bf16", "mxfp8", "mxfp4", "fp8_token")
EXACT_FORMATS = FORMATS[:3]
"""Their scales are powers of two."""
ACTIVATIONS = (SiLU(), SWIGLU, ClampedSiLU(), SiTUv2())
TIGHT = (
    SiLU(),
    SwiGLU(alpha=1.3, limit=1.0, beta=2.0),
    ClampedSiLU(0.5),
    SiTUv2(beta=0.7, beta_up=1.1),
)
"""Parameters that change many of normal values."""
OTHERS = {
    "gelu": GELU(),
    "gelu_tanh": GELU("tanh"),
    "swiglu_beta": SwiGLU(limit=None, beta=0.25),
    "relu2": ReLU2(),
}
ORDERS, RULES = tuple(GateUpOrder), tuple(ScaleRule)
COMBINES = (Combine.REDUCE, Combine.ATOMIC, Combine.FLAT)
DEEP = Sizes(2336, experts=2, top_k=1)
"""73 blocks of depth: several copies of activations to LDS, the last unit a quarter full."""
HIGH = Sizes(tokens=70)
"""A row block of 64 and a part of one."""
HIGH_DEEP = Sizes(1312, experts=2, top_k=1, tokens=70)
Cases = dict[str, MoECase]
FOUR_TILES = ("small", "small_in_units", "split", "more_splits_than_steps")
EXACT: Cases = {
    f"{a_format}-{ACTIVATIONS[i].name}-{tile}": MoECase(
        a_format,
        ACTIVATIONS[i],
        ORDERS[(i + j) % 3],
        COMBINES[(i + j) % 2],
        has_bias=i % 2 == 0,
        on_input=i == 1,
        rule=RULES[(i + j) % len(RULES)],
        tile=tile,
        sizes=Sizes(tokens=33),
    )
    for (i, tile), (j, a_format) in product(enumerate(FOUR_TILES), enumerate(EXACT_FORMATS))
}
"""Every tile with every format."""
OTHER_TILES: Cases = {
    "bf16": MoECase("bf16", ClampedSiLU(), GateUpOrder.INTERLEAVED_16, sizes=DEEP, tile="deep"),
    "mxfp4-sliced": MoECase(
        "mxfp4", SiTUv2(), combine=Combine.ATOMIC, sizes=replace(DEEP, tokens=40), tile="sliced"
    ),
    "mxfp8-split": MoECase("mxfp8", sizes=replace(DEEP, tokens=40), tile="deep_split"),
    "bf16-sliced_and_split": MoECase(
        "bf16", combine=Combine.ATOMIC, sizes=DEEP, tile="sliced_and_split"
    ),
    "mxfp8-floor": MoECase("mxfp8", SiLU(), rule=ScaleRule.FLOOR, sizes=DEEP, tile="grouped"),
    "mxfp4-wide": MoECase("mxfp4", SiLU(), rule=ScaleRule.EVEN, tile="wide"),
    "fp8_token": MoECase(
        "fp8_token", SiTUv2(), has_bias=False, on_input=True, tile="small_in_units"
    ),
    "fp8_token-high": MoECase(
        "fp8_token", SiTUv2(), has_bias=False, on_input=True, sizes=HIGH, tile="high_64"
    ),
}
HIGH_TILES: Cases = {
    "mxfp4-256": MoECase("mxfp4", sizes=HIGH, tile="high_256"),
    "mxfp8-256-deep": MoECase(
        "mxfp8", SiLU(), GateUpOrder.CONCATENATED, Combine.ATOMIC, sizes=HIGH_DEEP, tile="high_256"
    ),
    "mxfp4-128-deep": MoECase(
        "mxfp4",
        SiTUv2(),
        combine=Combine.ATOMIC,
        rule=ScaleRule.EVEN,
        sizes=replace(HIGH_DEEP, tokens=150),
        tile="high_128",
    ),
    "mxfp8-128-units": MoECase(
        "mxfp8",
        ClampedSiLU(),
        rule=ScaleRule.FLOOR,
        sizes=replace(HIGH, tokens=100),
        tile="high_128_in_units",
    ),
    "mxfp8-64-deep": MoECase(
        "mxfp8", order=GateUpOrder.INTERLEAVED_16, sizes=HIGH_DEEP, tile="high_64"
    ),
    "mxfp4-64": MoECase("mxfp4", SiLU(), has_bias=False, on_input=True, sizes=HIGH, tile="high_64"),
    "mxfp8-128-then-64": MoECase("mxfp8", sizes=replace(HIGH, tokens=150), tile="high_128_then_64"),
    "mxfp4-64-then-decode": MoECase(
        "mxfp4", SiLU(), combine=Combine.ATOMIC, sizes=HIGH, tile="high_64_then_decode"
    ),
    "bf16-256-deep": MoECase("bf16", combine=Combine.ATOMIC, sizes=HIGH_DEEP, tile="high_256"),
    "bf16-128": MoECase(
        "bf16",
        SiLU(),
        GateUpOrder.CONCATENATED,
        on_input=True,
        sizes=replace(HIGH, tokens=150),
        tile="high_128_in_units",
    ),
    "bf16-128-deep": MoECase("bf16", sizes=HIGH_DEEP, tile="high_128"),
    "mxfp8-one_expert": MoECase(
        "mxfp8",
        sizes=replace(HIGH, tokens=130, top_k=1),
        routing=Routing.ONE_EXPERT,
        tile="high_128_in_units",
    ),
}
STAGES: Cases = {
    f"{a_format}-{name}": MoECase(
        a_format,
        activation,
        ORDERS[(i + j) % 3],
        COMBINES[(i + 2 * j) % 3],
        has_bias=j % 2 == 0,
        on_input=j % 4 == i,
        rule=RULES[j % 4],
        exact=False,
        tile=FOUR_TILES[(i + j) % 4],
        sizes=Sizes(experts=5, tokens=64),
    )
    for i, a_format in enumerate(FORMATS)
    for j, (name, activation) in enumerate(
        [(each.name, each) for each in (ACTIVATIONS, TIGHT)[i % 2]] + [*OTHERS.items()]
    )
}
"""Pairwise: every format with every activation, order, combine, rule and tile, every activation
with every order, combine and tile. An activation more is one in `OTHERS`."""
NO_TOKENS: Cases = {
    combine.value: MoECase("mxfp8", combine=combine, sizes=Sizes(tokens=0)) for combine in COMBINES
}
ROUNDED: Cases = {
    a_format: MoECase(
        a_format, out_dtype=dtype, exact=False, sizes=Sizes(experts=5, tokens=64), seed=1
    )
    for a_format, dtype in (
        ("bf16", torch.float32),
        ("mxfp8", torch.float16),
        ("mxfp4", torch.bfloat16),
        ("fp8_token", torch.bfloat16),
    )
} | {
    "bf16-high": MoECase("bf16", out_dtype=torch.float32, exact=False, sizes=HIGH, tile="high_128"),
    "mxfp8-deep": MoECase("mxfp8", exact=False, sizes=replace(DEEP, tokens=40), tile="deep"),
}
MAP = (1, -1, 0, -1, -1)
ROUTED: Cases = {
    **{
        f"{tokens}_tokens-{a_format}": MoECase(
            a_format, sizes=Sizes(experts=5, tokens=tokens), tile="chosen"
        )
        for tokens, a_format in product((0, 1, 3), ("bf16", "mxfp4"))
    },
    **{
        routing.value: MoECase(
            "mxfp8", routing=routing, sizes=Sizes(experts=7, top_k=3, tokens=45), tile="grouped"
        )
        for routing in (Routing.ZIPF, Routing.ONE_EXPERT, Routing.HALF)
    },
    "one_expert_of_one": MoECase("bf16", sizes=Sizes(experts=1, top_k=1)),
    "many_slots": MoECase("mxfp4", sizes=Sizes(experts=7, top_k=6, tokens=9)),
    **{
        f"map-{combine.value}": MoECase(
            a_format,
            combine=combine,
            expert_map=MAP,
            local_tokens=17,
            stray_ids=True,
            sizes=Sizes(experts=2),
        )
        for a_format, combine in (("bf16", Combine.REDUCE), ("mxfp4", Combine.ATOMIC))
    },
    "stray_ids": MoECase("mxfp8", stray_ids=True, tile="chosen"),
    "no_local_tokens": MoECase("bf16", local_tokens=0),
}
OPERANDS: Cases = {
    "quantised": MoECase("mxfp4", x="quantised", rule=ScaleRule.EVEN),
    "shifted": MoECase("bf16", x="shifted"),
    "gaps-router_bf16": MoECase(
        "bf16", x="gaps", stray_ids=True, ids_dtype=torch.int64, weights_dtype=torch.bfloat16
    ),
    "shifted-router_float16-map": MoECase(
        "mxfp8",
        x="shifted",
        stray_ids=True,
        expert_map=MAP,
        ids_dtype=torch.int64,
        weights_dtype=torch.float16,
        sizes=Sizes(experts=2),
    ),
    "gaps-fp8_token": MoECase("fp8_token", x="gaps", exact=False, sizes=Sizes(experts=5)),
    "nan": MoECase("bf16", bad=torch.nan),
    "nan-mxfp8": MoECase("mxfp8", bad=torch.nan, sizes=HIGH, tile="high_64"),
    "infinity-mxfp4": MoECase("mxfp4", SiLU(), bad=-torch.inf),
    "infinity-fp8_token": MoECase("fp8_token", bad=torch.inf, exact=False, sizes=Sizes(experts=5)),
}
"""Activations, router results and weights of other dtypes, strides and contents."""
POISONED: Cases = {
    **{a_format: MoECase(a_format, poisoned=True, x="gaps") for a_format in EXACT_FORMATS},
    "fp8_token": MoECase("fp8_token", poisoned=True, exact=False, sizes=Sizes(experts=5)),
    "mxfp8-split": MoECase("mxfp8", poisoned=True, tile="split"),
    "mxfp4-sliced": MoECase("mxfp4", poisoned=True, tile="sliced_and_split"),
    **{
        f"{a_format}-{rows}": MoECase(a_format, poisoned=True, sizes=HIGH, tile=f"high_{rows}")
        for a_format, rows in (
            *product(("mxfp8", "mxfp4"), (64, 128, 256)),
            *product(("bf16",), (128, 256)),
        )
    },
}
"""Depths of 160 and 96 elements: the last unit of 128 has padding in both stages."""
NO_GATE: Cases = {
    "poisoned": MoECase(
        "mxfp8", ReLU2(), combine=Combine.ATOMIC, poisoned=True, exact=False, tile="split"
    )
}
"""One case, so that its kernels run on gfx950 in both schedules."""
OUT: Cases = {
    f"{out}-{str(dtype).removeprefix('torch.')}-{combine.value}-{tile}": MoECase(
        "bf16", combine=combine, out_dtype=dtype, out=out, tile=tile, sizes=Sizes(tokens=33)
    )
    for out, dtype, tiles in (
        ("new", torch.bfloat16, ("small", "split")),
        ("new", torch.float32, ("split", "small")),
        ("x", torch.bfloat16, ("small", "split")),
    )
    for combine, tile in zip(COMBINES[:2], tiles, strict=True)
} | {"no_tokens": MoECase("bf16", out="new", sizes=Sizes(tokens=0))}
FROM_LOGITS: Cases = {
    "bf16": MoECase("bf16", tile="split"),
    "mxfp8": MoECase("mxfp8", x="quantised", local_tokens=7),
    "expert_map": MoECase("bf16", on_input=True, expert_map=(2, -1, 0, -1, 1)),
    "few_tokens": MoECase("bf16", tile="chosen", sizes=Sizes(tokens=2)),
    "out": MoECase("bf16", out="x"),
    "no_tokens": MoECase("bf16", sizes=Sizes(tokens=0)),
}
"""The choice of experts is that of the routing cases."""
WIDE = Sizes(256, 128, tokens=40)
"""Depths that groups of 128 weights divide."""
WEIGHTS: Cases = {
    "mxfp8-bf16": MoECase("bf16", w_format="mxfp8_e4m3", tile="split"),
    "mxfp8-mxfp8": MoECase("mxfp8", SiLU(), w_format="mxfp8_e4m3", poisoned=True),
    "mxfp8-mxfp4": MoECase("mxfp4", SiTUv2(), w_format="mxfp8_e4m3", tile="wide"),
    "mxfp8-bf16-deep": MoECase(
        "bf16", SiLU(), w_format="mxfp8_e4m3", poisoned=True, sizes=DEEP, tile="sliced_and_split"
    ),
    "mxfp8-mxfp8-deep": MoECase(
        "mxfp8",
        order=GateUpOrder.CONCATENATED,
        combine=Combine.ATOMIC,
        w_format="mxfp8_e4m3",
        poisoned=True,
        sizes=replace(DEEP, tokens=40),
        tile="sliced",
    ),
    "mxfp8-mxfp4-deep": MoECase(
        "mxfp4", w_format="mxfp8_e4m3", poisoned=True, sizes=DEEP, tile="deep"
    ),
    "mxfp8-mxfp8-128": MoECase(
        "mxfp8",
        w_format="mxfp8_e4m3",
        poisoned=True,
        sizes=replace(HIGH_DEEP, tokens=150),
        tile="high_128",
    ),
    "mxfp8-mxfp8-128-units": MoECase(
        "mxfp8",
        ClampedSiLU(),
        GateUpOrder.INTERLEAVED_16,
        Combine.ATOMIC,
        on_input=True,
        w_format="mxfp8_e4m3",
        poisoned=True,
        sizes=replace(HIGH, tokens=100),
        tile="high_128_in_units",
    ),
    "mxfp8-fp8_token-128": MoECase(
        "fp8_token", SiLU(), w_format="mxfp8_e4m3", exact=False, sizes=HIGH, tile="high_128"
    ),
    "nvfp4-bf16": MoECase("bf16", w_format="nvfp4", poisoned=True, tile="wide"),
    "nvfp4-mxfp8": MoECase("mxfp8", combine=Combine.ATOMIC, w_format="nvfp4", tile="split"),
    "nvfp4-mxfp4": MoECase("mxfp4", SiLU(), w_format="nvfp4"),
    "nvfp4-fp8_token": MoECase("fp8_token", w_format="nvfp4", exact=False, sizes=WIDE),
}
"""Other formats with the values of MXFP4, where scales allow it."""
WEIGHT_STAGES: Cases = {
    f"{w_format}-{a_format}-{activation.name}{'-zero_points' * zero_points}": MoECase(
        a_format,
        activation,
        order,
        w_format=w_format,
        zero_points=zero_points,
        exact=False,
        poisoned=a_format == "bf16",
        sizes=WIDE,
        tile=tile,
    )
    for w_format, a_format, activation, order, tile, zero_points in (
        ("mxfp8_e4m3", "fp8_token", SWIGLU, ORDERS[1], "small", False),
        ("mxfp8_e4m3", "bf16", ReLU2(), ORDERS[0], "small", False),
        ("nvfp4", "bf16", SiLU(), ORDERS[0], "split", False),
        ("nvfp4", "mxfp8", ReLU2(), ORDERS[0], "small", False),
        ("int4_g32", "bf16", SiLU(), ORDERS[0], "chosen", False),
        ("int4_g32", "mxfp4", SWIGLU, ORDERS[2], "chosen", False),
        ("int4_g64", "mxfp8", ClampedSiLU(), ORDERS[1], "split", False),
        ("int4_g128", "bf16", SiLU(), ORDERS[2], "small", False),
        ("int4_g128", "mxfp8", SWIGLU, ORDERS[1], "split", False),
        ("int4_g128", "bf16", SWIGLU, ORDERS[1], "small", True),
        ("int4_g128", "fp8_token", SiLU(), ORDERS[2], "small", True),
        ("int4_g128", "mxfp8", ReLU2(), ORDERS[0], "split", True),
    )
}
"""Scales of any value, zero points, factors of rows."""
ALL = (
    EXACT,
    OTHER_TILES,
    HIGH_TILES,
    STAGES,
    NO_TOKENS,
    ROUNDED,
    ROUTED,
    OPERANDS,
    POISONED,
    NO_GATE,
    OUT,
    FROM_LOGITS,
    WEIGHTS,
    WEIGHT_STAGES,
)
