"""`hybridkv serve`: an OpenAI-compatible server on a local checkpoint, or on the demo model."""

from __future__ import annotations

import gc
import json
import os
import shlex
from pathlib import Path
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
from hybridkv.cli.engine_options import EngineOptions, takes_engine_options
from hybridkv.cli.interrupts import QuietImports
from hybridkv.cli.layers import parse_layers
from hybridkv.cli.link_options import link_options
from hybridkv.cli.tables import console
from hybridkv.demo import demo_model
from hybridkv.errors import InputError
from hybridkv.units import format_bytes, parse_size

if TYPE_CHECKING:
    from hybridkv.engine import Engine
    from hybridkv.link.link import Link
    from hybridkv.serve import HiddenFolder, Server

KEY_VARIABLE = "HYBRIDKV_API_KEY"
OPERATOR_KEY_VARIABLE = "HYBRIDKV_OPERATOR_KEY"
_HIGHEST_PORT = 65535
_LEAST_BODY_BYTES = 1024


@takes_engine_options()
def serve_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory a transformers model was saved to. Without one: the demo model, a small hybrid model "
            "that comes with the package.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its directory's name.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help=f"A key that clients must send; may be given more than once. Also: ${KEY_VARIABLE}."
        ),
    ] = None,
    operator_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help=f"The operator's key: it shows all requests and what is cached. Also: ${OPERATOR_KEY_VARIABLE}.",
        ),
    ] = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    history: Annotated[int, typer.Option(help="Ended requests whose records are kept; 0: none.")] = 1000,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Serve no page at /.")] = False,
    max_waiting: Annotated[
        int, typer.Option(help="Samples (prompts times n) that may wait for their first token; others get a 429.")
    ] = 16384,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address or network of a proxy whose X-Forwarded-For names the client; may be given more than once.",
        ),
    ] = None,
    max_body: Annotated[str, typer.Option(help="Size of a request's body, at most.")] = "16MiB",
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    receive_timeout: ReceiveTimeout = 20.0,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds that running requests have to finish when the server stops.")
    ] = 30,
    hidden_states_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for hidden states of requests that ask for them; their clients read and delete the files.",
        ),
    ] = None,
    hidden_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Layers, such as 2,18,34, whose hidden states every request gets that has return_token_ids and "
            "lacks hidden_states.",
        ),
    ] = None,
    hidden_states_size: Annotated[
        str | None, typer.Option(help="Size of all files of hidden states, at most.", show_default="10GiB")
    ] = None,
    hidden_states_ttl: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which a file of hidden states is removed that was not read.", show_default="600"
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="prefill: compute prompts for other servers; decode: continue prompts of --peer servers; both.",
            show_default="neither",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Link address of a server that prefills; may be given more than once. For role decode."
        ),
    ] = None,
    link_host: Annotated[
        str | None,
        typer.Option(
            help="Address of this machine by which linked servers reach it; their network must be trusted.",
            show_default="127.0.0.1",
        ),
    ] = None,
    link_port: Annotated[
        int | None, typer.Option(help="Port for calls of linked servers.", show_default="any that is free")
    ] = None,
    link_secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the secret that linked servers share. Or: $HYBRIDKV_LINK_SECRET."),
    ] = None,
    link_lease: Annotated[
        float | None,
        typer.Option(help="Seconds that a computed prompt waits for a server that fetches it.", show_default="60"),
    ] = None,
    link_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a prompt that has not come is computed here.", show_default="30"),
    ] = None,
    link_offer_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the memory that prompts may keep which wait for a server that fetches them.",
            show_default="0.5",
        ),
    ] = None,
    no_link_checksums: Annotated[
        bool, typer.Option("--no-link-checksums", help="Send prompts without checksums.")
    ] = False,
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    *,
    options: EngineOptions,
) -> None:
    """Serve a model to any client of OpenAI's API, until Ctrl-C or SIGTERM."""
    serve = _serve()
    clients = serve.Clients(trusted_proxy or ())
    keys, operator = api_keys(api_key or []), _operator_key(operator_key)
    max_body_bytes = parse_size(max_body)
    check_server_options(port, max_body_bytes, shutdown_timeout)
    hosts, origins = sites(serve, host, allowed_host, cors_origin, keys)
    connections = serve.ConnectionLimits(max_connections, max_connections_per_address, receive_timeout)
    if max_waiting < 1:
        raise InputError(f"max waiting {max_waiting}: at least 1 sample must be let in")
    if history < 0:
        raise InputError(f"history {history}: choose a number of requests, or 0 to keep none")
    check_choice("log format", log_format, serve.LOG_FORMATS)
    check_choice("log level", log_level, serve.LOG_LEVELS)
    layers = _hidden_layers(hidden_layers, hidden_states_dir)
    link = link_options(
        role,
        peers=peer,
        host=link_host,
        port=link_port,
        secret_file=link_secret_file,
        lease_s=link_lease,
        timeout_s=link_timeout,
        offer_share=link_offer_share,
        checksums=False if no_link_checksums else None,
    )
    serve.set_up_logs(log_format, log_level)
    server = serve.Server(host, port)
    folder = _hidden_folder(serve, hidden_states_dir, hidden_states_size, hidden_states_ttl)
    checkpoint = model if model is not None else str(demo_model())
    root = Path(checkpoint).resolve()
    model_name = served_model_name or root.name
    with options.start(checkpoint, link=link) as engine:
        app = serve.make_app(
            engine,
            serve.ServeOptions(
                model_name,
                root=str(root),
                api_keys=keys,
                max_body_bytes=max_body_bytes,
                max_waiting=max_waiting,
                clients=clients,
                hidden_folder=folder,
                hidden_layers=layers,
                operator_key=operator,
                is_local=server.is_local,
                history=history,
                ui=not no_ui,
                allowed_hosts=hosts,
                cors_origins=origins,
                connections=connections,
            ),
        )
        gc.collect()
        gc.freeze()  # what the model is made of lives as long as the process: no later collection looks at it
        server.run(
            app,
            shutdown_timeout=shutdown_timeout,
            on_ready=lambda: _announce(
                engine, server, model_name, keys, _places(options.store or [], folder), has_page=not no_ui
            ),
        )


