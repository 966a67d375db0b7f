"""A gpt-oss-20b-sized model through Transformers: decode and prefill under mxpert and without it.

    python -m benchmarks.models.run --output benchmarks/results/nvidia-h200/models.json
    python -m benchmarks.models.render benchmarks/results/nvidia-h200/models.json

One model with random weights (the published config, 24 layers) is built on the device. Its experts
are quantised once; the dense implementations get the dequantised weights, so that all of them
compute the same function. Each is gated first, then timed: tokens/s of `generate` as a user calls
it, of the decode step in a CUDA graph, and of a long prefill, with the MoE blocks' share.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import transformers
from transformers import GptOssConfig, GptOssForCausalLM

import mxpert
from benchmarks.harness.document import FACTS, Document, Row
from benchmarks.harness.script import Script, machine
from benchmarks.models.peer import TransformersMXFP4
from benchmarks.models.rows import KEY_COLUMNS, SCHEMA, make_row
from benchmarks.models.timing import StepClock, graph_step, moe_milliseconds, steps, timed_forward
from mxpert.integrations.models.convert import mx_experts
from mxpert.integrations.models.expert_modules import MXExperts
from mxpert.testing.noise import sqnr_floor_db
from mxpert.testing.numerics import cosine
from mxpert.testing.timing import read_bandwidth

PROMPT = 32
GATE_TOKENS = 64
LAYER_COSINE = 0.9999
NOISE_MARGIN_DB = 1.0
"""Below the floor that holds for Gaussian data: this model's normalised rows are nearly that."""


@dataclass(frozen=True)
class Variant:
    """One implementation of the experts; `activation` is None for dense weights.

    Without `computes` it returns its input: what remains is the time of everything else.
    """

    impl: str
    format: str
    activation: str | None = None
    graph: bool = True
    computes: bool = True

    def __str__(self) -> str:
        return f"{self.impl} {self.format}"


EAGER = Variant("transformers", "eager", graph=False)  # the host reads which experts are hit
VARIANTS = (
    Variant("mxpert", "a16w4", "bf16"),
    Variant("transformers", "grouped_mm"),
    Variant("mxpert", "a8w4", "mxfp8"),
    Variant("transformers", "mxfp4"),
    EAGER,
    Variant("no", "experts", computes=False),
)


class NoExperts(torch.nn.Module):
    """In place of a layer's experts; it returns the hidden states that it gets."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


@dataclass
class Bench:
    """The model, its two sets of experts, and what was measured so far."""

    model: Any
    converted: list[MXExperts]
    peer: TransformersMXFP4 | str
    document: Document
    deadline: float

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The MoE blocks: router and experts."""
        return [experts.source.places[0][0] for experts in self.converted]

    def save(self) -> None:
        SCHEMA.validate(self.document.as_json())
        self.document.save()


_NO_TOKENS: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def published_config(layers: int) -> GptOssConfig:
    """gpt-oss-20b as published, with `layers` decoder layers."""
    return GptOssConfig(num_hidden_layers=layers, num_local_experts=32, **_NO_TOKENS)


def tiny_config() -> GptOssConfig:
    """Two layers that a CPU runs in a second."""
    return GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=128,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        **_NO_TOKENS,
    )


