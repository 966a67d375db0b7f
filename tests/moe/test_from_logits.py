"""fused_moe_from_logits has the bits of route_topk and fused_moe, and checks its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import GroupScore, Scoring, TopKOptions
from mxpert.core.describe import describe
from mxpert.core.ops import OPS
from mxpert.core.problem import MoEProblem, Op, SwiGLU, TopKProblem
from mxpert.core.registry import resolve
from mxpert.core.target import on_device
from mxpert.distributed import ExpertParallel
from mxpert.formats.tensor import Layout
from mxpert.moe.checks import LogitsOptions, moe_options
from mxpert.moe.inputs import FusedMoEInputs
from mxpert.moe.layer import routed
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.devices import DEVICES
from support.launches import recorded_launches

Options = dict[str, Any]
E, H, T, K = 8, 64, 5, 2
LAYER = random_moe_problem(MoEShape(H, 32, E, K, has_bias=True), T)
X, WEIGHTS = LAYER.x, LAYER.weights
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(E, generator=torch.Generator().manual_seed(2))
NAN_ROW = LOGITS.index_fill(0, torch.tensor([1]), float("nan"))
ACTIVATION = mxpert.SwiGLU()


def from_logits(logits: Any = LOGITS, top_k: Any = K, x: Any = X, **options: Any) -> torch.Tensor:
    weights = options.pop("weights", WEIGHTS)
    return mxpert.fused_moe_from_logits(
        x, weights, logits, top_k, **{"activation": ACTIVATION, **options}
    )


def in_two_calls(
    logits: torch.Tensor = LOGITS,
    top_k: int = K,
    x: Any = X,
    routing: TopKOptions = TopKOptions(),
    correction_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    topk = mxpert.route_topk(logits, top_k, **vars(routing), correction_bias=correction_bias)
    return mxpert.fused_moe(x, WEIGHTS, *topk, **{"activation": ACTIVATION, **options})


CHOICES: dict[str, Options] = {
    **{
        f"{scoring.value}-{weighing}{'' if bias is None else '-bias'}": dict(
            routing=TopKOptions(scoring, weighing == "normalised"), correction_bias=bias
        )
        for scoring in Scoring
        for weighing in ("normalised", "plain")
        for bias in (None, BIAS)
    },
    "groups-max": dict(
        routing=TopKOptions("sigmoid", num_groups=4, top_groups=2, group_score="max")
    ),
    "groups-top2": dict(
        routing=TopKOptions("sigmoid", num_groups=2, top_groups=1), correction_bias=BIAS
    ),
    "scaled": dict(routing=TopKOptions(routed_scaling_factor=2.5)),
    "nan": dict(logits=NAN_ROW),
    "clamped": dict(logits=NAN_ROW, routing=TopKOptions(clamp_nan=True)),
    "every-expert": dict(top_k=E),
    "one-expert": dict(top_k=1, apply_router_weight_on_input=True),
    "two-on-input": dict(apply_router_weight_on_input=True),
    "float16-logits": dict(logits=LOGITS.half()),
    "bfloat16-logits": dict(logits=LOGITS.bfloat16()),
    "column-major-logits": dict(logits=LOGITS.mT.contiguous().mT),
    "wide-rows-logits": dict(logits=torch.cat([LOGITS, LOGITS], 1)[:, :E]),
    "mxfp8": dict(activation_format="mxfp8", scale_rule="floor"),
    "quantised-x": dict(x=mxpert.quantize(X, "mxfp8"), activation_format="mxfp8"),
    "float32-atomic": dict(out_dtype=torch.float32, combine="atomic"),
    "two-tokens": dict(num_local_tokens=torch.tensor([2], dtype=torch.int32)),
    "no-tokens": dict(logits=LOGITS[:0], x=X[:0]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_it_has_the_bits_of_two_calls(name: str) -> None:
    want = in_two_calls(**CHOICES[name])
    assert_same(from_logits(**CHOICES[name]), want)
    out = torch.full_like(want, float("nan"))
    assert from_logits(**CHOICES[name], out=out) is out
    assert_same(out, want)


def assert_same(have: torch.Tensor, want: torch.Tensor) -> None:
    assert (have.shape, have.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


PLANTED = {
    "normalize": (dict(scoring="sigmoid"), dict(normalize=False)),
    "scoring": (dict(), dict(scoring=Scoring.SIGMOID)),
    "num_groups": (dict(num_groups=4, group_score="max"), dict(num_groups=1)),
    "top_groups": (dict(num_groups=4, top_groups=1, group_score="max"), dict(top_groups=4)),
    "routed_scaling_factor": (dict(routed_scaling_factor=2.5), dict(routed_scaling_factor=1.0)),
    "group_score": (
        dict(scoring="sigmoid", num_groups=2, group_score="max"),
        dict(group_score=GroupScore.TOP2),
    ),
    "clamp_nan": (dict(clamp_nan=True), dict(clamp_nan=False)),
}


@pytest.mark.parametrize("field", PLANTED)
def test_an_option_that_is_lost_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem of the call holds another value of one option than the caller gave."""
    given, lost = PLANTED[field]
    logits = LOGITS if field != "clamp_nan" else NAN_ROW
    if field == "group_score":  # group 0 has the best expert, group 1 the best two
        logits = torch.tensor([[3.0, -9, -9, -9, 2, 2, -9, -9]]).expand(T, E).contiguous()
    routing = TopKOptions(**given)
    want = in_two_calls(logits, routing=routing)
    assert_same(from_logits(logits, routing=routing), want)
    right = LogitsOptions.routing.fget
    assert right is not None
    monkeypatch.setattr(
        LogitsOptions, "routing", property(lambda options: replace(right(options), **lost))
    )
    options = dict(out_dtype=torch.float32)  # a call that no cache knows
    with pytest.raises(AssertionError):
        assert_same(
            from_logits(logits, routing=routing, **options),
            in_two_calls(logits, routing=routing, **options),
        )


