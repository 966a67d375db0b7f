"""Proof at size: Hopper MoE layers of the named models against float64, for every bucket of T.

    python -m benchmarks.moe.at_size --output benchmarks/results/nvidia-h200/at_size.json

Weights are drawn on the device as MXFP4 codes and scales; two models have more than 4 GiB in one
projection, "padded" is a shape that fills no unit of the prepared layout. What pads prepared
weights is poisoned, and outputs and scratch start as NaN. Sampled tokens of every batch are
compared: stage 1, stage 2 on the rows that stage 1 stored, and the fused layer. Only the experts
that these tokens hit are dequantised. Writes at_size.json and at_size.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import mxpert
from benchmarks.harness.document import Row
from benchmarks.harness.run import Run
from benchmarks.harness.script import Script, Seconds, machine, parse_list
from benchmarks.harness.tables import absences, bullets, folded, page, row_table, where
from benchmarks.moe import warm_up
from benchmarks.moe.cells import NAMED, Cell
from benchmarks.moe.ours import ACTIVATION
from mxpert import GateUpOrder
from mxpert.cli.measure import float64_reference
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.errors import message
from mxpert.formats import MXTensor
from mxpert.formats.tensor import Layout
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.numerics import relative_l2
from mxpert.testing.problems import MODEL_SHAPES, MoEInputs, MoEShape, random_moe_problem
from support.hopper import down_tolerance, intermediate_tolerance, layer_tolerance
from support.poison import nan_filled_scratch, poison_prepared
from support.rounding import gate_up_oracle

Rows = torch.Tensor | MXTensor
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192, 32768)
DRY_TOKENS = (1, 4, 16)
SAMPLE = (0, 1, 3, 15, 63, 127, 255, 1023, 4095, 8191, 32767)
"""Tokens that are compared: the first, and the last of every bucket."""

ORDER = (
    *("kimi-k2", "dsv4-pro", "gpt-oss-120b", "deepseek-v3", "qwen3-235b"),
    "kimi-k2-tp4-shared",
    *("dsv4-flash", "gpt-oss-20b", "glm-5.1", "minimax-m2.7", "qwen3-next"),
)
_LIKE_COMPARE: dict[str, Any] = dict(
    activation=ACTIVATION, has_bias=False, gate_up_order=GateUpOrder.INTERLEAVED
)
SHAPES = {name: replace(MODEL_SHAPES[name], **_LIKE_COMPARE) for name in ORDER} | {
    "padded": MoEShape(2912, 1440, 32, 4, ACTIVATION, GateUpOrder.INTERLEAVED)
}
"""The models' sizes with the activation that moe/run.py measures: the binaries are the same."""

STAGES = ("gate_up", "down", "layer")
PROTOCOL = {
    "data": "normal x, uniformly random codes, scales with a deviation of one binade, uniform "
    "routing; SwiGLU with interleaved gate and up, no biases",
    "poison": "rows that pad prepared weights have NaN scales, depth that pads them the largest "
    "codes; outputs and scratch start as NaN",
    "error": "relative L2 over the sampled tokens, to float64 on the same quantised operands: "
    "gate_up, down in float32 on the stored rows, layer in bfloat16",
    "limit": "derived from formats, sums and the number of values (tests/support/hopper.py)",
}


@dataclass(kw_only=True)
class Proof(Run):
    """What one invocation works with, and what it has found."""

    seconds: Seconds = field(default_factory=Seconds)

    def take_over(self, old: Row) -> None:
        super().take_over(old)
        self.seconds.update(old["meta"]["seconds"])

    def as_json(self) -> Row:
        self.meta["seconds"] = dict(self.seconds)
        return super().as_json()


@dataclass(frozen=True)
class Batch:
    """Results of sampled tokens of one batch.

    Args:
        tokens: int64 [S]. h: rows [S · k, F] by (token, slot). down: float32 [S, H].
        layer: bfloat16 [S, H]. finite: of all tokens' results. backend, config: that answered.
    """

    num_tokens: int
    tokens: torch.Tensor
    h: Rows
    down: torch.Tensor
    layer: torch.Tensor
    finite: bool
    backend: str
    config: str


def choose(inputs: MoEInputs, tokens: slice | torch.Tensor) -> MoEInputs:
    """Some tokens of a batch."""
    names = ("x", "topk_ids", "topk_weights")
    return replace(inputs, **{name: getattr(inputs, name)[tokens].contiguous() for name in names})