def _announce(
    engine: Engine, server: Server, model_name: str, keys: tuple[str, ...], places: list[str], *, has_page: bool
) -> None:
    """The address, the plan, the stores and directories, and a line to try it with."""
    plan, out = engine.plan, console()
    reason = ", which is all that fits: --memory gives it more" if engine.is_short_of_memory else ""
    out.print(
        f"\n[bold]{escape(model_name)}[/] on {engine.device}: {format_bytes(plan.arena_bytes)} for its cache, blocks "
        f"of {plan.options.block_tokens} tokens, up to {engine.max_model_len:,} tokens a request{reason}"
    )
    for group in plan.groups:
        cut = f" x {group.layout.pages}" if group.layout.pages > 1 else ""
        out.print(f"  {group.name}: {len(group.layers)} layers, pages of {format_bytes(group.page_bytes)}{cut}")
    out.print(f"  kernels: {engine.kernels}", highlight=False, soft_wrap=True)
    for name, directory in engine.adapters.items():
        out.print(f"  adapter {escape(name)}: {escape(str(directory))}", highlight=False, soft_wrap=True)
    for place in places:
        out.print(f"  {escape(place)}", highlight=False, soft_wrap=True)
    if engine.link is not None:
        out.print(f"  {_about(engine.link)}", highlight=False, soft_wrap=True)
    page = "a page to look inside: /, " if has_page else ""
    out.print(
        f"\nServing at [bold]{server.url}[/] ({page}API: /openapi.json, and /docs with internet). Try it:\n",
        highlight=False,
        soft_wrap=True,
    )
    out.print(_curl(server.url, model_name, bool(keys)) + "\n", highlight=False, soft_wrap=True, markup=False)
    if not server.is_local and not keys:
        out.print(f"Anyone who can reach {server.host} can use it: --api-key asks for a key.\n", highlight=False)