def test_experts_of_other_ranks_are_skipped() -> None:
    expert_map = torch.tensor([0, -1, 1, 2, -1, 3, 4, 5, 6, -1, 7, -1], dtype=torch.int32)
    logits = torch.randn(T, 12, generator=torch.Generator().manual_seed(3))
    given: Options = dict(logits=logits, top_k=4, expert_map=expert_map)
    assert_same(from_logits(**given), in_two_calls(**given))
    problem = describe(mxpert.fused_moe_from_logits, X, WEIGHTS, logits, 4, **layer(expert_map))
    assert isinstance(problem, MoEProblem)
    assert (problem.num_routed, problem.num_experts) == (12, E)
    assert problem.local_top_k == pytest.approx(4 * 8 / 12)


def layer(expert_map: torch.Tensor | None = None) -> Options:
    return dict(activation=ACTIVATION, expert_map=expert_map)


def test_calls_that_differ_in_one_option_are_told_apart() -> None:
    """Each is made twice: the second call is found among those of all options."""
    for _ in range(3):
        for choice in CHOICES.values():
            assert_same(from_logits(**choice), in_two_calls(**choice))


def test_its_problem_is_that_of_the_layer_with_a_choice() -> None:
    routing = TopKOptions(Scoring.SIGMOID)
    call = mxpert.fused_moe_from_logits, X, WEIGHTS, LOGITS, K
    problem = describe(*call, activation=ACTIVATION, routing=routing)
    topk = mxpert.route_topk(LOGITS, K)
    given_ids = describe(mxpert.fused_moe, X, WEIGHTS, *topk, activation=ACTIVATION)
    assert isinstance(problem, MoEProblem)
    assert isinstance(given_ids, MoEProblem)
    assert replace(problem, routing=None, num_routed=0, options=given_ids.options) == given_ids
    assert problem.choice == TopKProblem(Op.ROUTE_TOPK, problem.target, T, K, E, routing)
    assert given_ids.choice is None
    assert hash(problem) == hash(given_ids)
    assert problem != given_ids


def test_explain_says_how_experts_are_chosen() -> None:
    call = mxpert.fused_moe_from_logits, X, WEIGHTS, LOGITS, K
    assert "  routing: top 2 of 8 experts, softmax, normalised\n" in str(
        mxpert.explain(*call, activation=ACTIVATION)
    )
    routing = TopKOptions("sigmoid", False, num_groups=4, top_groups=2, group_score="max")
    assert "  routing: top 2 of 8 experts in 2 of 4 groups, sigmoid\n" in str(
        mxpert.explain(*call, activation=ACTIVATION, routing=routing)
    )


