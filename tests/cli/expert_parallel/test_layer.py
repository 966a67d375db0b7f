"""`mxpert bench --expert-parallel`: starts its ranks, gates before it times, clear errors."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from mxpert.cli.expert_parallel import layer, ranks
from mxpert.cli.expert_parallel.layer import Case, Collectives, Load, OnRanks, RankCase, RankWeights
from mxpert.cli.main import app
from mxpert.cli.measure import GateError
from mxpert.distributed import DispatchedTokens, ExpertParallel, Placement
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.testing.ranks import RankFailedError, Variant, join_group, start_ranks, time_ranks
from support.outcomes import assert_one_line

runner = CliRunner()
SHAPE = MoEShape(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2, has_bias=True)
STAGES = {"dispatch", "local", "combine", "exchange", "layer"}


def run(output: Path, *arguments: str) -> Any:
    return runner.invoke(app, ["bench", "--output", str(output), *arguments])


def test_two_processes_are_measured(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        *("--expert-parallel", "2", "--scale", "32", "--tokens", "3", "--json", "-"),
        *("--format", "a8w4", "--routing", "zipf", "--model", "gpt-oss-20b"),
    )
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document == json.loads((tmp_path / "expert_parallel.json").read_text())
    assert not (tmp_path / "expert_parallel.png").exists(), "a CPU's times are not shown"
    assert not re.search(r"\d (µs|ms)", outcome.stderr), outcome.stderr
    assert (document["kind"], document["ranks"]) == ("expert_parallel", 2)
    rows = document["rows"]
    by_impl = {
        impl: [row for row in rows if row["impl"] == impl] for impl in (r["impl"] for r in rows)
    }
    assert set(by_impl) == {"mxpert/gather", "all_gather + reduce_scatter"}
    for mine in by_impl.values():
        assert {row["stage"] for row in mine} == STAGES
        for row in mine:
            assert (row["N"], row["T"], row["wire"]) == (2, 3, "mxfp8")
            assert row["us"] > 0
            assert 0 <= row["rel_l2"] < 1e-2
            assert 0.5 <= row["balance"] <= 1
    (explained,) = document["explain"].values()
    assert "transport: gather" in explained
    for part in ("bench --expert-parallel 2", "not symmetric", "balance", "mxpert bench --plan"):
        assert part in outcome.stderr


def fail_on_rank(rank: int) -> None:
    """Rank 1 fails; the others would wait for it. No rank looks up the host's name."""
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    join_group()
    if dist.get_rank() == rank:
        raise ValueError("bench: x — need y, got z")
    dist.barrier()


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(RankFailedError, match="rank 1: ValueError: bench: x — need y, got z"):
        start_ranks(fail_on_rank, 2, 1)


def request_of() -> ranks.RanksRequest:
    return ranks.RanksRequest(2, {"tiny": SHAPE}, [1], ["bf16"], "uniform")


@pytest.mark.parametrize(
    ("reason", "error", "part"),
    [
        ("rank 1: ValueError: op: x — need y, got z", ValueError, "^op: x — need y, got z$"),
        ("rank 0: OutOfMemoryError: CUDA out of memory", ValueError, "enough GPU memory"),
        ("rank 0: RuntimeError: a defect", RankFailedError, "a defect"),
    ],
)
def test_failures_of_ranks_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, reason: str, error: type[Exception], part: str
) -> None:
    def start(*arguments: object) -> None:
        raise RankFailedError(reason)

    monkeypatch.setattr(ranks, "start_ranks", start)
    with pytest.raises(error, match=part):
        ranks.run_ranks(request_of())


