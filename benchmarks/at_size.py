"""Proof at size: Hopper MoE layers of the named models against float64, for every bucket of T.

    python benchmarks/at_size.py --output benchmarks/results/nvidia-h200/at_size.json

Weights are drawn on the device as MXFP4 codes and scales; two models have more than 4 GiB in one
projection, "padded" is a shape that fills no unit of the prepared layout. What pads prepared
weights is poisoned, and outputs and scratch start as NaN. Sampled tokens of every batch are
compared: stage 1, stage 2 on the rows that stage 1 stored, and the fused layer. Only the experts
that these tokens hit are dequantised. Writes at_size.json and at_size.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import warm_up
from moe.cells import NAMED, Cell, parse_list
from harness.faults import describe
from moe.ours import ACTIVATION
from render import add_render_option, folded, markdown_table, render_again

import mxpert
from mxpert import GateUpOrder
from mxpert.cli.measure import float64_reference
from mxpert.cli.report import environment, write_json
from mxpert.errors import message, require
from mxpert.formats import MXTensor
from mxpert.formats.tensor import Layout
from mxpert.problem import ACTIVATION_FORMATS
from mxpert.routing import RoutingPlan
from mxpert.testing.numerics import relative_l2
from mxpert.testing.problems import MODEL_SHAPES, MoEInputs, MoEShape, random_moe_problem
from support.hopper import down_tolerance, intermediate_tolerance, layer_tolerance
from support.poison import nan_filled_scratch, poison_prepared
from support.rounding import gate_up_oracle

Row = dict[str, Any]
Rows = torch.Tensor | MXTensor
DEFAULT_OUTPUT = ROOT / "benchmarks/results/nvidia-h200/at_size.json"
DRY_OUTPUT = ROOT / "reports/at-size-dry-run.json"
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192, 32768)
DRY_TOKENS = (1, 4, 16)
SAMPLE = (0, 1, 3, 15, 63, 127, 255, 1023, 4095, 8191, 32767)
"""Tokens that are compared: the first, and the last of every bucket."""

ORDER = (
    "kimi-k2",
    "dsv4-pro",
    "gpt-oss-120b",
    "deepseek-v3",
    "qwen3-235b",
    "kimi-k2-tp4",
    "dsv4-flash",
    "gpt-oss-20b",
    "glm-5.1",
    "minimax-m2.7",
    "qwen3-next",
)
SHAPES = {
    **{
        name: replace(
            MODEL_SHAPES[name],
            activation=ACTIVATION,
            has_bias=False,
            gate_up_order=GateUpOrder.INTERLEAVED,
        )
        for name in ORDER
    },
    "padded": MoEShape(2912, 1440, 32, 4, ACTIVATION, GateUpOrder.INTERLEAVED),
}
"""The models' sizes with the activation that compare.py measures: the binaries are the same."""

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


