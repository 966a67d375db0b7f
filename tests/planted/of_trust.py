"""Faults of trust: reloads, weight updates, files, training's conventions, ranks that differ."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from planting import Fault

import mxpert
import mxpert.modules
import mxpert.moe.weights
from mxpert import GateUpOrder, Layout, MoEWeights, UnsupportedError, modules
from mxpert.core import files
from mxpert.core.known import KnownArguments
from mxpert.distributed import all_to_all, calls, gather, transport, workspace
from mxpert.distributed.placement import Placement
from mxpert.integrations.checkpoints import published_experts
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from mxpert.integrations.serving import layer_weights, loads, reload
from mxpert.modules import quantize_weights, requantize_
from mxpert.moe import requantize
from mxpert.moe.hopper import layout as layouts
from mxpert.training import autograd as main_grad
from mxpert.training import checks, clip_grad_norm_, expert_parallel, grouped_linear

E, H, F = 3, 64, 64
ORDER = GateUpOrder.INTERLEAVED
CPU = torch.device("cpu")


def dense(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = (torch.randn(*size, generator=generator) for size in ((E, 2 * F, H), (E, H, F)))
    return gate_up, down


def weights(seed: int = 0) -> MoEWeights:
    return quantize_weights(*dense(seed), gate_up_order=ORDER)


def refused(call: Callable[[], object], kind: type[Exception] = ValueError) -> None:
    """Raise unless the call is refused."""
    with contextlib.suppress(kind):
        call()
        raise AssertionError("not refused")


def computes(held: MoEWeights) -> torch.Tensor:
    x, routing = torch.ones(2, H).bfloat16(), mxpert.route_topk(torch.eye(2, E), 2)
    return mxpert.fused_moe(x, held, *routing, activation=mxpert.SiLU())


# ---- serving ------------------------------------------------------------------------------------


def layer_of(held: MoEWeights) -> Any:
    """A layer whose loaded parameters an engine hands over."""
    layer, parts = torch.nn.Module(), (("w13", held.gate_up_proj), ("w2", held.down_proj))
    for name, projection in parts:
        for suffix, tensor in (("weight", projection.qdata), ("weight_scale", projection.scale)):
            parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            layer.register_parameter(f"{name}_{suffix}", parameter)
    return layer


def padding_is_cleared() -> None:
    """32 of 64 columns are the model's; the others are uninitialised, with scales of NaN."""
    layer = layer_of(weights())
    layer.w13_weight_scale.data[:, 64:] = 255
    layer.w2_weight_scale.data[..., 1:] = 255
    held = layer_weights.prepare_layer(layer, ORDER, None, op="planted", columns=32)
    assert computes(held).isfinite().all()


def a_refused_reload_leaves_nothing_plausible() -> None:
    model, held = reload.Model(None), weights()
    model.add(held)
    with contextlib.suppress(ValueError), model.reloading():
        raise ValueError
    assert not computes(held).isfinite().any()


def missing_tensors_are_named() -> None:
    layer, watched = layer_of(weights()), loads.Loads()
    for parameter in layer.parameters():
        parameter.weight_loader = lambda param, loaded_weight, shard_id, expert_id: None
    watched.watch(layer.named_parameters())
    parameter = layer.w2_weight
    for expert in (0, 2):
        parameter.weight_loader(parameter, None, shard_id="w2", expert_id=expert)
    refused(lambda: watched.require_all("planted", "layer", ["w2_weight"], [0, 1, 2]))


# ---- prepared weights and files -----------------------------------------------------------------


def new_weights_change_all_or_nothing() -> None:
    held = weights().prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    before, (gate_up, down) = held.gate_up_proj.qdata.clone(), dense(1)
    down[1, 0, :32] *= 2.0**-30
    refused(lambda: requantize_(held, gate_up, down))
    assert torch.equal(held.gate_up_proj.qdata, before)


def new_weights_have_the_offline_bits() -> None:
    held = weights().prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    requantize_(held, *dense(1))
    wanted = weights(1).prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    for name in ("qdata", "scale", "reference"):
        found = getattr(held.gate_up_proj, name)
        assert torch.equal(found, getattr(wanted.gate_up_proj, name))
    assert torch.equal(held.unprepare().gate_up_proj.qdata, weights(1).gate_up_proj.qdata)


