"""These tests run inside vLLM's own environment: `make test-vllm`."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for `tests`

import pytest
from checkpoints import FAMILIES, Family, save_checkpoint
from engines import Engine, Host
from oracle import Oracle

Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("host")
    host = Host(directory / "socket", directory / "log")
    host.start()
    yield host
    host.stop()


@pytest.fixture(scope="session")
def checkpoints(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written while the host imports vLLM."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return {name: save_checkpoint(family, directory / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def start(host: Host, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine of a family, in the background. It ends with the session, unless it is closed before."""
    logs = tmp_path_factory.mktemp("logs")

    def started(family: Family, **options: Any) -> Engine:
        host.wait_until_started()
        log = logs / f"{family.name}-{len(host.processes)}.log"
        engine = Engine(host, family, checkpoints[family.name], log, **options)
        host.processes.append(engine)
        return engine

    return started


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def oracle(family: Family, start: Start) -> Oracle:
    return Oracle(start(family, enable_prefix_caching=False, max_num_batched_tokens=2048))
