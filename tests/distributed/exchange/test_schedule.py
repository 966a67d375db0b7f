"""CTAs and tiles of the exchange's kernels."""

from __future__ import annotations

import itertools

import pytest

from mxpert.core.problem import Target
from mxpert.device.exchange_wait import MAX_CTAS
from mxpert.distributed.exchange.schedule import (
    Schedule,
    Work,
    combine_schedule,
    dispatch_schedule,
    most_ctas,
)

SMS = (16, 78, 114, 128, 132, 148, 256)
BOUNDS = (*range(1, 70), *range(96, 700, 31), 1024, 2048, 4095, 4096, 65536)
WIDTHS = (32, 704, 2880, 4096, 7168, 16384)


def gpu(num_sms: int) -> Target:
    return Target("cuda", "sm_90", "a GPU", num_sms, 232448)


def schedules(work: Work) -> tuple[Schedule, ...]:
    return dispatch_schedule(work), combine_schedule(work, 2), combine_schedule(work, 4)


def rounds(work: Work, schedule: Schedule) -> int:
    """Tiles of the CTA that has the most."""
    return -(-work.tiles(schedule.rows, schedule.block) // schedule.ctas)


@pytest.mark.parametrize("num_sms", SMS)
def test_waiting_ctas_leave_sms_free(num_sms: int) -> None:
    most = most_ctas(gpu(num_sms))
    assert most == min(MAX_CTAS.value, max(2**n for n in range(9) if 2**n < num_sms))


@pytest.mark.parametrize("num_sms", SMS)
def test_schedules_are_powers_of_two_within_bounds(num_sms: int) -> None:
    most = most_ctas(gpu(num_sms))
    for bound, width in itertools.product(BOUNDS, WIDTHS):
        for each in schedules(Work(bound, width, most)):
            assert all(value.bit_count() == 1 for value in vars(each).values()), each
            assert each.ctas <= most
            assert each.block < 2 * width
            # The registers of an SM do for a CTA, with at least 128 for each thread.
            assert each.num_warps <= 16


@pytest.mark.parametrize("width", WIDTHS)
def test_no_cta_has_many_small_tiles(width: int) -> None:
    """At most three tiles of one row, or six of 512 columns (float32); else they have more rows."""
    for bound in BOUNDS:
        work = Work(bound, width, most_ctas(gpu(132)))
        dispatch, combine, wide = schedules(work)
        if dispatch.rows == 1:
            assert rounds(work, dispatch) <= rounds(work, combine) <= 3
            assert rounds(work, wide) <= 6
        else:
            assert work.tiles(1, 1024) > 3 * work.most_ctas


@pytest.mark.parametrize(
    "bound, width, rows", [(160, 2880, 4), (256, 2880, 8), (512, 2880, 16), (1024, 2880, 8)]
)
def test_rows_give_the_busiest_cta_the_least_work(bound: int, width: int, rows: int) -> None:
    """Choices that were the fastest when timed; 512 rows in 8 would take two rounds of tiles."""
    assert dispatch_schedule(Work(bound, width, most_ctas(gpu(132)))).rows == rows
