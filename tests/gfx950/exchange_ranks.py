"""What the processes of test_exchange.py do; each scenario runs on all ranks, on gfx950 code.

Scenarios of conformance/exchange_ranks.py are taken as they are. ``NAME__SCHEDULE`` is a scenario
with the waves in an order of `support.gfx950_suite.SCHEDULES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from mxpert.testing.gfx950 import emulate
from tests.conformance import exchange_ranks

COMMON = {"_exchange_dispatch_kernel", "_exchange_combine_kernel"}
BOTH_SORTS = {
    "_routing_plan_expert_kernel",
    "_routing_plan_count_kernel",
    "_routing_plan_scatter_kernel",
}
INSTRUCTIONS = {
    "global_atomic_swap_x2",
    "global_atomic_cmpswap_x2",
    "global_atomic_add_x2",
    "s_memrealtime",
    "buffer_wbl2",
    "buffer_inv",
}


def every_kernel_of_the_exchange() -> None:
    """Many epochs, after which each kernel of the exchange and of both sorts was executed."""
    with emulate(schedule="random", seed=exchange_ranks.rank()) as emulation:
        exchange_ranks.many_epochs_are_exact()
    assert set(emulation.kernels) >= COMMON | BOTH_SORTS, set(emulation.kernels)
    assert set(emulation.counts) >= INSTRUCTIONS


def layer() -> None:
    """`fused_moe` from dispatch to combine, native and portable experts; nothing is interpreted."""
    exchange_ranks.layer_equals_one_rank("cdna4", "cdna4")


def _scenario(name: str) -> Callable[[], None]:
    found: Callable[[], None] = globals().get(name) or getattr(exchange_ranks, name)
    return found


def _emulated(name: str, schedule: str) -> None:
    with emulate(schedule=schedule, seed=exchange_ranks.rank()):  # type: ignore[arg-type]
        _scenario(name)()


def __getattr__(name: str) -> Callable[[], None]:
    scenario, _, schedule = name.rpartition("__")
    if not scenario:
        raise AttributeError(name)
    return functools.partial(_emulated, scenario, schedule)
