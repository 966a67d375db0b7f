"""Each check fires on a planted fault by name, and is silent on the correct neighbour."""

from __future__ import annotations

import pytest
import torch

import gfx950emu
from gfx950_support.assembler import read_instruction
from gfx950_support.listings import ADDRESS, execute, listing, program_of
from gfx950emu.effects import effects
from gfx950emu.wait_states import find_hazard, passes

STORE = "global_store_dword v1, v2, s[4:5]"


def out(size: int = 512) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def faults(
    kind: type[gfx950emu.Fault], body: str, *tensors: torch.Tensor, **options: object
) -> gfx950emu.Fault:
    """The fault of a kernel; it must be of this kind exactly."""
    with pytest.raises(gfx950emu.Fault) as caught:
        execute(body, *(tensors or (out(),)), **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind, caught.value
    assert caught.value.place.kernel == "written"
    assert "written.py:7" in str(caught.value)
    return caught.value


# -- waits -----------------------------------------------------------------------------------------

LOAD = f"{ADDRESS}\nglobal_load_dword v2, v1, s[4:5]\n{{}}\nv_add_u32_e32 v2, 1, v2\n{STORE}"


def test_a_missing_wait_for_global_memory() -> None:
    got = out(64)
    execute(LOAD.format("s_waitcnt vmcnt(0)"), got)
    assert (got == 1).all()  # once, although the check of sharing starts the launch again
    fault = faults(gfx950emu.WaitFault, LOAD.format("s_nop 0"))
    assert fault.what == "v2 is used before the vmcnt that covers its load"
    assert (fault.place.index, fault.place.wave) == (5, 0)
    assert fault.place.text == "v_add_u32_e32 v2, 1, v2"
    faults(gfx950emu.WaitFault, LOAD.format("s_waitcnt vmcnt(1)"))
    faults(gfx950emu.WaitFault, LOAD.format("s_waitcnt lgkmcnt(0)"))


def test_vmcnt_counts_stores_too() -> None:
    """With a store behind the load, all but the last operation are done at vmcnt(1)."""
    body = LOAD.format("global_store_dword v1, v0, s[4:5] offset:1024\ns_waitcnt vmcnt(1)")
    execute(body, out())


def test_a_missing_wait_for_lds() -> None:
    body = f"{ADDRESS}\nds_write_b32 v1, v0\nds_read_b32 v2, v1\n{{}}\n{STORE}"
    execute(body.format("s_waitcnt lgkmcnt(0)"), out(), lds=256)
    fault = faults(gfx950emu.WaitFault, body.format("s_waitcnt lgkmcnt(1)"), lds=256)
    assert "lgkmcnt" in fault.what


def test_a_missing_wait_for_a_scalar_load() -> None:
    """Scalar loads come back in any order, so a counter above 0 says nothing of them."""
    fault = faults(gfx950emu.WaitFault, f"{ADDRESS.replace('lgkmcnt(0)', 'lgkmcnt(1)')}\n{STORE}")
    assert fault.what == "s4 is used before the lgkmcnt(0) that covers its load"


def test_overwriting_the_register_of_a_load_in_flight() -> None:
    body = f"{ADDRESS}\nglobal_load_dword v2, v1, s[4:5]\n{{}}\ns_waitcnt vmcnt(0)\n{STORE}"
    faults(gfx950emu.WaitFault, body.format("v_mov_b32_e32 v2, 1"))
    # Loads of one kind return in order: the second one may have the same register.
    execute(body.format("global_load_dword v2, v1, s[4:5] offset:256"), out())
    faults(gfx950emu.WaitFault, body.format("ds_read_b32 v2, v1"), lds=256)


# -- LDS -------------------------------------------------------------------------------------------

EXCHANGE = f"""
{ADDRESS}
ds_write_b32 v1, v0
{{}}
v_xor_b32_e32 v3, 256, v1
ds_read_b32 v2, v3
s_waitcnt lgkmcnt(0)
{{}}
ds_write_b32 v1, v2
{STORE}
"""
"""Two waves exchange their numbers through LDS, then write it again."""
READY = "s_waitcnt lgkmcnt(0)\ns_barrier"


def test_waves_exchange_data_through_lds() -> None:
    for schedule in ("lowest", "random"):
        got = out(128)
        execute(EXCHANGE.format(READY, "s_barrier"), got, waves=2, lds=512, schedule=schedule)
        assert got.tolist() == [*range(64, 128), *range(64)]


@pytest.mark.parametrize("ready", ["s_nop 0", "s_barrier", "s_waitcnt lgkmcnt(0)"])
def test_a_missing_barrier_or_wait_ahead_of_a_read(ready: str) -> None:
    fault = faults(gfx950emu.LdsRaceFault, EXCHANGE.format(ready, "s_barrier"), waves=2, lds=512)
    assert "written by wave" in fault.what
    assert "barrier" in fault.what


def test_a_missing_barrier_ahead_of_an_overwrite() -> None:
    fault = faults(gfx950emu.LdsRaceFault, EXCHANGE.format(READY, "s_nop 0"), waves=2, lds=512)
    assert "overwritten while wave" in fault.what


def test_bytes_of_one_word_may_belong_to_two_waves() -> None:
    """The check follows bytes: each wave writes its own half of the same words."""
    body = f"""
    {ADDRESS}
    v_lshrrev_b32_e32 v3, 6, v0
    v_and_b32_e32 v4, 63, v0
    v_lshlrev_b32_e32 v4, 2, v4
    v_lshl_add_u32 v4, v3, 1, v4
    ds_write_b16 v4, v0
    ds_read_u16 v2, v4
    s_waitcnt lgkmcnt(0)
    {STORE}
    """
    got = out(128)
    execute(body, got, waves=2, lds=512)
    assert torch.equal(got, torch.arange(128, dtype=torch.int32))
    same = body.replace("v3, 6, v0", "v3, 7, v0")
    faults(gfx950emu.LdsRaceFault, same, waves=2, lds=512, schedule="random")


STORE_ONE_WORD = f"""
{ADDRESS}
v_readfirstlane_b32 s6, v0
v_mov_b32_e32 v3, 0
s_nop 0
v_mov_b32_e32 v4, {{}}
ds_write_b32 v3, v4
"""


def test_waves_may_store_the_same_value_twice() -> None:
    execute(STORE_ONE_WORD.format("9"), out(), waves=2, lds=16)
    lanes = STORE_ONE_WORD.format("v0")
    faults(gfx950emu.ConflictingStoreFault, lanes, lds=16)
    waves = STORE_ONE_WORD.format("s6")
    faults(gfx950emu.ConflictingStoreFault, waves, waves=2, lds=16)
    faults(gfx950emu.LdsRaceFault, waves, waves=2, lds=16, schedule="random")


DIRECT = f"""
{ADDRESS}
s_mov_b32 m0, 0
s_nop 0
global_load_lds_dword v[6:7], off
{{}}
ds_read_b32 v2, v1
s_waitcnt lgkmcnt(0)
{STORE}
"""
DIRECT = DIRECT.replace(
    "s_mov_b32 m0", "v_mov_b32_e32 v7, s5\nv_add_co_u32_e32 v6, vcc, s4, v1\ns_mov_b32 m0"
)


def test_a_load_straight_to_lds() -> None:
    got = torch.arange(64, dtype=torch.int32)
    execute(DIRECT.format("s_waitcnt vmcnt(0)"), got, lds=256)
    assert torch.equal(got, torch.arange(64, dtype=torch.int32))
    fault = faults(gfx950emu.LdsDirectFault, DIRECT.format("s_nop 0"), lds=256)
    assert "before vmcnt" in fault.what
    faults(gfx950emu.LdsDirectFault, DIRECT.format("s_waitcnt lgkmcnt(0)"), lds=256)


def test_a_load_straight_to_lds_must_not_overtake_reads() -> None:
    body = DIRECT.replace("global_load_lds", "ds_read_b32 v8, v1\n{}\nglobal_load_lds")
    execute(body.format("s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"), out(), lds=256)
    faults(gfx950emu.LdsRaceFault, body.format("s_nop 0", "s_waitcnt vmcnt(0)"), lds=256)


DIRECT_EXCHANGE = f"""
{ADDRESS}
v_and_b32_e32 v8, 64, v0
v_lshlrev_b32_e32 v8, 2, v8
v_mov_b32_e32 v7, s5
v_add_co_u32_e32 v6, vcc, s4, v1
v_readfirstlane_b32 s6, v8
s_mov_b32 m0, s6
v_xor_b32_e32 v9, 256, v1
global_load_lds_dword v[6:7], off
{{}}
ds_read_b32 v2, v9
s_waitcnt lgkmcnt(0)
{STORE}
"""
"""Two waves load 256 bytes each straight to LDS, and read each other's."""


def test_another_wave_reads_what_was_loaded_straight_to_lds() -> None:
    got = torch.arange(128, dtype=torch.int32)
    body = DIRECT_EXCHANGE.format("s_waitcnt vmcnt(0)\ns_barrier")
    execute(body, got, waves=2, lds=512)
    assert got.tolist() == [*range(64, 128), *range(64)]
    late = DIRECT_EXCHANGE.format("s_barrier\ns_waitcnt vmcnt(0)")
    faults(gfx950emu.LdsRaceFault, late, waves=2, lds=512)


COUNT = f"""
{ADDRESS}
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, 1
ds_write_b32 v3, v3
s_waitcnt lgkmcnt(0)
s_barrier
ds_add_u32 v3, v4
{{}}
ds_read_b32 v2, v3
s_waitcnt lgkmcnt(0)
{STORE}
"""


def test_atomic_operations_of_waves_on_lds() -> None:
    for schedule in ("lowest", "random"):
        got = out(128)
        execute(COUNT.format(READY), got, waves=2, lds=16, schedule=schedule)
        assert (got == 128).all()
    faults(gfx950emu.LdsRaceFault, COUNT.format("s_waitcnt lgkmcnt(0)"), waves=2, lds=16)
    early = COUNT.replace("s_barrier", "s_nop 0").format(READY)
    faults(gfx950emu.LdsRaceFault, early, waves=2, lds=16, schedule="random")


# -- addresses -------------------------------------------------------------------------------------


def test_out_of_bounds() -> None:
    body = f"{ADDRESS}\nv_mov_b32_e32 v2, 0\n{STORE}"
    fault = faults(gfx950emu.OutOfBoundsFault, body, out(63))
    assert fault.what == "4 bytes at byte 252 of the 252 of argument 0"
    assert (fault.place.workgroup, fault.place.wave, fault.place.lane) == (0, 0, 63)
    fault = faults(
        gfx950emu.OutOfBoundsFault,
        body.replace("s[4:5]\n", "s[4:5]\n").replace(
            "global_store_dword v1, v2, s[4:5]", "global_store_dword v1, v2, s[4:5] offset:-8"
        ),
    )
    assert fault.what == "4 bytes at 8 bytes ahead of argument 0"
    body = f"{ADDRESS}\nds_write_b32 v1, v0 offset:16"
    execute(body, out(), lds=272)
    fault = faults(gfx950emu.OutOfBoundsFault, body, lds=256)
    assert fault.place.lane == 60
    assert "0x100" in fault.what


def test_misaligned() -> None:
    body = f"{ADDRESS}\nv_add_u32_e32 v1, {{}}, v1\nv_mov_b32_e32 v2, 0\n{STORE}"
    execute(body.format(4), out())
    faults(gfx950emu.MisalignedFault, body.format(2))
    faults(
        gfx950emu.MisalignedFault, f"{ADDRESS}\nv_or_b32_e32 v1, 2, v1\nds_read_b32 v2, v1", lds=512
    )


# -- workgroups ------------------------------------------------------------------------------------

SHARED = f"{ADDRESS}\ns_lshl_b32 s6, s2, {{}}\nv_mov_b32_e32 v2, s6\nv_add_u32_e32 v1, s6, v1\n"


def test_workgroups_that_share_bytes() -> None:
    store, load = f"\n{STORE}", "\nglobal_load_dword v3, v1, s[4:5] offset:{}"
    execute(SHARED.format(8) + store, out(), grid=(2,))
    fault = faults(gfx950emu.SharedBytesFault, SHARED.format(7) + store, grid=(2,))
    assert "another workgroup wrote" in fault.what
    execute(SHARED.format(8) + load.format(0) + store, out(), grid=(2,))
    # Reads of a tensor ahead of its first store count, too.
    for order in (store + load.format(256), load.format(256) + store):
        fault = faults(gfx950emu.SharedBytesFault, SHARED.format(8) + order, grid=(2,))
        assert "another workgroup" in fault.what
    # 2 of 100 workgroups, which do not run at the same time.
    faults(
        gfx950emu.SharedBytesFault,
        SHARED.format(8).replace("s_lshl_b32 s6, s2", "s_and_b32 s6, s2").replace(", 8", ", 96")
        + store,
        grid=(100,),
    )


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_one_of_several_readers_writes(writer: int) -> None:
    """The writer has read the bytes itself, before or after the others."""
    body = f"""
    {ADDRESS}
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    s_cmp_lg_u32 s2, {writer}
    s_cbranch_scc1 .LBB0_1
    {STORE}
    .LBB0_1:
    """
    for schedule in ("lowest", "random"):
        fault = faults(gfx950emu.SharedBytesFault, body, grid=(3,), schedule=schedule)
        assert fault.place.workgroup is not None
    execute(body, out(), grid=(3,), checks=False)
    execute(body.replace(f"s2, {writer}", "s2, 7"), out(), grid=(3,))


def test_workgroups_may_share_bytes_by_atomics() -> None:
    add = f"{ADDRESS}\nv_mov_b32_e32 v2, 1\nglobal_atomic_add v1, v2, s[4:5]\n"
    got = out(64)
    execute(add, got, grid=(70,))
    assert (got == 70).all()
    fault = faults(
        gfx950emu.SharedBytesFault, f"{add}\nglobal_load_dword v3, v1, s[4:5]", grid=(2,)
    )
    assert "another workgroup updated" in fault.what


# -- distances -------------------------------------------------------------------------------------

MFMA = "v_mfma_f32_16x16x32_bf16 a[0:3], v[2:5], v[6:9], a[0:3]"
SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[2:9], v[10:17], a[0:3], v18, v19"
FP4 = SCALED.replace("v[2:9]", "v[2:5]") + " cbsz:4"
BOTH_FP4 = FP4.replace("v[10:17]", "v[10:13]") + " blgp:4"
DISTANCES = {
    # (first, second): wait states that they need
    ("v_mov_b32_e32 v2, v0", MFMA): 2,
    (MFMA, "v_accvgpr_read_b32 v1, a3"): 8,
    (MFMA, "global_store_dword v1, a0, s[4:5]"): 8,
    (MFMA, "v_accvgpr_write_b32 a0, 0"): 8,
    (MFMA, "v_mfma_f32_16x16x32_bf16 a[2:5], v[2:5], v[6:9], a[2:5]"): 6,
    (MFMA, "v_mfma_f32_16x16x32_bf16 a[4:7], a[0:3], v[6:9], a[4:7]"): 8,
    (MFMA, MFMA): 0,
    ("v_mfma_f32_16x16x32_bf16 a[4:7], v[2:5], v[6:9], a[0:3]", "v_accvgpr_write_b32 a0, 0"): 3,
    (SCALED, "v_accvgpr_read_b32 v1, a3"): 12,
    (BOTH_FP4, "v_accvgpr_read_b32 v1, a3"): 8,
    (FP4, "v_accvgpr_read_b32 v1, a3"): 12,
    ("v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v1"): 1,
    ("v_exp_f32_e32 v1, v2", "v_exp_f32_e32 v3, v1"): 0,
    ("v_cmp_lt_i32_e64 s[4:5], v1, v2", "v_cndmask_b32_e64 v3, v1, v2, s[4:5]"): 2,
    ("v_readfirstlane_b32 s4, v1", "buffer_load_dword v2, v3, s[4:7], 0 offen"): 5,
    ("v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v2, s4"): 4,
    ("v_mov_b32_e32 v1, v2", "v_readlane_b32 s5, v1, 3"): 1,
    ("v_mov_b32_e32 v1, v2", "v_mov_b32_dpp v3, v1 row_shr:1 row_mask:0xf bank_mask:0xf"): 2,
    ("v_mov_b32_e32 v1, v2", "v_permlane32_swap_b32 v1, v3"): 2,
    ("v_cmp_lt_i32_e32 vcc, v1, v2", "v_div_fmas_f32 v3, v4, v5, v6"): 4,
    ("v_or_b32_sdwa v1, v2, v3 dst_sel:WORD_1", "v_add_u32_e32 v4, v1, v1"): 1,
    ("global_store_dwordx4 v1, v[4:7], s[4:5]", "v_mov_b32_e32 v5, 0"): 2,
    ("global_store_dwordx2 v1, v[4:5], s[4:5]", "v_mov_b32_e32 v5, 0"): 0,
    ("buffer_store_dwordx4 v[4:7], v1, s[4:7], 0 offen", "v_mov_b32_e32 v5, 0"): 2,
    ("buffer_store_dwordx4 v[4:7], v1, s[4:7], s9 offen", "v_mov_b32_e32 v5, 0"): 0,
    ("s_mov_b32 m0, 0", "buffer_load_dword v1, s[4:7], 0 offen lds"): 1,
    ("v_add_u32_e32 v1, v2, v3", "v_add_u32_e32 v4, v1, v1"): 0,
    ("s_mov_b32 s4, 0", "v_mov_b32_e32 v1, s4"): 0,
}


@pytest.mark.parametrize(("first", "second"), DISTANCES)
def test_a_distance(first: str, second: str) -> None:
    need = DISTANCES[first, second]
    for states in range(need + 1):
        space = [f"s_nop {states - 1}"] if states else []
        program = program_of(listing("\n".join([first, *space, second])))
        fault = find_hazard(program, tuple(map(effects, program.instructions)))
        if states == need:
            assert fault is None, fault
        else:
            assert fault is not None
            assert f"needs {need} wait states" in fault.what
            assert fault.place.text == second
            assert f"has {states}" in fault.what
            assert isinstance(fault, gfx950emu.MfmaHazardFault) == ("mfma" in first + second)


def test_a_distance_across_a_branch() -> None:
    """The way back to the loop's start is shorter than the way around it."""
    body = f".LBB0_1:\nv_accvgpr_read_b32 v1, a0\ns_nop {{}}\n{MFMA}\ns_nop {{}}"
    body += "\ns_cbranch_scc0 .LBB0_1"
    for space, ok in ((6, True), (5, False)):
        program = program_of(listing(body.format(7, space)))
        fault = find_hazard(program, tuple(map(effects, program.instructions)))
        assert (fault is None) == ok, fault


PASSES = {
    "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]": 4,
    "v_mfma_f32_32x32x16_f16 a[0:15], v[0:3], v[4:7], a[0:15]": 8,
    "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[0:1], v[2:3], a[0:3]": 2,
    "v_mfma_f32_16x16x4_f32 a[0:3], v0, v1, a[0:3]": 8,
    "v_mfma_f32_32x32x2_f32 a[0:15], v0, v1, a[0:15]": 16,
    "v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[0:7], v[8:15], a[0:15]": 16,
    "v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[0:3], v[8:11], a[0:15] cbsz:4 blgp:4": 8,
}


@pytest.mark.parametrize("text", PASSES)
def test_passes(text: str) -> None:
    assert passes(read_instruction(text)) == PASSES[text]


def test_scratch_memory() -> None:
    body = "v_mov_b32_e32 v1, 0\nscratch_store_dword off, v1, off offset:4"
    fault = faults(gfx950emu.ScratchFault, body, scratch=64)
    assert fault.what == "64 bytes of scratch memory a lane"


def test_checks_can_be_left_out() -> None:
    """The result is the same: an emulated load arrives at once."""
    got = out(64)
    report = execute(LOAD.format("s_nop 0"), got, checks=False)
    assert (got == 1).all()
    assert not report.checks
