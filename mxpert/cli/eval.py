"""`mxpert eval`: what MXFP4 and narrow activations cost a checkpoint, on a text of yours."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..core.files import is_file, kind_of_file
from ..errors import message, require, require_device
from ..integrations.checkpoints.hub import local_checkpoint
from ..integrations.checkpoints.safetensors_files import CONFIG_FILE
from ..integrations.models.convert import restore
from ..integrations.models.evaluation import (
    DEFAULT_FORMATS,
    DEFAULT_WEIGHTS,
    ROUNDED,
    EvalReport,
    evaluate,
)
from .main import missing_package, quiet_imports
from .options import (
    FORMATS_HELP,
    WEIGHT_NAMES,
    JsonFile,
    check_checkpoint,
    check_target,
    parse_choices,
    parse_formats,
    reading,
)
from .plots import INK, NO_LINE, figure, has_matplotlib, line_style, save, styled
from .report import (
    Column,
    environment,
    make_console,
    print_table,
    progress,
    result_console,
    write_report,
)

EVAL_WEIGHTS = (*WEIGHT_NAMES, ROUNDED)
NUM_BYTES = 256
MAX_SIZE = 1 << 40
MOST_LEVEL_NAMES = 6
"""More names of formats stand upright below a plot, and their legend beside it."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)


Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Directory of a causal-LM MoE checkpoint, or its id on the Hugging Face Hub: "
        "bf16, gpt-oss's MXFP4, or one that mxpert wrote.",
        show_default=False,
    ),
]


EvalFormats = Annotated[
    str,
    typer.Option(
        "--format",
        "--formats",
        help=f"{FORMATS_HELP} The unquantised model is always there to compare with.",
    ),
]
EvalWeights = Annotated[
    str,
    typer.Option(
        "--weight-format",
        help=f"Formats of the experts, comma-separated, each with every format of activations: "
        f"{', '.join(EVAL_WEIGHTS)}. The last one is NVFP4 rounded to one e4m3 a weight.",
    ),
]


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    text: Annotated[Path, typer.Option(help="UTF-8 text to read.", show_default=False)],
    formats: EvalFormats = ",".join(DEFAULT_FORMATS),
    weight_formats: EvalWeights = ",".join(DEFAULT_WEIGHTS),
    context: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    max_tokens: Annotated[
        int, typer.Option(min=2, max=MAX_SIZE, help="Read at most so many tokens of the text.")
    ] = 32768,
    batch: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Windows per forward pass.")] = 8,
    device: Annotated[
        str, typer.Option(help="Where to run; 'auto' is the GPU where there is one.")
    ] = "auto",
    as_bytes: Annotated[
        bool,
        typer.Option(
            "--bytes", help="Bytes are the token ids. Default for a checkpoint without a tokenizer."
        ),
    ] = False,
    json_to: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a PNG here: loss by format, SQNR by layer."),
    ] = None,
) -> None:
    """Compare loss and perplexity of a checkpoint in bf16, a16w4, a8w4 and a4w4 on one text.

    'Δ loss' is the loss minus bf16's on the same windows, with its standard error. Where it is
    below twice that error, the format is as good as bf16 on this text. 'bf16xnvfp4' are bf16
    activations with NVFP4 experts. 'SQNR' is the ratio of
    signal to quantisation noise in the worst layer. For an MXFP4 checkpoint 'bf16' means the
    dequantised weights. The table goes to standard output; files are written for --json and --plot
    only.

    Examples:
        mxpert eval ./mixtral-bf16 --text wiki.txt
        mxpert eval ./gpt-oss-20b --text wiki.txt --format a8w4,a4w4
        mxpert eval ./mixtral-bf16 --text wiki.txt --format a16w4 --weight-format nvfp4,int4_g32
        mxpert eval ./mixtral-bf16 --text wiki.txt --json eval.json --plot eval.png
    """
    names = parse_formats(formats, "eval", "--format")
    weights = parse_choices(weight_formats, EVAL_WEIGHTS, "eval", "--weight-format")
    check_target(json_to, "eval")
    _check_files(text, plot)
    folder = local_checkpoint(checkpoint, "eval")
    name = checkpoint.name if folder == checkpoint else str(checkpoint)  # an id as it was given
    check_checkpoint(folder, "eval")
    _require_transformers()
    target = require_device(
        device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
        "eval",
        "--device",
    )
    ids, model = load(folder, text, as_bytes=as_bytes, limit=max_tokens, context=context)
    with progress(make_console(stderr=True), "eval") as advance:
        report = evaluate(
            model.to(target),
            ids.to(target),
            formats=names,
            weight_formats=weights,
            context=context,
            batch=batch,
            on_progress=advance,
        )
    print_report(report, name, json_to)
    names_of = {"kind": "eval", "checkpoint": name, "text": text.name}
    write_report(json_to, {**names_of, "environment": environment(target), **report.as_json()})
    if plot is not None:
        draw(plot, report, name)


def _require_transformers() -> None:
    """Refuse in one line where Transformers cannot be imported."""
    try:
        with quiet_imports():
            importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), "eval") from error


def _check_files(text: Path, plot: Path | None) -> None:
    """Refuse a text or a PNG that cannot be used."""
    require(is_file(text), "eval", str(text), need="a text file", got=kind_of_file(text))
    if plot is not None:
        remedy, got = "pip install matplotlib", "no such package"
        require(has_matplotlib(), "eval", "--plot", need="matplotlib", got=got, remedy=remedy)
        check_target(plot, "eval", "--plot")


