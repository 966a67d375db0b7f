"""The Hopper GEMM that reads FP8 copies of weights, compiled without a GPU; and when it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.configs import HopperGemmConfig, HopperKernel
from mxpert.core.problem import ACTIVATION_FORMATS, SiLU, SwiGLU
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import tile_list as schedule
from mxpert.moe.hopper.tile_limits import FP8_FROM_ROWS
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.aot import SHARED_MEMORY_LIMIT, CompiledKernel, compile_for
from support.hopper_launches import Launch, Recorder, describe
from support.sass import parse, register_operands, reused_barriers
from support.without_data import empty
from tests.moe.hopper.test_kernels_aot import (
    ACTIVATIONS,
    GELUS,
    MODELS,
    STEPS,
    TOKENS,
    WITH_BETA,
    gemms,
    shape_of,
)

KERNEL = "_moe_gemm_prefill_fp8_kernel"
TILES = tuple(heuristics.fp8_tiles())
tiles = pytest.mark.parametrize("tile", TILES)
FP8_FORMATS = tuple(name for name in ACTIVATION_FORMATS if name != "bf16")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def both_gemms(recorder: Recorder, shape: MoEShape, tile: str, *, has_bias: bool) -> list[Launch]:
    problem = describe(shape, 8192, "mxfp8", fp8=True)
    found = gemms(recorder.run(problem, heuristics.fp8_tiles()[tile], has_bias=has_bias))
    assert [launch.name for launch in found] == [KERNEL] * 2
    return found


def check_gemm(kernel: CompiledKernel) -> None:
    """Both operands of wgmma in shared memory, no spills, outputs by TMA."""
    metrics = kernel.metrics
    assert kernel.count(r"\bQGMMA\.64x\d+x32\.F32\.E4M3\.E4M3") > 0
    assert register_operands(kernel.listing) == 0
    assert metrics.spills == 0
    assert kernel.count(r"\bUTMALDG\.2D") > 0
    assert kernel.count(r"\bUTMASTG\.2D") > 0
    assert sum(metrics.global_stores.values()) == 1, "the counter of claims"
    assert metrics.shared_memory <= SHARED_MEMORY_LIMIT["sm_90"]
    assert not reused_barriers(kernel.listing)


@tiles
def test_gemms(recorder: Recorder, tile: str) -> None:
    """Both stages; stage 1 with another activation in each tile too, a third parameter in two."""
    index = TILES.index(tile)
    others = (ACTIVATIONS[2], WITH_BETA, GELUS[1], WITH_BETA)
    first, second = both_gemms(recorder, shape_of(SwiGLU()), tile, has_bias=True)
    other, _ = both_gemms(recorder, shape_of(others[index]), tile, has_bias=True)
    for launch in (first, second, other):
        check_gemm(launch.compile())


@pytest.mark.epilogues
@tiles
def test_gemms_without_bias(recorder: Recorder, tile: str) -> None:
    """One stage of each; with biases they need as many registers or more."""
    launch = both_gemms(recorder, shape_of(SiLU()), tile, has_bias=False)[TILES.index(tile) % 2]
    assert launch.arguments["HAS_BIAS"] is False
    check_gemm(launch.compile())


def test_wgmma_of_a_stage_are_in_flight_together(recorder: Recorder) -> None:
    """ptxas has not serialised them: four products follow each other without a wait."""
    launch, _ = both_gemms(recorder, shape_of(), "fp8_wide", has_bias=True)
    for block in parse(launch.compile().listing):
        names = [one.name for one in block.instructions]
        products = [place for place, name in enumerate(names) if name.startswith("QGMMA")]
        waits = [place for place, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
        assert 4 * len(waits) <= max(len(products), 4)


@tiles
def test_schedules_reach_as_far_as_tiles(tile: str) -> None:
    assert heuristics.fp8_tiles()[tile].blocks_per_tile <= schedule._MOST_BLOCKS.value


@tiles
def test_consumers_start_apart(recorder: Recorder, tile: str) -> None:
    """By stages that the producer can fill before any is released, however few there are."""
    whole = heuristics.fp8_tiles()[tile]
    problem = describe(shape_of(), 8192, "mxfp8", fp8=True)
    for num_stages in range(2, whole.num_stages + 1):
        config = replace(whole, num_stages=num_stages)
        for launch in gemms(recorder.run(problem, config, has_bias=False)):
            skew = launch.arguments["SKEW"] * (config.consumers - 1)
            assert skew < num_stages
            assert num_stages < 4 or skew > 0


def test_a_layer_lists_even_runs_once(recorder: Recorder) -> None:
    problem = describe(shape_of(SiLU()), 8192, "mxfp8", fp8=True)
    config = heuristics.fp8_tiles()["fp8_wide"]
    launches = recorder.run_layer(problem, config)
    (made,) = (launch for launch in launches if launch.name == "_moe_tile_schedule_kernel")
    assert made.arguments["EVEN"] is True
    assert made.compile().metrics.spills == 0
    of_others = recorder.run_layer(problem, heuristics.tiles(False)["wide"])
    (made,) = (launch for launch in of_others if launch.name == "_moe_tile_schedule_kernel")
    assert made.arguments["EVEN"] is False


def test_the_kernel_waits_for_the_one_before(recorder: Recorder) -> None:
    for launch in both_gemms(recorder, shape_of(), "fp8_narrow", has_bias=True):
        assert launch.arguments["launch_pdl"] is True
        steps = STEPS.findall(launch.compile().asm["ptx"])
        waits = [place for place, step in enumerate(steps) if step == "griddepcontrol.wait"]
        assert len(waits) == 1
        assert waits[0] < steps.index("griddepcontrol.launch_dependents")
        assert all(step.startswith("griddepcontrol") for step in steps[: waits[0]])


def test_one_binary_serves_all_models(recorder: Recorder) -> None:
    seen: dict[str, set[str]] = {}
    for shape in MODELS.values():
        for num_tokens in TOKENS:
            problem = describe(replace(shape, activation=SwiGLU()), num_tokens, "mxfp8", fp8=True)
            config = heuristics.fp8_tiles()["fp8_wide"]
            for launch in gemms(recorder.run(problem, config, has_bias=True)):
                seen.setdefault(str(launch.arguments["EPILOGUE"]), set()).add(launch.binary)
    assert {kind: len(binaries) for kind, binaries in seen.items()} == {"swiglu": 1, "linear": 1}


def test_the_kernel_that_makes_the_copy_moves_words() -> None:
    pack = pytest.importorskip("mxpert.moe.hopper.pack")
    arguments = dict(fp8=empty(0).view(dtype=pack.torch.int32), packed=empty(0), shifts=empty(0))
    arguments |= {name: empty(0, dtype=pack.torch.int32) for name in ("fp8", "packed")}
    kernel = pack._decode_hopper_fragment_kernel
    metrics = compile_for(kernel, arguments, target="sm_90").metrics
    assert metrics.spills == 0
    assert metrics.global_loads[128]
    assert not metrics.global_stores.keys() & {8, 16}


# --- choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 64, 1024, 4096, 8192, 32768])
@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_many_rows_take_the_fp8_copy(a_format: str, model: str, num_tokens: int) -> None:
    """Below the limit, and with bfloat16 activations, the choice is that without a copy."""
    shape = MODEL_SHAPES[model]
    without = describe(shape, num_tokens, a_format)
    problem = describe(shape, num_tokens, a_format, fp8=True)
    layer = heuristics.layer_heuristic(problem)
    reads = problem.rows_per_expert >= FP8_FROM_ROWS and a_format != "bf16"
    assert layer in list(heuristics.layer_configs(problem))
    if not reads:
        assert layer == heuristics.layer_heuristic(without)
        return
    for stage in (layer.gate_up, layer.down):
        assert isinstance(stage, HopperGemmConfig)
        assert stage.kernel is HopperKernel.PREFILL_FP8
        heuristics.require_valid(stage, problem)
        with pytest.raises(ValueError, match="config — need one of"):
            heuristics.require_valid(stage, without)


@pytest.mark.parametrize(
    "model, num_tokens, gate_up, down",
    [
        ("gpt-oss-120b", 5120, "fp8_middle", "fp8_middle"),  # 160 rows an expert
        ("gpt-oss-120b", 8192, "fp8_triple", "fp8_triple"),  # 256
        ("kimi-k2-tp4", 32768, "fp8_middle", "fp8_triple"),  # 683; 16 row units, and 112
    ],
)
def test_rows_of_an_expert_choose_the_tile(
    model: str, num_tokens: int, gate_up: str, down: str
) -> None:
    """Three consumers where row units divide by three, or nearly."""
    layer = heuristics.layer_heuristic(describe(MODEL_SHAPES[model], num_tokens, "mxfp8", fp8=True))
    tiles = heuristics.fp8_tiles()
    assert (layer.gate_up, layer.down) == (tiles[gate_up], tiles[down])


def test_rows_of_bfloat16_have_no_such_tile() -> None:
    config = heuristics.fp8_tiles()["fp8_wide"]
    with pytest.raises(ValueError, match="config — need one of"):
        heuristics.require_valid(config, describe(shape_of(), 8192, "bf16", fp8=True))


@pytest.mark.parametrize("change", [{"num_stages": 1}, {"num_stages": 9}, {"k_splits": 2}])
def test_other_tiles_are_refused(recorder: Recorder, change: dict[str, int]) -> None:
    config = replace(heuristics.fp8_tiles()["fp8_wide"], **change)
    problem = describe(shape_of(), 8192, "mxfp8", fp8=True)
    with pytest.raises(ValueError, match="config — need one of"):
        recorder.run(problem, config, has_bias=False)
    assert not gemms(recorder.launches)


def test_weights_without_a_copy_are_refused(recorder: Recorder) -> None:
    config = heuristics.fp8_tiles()["fp8_wide"]
    with pytest.raises(ValueError, match="config — need one of"):
        recorder.run(describe(shape_of(), 8192, "mxfp8"), config, has_bias=False)
    assert not gemms(recorder.launches)


def test_few_rows_read_the_4_bit_weights_beside_the_copy(recorder: Recorder) -> None:
    problem = describe(shape_of(), 64, "mxfp8", fp8=True)
    config = heuristics.two_stage_heuristic(problem).gate_up
    assert isinstance(config, HopperGemmConfig)
    found = gemms(recorder.run(problem, config, has_bias=False))
    assert [launch.name for launch in found] == ["_moe_gemm_decode_kernel"] * 2
    with_none = gemms(recorder.run(describe(shape_of(), 64, "mxfp8"), config, has_bias=False))
    assert [launch.binary for launch in found] == [launch.binary for launch in with_none]


def test_explain_says_who_reads_the_copy() -> None:
    for num_tokens, kernel in ((64, "kernel=decode"), (32768, "kernel=prefill_fp8")):
        text = str(explain_problem(describe(shape_of(), num_tokens, "mxfp8", fp8=True)))
        assert "backend: hopper" in text
        assert "formats: mxfp8xmxfp4+fp8" in text
        assert kernel in text
        assert f"FP8 copy is read from {FP8_FROM_ROWS} rows an expert on" in text
    assert "FP8" not in str(explain_problem(describe(shape_of(), 32768, "mxfp8")))


def test_tuned_rows_are_of_weights_without_a_copy() -> None:
    shape = MODEL_SHAPES["gpt-oss-120b"]
    without, beside = (describe(shape, 64, "mxfp8", fp8=fp8) for fp8 in (False, True))
    assert explain_problem(without).resolution.source == "table"
    assert explain_problem(beside).resolution.source == "heuristic"


def test_a_stage_on_its_own_takes_the_copy() -> None:
    problem = describe(shape_of(), 32768, "mxfp8", fp8=True)
    assert problem.weight_layout is Layout.HOPPER_FRAGMENT_FP8
    for unit in (64, 128):
        stage = replace(problem, op=heuristics.STAGE_OPS[0], routing_block_m=unit)
        assert heuristics.stage_heuristic(stage).kernel is HopperKernel.PREFILL_FP8
        assert heuristics.stage_heuristic(stage) in list(heuristics.stage_configs(stage))
    small = replace(problem, op=heuristics.STAGE_OPS[0], routing_block_m=16)
    assert heuristics.stage_heuristic(small).kernel is HopperKernel.DECODE
