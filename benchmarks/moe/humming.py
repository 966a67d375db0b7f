"""Humming: indexed GEMMs compiled at run time, with bf16 or per-token e4m3 activations."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe.cells import Cell, Inputs, Model
from benchmarks.moe.ours import ACTIVATION
from benchmarks.moe.peers import Call, MoEOps, Variants, aligned_rows, by_stage
from mxpert.errors import message
from mxpert.moe.weights import MoEWeights

_DTYPES = {"bf16": "bfloat16", "fp8_token": "float8e4m3"}
_NUM_LOCKS = 2048
_INT4 = {"quant_method": "humming", "b_dtype": "uint4", "bs_dtype": "bfloat16"}
WEIGHT_CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "mxfp8_e4m3": {
        "quant_method": "humming",
        "b_dtype": "float8e4m3",
        "bs_dtype": "float8e8m0",
        "weight_scale_group_size": 32,
    },
    "nvfp4": {
        "quant_method": "humming",
        "b_dtype": "float4e2m1",
        "bs_dtype": "float8e4m3",
        "weight_scale_group_size": 16,
        "weight_scale_2_type": "tensor",
    },
    **{f"int4_g{size}": _INT4 | {"weight_scale_group_size": size} for size in (32, 64, 128)},
}
"""What Humming is told of weights in our formats. Codes and scales lie in memory as ours do."""
_SWIGLU = (
    f"fminf(a, {ACTIVATION.limit}f) / (1.f + __expf(-{ACTIVATION.alpha}f * "
    f"fminf(a, {ACTIVATION.limit}f))) * "
    f"(fmaxf(fminf(b, {ACTIVATION.limit}f), -{ACTIVATION.limit}f) + 1.f)"
)


def paddings(model: Model) -> tuple[int, ...]:
    """Multiples that its sizes are padded to: where they are no multiple of 128 both choices are
    tried, and the faster one counts."""
    return (0,) if model.H % 128 == model.F % 128 == 0 else (0, 128)


def _shapes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, depth) of both projections."""
    return (2 * model.F, model.H), (model.H, model.F)


def _padding_options(padding: int) -> dict[str, int]:
    return dict(pad_k_to_multiple=padding, pad_n_to_multiple=padding) if padding else {}


def _tuning(config: Any, tokens: int, model: Model) -> dict[str, Any]:
    """The kernel that its own heuristic picks for so many tokens."""
    choose = importlib.import_module("humming.tune").get_heuristics_config
    return choose(config, shape_m=tokens * model.k, gemm_type="indexed") | {
        "use_batch_invariant": False
    }


def _compute() -> Any:
    return importlib.import_module("humming.config").ComputeConfig(gemm_type="indexed")


