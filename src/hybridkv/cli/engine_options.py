"""Options that every command which runs a model has, and the engine they make. Torch is imported when it is made."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hybridkv.cache import DEFAULT_POLICY
from hybridkv.cli.cache_options import (
    ROW_LAYERS_HELP,
    AttnPackSizeOption,
    BlockSizeOption,
    KvCacheDtypeOption,
    PolicyOption,
    RowOrderOption,
    StateDtypeOption,
)
from hybridkv.cli.interrupts import QuietImports
from hybridkv.errors import InputError
from hybridkv.plan.plan import DEFAULT_BLOCK_TOKENS, DEFAULT_ROW_LAYERS, DEFAULT_ROW_ORDER

if TYPE_CHECKING:
    from hybridkv.engine import Engine, SamplingParams
    from hybridkv.link.link import LinkOptions

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A directory a transformers model was saved to.")]
MaxTokensOption = Annotated[int, typer.Option(help="Tokens of a reply, at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0: always the likeliest token.")]
TopPOption = Annotated[float, typer.Option(help="Only the likeliest tokens that make up this much.")]
TopKOption = Annotated[int, typer.Option(help="Only so many of the likeliest tokens; 0: all.")]
SeedOption = Annotated[int | None, typer.Option(help="For the same reply every time.")]


_SPEED_PANEL = "Speed"
"""Flags with a negation have a panel of their own: their column would leave others too little room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of `Engine` as flags: a field for each, with its name and default."""

    memory: Annotated[str, typer.Option(help="Memory for the cache: 2GiB, 512M ...")] = "2GiB"
    dtype: Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float32 ...")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto"
    kv_cache_dtype: KvCacheDtypeOption = None
    state_dtype: StateDtypeOption = None
    block_size: BlockSizeOption = DEFAULT_BLOCK_TOKENS
    attn_pack_size: AttnPackSizeOption = None
    row_layers: Annotated[
        int | None, typer.Option(help=f"{ROW_LAYERS_HELP} Default: 1 on a CPU, {DEFAULT_ROW_LAYERS} on a GPU.")
    ] = None
    row_order: RowOrderOption = DEFAULT_ROW_ORDER
    policy: PolicyOption = DEFAULT_POLICY
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens that are computed at once. Default: by the device.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(help="Samples that are computed at once.")] = 256
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its reply, if less than the model's.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a tokenizer was saved to. Default: the model's.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    seed: Annotated[int | None, typer.Option(help="For requests that have none.")] = None
    store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Keep what is computed beyond this process: file:///path?size=200GiB, memory://?size=4GiB, "
            "valkey://host, s3://bucket ... Several: the fastest first.",
        ),
    ] = None
    stream: Annotated[str, typer.Option(help="How requests load from a store: auto, async or layerwise.")] = "auto"
    load_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a load is given up, and its request computes by itself.")
    ] = 30.0
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="A LoRA adapter, as peft saves it, after the name that requests give it: NAME=DIR. With serve: may be "
            "given more than once.",
        ),
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            help="Compile the model's layers: slower to start, then faster. Default: on a GPU.",
            rich_help_panel=_SPEED_PANEL,
        ),
    ] = None
    graphs: Annotated[
        bool,
        typer.Option(
            help="On a GPU, capture decoding steps as CUDA graphs: slower to start, then faster.",
            rich_help_panel=_SPEED_PANEL,
        ),
    ] = True

    def start(self, model: str, *, shows_bars: bool = True, link: LinkOptions | None = None) -> Engine:
        """Load the model. `shows_bars`: on a terminal, draw bars while weights are loaded."""
        engines = import_engine()
        _quiet(shows_bars)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {"store": self.store or None, "adapters": self._adapters_by_name() or None}
        engine: Engine = engines.Engine(model, **given, link=link)
        return engine

    def only_adapter(self) -> str | None:
        """The name of the adapter of all requests of a command. None without one."""
        names = list(self._adapters_by_name())
        if len(names) > 1:
            raise InputError(f"--adapter {names[0]} and --adapter {names[1]}: only serve takes several; give one")
        return names[0] if names else None

    def _adapters_by_name(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in self.adapters or ():
            name, _, directory = text.partition("=")
            if not name or not directory:
                raise InputError(f"--adapter {text!r}: write a name and a directory, such as sql=/path/to/adapter")
            if name in found:
                raise InputError(f"--adapter {name} twice: give each adapter a name of its own")
            found[name] = directory
        return found


def takes_engine_options(*fixed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for commands with a parameter `options: EngineOptions`: its fields become flags, after their own.

    `fixed`: fields without a flag, because the command sets them itself or has a flag of that name.
    """
    types = get_type_hints(EngineOptions, include_extras=True)
    flags = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(EngineOptions)
        if field.name not in fixed
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_flags(**given: Any) -> None:
            options = EngineOptions(**{flag.name: given.pop(flag.name) for flag in flags})
            command(**given, options=options)

        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
        with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        return with_flags

    return decorate


def sampling(
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...] = (),
    n: int = 1,
) -> SamplingParams:
    params: SamplingParams = import_engine().SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, n=n
    )
    return params


def import_engine() -> Any:
    """The engine's package, or what to do to have it."""
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        with QuietImports():
            from hybridkv import engine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise InputError(f"running models needs {error.name}: pip install 'hybridkv[engine]'") from error
    return engine


def _quiet(shows_bars: bool) -> None:
    """Bars of loading weights and of downloads are for terminals only: in a log they are noise."""
    if not shows_bars or not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
