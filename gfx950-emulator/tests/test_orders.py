"""What a wait or a barrier orders: each reason on a kernel of a few instructions that has it."""

from __future__ import annotations

import pytest
import torch

from gfx950_support.listings import ADDRESS, execute
from gfx950_support.orders import (
    LATER_WAIT,
    NO_ACCESSES,
    NO_USE,
    NOTHING_OUTSTANDING,
    OTHER_BYTES,
    SAME_CONTENT,
    SAME_VALUE,
    Orders,
    observe,
)

STORE = "global_store_dword v1, v2, s[4:5]"
PLACE = ADDRESS.strip().count("\n") + 1
"""Index of the first instruction behind `ADDRESS`."""


def observed(body: str) -> Orders:
    """Two waves with 1 KiB of LDS; v1 is 4 times the lane's number, v2 what is stored."""
    with observe() as orders:
        got = torch.zeros(128, dtype=torch.int32)
        execute(f"{ADDRESS}\n{body}\n{STORE}", got, waves=2, lds=1024)
    return orders


READ = "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize(
    "body",
    [
        "s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v2, 1",
        f"s_waitcnt lgkmcnt(0)\n{READ}",
        f"s_waitcnt vmcnt(0)\n{READ}",
    ],
)
def test_nothing_is_outstanding(body: str) -> None:
    """`ADDRESS` has waited for its load, and what follows the wait does not matter."""
    assert observed(body).reason_for_wait(PLACE) == NOTHING_OUTSTANDING


LOADS = "ds_read_b32 v2, v1\nds_read_b32 v3, v1\ns_waitcnt {}\n{}"


@pytest.mark.parametrize(
    "first, then, weakened, reason",
    [
        ("lgkmcnt(0)", "", "", NO_USE),
        ("lgkmcnt(0)", "", "lgkmcnt", NO_USE),
        ("lgkmcnt(0)", "s_waitcnt lgkmcnt(0)", "", LATER_WAIT),
        ("lgkmcnt(0)", "s_waitcnt lgkmcnt(0)", "lgkmcnt", LATER_WAIT),
        ("lgkmcnt(0)", "s_waitcnt lgkmcnt(1)", "", NO_USE),
        ("lgkmcnt(1)", "s_waitcnt lgkmcnt(0)", "lgkmcnt", LATER_WAIT),
        ("lgkmcnt(2)", "s_waitcnt lgkmcnt(0)", "lgkmcnt", NOTHING_OUTSTANDING),
        ("lgkmcnt(0) vmcnt(0)", "s_waitcnt lgkmcnt(0)", "vmcnt", NOTHING_OUTSTANDING),
    ],
)
def test_who_covers_what_a_wait_covers(first: str, then: str, weakened: str, reason: str) -> None:
    with observe() as orders:
        code = f"{ADDRESS}\n{LOADS.format(first, then)}"
        execute(code, torch.zeros(128, dtype=torch.int32), waves=2, lds=1024)
    assert orders.reason_for_wait(PLACE + 2, weakened) == reason


EXCHANGE = """
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
s_barrier
{then}
s_waitcnt lgkmcnt(0)
"""
"""Each wave stores 256 bytes of its own."""
PARTNER = "v_xor_b32_e32 v3, 256, v1\n"


@pytest.mark.parametrize(
    "then, reason",
    [
        ("v_mov_b32_e32 v2, v0", NO_ACCESSES),
        ("ds_read_b32 v2, v1", OTHER_BYTES),
        (f"{PARTNER}ds_read_b32 v2, v3 offset:512", OTHER_BYTES),
        (f"{PARTNER}ds_read_b32 v2, v3", None),
        (f"{PARTNER}s_barrier\nds_read_b32 v2, v3", NO_ACCESSES),
        (f"{PARTNER}ds_write_b32 v3, v2", SAME_CONTENT),
    ],
)
def test_what_a_barrier_orders(then: str, reason: str | None) -> None:
    orders = observed("v_mov_b32_e32 v2, 1\n" + EXCHANGE.format(then=then))
    assert orders.reason_for_barrier(PLACE + 3) == reason


def test_a_barrier_orders_only_what_is_waited_for() -> None:
    """The store is known to the other wave after the second barrier, which the wait precedes."""
    body = f"""
    ds_write_b32 v1, v0
    s_barrier
    s_waitcnt lgkmcnt(0)
    s_barrier
    {PARTNER}ds_read_b32 v2, v3
    s_waitcnt lgkmcnt(0)
    """
    orders = observed(body)
    assert orders.reason_for_barrier(PLACE + 1) == NO_ACCESSES
    assert orders.reason_for_barrier(PLACE + 3) is None


@pytest.mark.parametrize(
    "between, reason",
    [("", SAME_VALUE), ("v_mov_b32_e32 v2, v0", SAME_VALUE), ("v_add_u32_e32 v2, 1, v2", None)],
)
def test_what_a_store_changes(between: str, reason: str | None) -> None:
    """The second store writes what the first one has left there, or something else."""
    body = f"""
    v_mov_b32_e32 v2, v0
    ds_write_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    {between or "s_nop 0"}
    ds_write_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    """
    orders = observed(body)
    assert orders.reason_for_store(PLACE + 1) is None
    assert orders.reason_for_store(PLACE + 4) == reason
