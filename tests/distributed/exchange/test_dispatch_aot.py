"""Kernels of the SYMMETRIC exchange, and sorts that wait for it, compiled for every target.

The launches are those of the host code, recorded and not run.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from mxpert import MXTensor, ScaleRule
from mxpert.core.problem import Op, RoutingProblem, Target
from mxpert.core.target import on_device
from mxpert.formats import get_format
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.triton import PLAN
from support.aot import CompiledKernel, compile_for, specialize
from support.exchange import Case, exchanges_of_one_process
from support.launches import H200, RecordedLaunch, recorded_launches

META = torch.device("meta")
DISPATCH, COMBINE = "_exchange_dispatch_kernel", "_exchange_combine_kernel"
WAITING_DISPATCH = f"{DISPATCH} that waits"
TARGETS = {
    "sm_90": H200,
    "sm_100": Target("cuda", "sm_100", "NVIDIA B200", 148, 232448),
    "gfx950": Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024),
}
GPT_OSS = Case(num_experts=128, top_k=4, hidden_size=2880, combine_dtype=torch.bfloat16)
DEEPSEEK = Case(num_experts=256, top_k=8, hidden_size=7168, combine_dtype=torch.bfloat16)
BOUNDS = (1, 160, 4096)
"""Tiles of 1, 4 and 16 rows of gpt-oss."""
LITTLE_SHARED_MEMORY = 4096
"""Bytes with which a waiting CTA keeps no other kernel from its SM."""


def launches_of(
    target: str, bound: int, wire: str = "mxfp8", case: Case = GPT_OSS
) -> dict[str, RecordedLaunch]:
    """The launches of an exchange between two ranks, by the kernel's name.

    A dispatch that waits is WAITING_DISPATCH; for the other one sorts wait.
    """
    wire_format = "bf16" if wire == "bf16" else "mxfp8"
    case = Case(**{**vars(case), "wire_format": wire_format, "max_tokens": 4096})
    with on_device(TARGETS[target]), recorded_launches() as launches:
        specs = [case.spec(rank) for rank in range(case.size)]
        exchange = exchanges_of_one_process(specs, META)[0]
        rows = torch.empty(bound, case.hidden_size, dtype=torch.bfloat16, device=META)
        x: Any = rows
        if wire == "quantised before":
            codes, scale = (
                torch.empty(bound, case.hidden_size // width, dtype=torch.uint8, device=META)
                for width in (1, 32)
            )
            x = MXTensor.unchecked(codes, scale, get_format("mxfp8"))
        ids = torch.empty(bound, case.top_k, dtype=torch.int32, device=META)
        options = dict(bound=bound, scale_rule=ScaleRule.RCEIL, out_dtype=torch.bfloat16)
        slots = case.size * bound
        returned = torch.empty(slots, case.hidden_size, dtype=case.combine_dtype, device=META)
        for waits in (False, True):
            received = exchange.dispatch(x, ids.float(), ids, **options, waits=waits)
            exchange.combine(returned, received, rows)
        _sort(TARGETS[target], slots, case, exchange.arrivals(bound))
    return {_name(launch): launch for launch in launches}


def _name(launch: RecordedLaunch) -> str:
    name: str = launch.kernel.__name__
    waits = name == DISPATCH and launch.arguments["arrivals"] is not None
    return WAITING_DISPATCH if waits else name


def _sort(target: Target, slots: int, case: Case, arrivals: torch.Tensor | None) -> None:
    ids = torch.empty(slots, case.top_k, dtype=torch.int32, device=META)
    local = case.num_experts // case.size
    problem = RoutingProblem(Op.ROUTING_PLAN, target, slots, case.top_k, local, local, 64)
    PLAN.launch(
        problem,
        PLAN.heuristic(problem),
        PlanInputs(topk_weights=ids.float(), topk_ids=ids, arrivals=arrivals),
    )


def compiled(launch: RecordedLaunch, target: str) -> CompiledKernel:
    return compile_for(launch.kernel, launch.arguments, target=target)


WAITING = (
    WAITING_DISPATCH,
    COMBINE,
    "_routing_plan_expert_kernel",
    "_routing_plan_count_kernel",
    "_routing_plan_scatter_kernel",
)
SETTING = (DISPATCH, WAITING_DISPATCH, COMBINE)
AWAITED_WORDS = 5
"""Words of `arrivals`, and the time-out."""
CONSTANT_WORDS = {DISPATCH: 1, WAITING_DISPATCH: 1 + AWAITED_WORDS, COMBINE: 1 + 1}
"""Loads before the wait for the previous kernel: of addresses, and of what a wait needs."""


ROWS = {
    "gpt-oss-bf16": (GPT_OSS, "bf16"),
    "gpt-oss-mxfp8": (GPT_OSS, "mxfp8"),
    "gpt-oss-quantised-before": (GPT_OSS, "quantised before"),
    "deepseek-mxfp8": (DEEPSEEK, "mxfp8"),
}
"""Sizes, and what travels."""


@pytest.mark.parametrize(
    "target, bound, rows",
    [
        (target, bound, rows)
        for (i, target), (j, bound), (k, rows) in itertools.product(
            enumerate(TARGETS), enumerate(BOUNDS), enumerate(ROWS)
        )
        if (i + j + k) % 2 == 0
    ],
)
def test_rows_are_stored_16_bytes_at_a_time(target, bound, rows):
    """No spills, little shared memory; rows take 16-byte stores, and so do partial rows.

    Pairwise: targets, bounds and kinds of rows.
    """
    case, wire = ROWS[rows]
    launches = launches_of(target, bound, wire, case)
    for name in SETTING:
        metrics = compiled(launches[name], target).metrics
        assert metrics.scratch == 0, name
        if target != "gfx950":  # there scalar registers go to vector registers
            assert metrics.spills == 0, name
        assert metrics.shared_memory <= LITTLE_SHARED_MEMORY, name
        assert metrics.global_stores.get(128, 0) >= 1, (name, metrics.global_stores)
        narrow = sum(n for width, n in metrics.global_stores.items() if width == 64)
        assert narrow <= 3, (name, metrics.global_stores)  # words of tokens, epochs and calls


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_flags_are_released_and_acquired_at_system_scope(target, bound):
    launches = launches_of(target, bound)
    for name, launch in launches.items():
        ptx = compiled(launch, target).asm["ptx"]
        released = re.findall(r"atom\.global\.\w+\.release\.exch\.b64|atom\S*xch\S*", ptx)
        assert set(released) == (
            {"atom.global.sys.release.exch.b64"} if name in SETTING else set()
        ), name
        acquired = re.findall(r"ld\.acquire\S*", ptx)
        assert set(acquired) == ({"ld.acquire.sys.global.b64"} if name in WAITING else set()), name
        if name in SETTING:  # all threads' stores come before the flag
            ahead = ptx[: ptx.index("atom.global.sys.release")]
            stored = max(ahead.rfind("st.global.v4"), ahead.rfind("st.global.v2"))
            assert stored < ahead.rfind("bar.sync")
        if name in WAITING:
            assert "ld.volatile.global.b64" in ptx
            assert "globaltimer" in ptx


@pytest.mark.parametrize("bound", BOUNDS)
def test_flags_are_released_and_acquired_on_gfx950(bound):
    for name, launch in launches_of("gfx950", bound).items():
        code = re.sub(r"(?m)^\s*(\.loc|;).*\n", "", compiled(launch, "gfx950").asm["amdgcn"])
        if name in SETTING:  # each wave waits for its own stores; then the barrier, then the flag
            order = r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)(?s:.)*?s_barrier(?s:.)*?"
            assert re.search(order + r"global_atomic_swap_x2 .* sc1\n", code), name
        if name in WAITING:
            acquire = r"sc0 sc1\n\s+s_waitcnt vmcnt\(0\)\n\s+buffer_inv sc0 sc1"
            assert re.search(acquire, code), name
            # The words, the polls and the flags at the end pass by the caches.
            assert len(re.findall(r"_(?:load_dwordx2|atomic_add_x2) .* sc0 sc1\n", code)) >= 3, name
            assert re.search(r"s_memrealtime s\[\d+:\d+\]\ns_waitcnt lgkmcnt\(0\)", code), name


@pytest.mark.parametrize("bound", BOUNDS)
def test_dependent_launch(bound):
    """A kernel that waits for ranks lets the next one start only then; dispatch does it at once.

    Before its own wait a kernel only loads what never changes.
    """
    for name, launch in launches_of("sm_90", bound).items():
        assert launch.arguments["launch_pdl"] is True
        ptx = compiled(launch, "sm_90").asm["ptx"]
        ahead, _ = ptx.split("griddepcontrol.wait")
        assert not re.findall(r"\b(?:st|atom|red)\.\w*\.?global", ahead), name
        loads = re.findall(r"\bld\.\w*\.?global", ahead)
        assert len(loads) == CONSTANT_WORDS.get(name, AWAITED_WORDS), name
        started = ptx.index("griddepcontrol.launch_dependents")
        if name in WAITING:
            assert ptx.index("ld.acquire.sys") < started, name
        else:
            assert started < len(ahead), name


def test_sorts_without_arrivals_do_not_wait():
    for slots in (2, 8192):
        with recorded_launches() as launches:
            _sort(H200, slots, GPT_OSS, None)
        for launch in launches:
            ptx = compiled(launch, "sm_90").asm["ptx"]
            assert not re.search(r"globaltimer|volatile|acquire|atom\.global", ptx)
            assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")


def test_binaries_do_not_depend_on_ranks_and_model():
    """Ranks, experts, tokens and slots are arguments; tiles and padded sizes are compiled in."""
    keys: dict[str, set[str]] = {}
    for size, experts in ((2, 128), (4, 128), (8, 60)):
        case = Case(**{**vars(GPT_OSS), "size": size, "num_experts": experts})
        for bound in (1536, 2000, 4096):
            for name, launch in launches_of("sm_90", bound, case=case).items():
                if name in SETTING:
                    named = {
                        key: value
                        for key, value in launch.arguments.items()
                        if key in launch.kernel.arg_names or key in ("num_warps", "maxnreg")
                    }
                    keys.setdefault(name, set()).add(specialize(launch.kernel, named, "sm_90").key)
    # Offsets beyond 2 GiB have 64 bits: a second binary of each kernel.
    assert {name: len(each) for name, each in keys.items()} == dict.fromkeys(SETTING, 1)
