"""Command-line options and checkpoints: parse values, refuse bad ones before any work starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from ..core.backend import BACKENDS
from ..core.files import is_file, kind_of_file, short
from ..core.problem import SHORT_NAMES, OwnFormat, parse_activation_format
from ..distributed.planner import LINKS
from ..errors import UnsupportedError, message, require
from ..formats.spec import MXFP4
from ..formats.weight_rounding import WeightRounding
from ..formats.weight_tensor import WeightFormatName
from ..integrations.checkpoints.safetensors_files import CONFIG_FILE, CheckpointReader, read_json
from ..moe.prepared_weights import check_keep_fp8
from ..routing.plan import TOKEN_MASK
from ..testing.problems import MODEL_SHAPES

FORMAT_NAMES = SHORT_NAMES
WEIGHT_NAMES: tuple[str, ...] = get_args(WeightFormatName)
"""Names of the formats of weights."""
FORMATS_HELP = (
    f"Activation formats, comma-separated: {', '.join(SHORT_NAMES.values())}; the "
    f"names {', '.join(SHORT_NAMES)} mean the same."
)
JSON_HELP = (
    "Write the machine-readable report to this file. With '-' it goes to standard output, "
    "and everything else to standard error."
)
JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help=JSON_HELP)]
Formats = Annotated[str, typer.Option("--format", "--formats", help=FORMATS_HELP)]
Tokens = Annotated[str, typer.Option(help="Token counts, comma-separated.")]
WeightFormat = Annotated[
    str, typer.Option(metavar="NAME", help=f"Weights: {', '.join(WEIGHT_NAMES)}.")
]
KeepFp8 = Annotated[
    bool,
    typer.Option(
        "--keep-fp8",
        help="Keep an FP8 copy of MXFP4 weights, for prefill in 8 or 4 bits on Hopper. Name "
        "--format without a16w4.",
    ),
]
Plan = Annotated[bool, typer.Option("--plan", help="Predict a layer over several GPUs, on paper.")]
Ranks = Annotated[str, typer.Option(help="With --plan: numbers of GPUs, a list or a range.")]
RanksToStart = Annotated[
    int | None,
    typer.Option(
        "--expert-parallel",
        metavar="N",
        help="Measure a layer over N GPUs: this command starts a process for each.",
    ),
]
LinkName = Annotated[str, typer.Option("--link", help=f"With --plan: {', '.join(LINKS)}.")]
DEFAULT_FORMATS = "a16w4,a8w4,a4w4"


def parse_numbers(text: str, command: str, option: str) -> list[int]:
    """A comma-separated list of positive integers, each at most the largest token count.

    >>> parse_numbers("1,16", "demo", "--tokens")
    [1, 16]
    """
    parts = [part.strip() for part in text.split(",")]
    valid = all(
        part.isascii()
        and part.isdigit()
        and len(part) <= len(str(TOKEN_MASK))
        and 0 < int(part) <= TOKEN_MASK
        for part in parts
    )
    require(
        valid,
        command,
        option,
        got=short(text),
        need=f"integers from 1 to {TOKEN_MASK}, separated by commas",
        remedy=f"for example {option} 1,16,128",
    )
    return [int(part) for part in parts]


def parse_choices(text: str, allowed: Sequence[str], command: str, option: str) -> list[str]:
    """A comma-separated list of names, each one of `allowed`.

    >>> parse_choices("gate_up,down", ["gate_up", "down", "layer"], "bench", "--stage")
    ['gate_up', 'down']
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        require(
            part in allowed, command, option, need=f"some of {','.join(allowed)}", got=short(part)
        )
    return list(dict.fromkeys(parts))


def parse_formats(text: str, command: str, option: str) -> list[OwnFormat]:
    """A comma-separated list of activation formats in either vocabulary, each once.

    >>> parse_formats("a16w4,mxfp8,a8w4-token", "bench", "--format")
    ['bf16', 'mxfp8', 'fp8_token']
    """
    found = []
    for part in (part.strip() for part in text.split(",")):
        try:
            found.append(parse_activation_format(part, command))
        except ValueError as error:
            raise ValueError(
                message(
                    command,
                    option,
                    f"some of {','.join(SHORT_NAMES.values())} or {','.join(SHORT_NAMES)}",
                    short(part),
                )
            ) from error
    return list(dict.fromkeys(found))


def check_weight_format(name: str, command: str) -> WeightFormatName:
    """Return the name of a --weight-format; refuse an unknown one.

    >>> check_weight_format("nvfp4", "bench")
    'nvfp4'
    """
    need = f"one of {', '.join(WEIGHT_NAMES)}"
    require(name in WEIGHT_NAMES, command, "--weight-format", need=need, got=short(name))
    return cast("WeightFormatName", name)


def check_rounding(name: str | None, command: str) -> WeightRounding | None:
    """Return the name of a --weight-rounding; refuse an unknown one.

    >>> check_rounding("e4m3", "inspect")
    'e4m3'
    """
    known = get_args(WeightRounding)
    need = f"one of {', '.join(known)}"
    fits = name is None or name in known
    require(fits, command, "--weight-rounding", need=need, got=short(str(name)))
    return cast("WeightRounding | None", name)


