"""Humming: indexed GEMMs compiled at run time, with bf16 activations, or e4m3 ones that have a
scale for each token or for 128 values."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe.cells import Cell, Inputs, Model
from benchmarks.moe.ours import ACTIVATION
from benchmarks.moe.peer_gate import SPANS, Steps, decoded
from benchmarks.moe.peers import Call, MoEOps, Variants, aligned_rows, by_stage
from mxpert.errors import message
from mxpert.formats.tensor import MXTensor
from mxpert.formats.weight_tensor import WEIGHT_FORMATS, WeightLike
from mxpert.moe.weights import MoEWeights

_NUM_LOCKS = 2048
_SWIGLU = (
    f"fminf(a, {ACTIVATION.limit}f) / (1.f + __expf(-{ACTIVATION.alpha}f * "
    f"fminf(a, {ACTIVATION.limit}f))) * "
    f"(fmaxf(fminf(b, {ACTIVATION.limit}f), -{ACTIVATION.limit}f) + 1.f)"
)


def weight_config(name: str) -> dict[str, Any]:
    """What it calls a weight format of ours. Its containers hold the same codes and scales."""
    if name.startswith("int4"):
        packed = dict(format="pack-quantized", type="int", num_bits=4, strategy="group")
        group = WEIGHT_FORMATS[name].group_size
        return dict(quant_method="compressed-tensors", group_size=group, **packed)
    if name == "mxfp4":
        return {"quant_method": "mxfp4"}
    return {"quant_method": "modelopt", "quant_algo": name.partition("_")[0]}


def input_config(activation: str) -> dict[str, Any]:
    """What it calls activations; without a group there is one scale for each token."""
    if activation == "bf16":
        return {"dtype": "bfloat16"}
    span = SPANS[activation]
    return {"dtype": "float8e4m3"} | ({} if span is None else {"group_size": span})


@dataclass(frozen=True)
class Padding:
    """Multiples that the rows and the depth of both projections are padded to."""

    rows: int = 1
    depth: int = 1

    def changes(self, model: Model) -> bool:
        """Whether a size of the model is no such multiple."""
        return any(rows % self.rows or depth % self.depth for rows, depth in _shapes(model))

    @property
    def options(self) -> dict[str, int]:
        """As Humming's layers take them."""
        return {"pad_n_to_multiple": self.rows, "pad_k_to_multiple": self.depth}


NO_PADDING, TO_128, TO_256 = Padding(), Padding(128, 128), Padding(256, 128)
"""vLLM 0.33 pads to the last in every model: Humming has tiles of 256 columns of an output."""


def paddings(model: Model, activation: str) -> tuple[Padding, ...]:
    """Paddings that differ for the model; the fastest counts. Spans that share a scale have to be
    whole."""
    found = [each for each in (TO_128, TO_256) if each.changes(model)]
    if not (SPANS.get(activation) and TO_128.changes(model)):
        found.insert(0, NO_PADDING)
    return tuple(found)