class Compiler:
    """Fills Humming's cache of compiled kernels in threads, while other cells are measured.

    Only the compiler's subprocesses run here: nothing is loaded onto the GPU, so that captures of
    CUDA graphs go on undisturbed.
    """

    def __init__(self, activations: Sequence[str]) -> None:
        module = importlib.import_module("humming.kernel.humming")

        class CompiledOnly(module.HummingKernel):  # type: ignore[misc, name-defined]
            def register_kernel(self) -> None:
                """Leave the kernel on disk."""

        self.kernel, self.activations = CompiledOnly, activations
        workers = max(1, 3 * (os.cpu_count() or 1) // 4)
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self.pending: dict[str, list[Future[None]]] = {}

    def start(self, cells: Sequence[Cell]) -> None:
        """Queue the kernels of all cells, in their order; each distinct kernel once."""
        seen: set[str] = set()
        for cell in cells:
            jobs = self.pending.setdefault(str(cell), [])
            every = itertools.product(self.activations, paddings(cell.model), _shapes(cell.model))
            for activation, padding, (rows, depth) in every:
                for options in self._options(cell, activation, padding, rows, depth):
                    key = json.dumps(options, sort_keys=True, default=str)
                    if key not in seen:
                        seen.add(key)
                        jobs.append(self.pool.submit(self._compile, options))

    def _options(
        self, cell: Cell, activation: str, padding: int, rows: int, depth: int
    ) -> list[dict[str, Any]]:
        """Arguments of one kernel; none where Humming refuses the shape."""
        schema = importlib.import_module("humming.schema")
        prepare = importlib.import_module("humming.transform").prepare_layer_config
        weights = schema.BaseWeightSchema.from_config(dict(WEIGHT_CONFIGS[cell.weights]))
        inputs = schema.BaseInputSchema.from_config(
            {"quant_method": "humming", "dtype": _DTYPES[activation]}
        )
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            config = prepare(
                shape_n=rows,
                shape_k=depth,
                num_experts=cell.model.E,
                weight_schema=weights.to_humming_schema(torch.bfloat16),
                input_schema=inputs.to_humming_schema(torch.bfloat16),
                torch_dtype=torch.bfloat16,
                device=device,
                **_padding_options(padding),
            )
            options = (
                json.loads(config.to_str())
                | json.loads(_compute().to_str())
                | _tuning(config, cell.tokens, cell.model)
            )
        except Exception:  # the peer reports it when its kernels are asked for
            return []
        options.pop("num_sms", None)
        options.pop("sublayer_name", None)
        return [options]

    def _compile(self, options: dict[str, Any]) -> None:
        with torch.cuda.device(torch.cuda.current_device()):
            self.kernel(**options)

    def wait(self, cell: Cell, seconds: float) -> None:
        """Until the kernels of a cell are compiled (or have failed).

        Raises:
            TimeoutError: they are not ready in time.
        """
        jobs = self.pending.get(str(cell), [])
        late = wait(jobs, timeout=max(0.0, seconds)).not_done
        if late:
            raise TimeoutError(f"{len(late)} kernels of {cell} are still being compiled")

    def stop(self) -> None:
        """Drop what has not begun."""
        self.pool.shutdown(wait=False, cancel_futures=True)


class Projection:
    """One projection's weights in Humming's layout."""

    def __init__(self, model: Model, projection: Any, activation: str, padding: int) -> None:
        layer_type = importlib.import_module("humming.layer").HummingLayer
        experts, rows, depth = projection.shape
        with projection.device:
            layer = layer_type(
                shape_n=rows,
                shape_k=depth,
                num_experts=experts,
                weight_config=dict(WEIGHT_CONFIGS[projection.format.name]),
                input_config={"dtype": _DTYPES[activation]},
                torch_dtype=torch.bfloat16,
                **_padding_options(padding),
            )
        layer = layer.to(projection.device)
        layer.weight.data.copy_(projection.qdata.view(layer.weight.dtype))
        layer.weight_scale.data.copy_(projection.scale.view(layer.weight_scale.dtype))
        factors = getattr(projection, "row_scale", None)
        if factors is not None:  # one for all rows of an expert, as `random_weights` has them
            layer.weight_scale_2.data.copy_(factors[:, 0])
        layer.transform()
        self.model, self.config, self.rows = model, layer.humming_config, rows
        names = ("weight", "weight_scale", "weight_scale_2", "zero_point", "bias")
        self.tensors = {
            name: getattr(layer, name) for name in names if getattr(layer, name, None) is not None
        }
        self.locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=projection.device)

    def kernel(self, tokens: int) -> tuple[torch.Tensor, int]:
        """Launch configuration and rows of a block for so many tokens."""
        tuning = _tuning(self.config, tokens, self.model)
        kernel_type = importlib.import_module("humming.kernel.humming").HummingKernel
        launch = kernel_type.prepare_kernels(
            self.config.to_str(),
            _compute().to_str(),
            [(0, 1 << 30, tuning)],
            device=torch.cuda.current_device(),
        )
        return launch, int(tuning["block_shape"][0])

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantised rows and their scales; bf16 rows as they are."""
        return importlib.import_module("humming.forward").may_quant_input(self.config, rows)

    def activate(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """SwiGLU of interleaved rows, quantised in the same launch where this stage wants it."""
        process = importlib.import_module("humming.forward").may_process_input
        values, group_scale, token_scale = process(
            self.config, rows, activation_type="binary_interleaved", activation_impl=_SWIGLU
        )
        return values, token_scale if group_scale is None else group_scale

    def multiply(
        self,
        launch: torch.Tensor,
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        out: torch.Tensor,
        aligned: tuple[torch.Tensor, ...],
        top_k: int,
    ) -> None:
        """The GEMM: row r of `rows` serves sorted ids r · top_k … of `out`."""
        sorted_ids, expert_ids, used = aligned
        importlib.import_module("humming.ops").launch_kernel(
            configs=launch,
            outputs=out,
            locks=self.locks,
            top_k=top_k,
            inputs=rows,
            input_scale=scale,
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=used,
            **self.tensors,
        )


class Humming:
    """Both projections, once for each padding that Humming accepts."""

    impl, same_weights = "humming", True

    def __init__(
        self,
        folder: Path,
        model: Model,
        weights: MoEWeights,
        activation: str,
        compiler: Compiler,
        seconds_left: Callable[[], float],
    ) -> None:
        self.model, self.activation = model, activation
        self.compiler, self.seconds_left = compiler, seconds_left
        self.routing = MoEOps(folder, model)
        self.paddings: dict[str, tuple[Projection, Projection]] = {}
        errors = []
        for padding in paddings(model):
            try:
                self.paddings[f"padding {padding}"] = (
                    Projection(model, weights.gate_up_proj, activation, padding),
                    Projection(model, weights.down_proj, activation, padding),
                )
            except Exception as error:
                errors.append(f"padding {padding}: {error!r}")
        if not self.paddings:
            need = "a shape that it can hold"
            raise ValueError(message("humming", model.name, need, "; ".join(errors)))

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        self.compiler.wait(cell, self.seconds_left())
        variants, errors = {}, []
        for name, pair in self.paddings.items():
            try:
                variants[name] = by_stage([self._calls(inputs, pair) for inputs in batches])
            except Exception as error:
                errors.append(f"{name}: {error!r}")
        if not variants:
            need = "a kernel that runs"
            raise ValueError(message("humming", str(cell), need, "; ".join(errors)))
        return variants

    def _calls(self, inputs: Inputs, pair: tuple[Projection, Projection]) -> dict[str, Call]:
        from benchmarks.moe.glue_kernels import sum_slots

        gate_up, down = pair
        model, tokens = self.model, inputs.x.shape[0]
        rows = tokens * model.k
        (launch_1, block_1), (launch_2, block_2) = gate_up.kernel(tokens), down.kernel(tokens)
        empty = inputs.x.new_empty
        inner, parts, y = empty(rows, 2 * model.F), empty(rows, model.H), empty(tokens, model.H)
        ready_1 = aligned_rows(inputs.logits, model, block_1)
        ready_2 = aligned_rows(inputs.logits, model, block_2)
        ready_weights = self.routing.topk(inputs.logits)[0]

        def first(aligned: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
            gate_up.multiply(launch_1, *gate_up.encode(inputs.x), inner, aligned, model.k)
            return down.activate(inner)

        def second(
            h: tuple[torch.Tensor, torch.Tensor | None],
            weights: torch.Tensor,
            aligned: tuple[torch.Tensor, ...],
        ) -> torch.Tensor:
            down.multiply(launch_2, *h, parts, aligned, 1)
            sum_slots(y, parts, weights)
            return y

        def layer() -> torch.Tensor:
            weights, ids = self.routing.topk(inputs.logits)
            aligned_1 = self.routing.align(ids, block_1)
            aligned_2 = aligned_1 if block_1 == block_2 else self.routing.align(ids, block_2)
            return second(first(aligned_1), weights, aligned_2)

        encoded, h = gate_up.encode(inputs.x), first(ready_1)
        return {
            "gate_up_gemm": functools.partial(
                gate_up.multiply, launch_1, *encoded, inner, ready_1, model.k
            ),
            "down_gemm": functools.partial(down.multiply, launch_2, *h, parts, ready_2, 1),
            "gate_up": functools.partial(first, ready_1),
            "down": functools.partial(second, h, ready_weights, ready_2),
            "layer": layer,
        }