def loaded_weights_do_not_follow_the_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layer.safetensors")
        weights().save(path)
        held = MoEWeights.load(path)
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"\xff" * (size - size // 2))
        for name, tensor in weights().state_dict().items():
            assert name == "_extra_state" or torch.equal(held.state_dict()[name], tensor)


def a_checkpoint_is_copied() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        safetensors.torch.save_file({"name": torch.zeros(4)}, path)
        reader = CheckpointReader(path, "planted")
        held = published_experts.read_tensor(reader, "name", "cpu", False)
        with path.open("r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"\xff" * 16)
        assert not held.any()


def two_threads_save_one_file() -> None:
    both, save_file = threading.Barrier(2), safetensors.torch.save_file

    def together(*arguments: Any) -> None:
        both.wait(10)
        save_file(*arguments)
        both.wait(10)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(safetensors.torch, "save_file", together),
        ThreadPoolExecutor(2) as pool,
    ):
        path = Path(folder, "layer.safetensors")
        for done in [pool.submit(weights().save, path) for _ in range(2)]:
            assert done.exception() is None, done.exception()


def float32_routing_is_kept() -> None:
    bias = torch.tensor([1.0, 1.001, 1.002])
    moe = mxpert.MoE(weights(), torch.randn(E, H), top_k=1, correction_bias=bias.clone())
    assert torch.equal(moe.bfloat16().correction_bias, bias)


# ---- training -----------------------------------------------------------------------------------


def norms_of_float16_do_not_overflow() -> None:
    part = torch.nn.Parameter(torch.zeros(512, dtype=torch.float16))
    part.grad = torch.full_like(part, 2.0**13)
    clip_grad_norm_(part, 1.0)
    assert part.grad.any()


def in_float16(owned: Any, shared: Any, p: float, group: Any) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([each.grad for each in shared], p)


def trained(dtype: torch.dtype, *, marked: bool) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(1, 32, 32))
    weight.main_grad = torch.zeros(1, 32, 32, dtype=dtype)  # type: ignore[attr-defined]
    if marked:
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    grouped_linear(torch.ones(4, 32), weight, torch.tensor([0, 4])).sum().backward()
    return weight


def megatron_is_told() -> None:
    weight: Any = trained(torch.float32, marked=True)
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


