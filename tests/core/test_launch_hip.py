"""Host code on an MI355X down to the driver's C functions: launches, tuning, timing.

The stub records what would be launched. That a launch computes the right values is the matter of
the tests in tests/gfx950.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mxpert
from mxpert.cli.tune_cells import TARGETS, Cell, Trial, choose
from mxpert.core import target
from mxpert.core.backend import layouts_for
from mxpert.core.problem import GemmConfig
from mxpert.testing.problems import MODEL_SHAPES, MoEShape, random_moe_problem
from mxpert.testing.timing import _l2_sweep, read_bandwidth
from support.hip import LEADING, REPLAY_MS, replayed_graphs, stub_driver, stub_torch
from support.layers import run_layer

MI355X = TARGETS["amd-instinct-mi355x"]
SHAPE = MoEShape(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, has_bias=True)


@pytest.fixture
def launches() -> Iterator[list[tuple]]:
    """Arguments of the C launcher, in ops that take every tensor for one on an MI355X."""
    with target.on_device(MI355X), stub_driver() as launched:
        yield launched


def test_the_device_is_detected_without_its_features() -> None:
    target._gpu_target.cache_clear()
    with stub_torch():
        assert target.detect_target("cuda") == MI355X
    target._gpu_target.cache_clear()


@pytest.mark.parametrize("a_format", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
def test_a_layer_is_launched(launches: list[tuple], replays: list[object], a_format: str) -> None:
    """Every call makes the same launches of gfx950 binaries, with the addresses of its tensors.

    No call is replayed: only CUDA's launcher can be started without Triton.
    """
    inputs = random_moe_problem(SHAPE, 16)
    seen = []
    for _ in range(3):
        launches.clear()
        with mxpert.override(backend="triton"):
            run_layer(inputs, activation_format=a_format)
        seen.append([(call[1:4], call[4], call[5]) for call in launches])
        (gate_up,) = (call for call in launches if call[5] == "_moe_gate_up_kernel")
        tensors = [each for each in gate_up[LEADING:] if isinstance(each, torch.Tensor)]
        weights = inputs.weights.gate_up_proj
        addresses = {tensor.data_ptr() for tensor in tensors}
        assert {weights.qdata.data_ptr(), weights.scale.data_ptr()} <= addresses
    assert seen[0] == seen[1] == seen[2]
    assert not replays
    assert {stream for _, stream, _ in seen[0]} == {7}, "the stub's current stream"
    assert {"_moe_gate_up_kernel", "_moe_down_kernel"} <= {name for *_, name in seen[0]}


def test_training_is_launched(launches: list[tuple]) -> None:
    a = torch.randn(64, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32)
    rows, columns = mxpert.quantize_dual(a, "mxfp8_e4m3", group_offsets=offsets)
    weights = mxpert.quantize(torch.randn(2, 32, 64), "mxfp8_e4m3")
    grad = mxpert.quantize_dual(a, "mxfp8_e5m2", group_offsets=offsets)[1]
    with mxpert.override(backend="triton"):
        mxpert.grouped_gemm(rows, weights, offsets)
        mxpert.grouped_wgrad(grad, columns, offsets)
    names = {call[5] for call in launches}
    assert {"_grouped_gemm_kernel", "_grouped_wgrad_kernel"} <= names


@pytest.mark.parametrize("a_format", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_candidates_of_the_tuner_use_scaled_mfma(num_tokens: int, a_format: str) -> None:
    """All are valid for the device, and none would be decoded to bf16; 256 CUs split K early."""
    cell = Cell("gpt-oss-120b", MODEL_SHAPES["gpt-oss-120b"], num_tokens, a_format)
    choice = choose(cell, MI355X, layouts_for(MI355X.arch), "triton")
    configs = choice.configs()
    assert configs[0] == choice.kernel.heuristic(choice.problem)
    assert len(configs) > 100
    stages = [stage for config in configs for stage in (config.gate_up, config.down)]
    assert all(isinstance(stage, GemmConfig) for stage in stages)
    low = {stage.block_k for stage in stages if stage.block_m == 16}
    assert (64 in low) is (a_format == "bf16")


def test_a_cell_is_timed(launches: list[tuple]) -> None:
    """Gate and timing of two configs: each is captured once and replayed as often as the other."""
    choice = choose(Cell("here", SHAPE, 16, "mxfp8"), MI355X, layouts_for(MI355X.arch), "triton")
    weights = random_moe_problem(SHAPE, 16).weights
    trial = Trial(choice, SHAPE, weights, weights)
    configs = choice.configs()[:2]
    launches.clear()
    with stub_torch():
        trial.device = torch.device("cuda")
        timings = trial.times(configs, failures := {})
        trial.require_alive(configs[0])
        replays = replayed_graphs()
    assert not failures
    us = REPLAY_MS * 1e3 / len(trial.batches)
    assert [timing.us for timing in timings.values()] == pytest.approx([us, us])
    samples = {timing.samples for timing in timings.values()}
    assert replays == len(configs) * (samples.pop() + 1)
    stages = [call for call in launches if call[5] == "_moe_down_kernel"]
    assert len(stages) == 2 * len(configs) * len(trial.batches), "a warm run, and the capture"


def test_the_sweep_is_larger_than_the_infinity_cache() -> None:
    """torch tells the L2 of one XCD, 4 MiB; the memory side has a cache of 256 MiB."""
    with stub_torch():
        assert _l2_sweep().nbytes >= 512 << 20


def test_the_read_bandwidth_is_measured(launches: list[tuple]) -> None:
    with stub_torch():
        assert read_bandwidth("cuda") == pytest.approx(4 * (1 << 30) / REPLAY_MS * 1e3)
    assert {call[5] for call in launches} == {"_read_stream_kernel"}