@pytest.mark.parametrize("tokens", [0, 64])
def test_portable_kernels_choose_experts_in_a_launch_of_their_own(tokens: int) -> None:
    """One launch more than with ids; none without tokens."""
    x, logits = torch.zeros(tokens, H, dtype=torch.bfloat16), torch.zeros(tokens, E)
    weights = WEIGHTS.prepare(device="cpu", layout=Layout.ROW_MAJOR)
    names = []
    for call in (
        lambda: from_logits(logits, x=x, weights=weights),
        lambda: mxpert.fused_moe(
            x,
            weights,
            *(torch.zeros(tokens, K, dtype=each) for each in (torch.float32, torch.int32)),
            activation=ACTIVATION,
        ),
    ):
        with on_device(DEVICES["sm_100"]), recorded_launches() as made:
            assert call().shape == (tokens, H)
        names.append([each.kernel.__name__ for each in made])
    first, others = names
    assert first == (["_route_topk_kernel", *others] if tokens else [])


def test_more_experts_than_the_top_k_kernel_takes_are_refused_by_name() -> None:
    """Although those of this rank are few."""
    expert_map = torch.full((1025,), -1, dtype=torch.int32)
    call = mxpert.fused_moe_from_logits, X, WEIGHTS, torch.zeros(T, 1025), K
    with on_device(DEVICES["sm_100"]), mxpert.override(backend="triton"):
        problem = describe(*call, **layer(expert_map))
        with pytest.raises(mxpert.UnsupportedError, match="at most 1024 experts, not 1025"):
            resolve(problem)


def test_ids_are_passed_on_as_they_are() -> None:
    topk = mxpert.route_topk(LOGITS, K)
    inputs = FusedMoEInputs(X, WEIGHTS, *topk)
    problem = describe(mxpert.fused_moe, X, WEIGHTS, *topk, activation=ACTIVATION)
    assert isinstance(problem, MoEProblem)
    assert routed(problem, inputs) is inputs


def ranks() -> ExpertParallel:
    return ExpertParallel(num_experts=E, top_k=K, hidden_size=H, max_tokens=16)


def test_ranks_get_the_ids() -> None:
    y = from_logits(expert_parallel=ranks())
    assert_same(y, in_two_calls(expert_parallel=ranks()))
    out = torch.empty_like(y)
    assert from_logits(expert_parallel=ranks(), out=out) is out
    assert_same(out, y)
    call = mxpert.fused_moe_from_logits, X, WEIGHTS, LOGITS, K
    why = mxpert.explain(*call, activation=ACTIVATION, expert_parallel=ranks())
    assert isinstance(why.problem, MoEProblem)
    assert "transport: gather" in str(why)


