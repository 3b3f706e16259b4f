"""The commands, and the one place where errors become an exit code: 2 for bad input, 1 for what failed otherwise."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, cast

import typer

from hybridkv.cli.chat import chat_command
from hybridkv.cli.demo import demo_command
from hybridkv.cli.extract import extract_command
from hybridkv.cli.generate import generate_command
from hybridkv.cli.interrupts import INTERRUPTED
from hybridkv.cli.models import models_command
from hybridkv.cli.plan import plan_command
from hybridkv.cli.replay import replay_command
from hybridkv.cli.route import route_command
from hybridkv.cli.serve import serve_command
from hybridkv.cli.store import store_app
from hybridkv.cli.why import why_command
from hybridkv.errors import HybridKVError, InputError
from hybridkv.renamed import new_flag

app = typer.Typer(
    name="hybridkv",
    help="The KV cache of hybrid LLMs: plan, share, store, move and recover it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan_command)
app.command("models")(models_command)
app.command("replay")(replay_command)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("extract")(extract_command)
app.command("serve")(serve_command)
app.command("route")(route_command)
app.command("why")(why_command)
app.command("demo")(demo_command)
app.add_typer(store_app, name="store")

# What the parser raises on a wrong option or value. Typer exports only BadParameter, a direct subclass of it.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_UNKNOWN_FLAG = re.compile(r"No such option: --([\w-]+)")


def _show_version(wanted: bool) -> None:
    if wanted:
        from hybridkv import __version__

        typer.echo(f"hybridkv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before any command."""


def run(args: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(args or ["--help"], prog_name="hybridkv", standalone_mode=False)
        sys.stdout.flush()
    except HybridKVError as error:
        return _complain(str(error), code=2 if isinstance(error, InputError) else 1)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone: no error, and nobody to tell
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        return _complain(f"cannot write: {error.strerror}", code=1)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "hybridkv"
        message = _renamed(error) or error.format_message()  # empty: a group without a command has shown its help
        return _complain(f"{message} (see '{command} --help')") if message else 2
    return code if isinstance(code, int) else 0


def _renamed(error: typer.BadParameter) -> str | None:
    """The new name of a flag that is not known any more."""
    unknown = _UNKNOWN_FLAG.match(error.format_message())
    if unknown is None or error.ctx is None:
        return None
    new = new_flag(unknown[1], [str(option.name) for option in error.ctx.command.params])
    return f"--{unknown[1]} is now --{new}" if new is not None else None


def _complain(message: str, code: int = 2) -> int:
    typer.echo(f"hybridkv: error: {' '.join(message.split())}", err=True)
    return code


def _discard_output() -> None:
    """What is still buffered would fail once more when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
