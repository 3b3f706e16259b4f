"""One tiny engine and one server for all tests of the server; after each test nothing may be left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv import Engine
from tests.engine.checkpoints import save_checkpoint
from tests.serve.serving import Pace, Served, check_idle, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve") / "tiny"
    save_checkpoint("qwen3_next", directory)
    return directory


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    """Few run at once and steps are short: queues, and prompts that take several steps."""
    with Engine(checkpoint, memory="16MiB", device="cpu", max_num_seqs=8, max_num_batched_tokens=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def one_server(engine: Engine) -> Iterator[Served]:
    with serving(engine, max_body_bytes=2**20, max_waiting=16) as served:
        yield served


@pytest.fixture
def served(one_server: Served) -> Iterator[Served]:
    yield one_server
    check_idle(one_server)


@pytest.fixture
def recorded(engine: Engine) -> Iterator[Served]:
    """A server of its own: an engine's records go to the server that was started last."""
    with serving(engine) as served:
        yield served
        check_idle(served)


@pytest.fixture
def pace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    pace = Pace(engine)
    monkeypatch.setattr(engine._core, "step", pace.step)
    yield pace
    pace.run()
