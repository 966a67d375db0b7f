"""Grids of the Hopper MoE kernels where a call leaves SMs to other work, on a stub target."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.moe.hopper import config as heuristics
from mxpert.testing.problems import MODEL_SHAPES
from support.hopper_launches import H200, Launch, Recorder, describe

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
