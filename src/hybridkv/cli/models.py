"""`hybridkv models`: what the catalogue knows."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from hybridkv.cli.tables import console, write
from hybridkv.models import catalogue, load_model
from hybridkv.units import format_bytes


def models_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models known by name. Any other model: give its directory or config.json."""
    specs = [load_model(name) for name in catalogue()]
    if as_json:
        records = [
            {
                "model": spec.name,
                "model_type": spec.model_type,
                "layers": spec.num_layers,
                "kv_bytes_per_token": spec.kv_bytes_per_token,
                "state_bytes": spec.state_bytes,
                "verified": spec.verified,
            }
            for spec in specs
        ]
        write(json.dumps(records, indent=2))
        return
    table = Table(
        title="Models known by name", caption="* unverified: no config in the transformers source to check it against"
    )
    table.add_column("model")
    table.add_column("family")
    for header in ("layers", "KV / token", "state"):
        table.add_column(header, justify="right")
    for spec in specs:
        table.add_row(
            spec.name + ("" if spec.verified else " *"),
            spec.model_type,
            str(spec.num_layers),
            format_bytes(spec.kv_bytes_per_token) if spec.kv_bytes_per_token else "-",
            format_bytes(spec.state_bytes) if spec.state_bytes else "-",
        )
    console().print(table)
