"""Options that every command which runs a model has, and the engine they make. Torch is imported when it is made."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridkv.cli.interrupts import QuietImports
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.engine import Engine, SamplingParams

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A directory a transformers model was saved to.")]
MemoryOption = Annotated[str, typer.Option(help="Memory for the cache: 2GiB, 512M ...")]
DtypeOption = Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float32 ...")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")]
StoreOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Keep what is computed beyond this process: file:///path?size=200GiB, memory://?size=4GiB. "
        "Several: the fastest first.",
    ),
]
StreamOption = Annotated[str, typer.Option(help="How requests load from a store: auto, async or layerwise.")]
CompileOption = Annotated[
    bool,
    typer.Option("--compile/--no-compile", help="Compile the model's layers: slow to start, then faster on a GPU."),
]
MaxTokensOption = Annotated[int, typer.Option(help="Tokens of a reply, at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0: always the likeliest token.")]
TopPOption = Annotated[float, typer.Option(help="Only the likeliest tokens that make up this much.")]
TopKOption = Annotated[int, typer.Option(help="Only so many of the likeliest tokens; 0: all.")]
SeedOption = Annotated[int | None, typer.Option(help="For the same reply every time.")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What it takes to start an engine."""

    model: str
    memory: str
    dtype: str
    device: str
    trust_remote_code: bool
    store: list[str] | None = None
    stream: str = "auto"
    max_length: int | None = None
    max_running: int = 256
    compile: bool = False

    def start(self) -> Engine:
        engines = _engine()
        _quiet()
        engine: Engine = engines.Engine(
            self.model,
            memory=self.memory,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            store=self.store or None,
            stream=self.stream,
            max_length=self.max_length,
            max_running=self.max_running,
            compile=self.compile,
        )
        return engine


def sampling(
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...] = (),
    n: int = 1,
) -> SamplingParams:
    params: SamplingParams = _engine().SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, n=n
    )
    return params


def _engine() -> Any:
    """The engine's package, or what to do to have it."""
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        with QuietImports():
            from hybridkv import engine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise HybridKVError(f"running models needs {error.name}: pip install 'hybridkv[engine]'") from error
    return engine


def _quiet() -> None:
    """Bars of loading weights and of downloads are for terminals only: in a log they are noise."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
