"""The `mxpert` command; each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import UnsupportedError, message

EXIT_USER_ERROR = 2
_MESSAGE_MARK = " — "  # only messages in the library's own form are shown without a traceback


@dataclass(frozen=True)
class _Lazy:
    """Where a command's function lives, what `mxpert --help` says, and the extra it may need."""

    module: str
    function: str
    summary: str
    extra: str = "transformers"


COMMANDS = {
    "demo": _Lazy("demo", "demo",
                  "Run a gpt-oss checkpoint's MoE layers here and check every number."),
    "doctor": _Lazy("doctor", "doctor", "Say what works on this machine, what does not, and why."),
    "quantize": _Lazy("quantize", "quantize", "Convert a bf16 MoE checkpoint to MXFP4."),
    "inspect": _Lazy("inspect", "inspect", "Show MX statistics of a checkpoint or a tensor."),
    "eval": _Lazy("eval", "evaluate_checkpoint",
                  "Compare a checkpoint's loss in bf16, a16w4, a8w4 and a4w4 on a text."),
    "bench": _Lazy("bench", "bench", "Time named models against the ceilings of this machine.",
                   "plot"),
    "tune": _Lazy("tune", "tune", "Search the tiles that are fastest on this GPU."),
}


def _load(name: str) -> Any:
    """Import a subcommand and build its parser."""
    entry = COMMANDS[name]
    try:
        module = importlib.import_module(f"mxpert.cli.{entry.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mxpert"):
            raise
        raise UnsupportedError(
            f"mxpert {name}: import{_MESSAGE_MARK}need {error.name}, got no such package; "
            f"pip install 'mxpert[{entry.extra}]'") from error
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown",
                         pretty_exceptions_enable=False)
    single.command(name)(getattr(module, entry.function))
    return typer.main.get_command(single)


class _LazyGroup(TyperGroup):
    """Lists every command without importing one; turns the library's errors into one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name=name, help=entry.summary)
                         for name, entry in COMMANDS.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of COMMANDS, not of the alphabet

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if command is None else _load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError, UnsupportedError) as error:
            text = str(error)
            if _MESSAGE_MARK not in text:
                if not isinstance(error, OSError) or error.filename is None:
                    raise
                text = message(f"mxpert {ctx.invoked_subcommand}", str(error.filename),
                               "a path that can be used", error.strerror)
            typer.echo(f"error: {text}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error


app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True,
                  rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mxpert {__version__}")
        raise typer.Exit


@app.callback(epilog="Start with `mxpert doctor`, then `mxpert demo`.")
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True,
                                 help="Print the version and exit."),
) -> None:
    """Microscaling (MXFP4, MXFP8) kernels for Mixture-of-Experts layers.

    Examples:

        mxpert doctor                                   what works on this machine

        mxpert demo                                     a checked run of a small gpt-oss

        mxpert demo --checkpoint ./gpt-oss-20b          the same on real weights

        mxpert bench --model gpt-oss-120b --tokens 1,64,1024

        mxpert tune --model gpt-oss-120b --time-budget 300

        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4

        mxpert inspect ./mixtral-mxfp4

        mxpert eval ./mixtral-bf16 --text wiki.txt
    """


if __name__ == "__main__":
    app()