def test_a_wrong_result_has_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_ranks", lambda *_: [{"gate": "bench: a — need b, got c"}])
    outcome = run(tmp_path, "--expert-parallel", "2")
    assert outcome.exit_code == 1
    assert "error: bench: a — need b, got c" in outcome.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--expert-parallel", "0"], "need 1 to 16 on a CPU, got 0", id="no-ranks"),
        pytest.param(["--expert-parallel", "17"], "need 1 to 16 on a CPU, got 17", id="many"),
        pytest.param(
            ["--expert-parallel", "8", "--scale", "32"],
            "at most 4, the experts of gpt-oss-120b/32",
            id="more-than-experts",
        ),
        pytest.param(
            ["--expert-parallel", "2", "--plan"], "--expert-parallel — need none", id="both-modes"
        ),
        pytest.param(
            ["--expert-parallel", "2", "--stage", "down"], "--stage — need none", id="stage"
        ),
        pytest.param(
            ["--plan", "--backend", "triton"], "--backend — need none with --plan", id="backend"
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    outcome = run(tmp_path, *arguments)
    assert_one_line(outcome, part)
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks.check_ranks(2, {"tiny": SHAPE})
    with pytest.raises(ValueError, match="need 1 to 2, the GPUs that are visible here, got 4"):
        ranks.check_ranks(4, {"tiny": SHAPE})


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_case(num_tokens: int, wire: str = "bf16") -> RankCase:
    ep = ExpertParallel(
        num_experts=4, top_k=2, hidden_size=64, max_tokens=num_tokens, wire_format=wire
    )
    weights = RankWeights.random(SHAPE, ep)
    a_format = "mxfp8" if wire == "mxfp8" else "bf16"
    return RankCase(Case("tiny", SHAPE, num_tokens, "uniform", a_format, wire), weights, ep)


WRONG = {
    "factor": lambda right, tokens: right(tokens) * 1.02,
    "other-rows": lambda right, tokens: right(tokens).roll(1, 0),
    "dropped-expert": lambda right, tokens: right(
        replace(tokens, topk_weights=tokens.topk_weights * torch.tensor([1.0, 0.0]))
    ),
    "nan": lambda right, tokens: right(tokens) * torch.nan,
}


@pytest.mark.parametrize("kind", [OnRanks, Collectives])
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.usefixtures("alone")
def test_the_gate_passes_what_is_right_and_nothing_else(wire: str, kind: Any) -> None:
    case = made_case(5, wire)
    exchange = kind(case.case, case.weights, case.ranks)
    assert case.gate(exchange) < 1e-2
    right = exchange.layer
    for wrong in WRONG.values():
        exchange.layer = functools.partial(wrong, right)
        with pytest.raises(GateError, match="rank 0"):
            case.gate(exchange)


@pytest.mark.usefixtures("alone")
def test_parts_give_the_whole() -> None:
    """What is timed as parts, as exchange and as layer computes the same output."""
    case = made_case(3)
    for kind in (OnRanks, Collectives):
        exchange = kind(case.case, case.weights, case.ranks)
        outputs: list[torch.Tensor] = []
        combine = exchange.combine
        exchange.combine = lambda rows, received, combine=combine, outputs=outputs: (
            outputs.append(combine(rows, received)) or outputs[-1]
        )
        whole = exchange.layer(case.tokens[0])
        variants = case.variants(exchange)
        outputs.clear()
        for name in ("parts", "exchange"):
            for call, *_ in variants[name].steps.values():
                call()
        assert len(outputs) == 2
        for output in outputs:
            torch.testing.assert_close(output, whole, rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_samples_are_of_steps_and_their_sum() -> None:
    order: list[str] = []
    variants = {
        "two": Variant({"a": [lambda: order.append("a")], "b": [lambda: order.append("b")]}),
        "one": Variant({"c": [lambda: order.append("c")] * 3}),
    }
    samples = time_ranks(variants, device=torch.device("cpu"), repeats=4, warmup=1)
    assert {name: set(steps) for name, steps in samples.items()} == {
        "two": {"a", "b", "total"},
        "one": {"c"},
    }
    assert all(len(each) == 4 for steps in samples.values() for each in steps.values())
    for first, second, total in zip(*(samples["two"][n] for n in ("a", "b", "total")), strict=True):
        assert total == pytest.approx(first + second)
    text = "".join(order)
    assert text.count("ab") == text.count("ccc") == 5, "in turns, steps one after the other"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "steps", [{}, {"a": []}, {"a": [list], "b": [list, list]}], ids=["none", "no-calls", "uneven"]
)
def test_uneven_steps_are_refused(steps: dict) -> None:
    with pytest.raises(ValueError, match="steps with equally many calls"):
        time_ranks({"x": Variant(steps)}, device=torch.device("cpu"), repeats=1)


@pytest.mark.usefixtures("alone")
def test_a_rank_with_fewer_experts_than_a_token_chooses() -> None:
    """top_k = 2 of a rank's single expert: the second id is foreign."""
    ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=64, max_tokens=1)
    weights = RankWeights.random(SHAPE, ep)
    case = Case("tiny", SHAPE, 1, "uniform", "bf16", "bf16")
    alone = SimpleNamespace(
        transport=ep.transport,
        device=ep.device,
        combine_dtype=ep.combine_dtype,
        num_local_experts=1,
        local_top_k=1.0,
        with_max_tokens=lambda count: alone,
    )
    one = replace(weights, local=layer.take_experts(weights.every, (0,)))
    x, ids = torch.randn(1, 64, dtype=torch.bfloat16), torch.tensor([[0, -1]], dtype=torch.int32)
    received = DispatchedTokens(x, torch.ones(1, 2), ids, num_tokens=1)
    expected = OnRanks(case, weights, ep).compute(received)
    found = OnRanks(case, one, alone).compute(received)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_load_is_that_of_the_busiest_rank() -> None:
    placement = Placement.contiguous(4, 2)
    ids = torch.tensor([[0, 1], [0, 2], [1, 0]])
    load = Load.of([ids, ids], placement)
    assert (load.rows, load.hit, load.balance) == (5.0, 2.0, 3 / 5)


def test_experts_are_taken_in_order() -> None:
    weights = random_moe_problem(SHAPE, 1).weights
    taken = layer.take_experts(weights, (2, 0))
    assert taken.num_experts == 2
    for mine, every in (
        (taken.gate_up_proj.qdata, weights.gate_up_proj.qdata),
        (taken.down_proj.scale, weights.down_proj.scale),
        (taken.gate_up_bias, weights.gate_up_bias),
        (taken.down_bias, weights.down_bias),
    ):
        assert torch.equal(mine, every[[2, 0]])
