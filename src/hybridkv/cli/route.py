"""`hybridkv route`: one address in front of prefill and decode workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hybridkv.cli.door_options import (
    AllowedHost,
    CorsOrigin,
    MaxConnections,
    MaxConnectionsPerAddress,
    ReceiveTimeout,
    sites,
)
from hybridkv.cli.interrupts import QuietImports
from hybridkv.cli.serve import KEY_VARIABLE, api_keys, check_choice, check_server_options
from hybridkv.cli.tables import console
from hybridkv.errors import InputError
from hybridkv.units import parse_size

if TYPE_CHECKING:
    from hybridkv.route import RouteOptions
    from hybridkv.serve import Server


def route_command(
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A prefill worker, http://HOST:PORT; may be given more than once."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A decode worker, http://HOST:PORT; may be given more than once."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.")] = 8000,
    early: Annotated[
        bool, typer.Option("--early", help="Ask both workers at once; the decode worker waits for the KV.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help=f"A key that clients must send; may be given more than once. Also: ${KEY_VARIABLE}."
        ),
    ] = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    prefill_timeout: Annotated[
        float, typer.Option(help="Seconds after which the decode worker computes a prompt itself.")
    ] = 120.0,
    max_body: Annotated[str, typer.Option(help="Size of a request's body, at most.")] = "16MiB",
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    receive_timeout: ReceiveTimeout = 20.0,
    max_reply: Annotated[
        str, typer.Option(help="Size of a worker's reply, at most; streams may have any length.")
    ] = "64MiB",
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds that running requests have to finish when the router stops.")
    ] = 30,
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Send each request to a prefill and a decode worker, until Ctrl-C or SIGTERM."""
    route, serve = _packages()
    keys = api_keys(api_key or [])
    max_body_bytes = parse_size(max_body)
    check_server_options(port, max_body_bytes, shutdown_timeout)
    hosts, origins = sites(serve, host, allowed_host, cors_origin, keys)
    check_choice("log format", log_format, serve.LOG_FORMATS)
    check_choice("log level", log_level, serve.LOG_LEVELS)
    options = route.RouteOptions(
        tuple(prefill or ()),
        tuple(decode or ()),
        api_keys=keys,
        max_body_bytes=max_body_bytes,
        max_reply_bytes=parse_size(max_reply),
        prefill_timeout_s=prefill_timeout,
        is_early=early,
        allowed_hosts=hosts,
        cors_origins=origins,
        connections=serve.ConnectionLimits(max_connections, max_connections_per_address, receive_timeout),
    )
    serve.set_up_logs(log_format, log_level)
    server = serve.Server(host, port)
    server.run(
        route.make_router(options), shutdown_timeout=shutdown_timeout, on_ready=lambda: _announce(server, options)
    )


def _announce(server: Server, options: RouteOptions) -> None:
    out = console()
    for role, urls in (("prefill", options.prefill), ("decode", options.decode)):
        for url in urls:
            out.print(f"  {role}: {escape(url)}", highlight=False, soft_wrap=True)
    out.print(f"\nRouting at [bold]{server.url}[/]\n", highlight=False)
    if not server.is_local and not options.api_keys:
        out.print(f"Anyone who can reach {server.host} can use it: --api-key asks for a key.\n", highlight=False)


def _packages() -> tuple[Any, Any]:
    """The packages of the router and the server, or what to do to have them."""
    try:
        with QuietImports():
            from hybridkv import route, serve
    except ModuleNotFoundError as error:
        known = {"fastapi", "httpx", "pydantic", "prometheus_client", "starlette", "torch", "transformers", "uvicorn"}
        if error.name not in known:
            raise
        raise InputError(f"routing needs {error.name}: pip install 'hybridkv[serve]'") from error
    return route, serve
