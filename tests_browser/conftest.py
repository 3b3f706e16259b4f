"""These tests open the page in Chromium: `make test-browser`. Servers and the browser are shared by all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browsing import Page, start_browser
from selenium import webdriver
from servers import Served

KEYS = ("first-key", "second-key")
OPERATOR = "operator-key"
HOSTILE_NAME = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


class Servers:
    """Servers that the session's tests need. They start one after the other, while tests run on the earlier ones."""

    def __init__(self, names: set[str], store: Path) -> None:
        keys = [option for key in KEYS for option in ("--api-key", key)]
        options: dict[str, list[str]] = {
            "server": [],
            "keyed": [*keys, "--operator-key", OPERATOR, "--served-model-name", HOSTILE_NAME],
            "stored": ["--operator-key", OPERATOR, "--store", f"file://{store}?size=1GiB"],
            "without_page": ["--no-ui"],
        }
        self._pool = ThreadPoolExecutor(1)
        self._started = {name: self._pool.submit(_start, options[name]) for name in options if name in names}

    def get(self, name: str) -> Served:
        return self._started[name].result()

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for started in self._started.values():
            if not started.cancelled() and started.exception() is None:
                started.result().stop()


def _start(options: list[str]) -> Served:
    return Served(*options).wait()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    names = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    servers = Servers(names, tmp_path_factory.mktemp("stored") / "store")
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def server(servers: Servers) -> Served:
    """Without keys: who calls from this machine is the operator."""
    return servers.get("server")


@pytest.fixture(scope="session")
def keyed(servers: Servers) -> Served:
    """With keys, and with a model whose name is markup."""
    return servers.get("keyed")


@pytest.fixture(scope="session")
def stored(servers: Servers) -> Served:
    """With a key for the operator alone, and a store of files, so that a restart forgets nothing."""
    return servers.get("stored")


@pytest.fixture(scope="session")
def without_page(servers: Servers) -> Served:
    return servers.get("without_page")


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    """A new tab. After the test, its console must be empty and its requests must have gone to the server alone."""
    page = Page(driver)
    yield page
    page.check()
    driver.close()
    driver.switch_to.window(driver.window_handles[0])