@dataclass
class Proof:
    """What one invocation works with, and what it has found."""

    device: torch.device
    dry: bool
    path: Path
    meta: Row
    deadline: float
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)

    def document(self) -> Row:
        return {
            "meta": self.meta
            | {"failures": self.failures, "left": self.left, "seconds": dict(self.seconds)},
            "rows": self.rows,
        }

    def spent(self, what: str, since: float) -> float:
        """Add the time since then to `seconds`; the time now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[what] += now - since
        return now


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
    return replace(
        inputs,
        x=inputs.x[tokens].contiguous(),
        topk_ids=inputs.topk_ids[tokens].contiguous(),
        topk_weights=inputs.topk_weights[tokens].contiguous(),
    )


def take(h: Rows, rows: torch.Tensor) -> Rows:
    """Some rows of an intermediate."""
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of several batches."""
    first = parts[0]
    if isinstance(first, MXTensor):
        return replace(
            first,
            qdata=torch.cat([part.qdata for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
        )
    return torch.cat(list(parts))


def make_plan(inputs: MoEInputs, routing_block_m: int) -> RoutingPlan:
    return mxpert.make_routing_plan(
        inputs.topk_weights,
        inputs.topk_ids,
        num_experts=inputs.weights.num_experts,
        routing_block_m=routing_block_m,
    )


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
    return Batch(
        count,
        tokens,
        take(h, plan.slot_rows[tokens].flatten().long()),
        down[tokens],
        layer[tokens],
        finite,
        chosen.kernel.backend,
        str(chosen.config),
    )


def true_down(inputs: MoEInputs, h: Rows, a_format: str) -> torch.Tensor:
    """float64 [T, H] of stage 2 from rows [T · k, F] by (token, slot)."""
    with float64_reference():
        plan = make_plan(inputs, 1)
        order = plan.sorted_token_ids.new_zeros(plan.capacity, dtype=torch.int64)
        places = plan.slot_rows.flatten().long()
        order[places] = torch.arange(len(places), device=places.device)
        return mxpert.moe_down(
            take(h, order),
            inputs.weights,
            plan,
            activation_format=a_format,
            out_dtype=torch.float64,
        )


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
        rows.append(
            {
                "model": name,
                "E": weights.num_experts,
                "k": top_k,
                "H": weights.hidden_size,
                "F": weights.intermediate_size,
                "T": batch.num_tokens,
                "activation": a_format,
                "compared": count,
                "gate_up_gib": weights.gate_up_proj.qdata.numel() / 2**30,
                "backend": batch.backend,
                "config": batch.config,
                "finite": batch.finite,
                "limits": limits,
                "errors": {
                    stage: error if math.isfinite(error) else None
                    for stage, error in errors.items()
                },
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
    shape = SHAPES[name]
    if proof.dry:
        shape = replace(
            shape, hidden_size=64, intermediate_size=32, num_experts=max(8, shape.top_k)
        )
    now = time.monotonic()
    plain, prepared = make_problem(shape, max(tokens), proof.device)
    now = proof.spent("weights", now)
    for a_format in formats:
        try:
            batches = [run_batch(choose(prepared, slice(count)), a_format) for count in tokens]
            now = proof.spent("kernels", now)
            found = judge(name, plain, a_format, batches)
            now = proof.spent("float64", now)
            wrong = {row["backend"] for row in found} - {"hopper"}
            require(
                proof.dry or not wrong,
                "at_size",
                f"{name} {a_format}",
                got=sorted(wrong),
                need="the hopper backend",
            )
        except Exception as error:
            proof.failures.append({"model": name, "activation": a_format, "error": describe(error)})
            print(f"{name} {a_format}: {describe(error)}", file=sys.stderr, flush=True)
            if proof.device.type == "cuda":
                torch.cuda.synchronize()
            continue
        proof.rows += found
        print(
            f"{name} {a_format}: {len(found)} batches, worst error "
            f"{share_of_limit(found, *STAGES):.2f} of its limit",
            flush=True,
        )


def prove(
    proof: Proof, names: Sequence[str], formats: Sequence[str], tokens: Sequence[int]
) -> None:
    """All models until the time limit, which one as long as the longest so far must still fit."""
    longest = 0.0
    for name in names:
        began = time.monotonic()
        if began + longest > proof.deadline:
            proof.left.append(name)
            continue
        prove_model(proof, name, formats, tokens)
        if proof.device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - began)
        write_json(proof.path, proof.document())


# --- tables -------------------------------------------------------------------------------------


def summary(document: Row) -> str:
    """One line for each model and format: the largest error of each stage over its limit."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        groups.setdefault((row["model"], row["activation"]), []).append(row)
    lines = []
    for (name, a_format), rows in groups.items():
        lines.append(
            [
                f"{name} {a_format}",
                f"{rows[0]['gate_up_gib']:.1f}",
                f"{min(row['T'] for row in rows)} … {max(row['T'] for row in rows)}",
                *(f"{share_of_limit(rows, stage):.2f}" for stage in STAGES),
                f"{sum(row['ok'] for row in rows)} of {len(rows)}",
            ]
        )
    return markdown_table(
        [
            "model",
            "GiB of gate and up",
            "T",
            *(f"{stage}: error / limit" for stage in STAGES),
            "batches right",
        ],
        lines,
    )


def markdown(document: Row) -> str:
    """Summary, every error, what is missing."""
    meta = document["meta"]
    versions = ", ".join(f"{name} {text}" for name, text in meta["versions"].items() if text)

    def text(row: Row, stage: str) -> str:
        error = row["errors"][stage]
        return f"{'none' if error is None else f'{error:.1e}'} ({row['limits'][stage]:.1e})"

    body = [
        [
            row["model"],
            row["activation"],
            str(row["T"]),
            str(row["compared"]),
            *(text(row, stage) for stage in STAGES),
            "yes" if row["finite"] else "no",
            row["config"],
        ]
        for row in document["rows"]
    ]
    parts = [
        "# Proof at size",
        f"{meta['device']}, {meta['date']}, commit `{str(meta['commit'])[:12]}`, {versions}.",
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        summary(document),
        folded(
            "every batch, error (limit)",
            markdown_table(
                ["model", "format", "T", "tokens compared", *STAGES, "finite", "config"], body
            ),
        ),
    ]
    absent = [
        f"- {each['model']} {each['activation']}: `{each['error']}`" for each in meta["failures"]
    ]
    absent += [f"- out of time: {', '.join(meta['left'])}"] if meta["left"] else []
    if absent:
        parts += ["## Not proven", "\n".join(absent)]
    return "\n\n".join(parts) + "\n"


# --- command line -------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--formats", default=",".join(ACTIVATION_FORMATS))
    parser.add_argument("--output", type=Path, help=f"default: {DEFAULT_OUTPUT.name}")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=150.0,
        metavar="SECONDS",
        help="models that do not fit are listed as left; default: %(default)s",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what --output holds, and prove what it left"
    )
    add_render_option(parser)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU's reference kernels"
    )
    return parser.parse_args(arguments)


def resume(proof: Proof, names: Sequence[str]) -> list[str]:
    """Take over the rows of an earlier run on the same device and commit; the models without.

    Raises:
        ValueError: it was another device, commit or protocol.
    """
    old = json.loads(proof.path.read_text("utf-8"))
    for name in ("device", "commit", "protocol"):
        require(
            old["meta"][name] == proof.meta[name],
            "at_size",
            f"--resume {proof.path}: {name}",
            need=proof.meta[name],
            got=old["meta"][name],
            remedy="start a new run",
        )
    proof.rows, proof.seconds = old["rows"], Counter(old["meta"]["seconds"])
    done = {row["model"] for row in proof.rows}
    return [name for name in names if name not in done]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every batch is right and finite."""
    options, began = parse_arguments(arguments), time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    try:
        if options.render is not None:
            return render_again(options.render, markdown)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                message(
                    "at_size", "device", "a GPU", "none", "run with --dry-run to try the script"
                )
            )
        names = parse_list(options.models, list(SHAPES), "--models")
        formats = parse_list(options.formats, list(ACTIVATION_FORMATS), "--formats")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    tokens = DRY_TOKENS if options.dry_run else TOKENS
    facts = environment(device)
    meta = {
        "device": facts["device"],
        "versions": facts["versions"],
        "date": facts["date"],
        "commit": options.commit or facts["commit"],
        "protocol": PROTOCOL,
    }
    path = options.output or (DRY_OUTPUT if options.dry_run else DEFAULT_OUTPUT)
    proof = Proof(device, options.dry_run, path, meta, began + options.time_limit)
    try:
        names = resume(proof, names) if options.resume and path.is_file() else names
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.dry_run:
        warm_up.wait(
            warm_up.start(
                [Cell(model, count) for model in NAMED.values() for count in tokens], formats
            )
        )
        proof.spent("compilers", began)
    prove(proof, names, formats, tokens)
    document = proof.document()
    write_json(path, document)
    path.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
    wrong = [row for row in proof.rows if not row["ok"]]
    print("\n" + summary(document) + "\n")
    for row in wrong:
        print(
            f"wrong: {row['model']} T={row['T']} {row['activation']}: {row['errors']}, limits "
            f"{row['limits']}, finite {row['finite']}",
            file=sys.stderr,
        )
    print(
        "seconds: "
        + ", ".join(f"{what} {seconds:.1f}" for what, seconds in proof.seconds.most_common())
    )
    print(
        f"wrote {path} and .md: {len(proof.rows)} batches, {len(wrong)} wrong, "
        f"{len(proof.failures)} failures, {len(proof.left)} models left, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if wrong or proof.failures else 0


if __name__ == "__main__":
    sys.exit(main())
