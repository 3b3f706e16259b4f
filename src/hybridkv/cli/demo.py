"""`hybridkv demo`: a small model to try everything with, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.tables import write
from hybridkv.demo import NOISE_NOTE, build_demo_model, demo_directory


def demo_command(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Where it goes. Default: the user's cache.")
    ] = None,
) -> None:
    """Build a small hybrid model without downloads, and print its path.

    It is untrained and writes noise: hybridkv generate "$(hybridkv demo)" -p hello
    """
    path = build_demo_model(directory or demo_directory())
    typer.echo(f"hybridkv: {NOISE_NOTE}", err=True)
    write(str(path))