def load(
    checkpoint: Path, text: Path, *, as_bytes: bool, limit: int, context: int
) -> tuple[torch.Tensor, Any]:
    """Token ids of at least one window, and the model with dense experts."""
    with reading(checkpoint, "eval"), quiet_imports():
        ids = read_tokens(checkpoint, text, as_bytes=as_bytes, limit=limit)
        require(
            len(ids) >= context,
            "eval",
            str(text),
            need=f"at least {context} tokens",
            got=len(ids),
            remedy="give a longer text or a smaller --context",
        )
        return ids, load_dense(checkpoint)


def read_tokens(checkpoint: Path, text: Path, *, as_bytes: bool, limit: int) -> torch.Tensor:
    """Token ids of a text, int64 [S]: by the checkpoint's tokenizer, else bytes."""
    vocabulary = _vocabulary(checkpoint)
    content = read_text(text)
    has_tokenizer = any((checkpoint / name).exists() for name in _TOKENIZER_FILES)
    if as_bytes or not has_tokenizer:
        require(
            vocabulary >= NUM_BYTES,
            "eval",
            str(checkpoint),
            got=f"{vocabulary} tokens",
            need=f"a tokenizer, or a vocabulary of the {NUM_BYTES} bytes",
            remedy="put the model's tokenizer files beside its weights",
        )
        return torch.frombuffer(bytearray(content.encode("utf-8")), dtype=torch.uint8)[:limit].to(
            torch.int64
        )
    # A token has one character at least, bar a few special ones: more text would be cut off anyway.
    from transformers import AutoTokenizer  # not needed for --help and mistakes

    tokens = AutoTokenizer.from_pretrained(checkpoint)(content[: 16 * limit])["input_ids"]
    largest = max(tokens, default=0)
    require(
        largest < vocabulary,
        "eval",
        str(checkpoint),
        got=f"token {largest}",
        need=f"a tokenizer of the model's {vocabulary} tokens",
        remedy="put the model's own tokenizer files beside its weights",
    )
    return torch.tensor(tokens[:limit], dtype=torch.int64)


def read_text(text: Path) -> str:
    """The content of the text file; what is wrong with it is said of it, not of the checkpoint."""
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(message("eval", str(text), "UTF-8 text", error)) from error
    except OSError as error:
        got = error.strerror or str(error)
        raise ValueError(message("eval", str(text), "a file that can be read", got)) from error
    remedy = "name a text of a few thousand words"
    require(bool(content.strip()), "eval", str(text), need="text", got="none", remedy=remedy)
    return content


def load_dense(checkpoint: Path) -> Any:
    """The model in bfloat16 with dense experts, on the CPU; MXFP4 experts dequantised."""
    from transformers import AutoModelForCausalLM  # not needed for --help and mistakes

    from ..integrations.transformers import NAME

    config = _config(checkpoint)
    quantised = getattr(config, "quantization_config", None) is not None
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, experts_implementation=NAME if quantised else None
    )
    return restore(model) if quantised else model


def _config(checkpoint: Path) -> Any:
    require(
        (checkpoint / CONFIG_FILE).is_file(),
        "eval",
        str(checkpoint),
        need=f"a checkpoint with {CONFIG_FILE}",
        got="none",
    )
    from transformers import AutoConfig  # not needed for --help and mistakes
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoConfig.from_pretrained(checkpoint)


def _vocabulary(checkpoint: Path) -> int:
    return int(_config(checkpoint).get_text_config().vocab_size)


def print_report(report: EvalReport, title: str, json_to: str | None) -> None:
    """The table."""
    rows = []
    for result in report.formats:
        ratios = [layer.sqnr_db.get(result.name) for layer in report.layers]
        worst = min((ratio for ratio in ratios if ratio is not None), default=None)
        error = "" if result.delta_error is None else f" ± {result.delta_error:.4f}"
        rows.append(
            [
                result.name,
                f"{result.loss:.4f}",
                f"{result.perplexity:.3f}",
                "–" if result.name == "bf16" else f"{result.delta:+.4f}{error}",
                "–" if worst is None else f"{worst:.1f} dB",
            ]
        )
    print_table(
        result_console(json_to),
        f"{title}: {report.tokens} tokens in {report.windows} windows of {report.context}",
        ["format", "loss", Column("perplexity", 1), "Δ loss", Column("worst layer's SQNR", 2)],
        rows,
    )


@styled
def draw(path: Path, report: EvalReport, title: str) -> None:
    """Δ loss with error bars beside the SQNR of each layer, as PNG."""
    drawing, ((left, right),) = figure(f"{title}: {report.tokens} tokens", 1, 2)
    for index, result in enumerate(report.formats[1:]):
        left.errorbar(
            result.name,
            result.delta,
            yerr=2 * (result.delta_error or 0.0),
            capsize=5,
            **line_style(index, dash=NO_LINE, size=8),
        )
        values = [layer.sqnr_db[result.name] for layer in report.layers]
        right.plot(
            range(len(values)),
            [float("nan") if v is None else v for v in values],
            label=result.name,
            **line_style(index),
        )
    left.axhline(0, color=INK, linewidth=0.8)
    left.margins(x=0.2)
    place: dict[str, Any] = {}  # of the legend, as matplotlib takes it
    if len(report.formats) > MOST_LEVEL_NAMES:
        left.tick_params(axis="x", labelrotation=90)
        drawing.set_figheight(1.6 * drawing.get_figheight())
        place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "fontsize": "small"}
    left.grid(axis="y")
    left.set(
        ylabel="loss − bf16's, nats per token (bars: 2 standard errors)",
        title=f"bf16: {report.formats[0].loss:.4f}",
    )
    right.set(xlabel="MoE layer", ylabel="SQNR of the experts' output, dB")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid()
    right.legend(**place)
    save(drawing, path)