@torch.no_grad()
def build(config: GptOssConfig, device: torch.device) -> tuple[Any, list[MXExperts]]:
    """The model with its converted experts in place; the dense ones hold the same values."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.normal_()
        elif name.endswith("router.weight"):  # logits with a deviation of 2 route decisively
            parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
        elif ".experts." in name:
            wide = name.endswith("bias")
            parameter.normal_(std=0.1 if wide else parameter.shape[-2] ** -0.5)
    mxpert.convert(model, progress=False)
    converted = mx_experts(model)
    for experts in converted:
        for name, parameter in experts.restored().items():
            experts.source.module.register_parameter(name, parameter.requires_grad_(False))
    return model, converted


def use(bench: Bench, variant: Variant) -> None:
    """Hang one implementation under the model.

    Raises:
        RuntimeError: it is absent here.
    """
    for block in bench.blocks:
        block.__dict__.pop("forward", None)  # Transformers' MXFP4 path replaces it
    if not variant.computes:
        for experts in bench.converted:
            experts.source.replace_by(NoExperts())
    elif variant.format == "mxfp4":
        if isinstance(bench.peer, str):
            raise RuntimeError(bench.peer)
        bench.peer.install(bench.converted)
    elif variant.activation is None:
        bench.model.set_experts_implementation(variant.format)
        for experts in bench.converted:
            experts.source.replace_by(experts.source.module)
    else:
        for experts in bench.converted:
            experts.activation_format = variant.activation
            experts.source.replace_by(experts)


@dataclass(frozen=True)
class Truth:
    """Transformers' eager answers: arguments and result of each layer's experts, and logits."""

    ids: torch.Tensor
    calls: list[tuple[Any, torch.Tensor]]
    logits: torch.Tensor


@torch.no_grad()
def eager_truth(bench: Bench) -> Truth:
    use(bench, EAGER)
    calls: list[tuple[Any, torch.Tensor]] = []
    handles = [
        experts.source.module.register_forward_hook(
            lambda module, given, result: calls.append((given, result))
        )
        for experts in bench.converted
    ]
    ids = random_ids(bench, 1, GATE_TOKENS)
    logits = bench.model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return Truth(ids, calls, logits)


@torch.no_grad()
def gate(bench: Bench, variant: Variant, truth: Truth) -> dict[str, float | None]:
    """Cosines to eager of each layer's output for eager's input, and of the logits.

    Both are None for a model without experts.

    Raises:
        RuntimeError: the worst layer, or for a path of another form the logits, are too far off.
    """
    if not variant.computes:
        return {"layer_cosine": None, "logits_cosine": None}
    logits = cosine(bench.model(truth.ids, use_cache=False).logits, truth.logits)
    if variant.format == "mxfp4":  # its experts take other arguments
        if logits < 0.99:
            raise RuntimeError(f"red: logits cosine {logits:.6f}")
        return {"layer_cosine": None, "logits_cosine": logits}
    modules = [experts.source.current for experts in bench.converted]
    layer = min(
        cosine(module(*given), result)
        for module, (given, result) in zip(modules, truth.calls, strict=True)
    )
    least = LAYER_COSINE
    if variant.activation not in (None, "bf16"):
        noise = 10 ** (-(sqnr_floor_db(variant.activation) - NOISE_MARGIN_DB) / 10)
        least = 1 - noise / 2
    if layer < least:
        raise RuntimeError(f"red: layer cosine {layer:.6f}, need {least:.6f}")
    return {"layer_cosine": layer, "logits_cosine": logits}


def random_ids(bench: Bench, batch: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * tokens)
    ids = torch.randint(bench.model.config.vocab_size, (batch, tokens), generator=generator)
    return ids.to(bench.device)


@torch.no_grad()
def decode_greedily(bench: Bench, batch: int, new_tokens: int, **options: Any) -> StepClock:
    """Run `generate` greedily after a random prompt, with further options; return its clock."""
    ids = random_ids(bench, batch, PROMPT)
    clock = StepClock(bench.device)
    bench.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        stopping_criteria=[clock],
        **options,
    )
    return clock


def time_generate(bench: Bench, batch: int, new_tokens: int) -> dict[str, float]:
    """Decode steps of `generate` with its defaults: median step, and the MoE blocks' part of it."""
    decode_greedily(bench, batch, 3)
    found = decode_greedily(bench, batch, new_tokens).steps()
    with moe_milliseconds(bench.blocks, bench.device) as per_pass:
        hooked = decode_greedily(bench, batch, 6).steps()
    inside = steps(per_pass()[1:])  # the first pass is the prompt
    return found | {"moe_ms": inside["ms"], "step_ms_hooked": hooked["ms"]}


def time_static(bench: Bench, batch: int, new_tokens: int) -> dict[str, float]:
    """Decode steps of `generate` with a static cache, compiled and captured before they count.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: torch would run the step without compiling it.
    """
    torch._dynamo.reset()  # code compiled for another implementation counts towards a limit
    cache = dict(cache_implementation="static", max_cache_len=PROMPT + new_tokens)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(2):
            decode_greedily(bench, batch, 4, **cache)
        return decode_greedily(bench, batch, new_tokens, **cache).steps()


@torch.no_grad()
def time_prefill(bench: Bench, tokens: int, repeats: int) -> dict[str, float]:
    ids = random_ids(bench, 1, tokens)

    def run() -> object:
        return bench.model(ids, use_cache=False, logits_to_keep=1)

    run()
    with moe_milliseconds(bench.blocks, bench.device) as per_pass:
        found = timed_forward(run, bench.device, repeats)
    return found | {"moe_ms": steps(per_pass())["ms"], "step_ms_hooked": found["ms"]}


Measurement = tuple[str, str, int, int, Callable[[], dict[str, float]]]


def measurements(bench: Bench, variant: Variant, options: argparse.Namespace) -> list[Measurement]:
    """(phase, mode, batch, tokens, what gives the times)."""
    prefill, new_tokens, repeats = options.prefill, options.new_tokens, options.repeats

    def generate(batch: int) -> dict[str, float]:
        return time_generate(bench, batch, new_tokens)

    def graph(batch: int) -> dict[str, float]:
        return graph_step(bench.model, bench.blocks, random_ids(bench, batch, PROMPT), repeats)

    def static(batch: int) -> dict[str, float]:
        return time_static(bench, batch, new_tokens)

    modes = [("generate", generate, options.batches)]
    if variant.graph:
        modes += [("graph", graph, options.batches), ("static", static, options.static)]
    found: list[Measurement] = [
        ("decode", mode, batch, PROMPT, functools.partial(work, batch))
        for mode, work, batches in modes
        for batch in batches
    ]
    passes = functools.partial(time_prefill, bench, prefill, repeats)
    found.insert(len(options.batches), ("prefill", "forward", 1, prefill, passes))
    return found


