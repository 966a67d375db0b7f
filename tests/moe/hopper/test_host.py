"""Launches of the Hopper MoE kernels on a stub target: grids where a call leaves SMs to other work,
and the binaries of a served model."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import encode
from mxpert.testing.problems import MODEL_SHAPES
from support.aot import let_specialize
from support.hopper_launches import H200, Launch, Recorder, describe, served

GEMMS = ("_moe_gemm_decode_kernel", "_moe_gemm_prefill_kernel")


def gemms(monkeypatch: pytest.MonkeyPatch, tokens: int, num_sms: int | None) -> list[Launch]:
    problem = describe(MODEL_SHAPES["gpt-oss-20b"], tokens, "mxfp8", num_sms=num_sms)
    config = heuristics.two_stage_heuristic(problem).gate_up
    launches = Recorder(monkeypatch).run(problem, config, has_bias=True)
    return [each for each in launches if each.name in GEMMS]


@pytest.mark.parametrize("tokens", [1, 4096], ids=["decode", "prefill"])
def test_grids_keep_to_num_sms(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages; all SMs are the launch without the option, fewer ones have a CTA each."""
    free = gemms(monkeypatch, tokens, None)
    assert [each.grid for each in gemms(monkeypatch, tokens, H200.num_sms)] == [
        each.grid for each in free
    ]
    for limit in (1, H200.num_sms // 2, H200.num_sms - 1):
        limited = gemms(monkeypatch, tokens, limit)
        assert [each.grid for each in limited] == [(limit,)] * 2
        for own, other in zip(limited, free, strict=True):
            assert own.name == other.name
            changed = {
                name
                for name, value in own.arguments.items()
                if not hasattr(value, "shape") and value != other.arguments.get(name, value)
            }
            assert not changed


@pytest.mark.parametrize("tokens", [1, 4096], ids=["decode", "prefill"])
def test_gemms_that_leave_sms_do_not_start_early(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GEMM that waits for the previous kernel would hold the SMs that this one leaves."""
    for limit, early in ((None, True), (H200.num_sms, True), (66, False)):
        for launch in gemms(monkeypatch, tokens, limit):
            assert launch.arguments.get("launch_pdl", False) is early


SERVED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8192)
MOST_BINARIES = {"gpt-oss-120b": 46, "kimi-k2-tp4": 43, "qwen3-30b": 45, "deepseek-v3": 48}
"""Binaries that a model served in bf16 and mxfp8 has at SERVED_TOKENS; they may only become fewer.
Six of them are the one launch for one, two and up to four tokens."""


def binaries(model: str) -> collections.Counter[str]:
    """Number of binaries by kernel."""
    shape = MODEL_SHAPES[model]
    found = {
        (launch.name, launch.binary)
        for a_format in ("bf16", "mxfp8")
        for tokens in SERVED_TOKENS
        for launch in served(shape, tokens, a_format)
    }
    return collections.Counter(name for name, _ in found)


@pytest.mark.parametrize(("model", "most"), MOST_BINARIES.items(), ids=MOST_BINARIES)
def test_a_served_model_has_no_more_binaries(model: str, most: int) -> None:
    found = binaries(model)
    assert found.total() == most, f"lower MOST_BINARIES, or find what differs: {dict(found)}"


def test_a_number_that_triton_specialises_on_adds_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of all tokens: 40 for four tokens, multiples of 16 for more."""
    before = binaries("qwen3-next").total()
    let_specialize(monkeypatch, encode._moe_encode_rows_kernel, "num_slots")
    assert binaries("qwen3-next").total() > before
