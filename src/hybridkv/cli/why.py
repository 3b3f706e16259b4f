"""`hybridkv why`: what became of a request of a running server, and why not more of its prompt was cached."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hybridkv.cli.serve import KEY_VARIABLE, OPERATOR_KEY_VARIABLE
from hybridkv.cli.server_client import ServerClient
from hybridkv.cli.tables import console, write
from hybridkv.cli.why_tables import record_view, requests_table
from hybridkv.errors import InputError

_ROOT = ("v1", "hybridkv", "requests")


def why_command(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="The id of a reply, or its X-Request-Id. Without one: the latest requests are listed."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help=f"The key that made the request, or the operator's. Also: ${OPERATOR_KEY_VARIABLE}, ${KEY_VARIABLE}.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain where the tokens of a request's prompt came from, and why not more of them were cached."""
    if request == "":
        raise InputError("an empty ID: pass the id of a reply, or none for a list")
    client = ServerClient(url, api_key)
    found = client.get(*_ROOT) if request is None else client.get(*_ROOT, request)
    if as_json:
        write(json.dumps(found, indent=2))
        return
    try:
        _show(found, is_list=request is None)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{url} answers in a form of another version ({reason}): --json prints it as it is") from None


def _show(found: dict[str, Any], *, is_list: bool) -> None:
    out = console()
    if not is_list:
        out.print(record_view(found, out.width))
    elif found["data"]:
        out.print(requests_table(found["data"]))
    else:
        out.print("No requests yet.")