def measure(bench: Bench, variant: Variant, truth: Truth, options: argparse.Namespace) -> None:
    """Gate one implementation, then take its measurements; failures are noted and skipped."""
    document = bench.document
    try:
        use(bench, variant)
        cosines = gate(bench, variant, truth)
    except Exception as error:
        document.fail((str(variant),), error)
        return
    for phase, mode, batch, tokens, work in measurements(bench, variant, options):
        name = f"{variant} {phase} {mode} batch {batch}"
        if time.monotonic() > bench.deadline:
            document.fail((name,), "not measured: the time limit was reached")
            continue
        try:
            times = work()
        except Exception as error:
            document.fail((name,), error)
            traceback.print_exc()
            continue
        place = variant.impl, variant.format, phase, mode, batch, tokens
        row = make_row(*place, times, cosines)
        document.add(row)
        share = "" if row["moe_share"] is None else f", MoE share {row['moe_share']:.2f}"
        text = "{ms:.2f} ms, {tokens_per_s:.0f} tokens/s" + share
        print(f"{name}: {text.format(**row)}", flush=True)
        bench.save()


PROTOCOL = {
    "generate": f"model.generate with its defaults after a prompt of {PROMPT} tokens, "
    "greedy; ms is the median time between two decode steps",
    "static": "model.generate with cache_implementation='static', compiled and captured before",
    "graph": "one decode step on a static cache in a CUDA graph, replayed; MoE blocks "
    "replayed alone on the same inputs",
    "forward": "one forward pass without a cache, Transformers' eager attention",
    "moe": "router and experts; in generate and forward from events around each block "
    "of a further pass (share of that pass), host gaps included",
    "no experts": "experts that return their input: the time of everything else, not gated",
}


def make_meta(options: argparse.Namespace, config: GptOssConfig) -> Row:
    """On what, when and how it is measured."""
    model = {
        "name": "gpt-oss-20b config, random weights",
        "layers": config.num_hidden_layers,
        "experts": config.num_local_experts,
        "top_k": config.num_experts_per_tok,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }
    rate = read_bandwidth(options.device) / 1e12
    return machine(options, *FACTS, read_tbs=rate, model=model, protocol=PROTOCOL)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    names, add = [str(variant) for variant in VARIANTS], parser.add_argument
    add("--layers", type=int, default=24)
    numbers = dict(type=lambda text: [int(part) for part in text.split(",")])
    add("--batches", default=[1, 8, 64], **numbers)
    add("--prefill", type=int, default=8192, help="tokens of the prefill")
    add("--new-tokens", type=int, default=20)
    add("--repeats", type=int, default=5)
    text = "batches of generate with a static cache; each compiles for a minute; default: none"
    add("--static", default=[], metavar="BATCHES", help=text, **numbers)
    add("--impl", nargs="+", choices=names, default=names)


def make_bench(options: argparse.Namespace) -> Bench:
    """The model on its device, and an empty document."""
    transformers.utils.logging.set_verbosity_error()
    config = tiny_config() if options.dry_run else published_config(options.layers)
    model, converted = build(config, options.device)
    seconds = time.monotonic() - options.began
    print(f"built {config.num_hidden_layers} layers in {seconds:.0f} s")
    meta = make_meta(options, config)
    document = Document(options.path, meta, KEY_COLUMNS, saves_left=False)
    return Bench(model, converted, TransformersMXFP4.load(), document, options.deadline)


def run(options: argparse.Namespace, _: None) -> int:
    """Measure and write; 1 if no implementation of ours passed its gate."""
    if options.dry_run:
        options.batches, options.prefill, options.new_tokens, options.repeats = [1, 2], 48, 6, 2
    bench = make_bench(options)
    truth, document = eager_truth(bench), bench.document
    for variant in VARIANTS:
        if str(variant) in options.impl:
            measure(bench, variant, truth, options)
    bench.save()
    for (name,), text in document.failures.items():
        print(f"{name}: {text}", file=sys.stderr)
    print(f"wrote {document.path} after {time.monotonic() - options.began:.0f} s")
    return 0 if any(row["impl"] == "mxpert" for row in document.rows.values()) else 1


SCRIPT = Script("models", __doc__, run, add_options=add_options, limit=150.0)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
