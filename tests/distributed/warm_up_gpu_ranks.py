"""What the processes of test_warm_up_ranks_multi_gpu.py do; each function runs on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from triton import knobs

import mxpert
from mxpert.testing.numerics import assert_exact
from tests.distributed.multi_gpu.expert_parallel_ranks import (
    FORMATS,
    MAX_TOKENS,
    SHAPE,
    TRANSPORTS,
    make_layer,
)


def no_kernel_compiles_after_warm_up() -> None:
    """Triton is asked for no binary after warm_up, and results equal one GPU's."""
    for transport in TRANSPORTS:
        for wire_format, activation_format in FORMATS:
            layer = make_layer(transport, wire_format, activation_format)
            options: dict[str, Any] = dict(
                top_k=SHAPE.top_k,
                activation=layer.inputs.activation,
                activation_format=activation_format,
                topk_weights_dtype=layer.inputs.topk_weights.dtype,
                topk_ids_dtype=layer.inputs.topk_ids.dtype,
                expert_parallel=layer.ep,
            )
            compiled: list[str] = []

            def note(*, src: Any, compiled: list[str] = compiled, **_: Any) -> None:
                compiled.append(src.name)

            mxpert.warm_up(layer.mine, MAX_TOKENS, **options)
            for count in (0, 1, 3, 16, 33, 64, 128, MAX_TOKENS):
                tokens = layer.tokens(max(0, count - layer.ep.rank))
                with mock.patch.object(knobs.compilation, "listener", note):
                    found = layer.run(*tokens)
                    torch.cuda.synchronize()
                assert_exact(found, layer.judge(*tokens), f"{transport.name} {wire_format}")
            assert not compiled, f"{transport.name} {wire_format}: {compiled}"
            layer.ep.check()
            dist.barrier()
            layer.ep.close()
