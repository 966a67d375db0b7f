"""ExpertParallel in one process: arguments, errors, streams, views, explain, torch.compile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mxpert
from mxpert import UnsupportedError
from mxpert.distributed import (
    DispatchedTokens,
    ExpertParallel,
    PeerLostError,
    Placement,
    Transport,
    choice,
)
from mxpert.distributed.calls import StreamGuard
from mxpert.distributed.groups import Ranks, RollCall
from mxpert.distributed.layer import OBJECTS
from mxpert.distributed.transport import ExchangeSpec
from mxpert.testing.numerics import assert_close_relative, assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem

SHAPE = MoEShape(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
FLOAT32 = 1e-6
TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)


def make(**changes: Any) -> ExpertParallel:
    options: dict[str, Any] = dict(num_experts=4, top_k=2, hidden_size=64, max_tokens=8)
    return ExpertParallel(**options | changes, device="cpu")


def layer(inputs: MoEInputs, **options: Any) -> torch.Tensor:
    x, weights, routing = inputs.x, inputs.weights, (inputs.topk_weights, inputs.topk_ids)
    return mxpert.fused_moe(x, weights, *routing, activation=inputs.activation, **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 8])
@pytest.mark.parametrize("wire_format", ["bf16", "mxfp8"])
def test_one_rank_alone(transport: Transport, num_tokens: int, wire_format: str) -> None:
    ep = make(transport=transport, combine_dtype=torch.float32, wire_format=wire_format)
    inputs = random_moe_problem(SHAPE, num_tokens)
    options: dict[str, Any] = dict(activation_format=wire_format, out_dtype=torch.float32)
    actual = layer(inputs, expert_parallel=ep, **options)
    assert_close_relative(actual, layer(inputs, **options), FLOAT32, transport.name)
    assert (ep.size, ep.rank, ep.group, ep.local_experts) == (1, 0, None, (0, 1, 2, 3))


def test_auto_with_one_rank_sends_nothing() -> None:
    ep = make()
    assert ep.transport is Transport.GATHER
    assert "transport: gather (one rank, which sends nothing)" in ep.explain()


def test_a_bf16_result_is_the_rounded_float32_one() -> None:
    inputs = random_moe_problem(SHAPE, 8)
    ep = make(combine_dtype=torch.float32)
    exact = layer(inputs, expert_parallel=ep, out_dtype=torch.float32)
    assert_exact(layer(inputs, expert_parallel=ep), exact.bfloat16(), "bfloat16")


@pytest.mark.parametrize(
    "changes, error, text",
    [
        (dict(num_experts=0), ValueError, "num_experts — need at least 1"),
        (dict(num_experts=4.0), TypeError, "num_experts — need an int"),
        (dict(top_k=5), ValueError, "top_k — need at most 4, got 5"),
        (dict(top_k=0), ValueError, "top_k — need at least 1"),
        (dict(hidden_size=48), ValueError, "hidden_size — need a multiple of 32, got 48"),
        (dict(max_tokens=0), ValueError, "max_tokens — need at least 1"),
        (dict(max_tokens=True), TypeError, "max_tokens — need an int"),
        (dict(max_tokens=1 << 23), ValueError, "max_tokens — need ranks · max_tokens · top_k"),
        (dict(placement=[0]), TypeError, "placement — need None or a Placement"),
        (dict(placement=Placement.contiguous(5, 1)), ValueError, "placement.num_experts"),
        (dict(transport="nccl"), ValueError, "transport — need a Transport .'auto', "),
        (dict(wire_format="fp8"), ValueError, r"wire_format — need one of \['bf16', 'mxfp8'\]"),
        (dict(combine_dtype=torch.float16), TypeError, "combine_dtype — need bfloat16 or float32"),
        (dict(timeout_s=0), ValueError, "timeout_s — need seconds above 0"),
        (dict(timeout_s="1"), ValueError, "timeout_s"),
        (dict(timeout_s=10**400), ValueError, "timeout_s — need seconds above 0, at most 1e\\+09"),
        (dict(group_or_mesh="ep"), TypeError, "need None, a ProcessGroup or a DeviceMesh, got str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"ExpertParallel: .*{text}"):
        make(**changes)


def test_a_device_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="device — need a GPU or the CPU, got meta"):
        ExpertParallel(num_experts=4, top_k=2, hidden_size=64, max_tokens=8, device="meta")


def test_without_torch_distributed_the_error_shows_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = r"torch.distributed — need a process group, got none; .*torchrun --nproc-per-node {}"
    with pytest.raises(ValueError, match=text.format(4)):
        make(placement=Placement.contiguous(4, 4))
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(ValueError, match=text.format(2)):
        make()


def test_a_mesh_of_two_dimensions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = object.__new__(DeviceMesh)
    monkeypatch.setattr(DeviceMesh, "ndim", 2)
    monkeypatch.setattr(DeviceMesh, "mesh_dim_names", ("ep", "dp"), raising=False)
    with pytest.raises(ValueError, match=r'pass one of them, for example mesh\["ep"\]'):
        make(group_or_mesh=mesh)


# ---- transports -----------------------------------------------------------------------------


def test_a_named_transport_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice._CLASSES, Transport.SYMMETRIC, ("absent", "Absent"))
    with pytest.raises(mxpert.UnsupportedError, match="SYMMETRIC: cannot be imported"):
        make(transport=Transport.SYMMETRIC)


def test_auto_takes_symmetric_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: dict[Transport, str | None] = {Transport.SYMMETRIC: None, Transport.GATHER: None}
    monkeypatch.setattr(choice, "unavailable", lambda transport, *_: reasons[transport])
    monkeypatch.setattr(choice, "gather_objects", lambda _, value: [value, value])
    chosen = choice.choose(Transport.AUTO, None, 2, torch.device("cpu"))
    assert chosen == (Transport.SYMMETRIC, {Transport.SYMMETRIC: "the fastest that runs here"})
    reasons[Transport.SYMMETRIC] = "has no peer access"
    transport, why = choice.choose(Transport.AUTO, None, 2, torch.device("cpu"))
    assert transport is Transport.GATHER
    assert why[Transport.SYMMETRIC] == "has no peer access"
    assert why[Transport.GATHER] == "runs with every backend of torch.distributed"


def test_explain_names_the_local_layer_and_the_transport() -> None:
    inputs = random_moe_problem(SHAPE, 3)
    routing = inputs.topk_weights, inputs.topk_ids
    explanation = mxpert.explain(
        mxpert.fused_moe,
        inputs.x,
        inputs.weights,
        *routing,
        activation=inputs.activation,
        expert_parallel=make(transport=Transport.ALL_TO_ALL),
    )
    assert explanation.problem.num_tokens == 8  # type: ignore[union-attr]
    assert "backend: reference" in str(explanation)
    assert "transport: all_to_all (asked for by name)" in str(explanation)


# ---- calls ----------------------------------------------------------------------------------


def test_combine_checks_what_it_gets() -> None:
    ep, inputs = make(), random_moe_problem(SHAPE, 3)
    sent = ep.dispatch(inputs.x, inputs.topk_weights, inputs.topk_ids)
    assert isinstance(sent, DispatchedTokens)
    assert (sent.num_tokens, sent.topk_ids.shape) == (3, (8, 2))
    rows = torch.ones(8, 64, dtype=torch.bfloat16)
    for wrong, error, text in (
        (rows.float(), TypeError, "rows.dtype — need bfloat16"),
        (rows[:7], ValueError, r"rows.shape — need \[8, 64\]"),
        (rows.T.contiguous().T, ValueError, "rows — need a contiguous tensor"),
    ):
        with pytest.raises(error, match=text):
            ep.combine(wrong, sent)
    with pytest.raises(TypeError, match="dispatched — need DispatchedTokens, got tuple"):
        ep.combine(rows, (rows,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out.shape — need \[3, 64\]"):
        ep.combine(rows, sent, out=torch.empty(4, 64, dtype=torch.bfloat16))
    assert_exact(ep.combine(rows, sent), rows[:3], "rows")


def test_dispatch_checks_its_options() -> None:
    ep, inputs = make(), random_moe_problem(SHAPE, 3)
    routing = inputs.topk_weights, inputs.topk_ids
    with pytest.raises(ValueError, match=r"ExpertParallel.dispatch: scale_rule — need a ScaleRule"):
        ep.dispatch(inputs.x, *routing, scale_rule="up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ExpertParallel.dispatch: out_dtype"):
        ep.dispatch(inputs.x, *routing, out_dtype=torch.int32)
    quantised = mxpert.quantize(inputs.x, "mxfp4")
    with pytest.raises(ValueError, match="make ExpertParallel with wire_format='mxfp8'"):
        ep.dispatch(quantised, *routing)
    with pytest.raises(ValueError, match="a contiguous mxfp8_e4m3 MXTensor"):
        make(wire_format="mxfp8").dispatch(quantised, *routing)


@pytest.mark.parametrize("wrong", [True, "ep", Placement.contiguous(4, 1)], ids=repr)
def test_expert_parallel_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expert_parallel — need an mxpert.distributed.Expert"):
        layer(random_moe_problem(SHAPE, 2), expert_parallel=wrong)


@pytest.mark.parametrize("wrong", [None, "x", 3])
def test_tokens_of_another_type_are_refused(wrong: Any) -> None:
    ep, inputs = make(), random_moe_problem(SHAPE, 2)
    given = dict(x=inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)
    for name in given:
        with pytest.raises(
            TypeError, match=f"ExpertParallel.dispatch: {name} — need a torch.Tensor"
        ):
            ep.dispatch(**given | {name: wrong})


def test_an_mxfp8_wire_needs_an_mxfp8_layer() -> None:
    ep = make(wire_format="mxfp8")
    with pytest.raises(ValueError, match="activation_format — need 'mxfp8' with wire_format"):
        layer(random_moe_problem(SHAPE, 2), expert_parallel=ep)


def test_a_backward_pass_is_refused() -> None:
    inputs = random_moe_problem(SHAPE, 2)
    inputs.x.requires_grad_()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        with pytest.raises(UnsupportedError, match="fused_moe: backward — need an inference"):
            layer(inputs, expert_parallel=ep).sum().backward()
        sent = ep.dispatch(inputs.x, inputs.topk_weights, inputs.topk_ids)
        assert isinstance(sent.x, torch.Tensor)
        assert not sent.x.requires_grad
        rows = torch.zeros(len(sent.topk_ids), 64, dtype=torch.bfloat16, requires_grad=True)
        assert not ep.combine(rows, sent).requires_grad


def test_views_share_the_exchange() -> None:
    ep = make()
    view = ep.with_max_tokens(3)
    assert (view.max_tokens, ep.max_tokens) == (3, 8)
    assert view.exchange is ep.exchange
    for size, error in ((0, ValueError), (9, ValueError), ("3", TypeError)):
        with pytest.raises(error, match="max_tokens"):
            ep.with_max_tokens(size)  # type: ignore[arg-type]


def test_layers_have_numbers() -> None:
    ep = make()
    assert ep.layer is None
    assert [ep.of_next_layer().layer for _ in range(3)] == [0, 1, 2]
    view = ep.with_max_tokens(3).with_layer(7)
    assert (view.layer, view.max_tokens, view.of_next_layer()) == (7, 3, view)
    assert view.with_max_tokens(2).layer == 7
    assert ep.with_max_tokens(3).of_next_layer().layer == 3  # views count together
    for number, error in ((-1, ValueError), (4095, ValueError), ("a", TypeError)):
        with pytest.raises(error, match="ExpertParallel: layer — need"):
            ep.with_layer(number)  # type: ignore[arg-type]


def test_objects_are_freed() -> None:
    ep = make()
    view = ep.with_max_tokens(2)
    layer(random_moe_problem(SHAPE, 2), expert_parallel=view)
    numbers = {ep._handle, view._handle}
    assert numbers <= set(OBJECTS)
    del ep, view
    gc.collect()
    assert not numbers & set(OBJECTS)


def test_a_closed_object_is_refused() -> None:
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        ep.close()
        ep.close()
        with pytest.raises(ValueError, match="need an open one, got a closed one; make another"):
            layer(random_moe_problem(SHAPE, 2), expert_parallel=ep)


def test_check_of_a_healthy_object() -> None:
    ep = make()
    layer(random_moe_problem(SHAPE, 2), expert_parallel=ep)
    ep.check()


class Store:
    """A store of torch.distributed with an answer for each key; None stands for a dead server."""

    def __init__(self, answers: dict[str, bool] | None) -> None:
        self.answers = answers

    def check(self, keys: list[str]) -> bool:
        if self.answers is None:
            raise RuntimeError("Connection reset by peer")
        return all(self.answers.get(key, False) for key in keys)

    def set(self, key: str, value: str) -> None:
        self.check([key])


class BrokenGroup:
    """A group whose collectives fail."""

    def _allgather_base(self, *_: object) -> None:
        raise RuntimeError("Connection closed by peer")


def ranks_over(store: Store) -> Ranks:
    """Three ranks whose collectives fail."""
    placement = Placement.contiguous(3, 3)
    spec = ExchangeSpec("", 0, placement, 1, 32, 1, "bf16", torch.float32, 0.05)
    ranks = Ranks(None, spec, torch.device("cpu"))
    ranks._group = BrokenGroup()
    ranks._gather_options = None
    ranks._roll = roll = object.__new__(RollCall)
    roll._rank, roll._size, roll.store = 0, 3, store
    return ranks


@pytest.mark.parametrize(
    "answers, lost, text",
    [
        ({"failed/0": True, "failed/2": True}, (1,), "rank 1 — need an answer within 0.05 s"),
        ({"failed/0": True}, (1, 2), "rank 1, 2 — need an answer"),
        ({f"failed/{rank}": True for rank in range(3)}, (), "peers — need an answer"),
        (None, (), "peers — need an answer"),
    ],
    ids=["one", "two", "none", "without a store"],
)
def test_a_failed_collective_names_who_does_not_answer(
    answers: dict[str, bool] | None, lost: tuple[int, ...], text: str
) -> None:
    ranks = ranks_over(Store(answers))
    for _ in range(2):  # the error stays
        with pytest.raises(PeerLostError, match=text) as caught:
            ranks.all_gather(torch.empty(3), torch.empty(1))
        assert caught.value.ranks == lost


# ---- streams --------------------------------------------------------------------------------


class Streams:
    """The current stream of a device, as a test sets it; None while a graph is captured."""

    def __init__(self) -> None:
        self.handle: int | None = 0x10

    def __call__(self, device: torch.device) -> int | None:
        return self.handle


def test_a_second_stream_is_refused_and_captures_are_not() -> None:
    streams = Streams()
    guard = StreamGuard(torch.device("cuda", 0), streams)
    streams.handle = None
    guard.check("op")  # a capture binds nothing
    streams.handle = 0x20
    guard.check("op")
    streams.handle = None
    guard.check("op")
    streams.handle = 0x30
    remedy = "make an ExpertParallel for each stream of work"
    with pytest.raises(ValueError, match=f"op: stream — need .* 0x20, got 0x30; {remedy}"):
        guard.check("op")
    streams.handle = 0x20
    guard.check("op")


def test_views_share_the_stream() -> None:
    streams = Streams()
    ep, inputs = make(), random_moe_problem(SHAPE, 2)
    ep._guard = StreamGuard(torch.device("cuda", 0), streams)
    view = ep.with_max_tokens(4)
    sent = ep.dispatch(inputs.x, inputs.topk_weights, inputs.topk_ids)
    streams.handle = 0x20
    with pytest.raises(ValueError, match="stream — need the one of its first call, 0x10"):
        layer(inputs, expert_parallel=view)
    with pytest.raises(ValueError, match="stream"):
        ep.combine(torch.zeros(8, 64, dtype=torch.bfloat16), sent)


def test_streams_do_not_matter_on_a_cpu() -> None:
    def fail(device: torch.device) -> int:
        raise RuntimeError("asked for a stream")

    StreamGuard(torch.device("cpu"), fail).check("op")


# ---- traced programs ------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
def test_compiled_layers_have_no_graph_break(with_out: bool) -> None:
    ep, inputs = make(), random_moe_problem(SHAPE, 5)

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        routing = inputs.topk_weights, inputs.topk_ids
        given = out if with_out else None
        y = mxpert.fused_moe(
            2 * x,
            inputs.weights,
            *routing,
            activation=inputs.activation,
            out=given,
            expert_parallel=ep,
        )
        return y + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    outs = torch.zeros_like(inputs.x), torch.ones_like(inputs.x)
    assert_exact(compiled(inputs.x, outs[0]), step(inputs.x, outs[1]), "compiled")
    if with_out:
        assert_exact(outs[0], outs[1], "out=")


def test_a_compiled_call_is_checked_when_it_runs() -> None:
    ep, inputs = make(max_tokens=4), random_moe_problem(SHAPE, 5)
    compiled = torch.compile(lambda: layer(inputs, expert_parallel=ep), backend="aot_eager")
    with pytest.raises(ValueError, match="at most max_tokens = 4 tokens a rank, got 5"):
        compiled()
