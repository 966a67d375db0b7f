"""The `mxpert` command; each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..core.files import NO_ROOM
from ..core.interrupts import EXIT_INTERRUPTED, INTERRUPTED, raising
from ..errors import UnsupportedError, message
from .streams import discard, readers_may_go

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EXIT_USER_ERROR, EXIT_DEFECT = 2, 3
EXIT_CODES = """Exit codes: 0 success; 1 a check failed; 2 bad input, or something this machine
lacks, said in one line; 3 a defect of mxpert, with its traceback; 130 interrupted."""
EXAMPLES = "Examples:"
"""Starts the last part of a command's docstring: a line for each example."""
_TABLE_WIDTH = 80
_MESSAGE_MARK = " — "  # the library's own messages have it, and say all there is to say


@dataclass(frozen=True)
class _Lazy:
    """Where a command's function lives, and what `mxpert --help` says."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "demo": _Lazy(
        "demo", "demo", "Run a gpt-oss checkpoint's MoE layers here and check every number."
    ),
    "doctor": _Lazy(
        "doctor.command", "doctor", "Say what works on this machine, what does not, and why."
    ),
    "quantize": _Lazy("quantize", "quantize", "Quantise the experts of a bf16 MoE checkpoint."),
    "convert": _Lazy(
        "convert", "convert", "Write quantised experts in another container, bit for bit."
    ),
    "inspect": _Lazy("inspect", "inspect", "Show MX statistics of a checkpoint or a tensor."),
    "eval": _Lazy(
        "eval",
        "evaluate_checkpoint",
        "Compare a checkpoint's loss in bf16, a16w4, a8w4 and a4w4 on a text.",
    ),
    "bench": _Lazy("bench", "bench", "Time named models against the ceilings of this machine."),
    "tune": _Lazy("tune", "tune", "Search the tiles that are fastest on this GPU."),
}


def _load(name: str) -> Any:
    """Import a subcommand and build its parser."""
    entry = COMMANDS[name]
    try:
        with quiet_imports():
            module = importlib.import_module(f"mxpert.cli.{entry.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mxpert"):
            raise
        raise missing_package(error.name, name) from error
    single = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    single.command(name, cls=_Command, epilog=EXIT_CODES)(getattr(module, entry.function))
    return typer.main.get_command(single)


def missing_package(package: str, command: str) -> UnsupportedError:
    """The error of a command that needs a package which is not installed."""
    remedy = f"pip install {package.partition('.')[0]}"
    return UnsupportedError(
        message(f"mxpert {command}", "import", package, "no such package", remedy)
    )


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Mute what optional packages log about their own extensions when they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def one_line(error: Exception, command: str) -> str | None:
    """The error as one line for the user; None where it is a defect of mxpert."""
    text = " ".join(str(error).split())
    if _MESSAGE_MARK in text and isinstance(
        error, ValueError | TypeError | OSError | UnsupportedError
    ):
        return text
    op = f"mxpert {command}"
    if isinstance(error, OSError) and error.strerror is not None:
        where = "files" if error.filename is None else str(error.filename)
        need = "room to write" if error.errno in NO_ROOM else "a path that can be used"
        return message(op, where, need, error.strerror)
    is_memory = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    if isinstance(error, MemoryError) or is_memory:  # torch's by its name: it need not be imported
        remedy = "choose fewer tokens or a smaller model"
        return message(op, "memory", "enough for this problem", text[:200] or "too little", remedy)
    return None


class _Examples:
    """Help whose examples stand each on a line: typer would join lines into paragraphs."""

    help: str | None

    def __init__(self, *args: object, **attributes: object) -> None:
        super().__init__(*args, **attributes)
        text, _, self.examples = (self.help or "").partition(EXAMPLES)
        self.help = text.strip()

    def format_help(self, ctx: object, formatter: SupportsWrite[str]) -> None:
        super().format_help(ctx, formatter)  # type: ignore[misc]
        width = shutil.get_terminal_size().columns
        lines = [line.strip() for line in self.examples.splitlines() if line.strip()]
        examples = (f"{_folded(each, width)}\n" for each in lines)
        formatter.write("".join((f"{EXAMPLES}\n", *examples)))


def _filled(text: str, width: int, indent: int) -> str:
    """Lines of whole words, below each other at `indent`."""
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), " " * indent)


def _folded(example: str, width: int) -> str:
    r"""An example below its heading; where it is too long, a shell's continued lines.

    >>> print(_folded("mxpert eval ./mixtral-bf16 --text wiki.txt", 40))
      mxpert eval ./mixtral-bf16 \
          --text wiki.txt
    """
    if len(example) + 2 <= width:
        return f"  {example}"
    first, *rest = _filled(example, width - 8, 0).splitlines()
    return " \\\n      ".join([f"  {first}", *rest])


class _Body(TyperCommand):
    """Help in one column where a terminal is narrow: tables of rich would cut words there."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = shutil.get_terminal_size().columns
        if width >= _TABLE_WIDTH:
            super().format_help(ctx, formatter)
            return
        paragraphs = [ctx.get_usage()]
        paragraphs += [_filled(each, width, 2) for each in (self.help or "").split("\n\n")]
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        for names, text in filter(None, records):
            paragraphs.append(f"{_filled(names, width, 2)}\n{_filled(text, width, 6)}")
        paragraphs.append(_filled(self.epilog or "", width, 2))
        formatter.write("\n\n".join(paragraphs).replace("`", "") + "\n\n")


