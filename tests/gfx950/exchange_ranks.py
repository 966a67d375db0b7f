"""What the processes of test_exchange.py do; each scenario runs on all ranks, on gfx950 code.

The scenarios of interpreted/exchange_ranks.py are taken as they are: ``NAME__SCHEDULE`` is NAME
with the waves in an order of `support.gfx950_suite.SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from interpreted import exchange_ranks

from mxpert.testing.gfx950 import emulate


def __getattr__(name: str) -> Callable[[], None]:
    scenario, _, schedule = name.rpartition("__")

    def emulated() -> None:
        with emulate(schedule=schedule, seed=exchange_ranks.rank()):
            getattr(exchange_ranks, scenario)()

    return emulated
