"""Memory behind pointers in memory, and what orders its use by several devices."""

from __future__ import annotations

import functools
import time

import pytest
import torch

import gfx950emu
from gfx950_support.listings import execute
from gfx950emu import launcher, machine
from gfx950emu.launcher import Reachable

POINTER = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_lshlrev_b32_e32 v6, 3, v0
v_mov_b32_e32 v2, v0
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v8, 0
s_waitcnt lgkmcnt(0)
s_load_dwordx2 s[6:7], s[4:5], 0x0
s_waitcnt lgkmcnt(0)
"""
"""Loads a pointer from the first argument into s[6:7]; v1 and v6 are 4 and 8 times the lane's
number, v2 the number, v3 and v8 zero."""
STORE = "global_store_dword v1, v2, s[6:7]"


def behind(
    body: str, *memories: torch.Tensor, shared: bool = False, offset: int = 0, **options: object
) -> gfx950emu.Report:
    """Run a kernel whose argument holds the address of the first memory, plus `offset`."""
    table = torch.tensor([memories[0].data_ptr() + offset])
    reachable = [Reachable(f"peer {k}", each, shared) for k, each in enumerate(memories)]
    return execute(f"{POINTER}\n{body}", table, reachable=reachable, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pointer_in_memory(shared: bool) -> None:
    peer = torch.zeros(64, dtype=torch.int32)
    behind(STORE, peer, shared=shared)
    assert torch.equal(peer, torch.arange(64, dtype=torch.int32))


@pytest.mark.parametrize(
    "offset, what",
    [(4, "byte 256 of the 256 of peer 0"), (-4, "4 bytes ahead of peer 0"), (1 << 30, "bytes at")],
)
def test_bounds_of_what_a_pointer_reaches(offset: int, what: str) -> None:
    with pytest.raises(gfx950emu.OutOfBoundsFault, match=what):
        behind(STORE, torch.zeros(64, dtype=torch.int32), offset=offset)


def test_other_memory_is_out_of_reach() -> None:
    with pytest.raises(gfx950emu.OutOfBoundsFault):
        execute(f"{POINTER}\n{STORE}", torch.tensor([torch.zeros(64).data_ptr()]))


def test_alignment_behind_a_pointer() -> None:
    peer = torch.zeros(64, dtype=torch.int64)
    with pytest.raises(gfx950emu.MisalignedFault):
        behind(STORE, peer, offset=2)
    with pytest.raises(gfx950emu.MisalignedFault):  # of an atomic operation: its own size
        behind("global_atomic_swap_x2 v1, v[2:3], s[6:7]", peer, offset=4)


def test_workgroups_share_bytes_behind_a_pointer() -> None:
    with pytest.raises(
        gfx950emu.SharedBytesFault, match="of peer 0, which another workgroup wrote"
    ):
        behind(STORE, torch.zeros(64, dtype=torch.int32), grid=(2,))


def test_an_argument_inside_of_what_is_reachable() -> None:
    """The second argument is the upper half of the memory that the first one points to."""
    peer = torch.zeros(128, dtype=torch.int32)
    table = torch.tensor([peer.data_ptr()])
    body = f"""
    {POINTER}
    s_load_dwordx2 s[8:9], s[0:1], 0x8
    {STORE}
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[8:9]
    """
    execute(body, table, peer[64:], reachable=[Reachable("peer", peer)])
    assert torch.equal(peer, torch.arange(128, dtype=torch.int32) % 64)


def test_only_plain_cpu_tensors_are_reachable() -> None:
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"gfx950\.run: peer — need a contiguous CPU tensor"):
            Reachable("peer", tensor)


# ---- releases -----------------------------------------------------------------------------------

FLAG = "global_atomic_swap_x2 v8, v[2:3], s[6:7] offset:1024 sc1"
RELEASE = "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\n"


@pytest.mark.parametrize(
    "between, missing",
    [
        (RELEASE, None),
        ("s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1", r"an s_waitcnt vmcnt\(0\) behind buffer_wbl2"),
        ("s_waitcnt vmcnt(0)", "a buffer_wbl2 sc0 sc1"),
        ("buffer_wbl2 sc1\ns_waitcnt vmcnt(0)", "a buffer_wbl2 sc0 sc1"),
        ("buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(1)", r"an s_waitcnt vmcnt\(0\)"),
        (f"{RELEASE}{STORE}", r"an s_waitcnt vmcnt\(0\)"),
    ],
)
@pytest.mark.parametrize("waves", [1, 2])
def test_what_stands_between_data_and_flag(between: str, missing: str | None, waves: int) -> None:
    peer = torch.zeros(256, dtype=torch.int64)
    meet = "s_barrier\n" if waves > 1 else ""
    body = f"{STORE}\n{between}\n{meet}s_mov_b64 exec, 1\n{FLAG}"
    if missing is None:
        behind(body, peer, shared=True, waves=waves)
        behind(body.replace(meet, ""), peer, waves=waves)  # no other device
        return
    with pytest.raises(gfx950emu.ReleaseFault, match=f"without {missing}.*: global_store_dword"):
        behind(body, peer, shared=True, waves=waves)


def test_waves_meet_ahead_of_a_flag() -> None:
    peer = torch.zeros(256, dtype=torch.int64)
    with pytest.raises(gfx950emu.ReleaseFault, match="without an s_barrier"):
        behind(f"{STORE}\n{RELEASE}{FLAG}", peer, shared=True, waves=2)


def test_a_store_of_system_scope_needs_no_write_back() -> None:
    peer = torch.zeros(256, dtype=torch.int64)
    behind(f"{STORE} sc0 sc1\ns_waitcnt vmcnt(0)\n{FLAG}", peer, shared=True)
    with pytest.raises(gfx950emu.ReleaseFault, match=r"without an s_waitcnt vmcnt\(0\)"):
        behind(f"{STORE} sc0 sc1\n{FLAG}", peer, shared=True)


def test_all_paths_to_a_flag_are_followed() -> None:
    """The write-back is skipped on a path that no wave takes here; on the other one it is done."""
    body = f"""
    {STORE}
    s_cbranch_execz .LBB0_1
    {RELEASE}
    .LBB0_1:
    {FLAG}
    """
    with pytest.raises(gfx950emu.ReleaseFault):
        behind(body, torch.zeros(256, dtype=torch.int64), shared=True)


def test_a_flag_of_device_scope() -> None:
    with pytest.raises(gfx950emu.ReleaseFault, match=r"without sc1 \(system scope\)"):
        behind(FLAG.removesuffix("sc1"), torch.zeros(256, dtype=torch.int64), shared=True)


# ---- acquires -----------------------------------------------------------------------------------

POLL = "global_load_dwordx2 v[10:11], v8, s[6:7] offset:1024 sc0 sc1\ns_waitcnt vmcnt(0)\n"
LOAD = "global_load_dword v2, v1, s[6:7]"


@pytest.mark.parametrize(
    "between, is_right",
    [
        ("buffer_inv sc0 sc1\n", True),
        ("", False),
        ("buffer_inv sc1\n", False),
        ("buffer_inv sc0 sc1\n" + POLL, False),
    ],
)
def test_what_stands_between_flag_and_data(between: str, is_right: bool) -> None:
    peer = torch.zeros(256, dtype=torch.int64)
    if is_right:
        behind(f"{POLL}{between}{LOAD}", peer, shared=True)
        return
    with pytest.raises(gfx950emu.AcquireFault, match="behind a flag without a buffer_inv sc0 sc1"):
        behind(f"{POLL}{between}{LOAD}", peer, shared=True)


def test_an_invalidation_ahead_of_the_wait_is_too_early() -> None:
    load, wait = POLL.split("\n")[:2]
    with pytest.raises(gfx950emu.AcquireFault):
        behind(f"{load}\nbuffer_inv sc0 sc1\n{wait}\n{LOAD}", torch.zeros(256).long(), shared=True)


@pytest.mark.parametrize("then, is_right", [("", False), ("buffer_inv sc0 sc1\n", True)])
def test_a_barrier_passes_on_what_a_wave_has_seen(then: str, is_right: bool) -> None:
    """Only wave 0 looks at the flag; wave 1 loads the data."""
    body = f"""
    v_readfirstlane_b32 s8, v0
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc0 .LBB0_1
    {POLL}{then}
    .LBB0_1:
    s_barrier
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 .LBB0_2
    {LOAD}
    .LBB0_2:
    """
    peer = torch.zeros(256, dtype=torch.int64)
    if is_right:
        behind(body, peer, shared=True, waves=2)
        return
    with pytest.raises(gfx950emu.AcquireFault) as caught:
        behind(body, peer, shared=True, waves=2)
    assert caught.value.place.wave == 1


def test_bytes_that_change_under_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second plain load may return the first one's bytes; with sc0 sc1 it does not."""
    peer, read = torch.zeros(256, dtype=torch.int64), machine.Machine.clock

    def change(kernel: machine.Machine) -> int:
        peer[128] += 1
        return read(kernel)

    monkeypatch.setattr(machine.Machine, "clock", change)
    tick = "s_memrealtime s[8:9]\ns_waitcnt lgkmcnt(0)\n"
    plain = POLL.replace(" sc0 sc1", "")
    behind(f"{POLL}{tick}{POLL}", peer, shared=True)
    behind(f"{plain}{tick}buffer_inv sc0 sc1\n{plain}", peer, shared=True)
    with pytest.raises(gfx950emu.AcquireFault, match="byte 1024 of peer 0 has changed since"):
        behind(f"{plain}{tick}{plain}", peer, shared=True)