@pytest.mark.parametrize("name", ["x", "logits", "correction_bias"])
def test_a_backward_pass_raises(name: str) -> None:
    given: Options = dict(x=X, logits=LOGITS, correction_bias=BIAS)
    y = from_logits(**given | {name: given[name].clone().requires_grad_()})
    with pytest.raises(mxpert.UnsupportedError, match="fused_moe_from_logits: backward — need an"):
        y.sum().backward()
    with torch.no_grad():
        assert not from_logits(**given | {name: given[name].clone().requires_grad_()}).requires_grad


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    name: (lambda options=options: from_logits(**options), error, said)
    for name, options, error, said in (
        ("x", dict(x=[1.0]), TypeError, "x — need a torch.Tensor"),
        ("weights", dict(weights=None), TypeError, "weights — need MoEWeights"),
        ("logits", dict(logits=[1.0]), TypeError, "logits — need a torch.Tensor, got list"),
        ("logits-dtype", dict(logits=LOGITS.double()), TypeError, "logits.dtype — need"),
        ("logits-rows", dict(logits=LOGITS[:3]), ValueError, r"logits.shape — need \[5, 8\], got"),
        ("logits-width", dict(logits=LOGITS[:, :4]), ValueError, r"logits.shape — need \[5, 8\]"),
        (
            "logits-width-of-a-map",
            dict(expert_map=torch.zeros(9, dtype=torch.int32)),
            ValueError,
            r"logits.shape — need \[5, 9\], got \[5, 8\]",
        ),
        ("logits-device", dict(logits=LOGITS.to("meta")), ValueError, "logits.device — need cpu"),
        ("top_k-type", dict(top_k=2.0), TypeError, "top_k — need an int, got 2.0"),
        ("top_k-bool", dict(top_k=True), TypeError, "top_k — need an int, got True"),
        ("top_k-zero", dict(top_k=0), ValueError, "top_k — need 1 … 8"),
        ("top_k-many", dict(top_k=9), ValueError, "top_k — need 1 … 8"),
        ("routing", dict(routing="sigmoid"), TypeError, "routing — need an mxpert.TopKOptions"),
        ("normalize", dict(routing=TopKOptions(normalize=1)), TypeError, "normalize — need a bool"),
        (
            "groups",
            dict(routing=TopKOptions(num_groups=3, group_score="max")),
            ValueError,
            "num_groups — need a divisor of the 8 experts",
        ),
        (
            "group_score",
            dict(routing=TopKOptions(num_groups=4, top_groups=2)),
            ValueError,
            "group_score — need",
        ),
        ("bias", dict(correction_bias=BIAS[:3]), ValueError, r"correction_bias.shape — need \[8\]"),
        ("bias-dtype", dict(correction_bias=BIAS.half()), TypeError, "correction_bias.dtype"),
        ("flat", dict(combine="flat"), ValueError, "combine — need REDUCE or ATOMIC"),
        ("activation", dict(activation="geglu"), ValueError, "activation — need"),
        ("format", dict(activation_format="a3w4"), ValueError, "activation_format — need"),
        ("num_sms", dict(num_sms=0), ValueError, "num_sms — need at least 1"),
        ("expert_map", dict(expert_map=[0]), TypeError, "expert_map — need a torch.Tensor"),
        ("tokens", dict(num_local_tokens=3), TypeError, "num_local_tokens — need a torch.Tensor"),
        ("out", dict(out=torch.empty(3, H).bfloat16()), ValueError, r"out.shape — need \[5, 64\]"),
        ("ranks", dict(expert_parallel=4), TypeError, "expert_parallel — need an mxpert"),
        (
            "ranks-width",
            dict(expert_parallel=ranks(), logits=LOGITS[:, :4]),
            ValueError,
            r"logits.shape — need \[\*, 8\]",
        ),
        (
            "ranks-map",
            dict(expert_parallel=ranks(), expert_map=torch.arange(E, dtype=torch.int32)),
            ValueError,
            "expert_map — need None with expert_parallel",
        ),
    )
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_op_and_the_argument(name: str) -> None:
    call, error, said = BAD[name]
    from_logits()  # a right call is known
    with pytest.raises(error, match=f"^fused_moe_from_logits: {said}"):
        call()


def test_too_many_routed_rows() -> None:
    tokens = (1 << 24) // K
    x = torch.empty(1, H, dtype=torch.bfloat16).expand(tokens, H)
    with pytest.raises(ValueError, match=r"fused_moe_from_logits: logits — need fewer than"):
        from_logits(torch.empty(1, E).expand(tokens, E), x=x)


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("has_out", [False, True])
def test_opcheck(num_tokens: int, has_out: bool) -> None:
    name = f"fused_moe_from_logits{'_out' if has_out else ''}"
    options = moe_options("fused_moe_from_logits", SwiGLU())
    routing = TopKOptions("sigmoid", num_groups=4, top_groups=2)
    x = X[:num_tokens].clone()
    values = (
        options,
        K,
        *vars(routing).values(),
        x,
        WEIGHTS,
        LOGITS[:num_tokens],
        BIAS,
        None,
        None,
    )
    flat = OPS[name]._layout.flatten((*values, torch.zeros_like(x)) if has_out else values)
    torch.library.opcheck(getattr(torch.ops.mxpert, name), tuple(flat))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["groups-top2", "softmax-plain"])
def test_a_compiled_layer_is_one_op(name: str, dynamic: bool) -> None:
    routing, bias = CHOICES[name]["routing"], CHOICES[name]["correction_bias"]

    def run(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return from_logits(logits, x=x, routing=routing, correction_bias=bias)

    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)
    for count in (5, 3):
        assert_same(compiled(X[:count], LOGITS[:count]), run(X[:count], LOGITS[:count]))
    found = [node for node in nodes if "mxpert" in node]
    assert set(found) <= {"mxpert.fused_moe_from_logits"}
    assert found