def _about(link: Link) -> str:
    """A line about the link."""
    about = [f"role {link.options.role}"]
    if link.port:
        about.append(f"link at http://{link.options.host}:{link.port}")
    if link.options.peers:
        about.append("peers " + ", ".join(link.options.peers))
    return ", ".join(about)


def _places(stores: list[str], folder: HiddenFolder | None) -> list[str]:
    """Lines about what the server writes to."""
    lines = [f"store: {url}" for url in stores]
    return lines if folder is None else [*lines, f"hidden states: {folder.directory}"]


def _curl(url: str, model_name: str, needs_key: bool) -> str:
    """A command line that asks the server something."""
    messages = [{"role": "user", "content": "Who are you?"}]
    body = {"model": model_name, "messages": messages, "max_tokens": 64, "temperature": 0}
    header = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    content = f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"curl {url}/v1/chat/completions{header} {content}"


def _serve() -> Any:
    """The server's package, or what to do to have it."""
    try:
        with QuietImports():
            from hybridkv import serve
    except ModuleNotFoundError as error:
        known = {"fastapi", "pydantic", "prometheus_client", "starlette", "torch", "transformers", "uvicorn"}
        if error.name not in known:
            raise
        raise InputError(f"serving needs {error.name}: pip install 'hybridkv[serve]'") from error
    return serve


def _hidden_layers(layers: str | None, directory: Path | None) -> tuple[int | str, ...]:
    if layers is None:
        return ()
    if directory is None:
        raise InputError(f"--hidden-layers {layers} without --hidden-states-dir: name a directory to write them to")
    return tuple(parse_layers("--hidden-layers", layers))


def _hidden_folder(serve: Any, directory: Path | None, size: str | None, ttl_s: int | None) -> Any:
    """The directory, made before the model is loaded. Its class has the defaults of its limits."""
    limits: dict[str, int] = {}
    if size is not None:
        limits["max_bytes"] = parse_size(size)
        if limits["max_bytes"] < 1:
            raise InputError(f"--hidden-states-size {size}: no hidden states would fit; choose more, such as 10GiB")
    if ttl_s is not None:
        limits["ttl_s"] = ttl_s
        if ttl_s < 1:
            raise InputError(f"--hidden-states-ttl {ttl_s}: choose 1 second or more")
    if directory is not None:
        return serve.HiddenFolder(directory, **limits)
    if limits:
        given = f"--hidden-states-size {size}" if size is not None else f"--hidden-states-ttl {ttl_s}"
        raise InputError(f"{given} without --hidden-states-dir: name a directory to write hidden states to")
    return None


def api_keys(given: list[str]) -> tuple[str, ...]:
    """Keys of options and of $HYBRIDKV_API_KEY.

    An empty one is refused from the environment too: what was meant to be closed must not be open.
    """
    keys = [*given, os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else given
    return tuple(check_key("an API key", key) for key in keys)


def check_key(what: str, key: str) -> str:
    """A key that can be sent in a header."""
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise InputError(f"{what} that is empty or has other than printable ASCII: it could not be sent")
    return key


def _operator_key(given: str | None) -> str | None:
    """The operator's key, of the option or of $HYBRIDKV_OPERATOR_KEY."""
    key = given if given is not None else os.environ.get(OPERATOR_KEY_VARIABLE)
    return None if key is None else check_key("an operator key", key)


def check_server_options(port: int, max_body_bytes: int, shutdown_timeout: int) -> None:
    if not 0 <= port <= _HIGHEST_PORT:
        raise InputError(f"port {port}: choose 0 (any free one) to {_HIGHEST_PORT}")
    if max_body_bytes < _LEAST_BODY_BYTES:
        raise InputError(f"max body {max_body_bytes} bytes: no request would fit; choose 1KiB or more")
    if shutdown_timeout < 0:
        raise InputError(f"shutdown timeout {shutdown_timeout} s: choose 0 or more")


def check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{what} {value!r}: choose {' or '.join(known)}")