class _Command(_Examples, _Body):
    """A subcommand. Only while it runs an interrupt raises KeyboardInterrupt."""

    # Any: click's types, which releases of typer keep in different places.
    def invoke(self, ctx: Any) -> Any:
        with raising():
            return super().invoke(ctx)


class _LazyGroup(_Examples, TyperGroup):
    """Lists every command without importing one; turns errors into exit codes."""

    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name=name, help=entry.summary) for name, entry in COMMANDS.items()
        }

    def list_commands(self, ctx: object) -> list[str]:
        return list(self.commands)  # in the order of COMMANDS, not of the alphabet

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if command is None else _load(str(name)), rest

    def main(self, *args: Any, **extra: Any) -> Any:
        with readers_may_go():
            try:
                return super().main(*args, **extra)
            except OSError as error:  # of help and of errors in options, which precede `invoke`
                with contextlib.suppress(OSError):
                    typer.echo(f"error: {one_line(error, '--help')}", err=True)
                _drop_unwritten_output()
                sys.exit(EXIT_USER_ERROR)

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except typer.Abort:
            raise
        except KeyboardInterrupt as error:
            typer.echo(INTERRUPTED, err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except Exception as error:
            if hasattr(error, "exit_code"):
                raise  # typer's own
            text = one_line(error, str(ctx.invoked_subcommand))
            with contextlib.suppress(OSError):  # standard error may be full, too
                if text is None:
                    traceback.print_exc()
                typer.echo(f"error: {text or 'a defect of mxpert; please report it'}", err=True)
            _drop_unwritten_output()
            raise typer.Exit(EXIT_DEFECT if text is None else EXIT_USER_ERROR) from error


def _drop_unwritten_output() -> None:
    """Forget output that cannot be written: Python would try again on exit and change the code."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mxpert {__version__}")
        raise typer.Exit


@app.callback(epilog=f"Start with `mxpert doctor`, then `mxpert demo`. {EXIT_CODES}")
def main(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Microscaling (MXFP4, MXFP8) kernels for Mixture-of-Experts layers.

    `mxpert COMMAND --help` has examples and says what is written where. Results go to standard
    output, progress to standard error; `--json FILE` writes the machine-readable report of every
    command, `--json -` to standard output.

    Examples:
        mxpert doctor
        mxpert demo
        mxpert demo --checkpoint ./gpt-oss-20b
        mxpert bench --model gpt-oss-120b --tokens 1,64,1024
        mxpert tune --model gpt-oss-120b --time-budget 300
        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4
        mxpert convert ./mixtral-mxfp4 ./mixtral-ct --container mxfp4-pack-quantized
        mxpert inspect ./mixtral-mxfp4
        mxpert eval ./mixtral-bf16 --text wiki.txt
    """


if __name__ == "__main__":
    app()
