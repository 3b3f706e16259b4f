"""An option's old name is refused, and the error gives the new one: in Python, on the command line, in requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import typer.main

from hybridkv import Engine, SamplingParams
from hybridkv.cli.main import app, run
from hybridkv.cli.replay_sweep import KEYS
from hybridkv.errors import RequestError
from hybridkv.renamed import RENAMED
from hybridkv.serve import ServeOptions, Server
from hybridkv.serve.requests import ChatRequest, CompletionRequest

PYTHON: list[Callable[..., Any]] = [
    Engine,
    Engine.generate,
    Engine.stream,
    Engine.render_chat,
    SamplingParams,
    ServeOptions,
    Server.run,
]
BODIES: list[Any] = [CompletionRequest, ChatRequest]


def commands() -> dict[str, set[str]]:
    """The flags of each command, without their dashes."""
    found: Any = typer.main.get_command(app)
    flat = {name: one for name, one in found.commands.items() if not hasattr(one, "commands")}
    return {
        name: {flag[2:] for option in one.params for flag in option.opts if flag.startswith("--")}
        for name, one in flat.items()
    }


def flag(name: str) -> str:
    return name.replace("_", "-")


IN_PYTHON = [(f, old) for f in PYTHON for old, new in RENAMED.items() if new in inspect.signature(f).parameters]
IN_COMMANDS = [(name, old) for name, flags in commands().items() for old, new in RENAMED.items() if flag(new) in flags]
IN_BODIES = [(body, old) for body in BODIES for old, new in RENAMED.items() if new in body.model_fields]


def test_every_rename_has_a_place() -> None:
    """Every new name is one that some option still has: an error must not point to a name that is gone."""
    assert {old for _, old in (*IN_PYTHON, *IN_COMMANDS, *IN_BODIES)} == set(RENAMED)
    known = {*KEYS, *(name for flags in commands().values() for name in flags)}
    assert not {flag(old) for old in RENAMED} & known


@pytest.mark.parametrize(("function", "old"), IN_PYTHON)
def test_python_refuses_an_old_name(function: Callable[..., Any], old: str) -> None:
    with pytest.raises(TypeError, match=f"^{old} is now {RENAMED[old]}$"):
        function(**{old: 5})


def test_other_unknown_names_are_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp'"):
        Engine("model", tp=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'salt'"):
        SamplingParams(salt="x")  # type: ignore[call-arg]


@pytest.mark.parametrize(("command", "old"), IN_COMMANDS)
@pytest.mark.parametrize("form", ["--{} 5", "--{}=5"])
def test_commands_refuse_an_old_flag(command: str, old: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "x", *form.format(flag(old)).split()]) == 2
    captured = capsys.readouterr()
    new = flag(RENAMED[old])
    assert captured.err == f"hybridkv: error: --{flag(old)} is now --{new} (see 'hybridkv {command} --help')\n"
    assert captured.out == ""


@pytest.mark.parametrize(("body", "old"), IN_BODIES)
def test_requests_refuse_an_old_field(body: Any, old: str) -> None:
    own = {"prompt": "x"} if body is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(RequestError, match=f"{old} is now {RENAMED[old]}") as caught:
        body(**own, **{old: "x"}).params()
    assert caught.value.param == old