def forgetting(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[Any], None]:
    """A fault in the checks, with no arguments that have passed them before."""

    def planted(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(main_grad, "_PASSED", KnownArguments())
        plant(patch)

    return planted


def main_grad_may_have_16_bits() -> None:
    try:
        weight: Any = trained(torch.bfloat16, marked=False)
    except TypeError as error:
        raise AssertionError(str(error)) from error
    assert weight.main_grad.eq(4).all()


# ---- ranks --------------------------------------------------------------------------------------


SPEC = transport.ExchangeSpec(
    "planted", 0, Placement.contiguous(4, 2), 2, 32, 4, "bf16", torch.float32, 1.0
)


class TwoRanks:
    """Collectives of two ranks, of which the other one answers with `word` as its call."""

    size = 2

    def __init__(self, word: int) -> None:
        self.word = word

    def raise_lost(self) -> None:
        return None

    def all_gather(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        out.copy_(torch.cat([rows, rows]))
        if rows.dtype == torch.int64:
            out[1] = self.word

    def all_to_all(self, step: str, out: torch.Tensor, rows: torch.Tensor, *_: Any) -> None:
        out.copy_(rows)
        if rows.dtype == torch.int64:
            out[1, 1] = self.word


def other_calls_are_refused() -> None:
    """The other rank has other slots."""
    x = torch.ones(1, 32).bfloat16(), torch.ones(1, 2), torch.tensor([[0, 3]])
    rule, out_dtype = mxpert.ScaleRule.RCEIL, torch.float32
    for kind in (gather.GatherExchange, all_to_all.AllToAllExchange):
        exchange: Any = kind(None, SPEC, CPU)
        exchange._ranks = TwoRanks(calls.Call(8).word)
        refused(lambda: exchange.dispatch(*x, bound=4, scale_rule=rule, out_dtype=out_dtype))  # noqa: B023


def calls_have_names() -> None:
    words = [calls.Call(4).word, calls.Call(8).word]
    assert calls.differences(words) == "max_tokens 4 on rank 0, 8 on rank 1"


def small_memory_is_refused() -> None:
    full, group = OSError(errno.ENOSPC, "No space left"), SimpleNamespace(rank=lambda: 0)
    with (
        mock.patch.object(workspace.os, "posix_fallocate", side_effect=full),
        mock.patch.object(workspace, "gather_objects", lambda group, value: [value]),
    ):
        refused(lambda: workspace._mapped_files(group, 4096), UnsupportedError)


def without_memory(file: Any, nbytes: int) -> None:
    file.truncate(nbytes)


def setting(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant: exchange an attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def nothing(*_: Any, **__: Any) -> None:
    return None


FAULTS = (
    Fault(
        "padding of a reload is not cleared",
        setting(layer_weights, "clear_padding", nothing),
        padding_is_cleared,
    ),
    Fault(
        "a refused reload leaves two models mixed",
        setting(reload, "poison", nothing),
        a_refused_reload_leaves_nothing_plausible,
    ),
    Fault(
        "tensors that a checkpoint lacks are not missed",
        setting(loads.Loads, "_missing", lambda *_: []),
        missing_tensors_are_named,
    ),
    Fault(
        "new weights are written before they are checked",
        setting(requantize, "_require_held", nothing),
        new_weights_change_all_or_nothing,
    ),
    Fault(
        "new rows are packed in their own order",
        setting(requantize, "prepared_rows", lambda *_: torch.arange(2 * F).flip(0)),
        new_weights_have_the_offline_bits,
    ),
    Fault(
        "signs of packed codes are exchanged",
        setting(layouts, "_sign_tables", lambda device: _EXCHANGED),
        new_weights_have_the_offline_bits,
    ),
    Fault(
        "weights are the pages of their file",
        setting(
            mxpert.moe.weights.weights_state,
            "read",
            lambda path, op, copy, read=mxpert.moe.weights.weights_state.read: read(
                path, op, copy=False
            ),
        ),
        loaded_weights_do_not_follow_the_file,
    ),
    Fault(
        "a checkpoint's tensors are its pages",
        setting(
            published_experts, "read_tensor", lambda reader, name, device, mmap: reader.read(name)
        ),
        a_checkpoint_is_copied,
    ),
    Fault(
        "two threads fill one temporary file",
        setting(files.uuid, "uuid4", lambda: SimpleNamespace(hex="same")),
        two_threads_save_one_file,
    ),
    Fault(
        "a dtype rounds routing parameters",
        setting(modules, "_float32_kept", lambda before, moved: moved),
        float32_routing_is_kept,
    ),
    Fault(
        "norms are computed in float16",
        setting(expert_parallel, "_whole_norm", in_float16),
        norms_of_float16_do_not_overflow,
    ),
    Fault(
        "Megatron's mark is left alone",
        setting(main_grad.MarkedWeight, "of", staticmethod(nothing)),
        megatron_is_told,
    ),
    Fault(
        "main_grad is float32 or refused",
        forgetting(setting(checks, "MAIN_GRAD_DTYPES", (torch.float32,))),
        main_grad_may_have_16_bits,
    ),
    Fault(
        "GATHER does not compare calls",
        setting(gather, "require_same", nothing),
        other_calls_are_refused,
    ),
    Fault(
        "ALL_TO_ALL does not compare calls",
        setting(all_to_all, "require_same", nothing),
        other_calls_are_refused,
    ),
    Fault("slots are no part of a call", setting(calls.Call, "word", 1 << 62), calls_have_names),
    Fault(
        "a file in shared memory has no memory",
        setting(workspace, "_reserve", without_memory),
        small_memory_is_refused,
    ),
)

_LOW, _HIGH = layouts._sign_tables(CPU)
_EXCHANGED = (_LOW & 0x77777777, _HIGH | (_LOW & ~0x77777777))
"""Tables that give the sign of code j to nobody."""
