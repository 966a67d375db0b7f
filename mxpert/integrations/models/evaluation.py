"""Loss of one model on the same text in bf16 and in quantised formats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...core.problem import SHORT_NAMES, OwnFormat, parse_activation_format
from ...errors import message, require, require_tensor
from ...formats.spec import MXFP4
from ...formats.weight_tensor import NVFP4, parse_weight_format
from .convert import convert, mx_experts, restore
from .experts import FoundExperts, find_experts

BASELINE = "bf16"
DEFAULT_FORMATS = ("a16w4", "a8w4", "a4w4")
DEFAULT_WEIGHTS = ("mxfp4",)
ROUNDED = "nvfp4-e4m3"
"""NVFP4 rounded to one e4m3 a weight."""

ProgressCallback = Callable[[int, int, str], None]
"""Called with (tokens done, tokens in all, what is being done)."""

_Call = tuple[tuple[torch.Tensor, ...], torch.Tensor]


@dataclass(frozen=True)
class FormatResult:
    """Loss of the text in one format.

    Args:
        name: "bf16", "a16w4", …; with other weights than MXFP4 "bf16xnvfp4", …
        loss: mean cross entropy per predicted token, in nats.
        delta: loss minus the loss in bf16; 0 for bf16 itself.
        delta_error: standard error of `delta` over windows, of the paired differences; None for a
            single window.
        tokens_per_second: of the forward passes, without warm-up.
    """

    name: str
    loss: float
    delta: float
    delta_error: float | None
    tokens_per_second: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True)
class LayerResult:
    """Signal-to-quantisation-noise ratio of one layer's experts by format, in dB; None if exact."""

    name: str
    sqnr_db: dict[str, float | None]


@dataclass(frozen=True)
class EvalReport:
    """Outcome of `evaluate`.

    Args:
        tokens: number of predicted tokens.
        windows: number of windows. context: tokens per window.
        formats: results by format, bf16 first. layers: in the model's order.
    """

    tokens: int
    windows: int
    context: int
    formats: list[FormatResult]
    layers: list[LayerResult]

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        for entry, found in zip(content["formats"], self.formats, strict=True):
            entry["perplexity"] = found.perplexity
        return content


def evaluate(
    model: torch.nn.Module,
    token_ids: torch.Tensor,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    weight_formats: Sequence[str] = DEFAULT_WEIGHTS,
    context: int = 512,
    batch: int = 8,
    on_progress: ProgressCallback | None = None,
) -> EvalReport:
    """Loss and per-layer SQNR of a causal language model in bf16 and in quantised formats.

    The text is cut into windows of `context` tokens without overlap; a rest that does not fill a
    window is left out. In each window every token but the first is predicted. All formats read the
    same windows. A layer's SQNR compares its experts' output with bf16's for the same input and
    routing (those of the first window), so that it leaves out the errors of earlier layers.

    Args:
        model: an unconverted model with dense experts. It is converted in place and stays in the
            last of `formats`.
        token_ids: int64 [S] on the device of the model.
        formats: names of activation formats, as `fused_moe` takes them; the report uses the short
            ones ("a8w4" for "mxfp8").
        weight_formats: formats of the experts, each with all of `formats`: names as `convert` takes
            them, and "nvfp4-e4m3", NVFP4 rounded by `MoEWeights.round_weights`. The report says
            "bf16xnvfp4" for bf16 activations with NVFP4, and the short name with MXFP4. With
            several, a copy of the dense experts stays in CPU memory.
        context: tokens per window. batch: windows per forward pass.
        on_progress: called after each forward pass.

    Returns:
        EvalReport.

    Raises:
        ValueError: an unknown format, or a text that fills no window. TypeError, UnsupportedError:
            as `convert`.

    Example:
        >>> import transformers
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = transformers.MixtralForCausalLM(config)
        >>> report = evaluate(model, torch.arange(256), context=32)
        >>> [result.name for result in report.formats], report.tokens
        (['bf16', 'a16w4', 'a8w4', 'a4w4'], 248)
    """
    op = "evaluate"
    windows = _windows(token_ids, context, op)
    pairs = _pairs(parse_formats(formats, op), weight_formats, op)
    require(batch > 0, op, "batch", need="at least 1", got=batch)
    found = find_experts(model, op)
    names = [experts.name for experts in found]
    total, done = windows.numel() * (1 + len(pairs)), 0
    losses: dict[str, torch.Tensor] = {}
    seconds: dict[str, float] = {}
    model.eval()
    calls = _capture(model, found, windows[:1])
    sqnr: list[dict[str, float | None]] = [{} for _ in names]
    kept = _copies(found) if len(dict.fromkeys(weight_formats)) > 1 else []
    held = None
    for name, pair in {BASELINE: None, **pairs}.items():
        if pair is not None:
            _convert_to(model, pair, held, kept)
            held = pair[1]
            for entry, experts, call in zip(sqnr, mx_experts(model), calls, strict=True):
                entry[name] = _sqnr_db(experts, call)
        begin = time.perf_counter()
        losses[name] = torch.empty(len(windows), dtype=torch.float64)
        for start in range(0, len(windows), batch):
            part = windows[start : start + batch]
            losses[name][start : start + batch] = _window_losses(model, part)
            done += part.numel()
            if on_progress is not None:
                on_progress(done, total, name)
        seconds[name] = time.perf_counter() - begin
    results = [_result(name, losses, windows.numel() / seconds[name]) for name in losses]
    layers = [LayerResult(name, entry) for name, entry in zip(names, sqnr, strict=True)]
    return EvalReport(windows.shape[0] * (context - 1), len(windows), context, results, layers)