def _shapes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, depth) of both projections."""
    return (2 * model.F, model.H), (model.H, model.F)


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
        self.seen: set[str] = set()

    def start(self, cells: Sequence[Cell], weight_format: str = "mxfp4") -> None:
        """Queue the kernels of all cells, in their order; each distinct kernel once."""
        for cell in cells:
            jobs = self.pending.setdefault(f"{cell} {weight_format}", [])
            forms = [
                (name, size) for name in self.activations for size in paddings(cell.model, name)
            ]
            for (activation, padding), (rows, depth) in itertools.product(
                forms, _shapes(cell.model)
            ):
                found = self._options(cell, weight_format, activation, padding, rows, depth)
                for options in found:
                    key = json.dumps(options, sort_keys=True, default=str)
                    if key not in self.seen:
                        self.seen.add(key)
                        jobs.append(self.pool.submit(self._compile, options))

    def _options(
        self,
        cell: Cell,
        weight_format: str,
        activation: str,
        padding: Padding,
        rows: int,
        depth: int,
    ) -> list[dict[str, Any]]:
        """Arguments of one kernel; none where Humming refuses the shape."""
        schema = importlib.import_module("humming.schema")
        prepare = importlib.import_module("humming.transform").prepare_layer_config
        weights = schema.BaseWeightSchema.from_config(weight_config(weight_format))
        inputs = schema.BaseInputSchema.from_config(
            {"quant_method": "humming"} | input_config(activation)
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
                **padding.options,
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

    def wait(self, cell: Cell, weight_format: str, seconds: float) -> None:
        """Until the kernels of a cell are compiled (or have failed).

        Raises:
            TimeoutError: they are not ready in time.
        """
        jobs = self.pending.get(f"{cell} {weight_format}", [])
        late = wait(jobs, timeout=max(0.0, seconds)).not_done
        if late:
            raise TimeoutError(f"{len(late)} kernels of {cell} are still being compiled")

    def stop(self) -> None:
        """Drop what has not begun."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def _stored(projection: WeightLike) -> dict[str, torch.Tensor]:
    """Its tensors under the names of the container.

    Raises:
        ValueError: rows of an expert have different factors, which the container cannot hold.
    """
    names = {"weight": projection.qdata, "weight_scale": projection.scale}
    if isinstance(projection, MXTensor):
        return names
    if projection.row_scale is None:
        return {"weight_packed": projection.qdata, "weight_scale": projection.scale}
    factor = projection.row_scale[..., :1].contiguous()
    if not torch.equal(factor.expand_as(projection.row_scale), projection.row_scale):
        raise ValueError(message("humming", "row_scale", "one of each expert", "one of each row"))
    return names | {"weight_scale_2": factor}


class Projection:
    """One projection's weights in Humming's layout."""

    def __init__(
        self, model: Model, projection: WeightLike, activation: str, padding: Padding
    ) -> None:
        layer_type = importlib.import_module("humming.layer").HummingLayer
        experts, rows, depth = projection.shape
        with projection.device:
            layer = layer_type(
                shape_n=rows,
                shape_k=depth,
                num_experts=experts,
                weight_config=weight_config(projection.format.name),
                input_config=input_config(activation),
                torch_dtype=torch.bfloat16,
                **padding.options,
            )
        layer = layer.to(projection.device)
        for name, tensor in _stored(projection).items():
            held = getattr(layer, name).data
            held.copy_(tensor.view(held.dtype).view(held.shape))
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
        self.weight_format = weights.weight_format
        self.compiler, self.seconds_left = compiler, seconds_left
        self.routing = MoEOps(folder, model)
        self.paddings: dict[str, tuple[Projection, Projection]] = {}
        errors = []
        for padding in paddings(model, activation):
            try:
                self.paddings[str(padding)] = (
                    Projection(model, weights.gate_up_proj, activation, padding),
                    Projection(model, weights.down_proj, activation, padding),
                )
            except Exception as error:
                errors.append(f"{padding}: {error!r}")
        if not self.paddings:
            need = "a shape that it can hold"
            raise ValueError(message("humming", model.name, need, "; ".join(errors)))

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        self.compiler.wait(cell, self.weight_format, self.seconds_left())
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

        def steps() -> Steps:
            result = layer()
            rows = decoded(*gate_up.encode(inputs.x))
            return Steps(rows, inner, decoded(*down.activate(inner)), result)

        encoded, h = gate_up.encode(inputs.x), first(ready_1)
        return {
            "steps": steps,
            "gate_up_gemm": functools.partial(
                gate_up.multiply, launch_1, *encoded, inner, ready_1, model.k
            ),
            "down_gemm": functools.partial(down.multiply, launch_2, *h, parts, ready_2, 1),
            "gate_up": functools.partial(first, ready_1),
            "down": functools.partial(second, h, ready_weights, ready_2),
            "layer": layer,
        }