# ---- atomic operations, the clock ---------------------------------------------------------------


def test_only_swaps_are_atomic_between_processes() -> None:
    peer, add = torch.zeros(256, dtype=torch.int64), "global_atomic_add_x2 v6, v[2:3], s[6:7] sc1"
    with pytest.raises(NotImplementedError, match="peer 0 — need a swap"):
        behind(add, peer, shared=True)
    behind(f"v_mov_b32_e32 v2, 0\n{add}", peer, shared=True)  # adds nothing: a load
    behind(add, peer)
    assert peer[:64].tolist() == list(range(64))


@pytest.mark.parametrize("scope, is_right", [("", False), ("sc0", False), ("sc1", True)])
def test_polls_and_atomics_of_workgroups(scope: str, is_right: bool) -> None:
    """A load past the caches may meet another workgroup's atomic operation; a plain one may not."""
    words = torch.zeros(64, dtype=torch.int64)
    body = f"global_load_dwordx2 v[10:11], v6, s[6:7] {scope}\nglobal_atomic_add_x2 v6, v[2:3], "
    body += "s[6:7]"
    if is_right:
        behind(body, words, grid=(2,))
        assert words.tolist() == list(range(0, 128, 2))
        return
    with pytest.raises(gfx950emu.SharedBytesFault):
        behind(body, words, grid=(2,))


def test_the_clock_ticks_at_100_mhz(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits until 20 ms have passed; the wait is no endless loop."""
    body = """
    s_memrealtime s[8:9]
    s_waitcnt lgkmcnt(0)
    .LBB0_1:
    s_memrealtime s[10:11]
    s_waitcnt lgkmcnt(0)
    s_sub_u32 s12, s10, s8
    s_cmp_lt_u32 s12, 0x1e8480
    s_cbranch_scc1 .LBB0_1
    """
    monkeypatch.setattr(launcher, "Machine", functools.partial(machine.Machine, budget=40))
    start = time.monotonic()
    report = behind(body, torch.zeros(64, dtype=torch.int32))
    assert time.monotonic() - start >= 0.02
    assert 2 <= report.counts["s_memrealtime"] <= 0.02 / machine._CLOCK_PAUSE_S + 2