def _pairs(
    formats: Sequence[str], weight_formats: Sequence[str], op: str
) -> dict[str, tuple[OwnFormat, str]]:
    """Formats of activations and weights by the name that the report has for both."""
    need, got = "a list of names", repr(weight_formats)
    fits = not isinstance(weight_formats, str) and bool(weight_formats)
    require(fits, op, "weight_formats", need=need, got=got)
    pairs: dict[str, tuple[OwnFormat, str]] = {}
    for weight in weight_formats:
        if weight != ROUNDED:
            weight = parse_weight_format(weight, op, "weight_formats").name
        for name in formats:
            own = parse_activation_format(name, op)
            pairs[name if weight == MXFP4.name else f"{own}x{weight}"] = own, weight
    return pairs


_Copies = list[dict[str, torch.Tensor]]


def _copies(found: list[FoundExperts]) -> _Copies:
    """The dense weights of all layers in CPU memory, by name."""
    return [
        {name: value.detach().cpu().clone() for name, value in each.module.named_parameters()}
        for each in found
    ]


def _convert_to(
    model: torch.nn.Module, pair: tuple[OwnFormat, str], held: str | None, kept: _Copies
) -> None:
    """Bring a model whose experts are in the format `held`, or dense, into another one."""
    activation, weight = pair
    if weight == held:
        convert(model, activation, progress=False)
        return
    if held is not None:
        restore(model)
        with torch.no_grad():
            for experts, dense in zip(find_experts(model, "evaluate"), kept, strict=True):
                for name, value in experts.module.named_parameters():
                    value.copy_(dense[name])
    stored: Any = NVFP4.name if weight == ROUNDED else weight  # names of convert
    convert(model, activation, weight_format=stored, progress=False)
    if weight == ROUNDED:
        for module in mx_experts(model):
            rounded = module.weights.unprepare().round_weights("e4m3")
            module._hold(rounded.prepare(device=module.weights.device))


def parse_formats(formats: Sequence[str], op: str) -> list[str]:
    """The short names of activation formats, each once.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> parse_formats(["mxfp8", "a4w4", "a8w4"], "evaluate")
        ['a8w4', 'a4w4']
    """
    require(not isinstance(formats, str), op, "formats", need="a list of names", got=repr(formats))
    return list(
        dict.fromkeys(SHORT_NAMES[parse_activation_format(name, op, "formats")] for name in formats)
    )


def _windows(token_ids: torch.Tensor, context: int, op: str) -> torch.Tensor:
    """[W, context]."""
    require_tensor(token_ids, op, "token_ids", dtype=torch.int64, shape=(None,))
    require(context > 1, op, "context", need="at least 2 tokens", got=context)
    count = token_ids.shape[0] // context
    require(
        count > 0,
        op,
        "token_ids",
        need=f"at least one window of {context} tokens",
        got=f"{token_ids.shape[0]} tokens",
        remedy="give a longer text or a shorter context",
    )
    return token_ids[: count * context].view(count, context)


@torch.no_grad()
def _window_losses(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each window, float64 [W] on the CPU.

    Only one window's logits are in float32 at a time.
    """
    logits = _forward(model, windows)
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1].float(), ids[1:])
        for rows, ids in zip(logits, windows, strict=True)
    ]
    return torch.stack(losses).double().cpu()


def _forward(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids, use_cache=False) if hasattr(model, "config") else model(ids)
    logits: torch.Tensor = getattr(output, "logits", output)
    require(
        logits.dim() == 3 and logits.shape[:2] == ids.shape,
        "evaluate",
        "model",
        need="logits [B, S, V]",
        got=list(logits.shape),
    )
    return logits


@contextmanager
def _hooks(model: torch.nn.Module, names: list[str], calls: list[_Call]) -> Iterator[None]:
    def keep(
        module: torch.nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor
    ) -> None:
        calls.append((given, result))

    handles = [model.get_submodule(name).register_forward_hook(keep) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _capture(
    model: torch.nn.Module, found: list[FoundExperts], windows: torch.Tensor
) -> list[_Call]:
    """Arguments and result of each experts module for these windows, as mxpert's are called."""
    names = [experts.name for experts in found]
    calls: list[_Call] = []
    with _hooks(model, names, calls):
        _forward(model, windows)
    if len(calls) != len(names):
        raise ValueError(
            message(
                "evaluate",
                "model",
                f"{len(names)} experts modules called once in a forward pass",
                f"{len(calls)} calls",
            )
        )
    return [each.routed(*call) for each, call in zip(found, calls, strict=True)]


@torch.no_grad()
def _sqnr_db(experts: torch.nn.Module, call: _Call) -> float | None:
    """``10 log10(sum y^2 / sum (y - y')^2)``; None without noise or signal."""
    arguments, expected = call
    expected = expected.double()
    noise = float((experts(*arguments).double() - expected).square().sum())
    signal = float(expected.square().sum())
    return 10 * math.log10(signal / noise) if signal and noise else None


def _result(name: str, losses: dict[str, torch.Tensor], rate: float) -> FormatResult:
    difference = losses[name] - losses[BASELINE]
    error = None
    if len(difference) > 1:
        error = float(difference.std() / math.sqrt(len(difference)))
    return FormatResult(name, float(losses[name].mean()), float(difference.mean()), error, rate)
