"""Options of `hybridkv serve` and `hybridkv route` about connections, hosts and pages."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A name by which clients call a server without keys, besides IP addresses and localhost, such as "
        "gpu.example or *.example; *: any. May be given more than once.",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="An origin whose pages may use /v1, such as https://chat.example; *: any, with keys. May be given more "
        "than once.",
    ),
]
MaxConnections = Annotated[int | None, typer.Option(help="Connections at most.", show_default="what ulimit -n allows")]
MaxConnectionsPerAddress = Annotated[
    int | None,
    typer.Option(
        help="Connections of one address at most. Clients of a proxy all have its address.",
        show_default="three quarters of all",
    ),
]
ReceiveTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds for the head of a request to arrive. Its body may pause for as long, and has to come at 1 KiB/s."
    ),
]


class Sites(NamedTuple):
    """Checked options about hosts and pages."""

    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]


def sites(serve: Any, host: str, allowed_hosts: list[str] | None, cors_origins: list[str] | None, keys: Any) -> Sites:
    """The names by which the server is called, that of `--host` among them, and the origins. `serve`: the package."""
    hosts, origins = tuple(allowed_hosts or ()), tuple(cors_origins or ())
    serve.check_sites(hosts, origins, has_keys=bool(keys))
    return Sites((*hosts, host) if host else hosts, origins)