def take(h: Rows, rows: torch.Tensor) -> Rows:
    """Some rows of an intermediate."""
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of several batches."""
    first = parts[0]
    if isinstance(first, MXTensor):
        codes, scales = zip(*((part.qdata, part.scale) for part in parts), strict=True)
        return replace(first, qdata=torch.cat(codes), scale=torch.cat(scales))
    return torch.cat(list(parts))


def make_plan(inputs: MoEInputs, routing_block_m: int) -> RoutingPlan:
    options = dict(num_experts=inputs.weights.num_experts, routing_block_m=routing_block_m)
    return mxpert.make_routing_plan(inputs.topk_weights, inputs.topk_ids, **options)


def make_problem(
    shape: MoEShape, num_tokens: int, device: torch.device
) -> tuple[MoEInputs, MoEInputs]:
    """The largest batch, with plain and with prepared and poisoned weights; token 0 takes the last
    expert."""
    plain = random_moe_problem(shape, num_tokens, device=device)
    plain.topk_ids[0, 0] = shape.num_experts - 1
    prepared = replace(plain, weights=plain.weights.prepare(device=device))
    for part in (prepared.weights.gate_up_proj, prepared.weights.down_proj):
        if part.layout is Layout.HOPPER_FRAGMENT:
            poison_prepared(part)
    return plain, prepared


def run_batch(inputs: MoEInputs, a_format: str) -> Batch:
    """Both stages and the layer of one batch on kernels, with NaN where nothing was written."""
    options: dict[str, Any] = {"activation": inputs.activation, "activation_format": a_format}
    routed = inputs.topk_weights, inputs.topk_ids
    chosen = mxpert.explain(
        mxpert.fused_moe, inputs.x, inputs.weights, *routed, **options
    ).resolution
    plan = make_plan(inputs, chosen.config.routing_block_m)
    with nan_filled_scratch():
        h = mxpert.moe_gate_up(inputs.x, inputs.weights, plan, **options)
        down = mxpert.moe_down(
            h, inputs.weights, plan, activation_format=a_format, out_dtype=torch.float32
        )
        layer = mxpert.fused_moe(inputs.x, inputs.weights, *routed, **options)
    count = len(inputs.x)
    tokens = torch.tensor([token for token in SAMPLE if token < count], device=inputs.x.device)
    finite = bool(down.isfinite().all() & layer.isfinite().all())
    rows = take(h, plan.slot_rows[tokens].flatten().long())
    which = chosen.kernel.backend, str(chosen.config)
    return Batch(count, tokens, rows, down[tokens], layer[tokens], finite, *which)


def true_down(inputs: MoEInputs, h: Rows, a_format: str) -> torch.Tensor:
    """float64 [T, H] of stage 2 from rows [T · k, F] by (token, slot)."""
    with float64_reference():
        plan = make_plan(inputs, 1)
        order = plan.sorted_token_ids.new_zeros(plan.capacity, dtype=torch.int64)
        places = plan.slot_rows.flatten().long()
        order[places] = torch.arange(len(places), device=places.device)
        options: dict[str, Any] = dict(activation_format=a_format, out_dtype=torch.float64)
        return mxpert.moe_down(take(h, order), inputs.weights, plan, **options)


def judge(name: str, plain: MoEInputs, a_format: str, batches: Sequence[Batch]) -> list[Row]:
    """Errors and limits of every batch; each expert is dequantised once for all of them."""
    top_k = plain.topk_ids.shape[1]
    sampled = batches[-1].tokens
    oracle = gate_up_oracle(choose(plain, sampled), a_format)
    exact_h = oracle.round(a_format)
    tokens = torch.cat([*(batch.tokens for batch in batches), sampled])
    truths = true_down(
        choose(plain, tokens), join([*(batch.h for batch in batches), exact_h]), a_format
    ).split([len(batch.tokens) for batch in (*batches, batches[-1])])
    weights, rows = plain.weights, []
    for batch, down in zip(batches, truths[:-1], strict=True):
        count = len(batch.tokens)
        first = torch.arange(count * top_k, device=sampled.device)
        errors = {
            "gate_up": relative_l2(batch.h, take(exact_h, first)),
            "down": relative_l2(batch.down, down),
            "layer": relative_l2(batch.layer, truths[-1][:count]),
        }
        limits = {
            "gate_up": intermediate_tolerance(a_format, len(first) * weights.intermediate_size),
            "down": down_tolerance(a_format, torch.float32, plain, count),
            "layer": layer_tolerance(a_format, torch.bfloat16, plain, count),
        }
        sizes = weights.num_experts, top_k, weights.hidden_size, weights.intermediate_size
        finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
        rows.append(
            {
                "model": name,
                **dict(zip("EkHF", sizes, strict=True)),
                "T": batch.num_tokens,
                "activation": a_format,
                "compared": count,
                "gate_up_gib": weights.gate_up_proj.qdata.numel() / 2**30,
                "backend": batch.backend,
                "config": batch.config,
                "finite": batch.finite,
                "limits": limits,
                "errors": finite,
                "ok": batch.finite and all(errors[stage] <= limits[stage] for stage in STAGES),
            }
        )
    return rows


def share_of_limit(rows: Sequence[Row], *stages: str) -> float:
    """The largest error over its limit; infinite for an error that is no number."""
    return max(
        math.inf if row["errors"][stage] is None else row["errors"][stage] / row["limits"][stage]
        for row in rows
        for stage in stages
    )


def prove_model(proof: Proof, name: str, formats: Sequence[str], tokens: Sequence[int]) -> None:
    """Every format and batch of one model; a format that fails leaves the others."""
    shape, clock = SHAPES[name], proof.seconds.clock
    if proof.dry:
        experts = max(8, shape.top_k)
        shape = replace(shape, hidden_size=64, intermediate_size=32, num_experts=experts)
    with clock("weights"):
        plain, prepared = make_problem(shape, max(tokens), proof.device)
        proof.synchronize()
    for a_format in formats:
        try:
            with clock("kernels"):
                batches = [run_batch(choose(prepared, slice(count)), a_format) for count in tokens]
                proof.synchronize()
            with clock("float64"):
                found = judge(name, plain, a_format, batches)
                proof.synchronize()
            wrong = {row["backend"] for row in found} - {"hopper"}
            if wrong and not proof.dry:
                place, need = f"{name} {a_format}", "the hopper backend"
                raise ValueError(message("at_size", place, need, sorted(wrong)))
        except Exception as error:
            text = proof.fail((name, a_format), error)
            print(f"{name} {a_format}: {text}", file=sys.stderr, flush=True)
            proof.synchronize()
            continue
        for row in found:
            proof.add(row)
        worst = share_of_limit(found, *STAGES)
        print(f"{name} {a_format}: {len(found)} batches, worst error {worst:.2f} of its limit")


# --- tables -------------------------------------------------------------------------------------


def summary(document: Row) -> str:
    """One line for each model and format: the largest error of each stage over its limit."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        groups.setdefault((row["model"], row["activation"]), []).append(row)
    columns = {
        "model": lambda rows: "{model} {activation}".format(**rows[0]),
        "GiB of gate and up": lambda rows: f"{rows[0]['gate_up_gib']:.1f}",
        "T": lambda rows: f"{min(r['T'] for r in rows)} … {max(r['T'] for r in rows)}",
        **{
            f"{stage}: error / limit": lambda rows, stage=stage: (
                f"{share_of_limit(rows, stage):.2f}"
            )
            for stage in STAGES
        },
        "batches right": lambda rows: f"{sum(row['ok'] for row in rows)} of {len(rows)}",
    }
    return row_table(groups.values(), columns)


