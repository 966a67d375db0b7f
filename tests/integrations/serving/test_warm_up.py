"""mxpert.warm_up: after it no token count in its range launches a binary that is new."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert.formats import MXFP4, Layout, MXTensor
from mxpert.integrations.serving import layer as serving
from mxpert.moe import warm_up as module
from mxpert.moe.hopper.tile_limits import FP8_FROM_ROWS

Options = dict[str, Any]


def unwritten(experts: int, hidden: int, inner: int, layout: Layout) -> mxpert.MoEWeights:
    """Weights whose codes are whatever memory holds."""

    def projection(rows: int, depth: int) -> MXTensor:
        if layout is Layout.ROW_MAJOR:
            sizes = (experts, rows, depth // 2), (experts, rows, depth // 32)
            return MXTensor(*(torch.empty(size, dtype=torch.uint8) for size in sizes), MXFP4)
        units, steps = -(-rows // 64), -(-depth // 128)
        codes, shifts = (
            torch.empty(experts, units, steps, size, dtype=torch.uint8) for size in (4096, 256)
        )
        reference = torch.empty(experts, units * 64, dtype=torch.uint8)
        copy = torch.empty(experts, units, steps, 8192, dtype=torch.uint8)
        return MXTensor(
            *(codes, shifts, MXFP4, -1, layout, reference, (experts, rows, depth)),
            fp8_codes=copy if layout.has_fp8_codes else None,
        )

    return mxpert.MoEWeights(
        projection(2 * inner, hidden),
        projection(hidden, inner),
        gate_up_order=mxpert.GateUpOrder.INTERLEAVED,
    )


@contextmanager
def launched_binaries() -> Iterator[set[Any]]:
    """Keys of the binaries that an H200 would compile inside the block; nothing is launched."""
    pytest.importorskip("triton")
    from mxpert.core.launch import _signature
    from mxpert.core.target import on_device
    from support.launches import H200, Recorder, without_device

    keys: set[Any] = set()

    class Keys(Recorder):
        def execute(
            self, kernel: Any, grid: Any, arguments: Mapping[str, Any], *, warmup: bool
        ) -> None:
            constants, tensors = {}, []
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    tensors.append((name, value.dtype))
                elif hasattr(value, "block_shape"):  # a descriptor
                    layout = getattr(value, "layout", None)
                    tensors.append((name, value.base.dtype, *value.block_shape, layout))
                else:
                    constants[name] = value
            keys.add((_signature(kernel, {}, constants), *tensors))

    with without_device(record=False), on_device(H200, Keys()):
        yield keys


SHAPES = {  # experts, top_k, hidden, intermediate
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "kimi-k2-tp4": (384, 8, 7168, 512),
    "qwen3-next": (512, 10, 2048, 512),
    "dsv4-flash": (256, 6, 4096, 2048),
}
MAX_TOKENS = 2500
ROUTER_DTYPES = [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)]


FORMATS = [
    *itertools.product([Layout.HOPPER_FRAGMENT, Layout.ROW_MAJOR], ["bf16", "mxfp8"]),
    (Layout.HOPPER_FRAGMENT_FP8, "mxfp8"),
]


@pytest.mark.parametrize("layout, activation_format", FORMATS, ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("dtypes", ROUTER_DTYPES, ids=["float32-int32", "bfloat16-int64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_kernel_is_left_to_compile(
    shape: str, dtypes: tuple[torch.dtype, torch.dtype], layout: Layout, activation_format: str
) -> None:
    experts, top_k, hidden, inner = SHAPES[shape]
    weights = unwritten(experts, hidden, inner, layout)
    options: Options = dict(activation=mxpert.SiLU(), activation_format=activation_format)
    with launched_binaries() as binaries:
        counts = mxpert.warm_up(
            weights,
            MAX_TOKENS,
            top_k=top_k,
            topk_weights_dtype=dtypes[0],
            topk_ids_dtype=dtypes[1],
            **options,
        )
        warm = set(binaries)
        for num_tokens in (*range(1, 300), *range(300, MAX_TOKENS, 37), MAX_TOKENS):
            x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
            routing = module.even_routing(num_tokens, top_k, experts, x.device)
            topk_weights, topk_ids = (each.to(dt) for each, dt in zip(routing, dtypes, strict=True))
            mxpert.fused_moe(x, weights, topk_weights, topk_ids, **options)
            assert binaries == warm, f"{num_tokens} tokens launch another binary than {counts}"
    assert counts[0] == 1
    assert counts[-1] == MAX_TOKENS
    assert len(counts) < 40
    many_rows = MAX_TOKENS * top_k / experts >= FP8_FROM_ROWS
    assert any(is_fp8(key) for key in warm) == (layout.has_fp8_codes and many_rows)


@pytest.mark.parametrize("layout", [Layout.HOPPER_FRAGMENT, Layout.ROW_MAJOR], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_no_kernel_is_left_to_compile_from_logits(
    scoring: Any, dtype: torch.dtype, layout: Layout
) -> None:
    experts, top_k, hidden, inner = SHAPES["gpt-oss-20b"]
    weights = unwritten(experts, hidden, inner, layout)
    options: Options = dict(activation=mxpert.SiLU(), routing=mxpert.TopKOptions(scoring))
    options["correction_bias"] = torch.zeros(experts) if scoring == "sigmoid" else None
    with launched_binaries() as binaries:
        counts = mxpert.warm_up(
            weights, MAX_TOKENS, top_k=top_k, router_logits_dtype=dtype, **options
        )
        warm = set(binaries)
        for num_tokens in (*range(1, 300, 7), *range(300, MAX_TOKENS, 137), MAX_TOKENS):
            x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
            logits = torch.empty(num_tokens, experts, dtype=dtype)
            mxpert.fused_moe_from_logits(x, weights, logits, top_k, **options)
            assert binaries == warm, f"{num_tokens} tokens launch another binary than {counts}"
    assert any("route_topk" in key[0][0].__name__ for key in warm)


def test_logits_of_a_warm_up_use_the_experts_in_turn() -> None:
    seen: list[torch.Tensor] = []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(arguments[2])
        return mxpert.fused_moe_from_logits(*arguments, **options)

    with (
        mock.patch.object(module, "_token_counts", return_value=(8,)),
        mock.patch.object(module, "fused_moe_from_logits", noted),
    ):
        given: Options = dict(router_logits_dtype=torch.bfloat16, top_k=2, activation="silu")
        assert mxpert.warm_up(small(), 8, **given) == (8,)
    chosen = mxpert.route_topk(seen[-1], 2)[1].sort().values
    assert torch.equal(chosen, module.even_routing(8, 2, 4, chosen.device)[1].sort().values)


def is_fp8(key: Any) -> bool:
    """Whether a binary is one of the GEMM that reads FP8 copies."""
    return "prefill_fp8" in key[0][0].__name__


def test_a_server_compiles_for_copies_beside_layers_without() -> None:
    """Both kinds of layers of one shape, in either order."""
    layers = [
        serving.ServedLayer(unwritten(4, 256, 256, layout), mxpert.SiLU(), "mxfp8")
        for layout in (Layout.HOPPER_FRAGMENT, Layout.HOPPER_FRAGMENT_FP8)
    ]
    compiled = []
    with mock.patch.object(serving, "_warm", set()):
        for layer in layers:
            with launched_binaries() as binaries:
                serving.warm_up_layer(layer, 1024, top_k=2, logger=logging.getLogger("mxpert"))
            compiled.append(any(map(is_fp8, binaries)))
    assert compiled == [False, True]


def test_an_expert_map_is_a_binary_of_its_own() -> None:
    weights = unwritten(4, 256, 256, Layout.ROW_MAJOR)
    expert_map = torch.tensor([0, 1, -1, 2, 3, -1], dtype=torch.int32)
    options: Options = dict(top_k=2, activation=mxpert.SiLU())
    with launched_binaries() as binaries:
        mxpert.warm_up(weights, 8, **options)
        plain = set(binaries)
        mxpert.warm_up(weights, 8, expert_map=expert_map, **options)
    assert binaries > plain


def small() -> mxpert.MoEWeights:
    weights = unwritten(4, 32, 32, Layout.ROW_MAJOR)
    return weights.prepare(device="cpu")


def test_nothing_runs_on_the_reference_backend() -> None:
    with mock.patch.object(module, "even_routing", wraps=module.even_routing) as routed:
        assert mxpert.warm_up(small(), 8192, top_k=2, activation=mxpert.SiLU()) == ()
    assert routed.call_count == 1  # for explain


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int, int]] = []
    with (
        mock.patch.object(module, "_token_counts", return_value=(1, 5, 8)),
        mock.patch.object(module, "even_routing", wraps=module.even_routing) as routed,
    ):
        mxpert.warm_up(
            small(), 8, top_k=2, activation=mxpert.SiLU(), progress=lambda *step: seen.append(step)
        )
    assert seen == [(0, 3, 1), (1, 3, 5), (2, 3, 8), (3, 3, 8)]
    assert [call.args[0] for call in routed.call_args_list] == [1, 1, 5, 8]  # explain's first
    _, topk_ids = module.even_routing(8, 2, 4, torch.device("cpu"))
    assert topk_ids.unique().tolist() == [0, 1, 2, 3]


def test_slow_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch.object(module, "_SHOWN_EVERY", 0.0),
        mock.patch.object(module, "_token_counts", return_value=(1, 4)),
        caplog.at_level(logging.WARNING, logger="mxpert"),
    ):
        mxpert.warm_up(small(), 8, top_k=2, activation=mxpert.SiLU())
    assert "warm_up: 1 of 2 token counts, T = 4" in caplog.text


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens"),
        ({"top_k": 5}, ValueError, "top_k"),
        ({"weights": None}, TypeError, "weights"),
        ({"activation_format": "a3w4"}, ValueError, "activation_format"),
        ({"expert_map": [0, 1]}, TypeError, "expert_map"),
        ({"router_logits_dtype": torch.int32}, TypeError, "router_logits_dtype"),
        ({"router_logits_dtype": torch.float32, "routing": 1}, TypeError, "routing"),
        ({"routing": mxpert.TopKOptions("sigmoid")}, ValueError, "router_logits_dtype"),
        ({"correction_bias": torch.zeros(4)}, ValueError, "router_logits_dtype"),
    ],
    ids=str,
)
def test_wrong_arguments(changes: Options, error: type[Exception], said: str) -> None:
    right: Options = dict(weights=small(), max_tokens=4, top_k=2, activation=mxpert.SiLU())
    with pytest.raises(error, match=said):
        mxpert.warm_up(**{**right, **changes})
