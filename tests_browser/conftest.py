"""These tests open the page in Chromium: `make test-browser`. Servers and the browser are shared by all of them."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """Without keys: who calls from this machine is the operator."""
    served = Served()
    yield served
    served.stop()


@pytest.fixture(scope="session")
def keyed() -> Iterator[Served]:
    """With keys, and with a model whose name is markup."""
    keys = [option for key in KEYS for option in ("--api-key", key)]
    served = Served(*keys, "--operator-key", OPERATOR, "--served-model-name", HOSTILE_NAME)
    yield served
    served.stop()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Served]:
    """With a store of files, so that a restart forgets nothing."""
    served = Served("--store", f"file://{tmp_path}/store")
    yield served
    served.stop()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    """A new tab. After the test, its console must be empty and its requests must have gone to the server alone."""
    page = Page(driver)
    yield page
    page.check()
    driver.close()
    driver.switch_to.window(driver.window_handles[0])
