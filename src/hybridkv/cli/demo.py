"""`hybridkv demo`: the model that comes with the package, and what the cache does for it, in less than a minute."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hybridkv.cli.demo_drawing import Stage
from hybridkv.cli.engine_options import EngineOptions, import_engine
from hybridkv.cli.tables import console, write
from hybridkv.demo import demo_document, demo_model, demo_questions
from hybridkv.demo.acts import Demo
from hybridkv.demo.records import Figures

if TYPE_CHECKING:
    from hybridkv.engine import Engine

_MEMORY = "256MiB"


def demo_command(
    path: Annotated[bool, typer.Option("--path", help="Print the model's directory, and nothing else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object, last.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> None:
    """Ask a small hybrid model about a document: computed, from the cache, after a restart, and from a damaged store.

    Nothing is downloaded: the model comes with the package. Use it elsewhere: hybridkv chat "$(hybridkv demo --path)"
    """
    model = str(demo_model())
    if path:
        write(model)
        return
    stage = Stage(console())

    def start(store: str) -> Engine:
        options = EngineOptions(memory=_MEMORY, device=device, store=[store], stream="layerwise")
        return options.start(model, shows_bars=False)

    stage.wait_for_imports()
    import_engine()  # before there is a temporary directory: Ctrl-C ends the process here
    with Demo(start, demo_document(), demo_questions()) as demo:
        figures = _perform(demo, stage)
    stage.close(figures)
    if as_json:
        write(json.dumps(figures.as_json()))
    if figures.problems():
        raise typer.Exit(1)


def _perform(demo: Demo, stage: Stage) -> Figures:
    """All acts, each drawn as soon as it is over."""
    began = time.monotonic()
    with stage.busy("loading the model"):
        engine = demo.start()
    stage.open(engine)
    stage.announce("read")
    with stage.busy("reading the document"):
        figures = Figures(engine.model_name, str(engine.device), demo.read())
    stage.draw_answer(figures.read)
    stage.announce("ask")
    with stage.busy("asking"):
        for comparison in demo.ask():
            figures.comparisons.append(comparison)
            stage.draw_comparison(comparison)
    stage.announce("restart")
    with stage.busy("starting a new engine"):
        figures.restart = demo.restart()
    stage.draw_restart(figures.restart)
    stage.announce("corrupt")
    with stage.busy("starting a new engine"):
        figures.corruption = demo.corrupt()
    stage.draw_corruption(figures.corruption)
    figures.seconds = time.monotonic() - began
    return figures