def error_text(row: Row, stage: str) -> str:
    """Error and limit of a stage."""
    error = row["errors"][stage]
    return f"{'none' if error is None else f'{error:.1e}'} ({row['limits'][stage]:.1e})"


DETAIL = {
    "model": "{model}",
    "format": "{activation}",
    "T": "{T}",
    "tokens compared": "{compared}",
    **{stage: lambda row, stage=stage: error_text(row, stage) for stage in STAGES},
    "finite": lambda row: "yes" if row["finite"] else "no",
    "config": "{config}",
}


def markdown(document: Row) -> str:
    """Summary, every error, what is missing."""
    meta = document["meta"]
    failures = map("{model} {activation}: `{error}`".format_map, meta["failures"])
    return page(
        "# Proof at size",
        f"{where(meta)}.",
        bullets(meta["protocol"]),
        summary(document),
        folded("every batch, error (limit)", row_table(document["rows"], DETAIL)),
        absences("Not proven", failures, meta["left"]),
    )


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--models", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--formats", default=",".join(ACTIVATION_FORMATS))


def prepare(options: argparse.Namespace) -> tuple[Proof, list[str], list[str]]:
    """The document, models that it lacks, formats."""
    names = parse_list(options.models, list(SHAPES), "--models")
    formats = parse_list(options.formats, list(ACTIVATION_FORMATS), "--formats")
    meta = machine(options, "device", "versions", "date", "commit", protocol=PROTOCOL)
    proof = Proof.of(options, meta, ("model", "activation", "T"), ("model", "activation"))
    done = {row["model"] for row in proof.rows.values()}
    return proof, [name for name in names if name not in done], formats


def prove(options: argparse.Namespace, prepared: tuple[Proof, list[str], list[str]]) -> int:
    """All models until the time limit; 0 if every batch is right and finite."""
    proof, names, formats = prepared
    tokens = DRY_TOKENS if proof.dry else TOKENS
    if not proof.dry:
        cells = [Cell(model, count) for model in NAMED.values() for count in tokens]
        with proof.seconds.clock("compilers"):
            warm_up.wait(warm_up.start(cells, formats))
    for name in proof.each(names):
        prove_model(proof, name, formats, tokens)
    proof.save()
    document = proof.as_json()
    SCRIPT.write_tables(proof.path, document)
    wrong = [row for row in document["rows"] if not row["ok"]]
    print(f"\n{summary(document)}\n")
    for row in wrong:
        text = "wrong: {model} T={T} {activation}: {errors}, limits {limits}, finite {finite}"
        print(text.format(**row), file=sys.stderr)
    print(
        f"{proof.seconds}\nwrote {proof.path} and .md: {len(proof.rows)} batches, {len(wrong)} "
        f"wrong, {len(proof.failures)} failures, {len(proof.left)} models left, "
        f"{time.monotonic() - options.began:.0f} s"
    )
    return 1 if wrong or proof.failures else 0


SCRIPT = Script(
    "at_size", __doc__, prove, prepare, add_options, limit=150.0, resumes=True, markdown=markdown
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
