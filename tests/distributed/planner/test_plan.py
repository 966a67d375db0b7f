"""The planner: loads, links and layers against cases computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.distributed.placement import contiguous_bounds
from mxpert.distributed.planner import LINKS, ExpertLayer, LayerPlan, Link, plan_layer
from mxpert.distributed.planner.load import choice_probabilities, expected_maximum
from mxpert.distributed.planner.plan import MeasuredLayers, _busiest
from mxpert.testing.problems import random_routing

DEEPSEEK = ExpertLayer("deepseek-v3", 256, 8, 7168, 2048)
GPT_OSS = ExpertLayer("gpt-oss-120b", 128, 4, 2880, 2880)
KB = 1e-3  # 1 KB/µs is 1 GB/s: bytes over GB/s are ns


def hypergeometric(num_experts: int, top_k: int, size: int) -> float:
    """Probability that k distinct experts include one of a group of `size`."""
    return 1 - math.comb(num_experts - size, top_k) / math.comb(num_experts, top_k)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ranks"),
    [(128, 4, 2), (128, 4, 8), (256, 8, 8), (256, 8, 72), (385, 9, 7), (4, 4, 2), (2, 1, 2)],
)
def test_uniform_choices_are_hypergeometric(num_experts: int, top_k: int, ranks: int) -> None:
    bounds = contiguous_bounds(num_experts, ranks)
    found = choice_probabilities(num_experts, top_k, bounds)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(sizes) == num_experts
    assert max(sizes) - min(sizes) <= 1
    expected = [hypergeometric(num_experts, top_k, size) for size in sizes]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_zipf_choices_of_three_experts_by_hand() -> None:
    """Weights 6, 3, 2 (of 11): an expert is first, or second after another one."""
    weights = {0: 6.0, 1: 3.0, 2: 2.0}

    def chosen(expert: int) -> float:
        others = [each for each in weights if each != expert]
        after = sum(
            weights[other] / 11 * weights[expert] / (11 - weights[other]) for other in others
        )
        return weights[expert] / 11 + after

    found = choice_probabilities(3, 2, (0, 1, 2, 3), "zipf")
    expected = torch.tensor([chosen(expert) for expert in weights], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    pair = choice_probabilities(3, 2, (0, 1, 3), "zipf")[1]
    assert pair == pytest.approx(1.0, abs=1e-9), "two of three include expert 1 or 2"


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_choices_are_those_of_random_routing(routing: str) -> None:
    """Of S tokens the share that chooses a group is within five standard errors of the model."""
    tokens, bounds = 20_000, contiguous_bounds(64, 4)
    generator = torch.Generator().manual_seed(0)
    _, ids = random_routing(tokens, 64, 4, generator=generator, routing=routing)
    expected = choice_probabilities(64, 4, bounds, routing)
    for (first, last), share in zip(itertools.pairwise(bounds), expected, strict=True):
        seen = ((ids >= first) & (ids < last)).any(-1).double().mean()
        error = math.sqrt(float(share * (1 - share)) / tokens)
        assert abs(float(seen - share)) <= 5 * error + 1e-9
    every = choice_probabilities(64, 4, tuple(range(65)), routing)
    assert float(every.sum()) == pytest.approx(4, abs=1e-9), "each token has k experts"


def test_maximum_of_normal_variables_by_hand() -> None:
    def maximum(means: list[float], deviations: list[float]) -> float:
        return expected_maximum(torch.tensor(means), torch.tensor(deviations))

    assert maximum([5.0], [3.0]) == pytest.approx(5.0, abs=1e-6)
    assert maximum([1.0, 2.0], [0.0, 0.0]) == 2.0
    assert maximum([0.0, 0.0], [1.0, 1.0]) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-5)
    assert maximum([0.0] * 3, [2.0] * 3) == pytest.approx(3 / math.sqrt(math.pi), abs=1e-5)
    assert maximum([0.0, 100.0], [1.0, 1.0]) == pytest.approx(100.0, abs=1e-5)


def plan(layer: ExpertLayer = DEEPSEEK, **changes: object) -> LayerPlan:
    options: dict = {"num_ranks": 8, "num_tokens": 4096, "link": LINKS["nvlink4"]} | changes
    return plan_layer(layer, **options)


def test_exchange_within_a_host_by_hand() -> None:
    """4096 tokens need each of 7 other ranks with p = 0.662; 7392 bytes there, 14336 back."""
    share = hypergeometric(256, 8, 32)
    found = plan()
    rows = 4096 * 7 * share
    assert found.dispatch_bytes == pytest.approx(rows * 7168 * 33 / 32)
    assert found.combine_bytes == pytest.approx(rows * 7168 * 2)
    assert found.dispatch_us == pytest.approx(4 + rows * 7392 / 343e3)
    assert found.combine_us == pytest.approx(4 + rows * 14336 / 343e3)
    assert found.us == found.dispatch_us + found.local_us + found.combine_us
    bf16 = plan(wire_format="bf16")
    assert bf16.dispatch_bytes == found.combine_bytes
    assert bf16.local_us == found.local_us


@pytest.mark.parametrize(("ranks", "dispatch", "combine"), [(16, 642, 1245), (64, 2984, 5788)])
def test_exchange_between_hosts_by_hand(ranks: int, dispatch: float, combine: float) -> None:
    """deepseek-v3 with 4096 tokens a rank, one row for each host, at 47 GB/s; 55 µs of latency."""
    found = plan(num_ranks=ranks, link=LINKS["ib400"])
    assert found.dispatch_us - 55 == pytest.approx(dispatch, rel=1e-3)
    assert found.combine_us - 55 == pytest.approx(combine, rel=1e-3)


def test_nvlink_limits_where_the_network_is_fast() -> None:
    """2 hosts of 2 ranks, 4 experts, k = 1: a host needs a row with p = 1/2, a rank with 1/4."""
    layer = ExpertLayer("tiny", 4, 1, 1000, 32)
    fast = Link("fast", 2, 10.0, 4.0, "a test", network_gbs=1e6, network_latency_us=7.0)
    found = plan(layer, num_ranks=4, num_tokens=100, link=fast)
    assert found.combine_bytes == pytest.approx(100 * 2000 * 0.5)
    assert found.combine_us == pytest.approx(7 + 100 * 2000 * 2 * 0.25 / 10 * KB)
    slow = replace(fast, network_gbs=1.0)
    assert plan(layer, num_ranks=4, num_tokens=100, link=slow).combine_us == pytest.approx(
        7 + 100 * 2000 * 0.5 / 1 * KB
    )


def test_within_a_domain_the_network_is_not_used() -> None:
    for name in ("dispatch_us", "combine_us", "local_us"):
        assert getattr(plan(link=LINKS["ib400"]), name) == getattr(plan(), name)


def test_the_busiest_rank_receives_or_sends_most() -> None:
    assert _busiest(torch.tensor([0.5, 0.5])) == 0.5
    assert _busiest(torch.tensor([0.9, 0.1, 0.1])) == pytest.approx(2 * 0.9)
    assert _busiest(torch.tensor([0.9, 0.9, 0.0])) == pytest.approx(1.8)


def test_one_rank_exchanges_nothing() -> None:
    found = plan(num_ranks=1)
    assert (found.dispatch_us, found.combine_us, found.balance) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("activation_format", ACTIVATION_FORMATS)
def test_measured_layers_are_reproduced(activation_format: str) -> None:
    """At a measured shape and count the model gives the measured time, but for the fixed part."""
    layers = MeasuredLayers.shipped()
    seen = 0
    for row in layers.rows:
        if row["activation"] != activation_format:
            continue
        layer = ExpertLayer(row["model"], row["E"], row["k"], row["H"], row["F"])
        count = row["T"] * row["k"] / row["hit"]
        (each,) = layers.expert_us(layer, row["E"], [count], activation_format)
        us = layers.fixed_us + row["hit"] * each
        assert us == pytest.approx(row["us"], rel=1e-9)
        seen += 1
    assert seen >= 49


def test_a_layer_that_was_left_out_is_predicted() -> None:
    """gpt-oss-20b and 120b have equal experts: each predicts the other one.

    15 % is what the planner's predictions have to keep.
    """
    layers = MeasuredLayers.shipped()
    for left_out, other in (("gpt-oss-20b", "gpt-oss-120b"), ("gpt-oss-120b", "gpt-oss-20b")):
        mine = MeasuredLayers.__new__(MeasuredLayers)
        mine.__dict__.update(layers.__dict__)
        mine.curves = {
            name: [curve for curve in curves if curve.model != left_out]
            for name, curves in layers.curves.items()
        }
        for row in (row for row in layers.rows if row["model"] == left_out):
            layer = ExpertLayer(left_out, row["E"], row["k"], row["H"], row["F"])
            name, count = row["activation"], row["T"] * row["k"] / row["hit"]
            assert [curve.model for curve in mine.nearest(layer, name)] == [other]
            (each,) = mine.expert_us(layer, row["E"], [count], name)
            us = mine.fixed_us + row["hit"] * each
            assert us == pytest.approx(row["us"], rel=0.15), row


def tiny_layers() -> MeasuredLayers:
    """Experts of 32 × 32: a roof of 1 µs up to 10 rows, measured at twice that, 5 µs fixed."""
    weights = 3 * 32 * 32
    rows = [["tiny", name, 4, 1, 32, 32, 1, 1.0, 6.0] for name in ACTIVATION_FORMATS]
    rows += [["tiny", name, 4, 1, 32, 32, 40, 4.0, 13.0] for name in ACTIVATION_FORMATS]
    return MeasuredLayers(
        {
            "device": "none",
            "sources": [],
            "read_tbs": weights * 4.25 / 8 / 1e6,
            "bf16_tflops": 2 * 10 * weights / 1e6,
            "fp8_tflops": 2 * 10 * weights / 1e6,
            "sort_ns": 500.0,
            "columns": ["model", "activation", "E", "k", "H", "F", "T", "hit", "us"],
            "layers": rows,
        }
    )


def test_local_layer_by_hand() -> None:
    """One token: 1 µs of roof at a slowdown of 1, 5 µs fixed; 10 rows an expert: a slowdown of 2.

    2 ranks with 1000 tokens each, 4 experts, k = 1: 500 rows an expert, 50 µs of roof, slowdown 2.
    1000 more ids are sorted in 0.5 µs each.
    """
    layers, layer = tiny_layers(), ExpertLayer("tiny", 4, 1, 32, 32)
    assert layers.fixed_us == pytest.approx(5.0)
    one, ten, many = layers.expert_us(layer, 4, [1.0, 10.0, 500.0], "bf16")
    assert (one, ten, many) == pytest.approx((1.0, 2.0, 100.0))
    root_ten = layers.expert_us(layer, 4, [math.sqrt(10)], "bf16")[0]
    assert root_ten == pytest.approx(1.5), "linear in log rows"
    found = plan(layer, num_ranks=2, num_tokens=1000, layers=layers)
    mean = 5 + 2 * 100
    # Variance of a rank: two experts, 0.2 µs a row, 2000 · 1/4 · 3/4 rows each.
    deviation = math.sqrt(2 * 0.2**2 * 2000 * 0.25 * 0.75)
    slowest = mean + deviation / math.sqrt(math.pi)
    assert found.local_us == pytest.approx(slowest + 1000 * 0.5, rel=1e-4)
    assert found.balance == pytest.approx(mean / slowest, rel=1e-4)
    assert (found.hit_experts, found.rows_per_expert) == pytest.approx((2.0, 500.0))


def test_slowest_rank_of_few_tokens_is_that_of_random_routing() -> None:
    """8 ranks, 4 tokens each, time by the number of experts hit: simulated and predicted."""
    generator = torch.Generator().manual_seed(1)
    layers = MeasuredLayers.shipped()
    slowest = []
    for _ in range(400):
        _, ids = random_routing(32, 128, 4, generator=generator)
        rows = torch.bincount(ids.flatten().long(), minlength=128).view(8, 16)
        hit = (rows > 0).sum(-1)
        per_expert = layers.expert_us(GPT_OSS, 16, (rows.sum(-1) / hit).tolist(), "mxfp8")
        slowest.append(float((hit * torch.tensor(per_expert)).max()) + layers.fixed_us)
    found = plan(GPT_OSS, num_tokens=4).local_us
    # The model is normal and continuous, numbers of experts are neither.
    assert found == pytest.approx(sum(slowest) / len(slowest), rel=0.05)


def test_zipf_routing_has_a_slow_rank() -> None:
    uniform, zipf = plan(GPT_OSS), plan(GPT_OSS, routing="zipf")
    assert uniform.balance > 0.97
    assert zipf.balance < 0.5
    assert zipf.local_us > 2 * uniform.local_us
    assert zipf.dispatch_bytes > uniform.dispatch_bytes


def test_sizes_that_were_not_measured_are_scaled() -> None:
    found = plan(ExpertLayer("dsv4-pro", 384, 6, 7168, 3072))
    assert found.is_scaled
    assert found.measured == ("dsv3-ep8",)
    assert not plan().is_scaled
    assert plan(GPT_OSS).measured == ("gpt-oss-20b", "gpt-oss-120b")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_ranks": 257}, "num_ranks — need 1 to 256"),
        ({"num_ranks": 0}, "num_ranks — need 1 to 256"),
        ({"num_tokens": 0}, "num_tokens — need at least 1"),
        ({"activation_format": "fp16"}, "activation_format — need one of"),
        ({"wire_format": "mxfp4"}, "wire_format — need one of"),
        ({"routing": "half"}, "routing — need one of uniform, zipf"),
    ],
)
def test_bad_requests_are_refused(changes: dict, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        plan(**changes)


def test_links_state_their_sources() -> None:
    assert set(LINKS) == {"nvlink4", "nvlink5", "ib400"}
    assert all("DeepEP" in link.source or "H200" in link.source for link in LINKS.values())
