"""How waves run: branches, barriers, schedules, budgets, traces, and arguments."""

from __future__ import annotations

import pytest
import torch

import gfx950emu
from gfx950_support.listings import ADDRESS, code_of, execute, listing
from gfx950emu import machine as machines
from gfx950emu.memory import GlobalMemory

STORE = "global_store_dword v1, v2, s[4:5]"


def test_lanes_store_their_numbers() -> None:
    out = torch.zeros(128, dtype=torch.int32)
    report = execute(f"{ADDRESS}\nv_mov_b32_e32 v2, v0\n{STORE}", out, waves=2)
    assert torch.equal(out, torch.arange(128, dtype=torch.int32))
    assert (report.kernel, report.grid, report.lds, report.checks) == (
        "written",
        (1, 1, 1),
        0,
        True,
    )
    assert report.counts["s_waitcnt"] == 2
    assert report.instructions == sum(report.executed) == 12


def test_workgroups_know_their_numbers() -> None:
    """Along x in s2, along y in s3."""
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mul_i32 s6, s3, 3
    s_add_i32 s6, s6, s2
    s_lshl_b32 s7, s6, 2
    v_mov_b32_e32 v1, s7
    v_mov_b32_e32 v2, s6
    s_waitcnt lgkmcnt(0)
    s_mov_b64 exec, 1
    """
    for schedule in ("lowest", "random"):
        out = torch.full((6,), -1, dtype=torch.int32)
        execute(f"{body}\n{STORE}", out, grid=(3, 2), schedule=schedule)
        assert out.tolist() == list(range(6))


def test_preloaded_arguments() -> None:
    """With 2 dwords the address stands in s[2:3], and the code that would load it is skipped."""
    body = """
    s_endpgm
    s_branch .LBB0_1
    .LBB0_1:
    v_lshlrev_b32_e32 v1, 2, v0
    global_store_dword v1, v0, s[2:3]
    """
    out = torch.zeros(64, dtype=torch.int32)
    execute(body, out, preload=2)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))


DIVERGED = f"""
{ADDRESS}
v_mov_b32_e32 v2, 0
v_readfirstlane_b32 s6, v0
s_lshr_b32 s6, s6, 6
.LBB0_1:
s_cmp_eq_u32 s6, 0
s_cbranch_scc1 .LBB0_2
v_add_u32_e32 v2, s6, v2
s_sub_i32 s6, s6, 1
s_branch .LBB0_1
.LBB0_2:
s_barrier
{STORE}
"""
"""Wave w adds up 1 + 2 + … + w in a loop."""


@pytest.mark.parametrize("schedule", ["lowest", "random"])
def test_waves_take_their_own_branches(schedule: str) -> None:
    out = torch.zeros(4, 64, dtype=torch.int32)
    report = execute(DIVERGED, out, waves=4, schedule=schedule, seed=5)
    assert out[:, 0].tolist() == [0, 1, 3, 6]
    assert (out == out[:, :1]).all()
    assert report.counts["v_add_u32"] == 0 + 1 + 2 + 3


def test_a_random_schedule_takes_other_orders() -> None:
    """Traces of a kernel with one order of each seed differ in the step at which waves run."""
    seen = set()
    original = machines.Machine._choose

    class Recorder(machines.Machine):
        def _choose(self, ready):  # type: ignore[no-untyped-def]
            chosen = original(self, ready)
            self.order.append(tuple(self.state.indices))
            return chosen

    executable = code_of(listing(DIVERGED, waves=4)).executable
    for seed in range(4):
        memory = GlobalMemory()
        out = torch.zeros(4 * 64, dtype=torch.int32)
        address = memory.add("out", out.view(torch.uint8).numpy())
        segment = torch.tensor([address]).view(torch.uint8).numpy()
        kernarg = memory.add("the kernel arguments", segment)
        memory.load()
        machine = Recorder(executable, memory, 0, schedule="random", seed=seed)
        machine.order = []  # type: ignore[attr-defined]
        machine.launch((1,), kernarg, kernarg)
        seen.add(tuple(machine.order))  # type: ignore[attr-defined]
    assert len(seen) > 1


def test_a_wave_that_has_ended_frees_the_barrier() -> None:
    body = f"""
    {ADDRESS}
    v_readfirstlane_b32 s6, v0
    s_cmp_eq_u32 s6, 0
    s_cbranch_scc1 .LBB0_1
    s_barrier
    v_mov_b32_e32 v2, 7
    {STORE}
    .LBB0_1:
    """
    out = torch.zeros(2, 64, dtype=torch.int32)
    execute(body, out, waves=2)
    assert out[:, 5].tolist() == [0, 7]


def test_an_endless_loop_is_a_fault() -> None:
    code = code_of(listing(".LBB0_1:\ns_nop 0\ns_branch .LBB0_1", arguments=0)).executable
    for schedule in ("lowest", "random"):
        memory = GlobalMemory()
        kernarg = memory.add("the kernel arguments", torch.zeros(8, dtype=torch.uint8).numpy())
        memory.load()
        machine = machines.Machine(code, memory, 0, schedule=schedule, budget=1000)
        with pytest.raises(
            gfx950emu.EndlessLoopFault, match="a wave has executed 1000 instructions"
        ):
            machine.launch((1,), kernarg, kernarg)
        assert sum(machine.executed) == 1000


def test_a_trace() -> None:
    body = f"""
    {ADDRESS}
    v_lshlrev_b32_e32 v3, 8, v0
    v_mov_b32_e32 v4, 0
    ds_read_b32 v2, v1
    ds_read_b32 v5, v3
    ds_read_b32 v6, v4
    s_waitcnt lgkmcnt(0)
    {STORE}
    """
    out = torch.zeros(64, dtype=torch.int32)
    report = execute(body, out, lds=64 * 256, trace=True, grid=(1,))
    (trace,) = report.traces
    assert (trace.workgroup, trace.wave) == (0, 0)
    assert trace.instructions == list(range(11))
    # 64 rows of one bank take 64 cycles; all banks, or one word for all, take 1.
    assert trace.bank_cycles == {5: 1, 6: 64, 7: 1}
    assert {place: lines.size for place, lines in trace.half_lines.items()} == {0: 1, 9: 4}
    start = report.regions["argument 0"].start
    assert (trace.half_lines[9] * 64 == torch.arange(4).numpy() * 64 + start).all()


def test_registers_and_lds_start_with_garbage() -> None:
    body = f"{ADDRESS}\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\nv_add_u32_e32 v2, v3, v9\n{STORE}"
    outs = []
    for seed in (0, 0, 1):
        outs.append(torch.zeros(64, dtype=torch.int32))
        execute(body, outs[-1], lds=256, seed=seed)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_scalar_arguments_and_tensors_of_one_storage() -> None:
    """The second tensor is the upper half of the first: what is stored through it is seen there."""
    both = torch.zeros(128, dtype=torch.int32)
    body = f"{ADDRESS.replace('0x0', '0x8')}\nv_mov_b32_e32 v2, 3\n{STORE}"
    execute(body, both, both[64:])
    assert both.tolist() == [0] * 64 + [3] * 64


@pytest.mark.parametrize(
    ("arguments", "grid", "error", "words"),
    [
        (
            [torch.zeros(4, device="meta")],
            (1,),
            ValueError,
            "need a CPU tensor, got a tensor on meta",
        ),
        ([object()], (1,), TypeError, "need a CPU tensor or a number, got object"),
        ([torch.zeros(4), 1, 2], (1,), ValueError, "need 1 values"),
        ([], (), ValueError, "one to three numbers of workgroups"),
        ([], (-1,), ValueError, "one to three numbers of workgroups"),
        ({"x": torch.zeros(4)}, (1,), ValueError, "names no parameters"),
    ],
)
def test_wrong_arguments(arguments, grid, error, words) -> None:  # type: ignore[no-untyped-def]
    code = code_of(listing("s_nop 0"))
    with pytest.raises(error, match=words):
        gfx950emu.run(code, grid, arguments)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a kernel that triton\.compile made for gfx950"):
        gfx950emu.run(3, (1,), [])