def check_backend(backend: str | None, command: str) -> None:
    """Refuse an unknown --backend."""
    require(
        backend is None or backend in BACKENDS,
        command,
        "--backend",
        need=f"one of {', '.join(sorted(BACKENDS))}",
        got=short(str(backend)),
    )


def check_copies(
    keep_fp8: bool,
    formats: Sequence[OwnFormat],
    weight_format: WeightFormatName,
    backend: str | None,
    command: str,
) -> None:
    """Refuse --keep-fp8 beside options with which no kernel would read a copy.

    >>> check_copies(True, ["mxfp8"], "mxfp4", None, "bench")
    >>> check_copies(True, ["mxfp8"], "mxfp4", "triton", "bench")
    Traceback (most recent call last):
    ValueError: bench: --keep-fp8 — need a backend that reads FP8 copies, got 'triton'; omit it
    """
    option, remedy = "--keep-fp8", "omit it"
    for name in formats:
        check_keep_fp8(keep_fp8, name, command, option)
    need, fits = "MXFP4 weights", not keep_fp8 or weight_format == MXFP4.name
    require(fits, command, option, need=need, got=weight_format, remedy=remedy)
    layout = None if backend is None else BACKENDS[backend].weight_layout
    fits = not keep_fp8 or backend is None or getattr(layout, "with_fp8", None) is not None
    need, got = "a backend that reads FP8 copies", repr(backend)
    require(fits, command, option, need=need, got=got, remedy=remedy)


def check_model(name: str, command: str) -> str:
    """Return the name of a --model; refuse an unknown one."""
    require(
        name in MODEL_SHAPES,
        command,
        "--model",
        need=f"one of {', '.join(MODEL_SHAPES)}",
        got=short(name),
        remedy=f"mxpert {command} --list-models says what each is",
    )
    return name


def models_table() -> str:
    """The named models: sizes, and which share of which model each is."""
    lines = [f"{'model':<19}{'E':>5}{'k':>4}{'H':>6}{'F':>6}  what it is"]
    for name, shape in MODEL_SHAPES.items():
        sizes = f"{shape.num_experts:>5}{shape.top_k:>4}"
        sizes += f"{shape.hidden_size:>6}{shape.intermediate_size:>6}"
        lines.append(f"{name:<19}{sizes}  {shape.about}")
    return "\n".join(
        [*lines, "E experts, k of them per token, hidden size H, intermediate size F."]
    )


def _list_models(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(models_table())
        raise typer.Exit


ListModels = Annotated[
    bool,
    typer.Option(
        "--list-models",
        is_eager=True,
        callback=_list_models,
        help="List the named models with their sizes, and exit.",
    ),
]


def open_folder(folder: Path, command: str, option: str) -> None:
    """Make the folder for reports, and refuse one that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            message(
                command,
                option,
                "a folder that can be written",
                f"{str(folder)!r}: {error.strerror}",
            )
        ) from error


def check_target(target: str | Path | None, command: str, option: str = "--json") -> None:
    """Refuse a file that could not be written; None and "-" are no files."""
    if target is None or target == "-":
        return
    path = Path(target)
    usable = path.parent.is_dir() and not path.is_dir()
    hint = ", or -" if option == "--json" else ""
    require(
        usable,
        command,
        option,
        need=f"a file in an existing directory{hint}",
        got=short(str(target)),
    )
    require(
        os.access(path if path.exists() else path.parent, os.W_OK),
        command,
        option,
        need=f"a file that can be written{hint}",
        got=short(str(target)),
    )


def check_checkpoint(directory: Path, command: str) -> None:
    """Refuse a checkpoint directory that is damaged, by its headers; reads no weights.

    Raises:
        ValueError: no directory, a pipe or a device in it, a config.json or index that cannot be
            read, or a missing or truncated shard.
    """
    require(
        directory.is_dir(),
        command,
        str(directory),
        need="a checkpoint directory",
        got="none" if not directory.exists() else "a file",
    )
    for entry in sorted(directory.iterdir()):
        require(
            is_file(entry) or entry.is_dir() or not entry.exists(),
            command,
            str(entry),
            need="regular files in a checkpoint",
            got=kind_of_file(entry),
        )
    config = read_json(directory / CONFIG_FILE, command)
    quantization = config.get("quantization_config")
    require(
        quantization is None or isinstance(quantization, dict),
        command,
        f"{directory / CONFIG_FILE}: quantization_config",
        need="a JSON object",
        got=short(quantization),
    )
    if any(directory.glob("*.safetensors*")):
        CheckpointReader(directory, command).check_files()


@contextmanager
def reading(directory: Path, command: str) -> Iterator[None]:
    """Inside, other libraries read a checkpoint: what they raise becomes one line about it."""
    try:
        yield
    except Exception as error:
        if " — " in str(error) or isinstance(error, UnsupportedError | MemoryError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            message(
                command,
                str(directory),
                "a checkpoint that can be loaded",
                reason[:300],
                "it may be damaged: download it again",
            )
        ) from error
