"""A browser's tab with the page in it: what a user does, and what the browser has logged."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 20.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def start_browser(profile: Path) -> webdriver.Chrome:
    """Debian's Chromium with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


class Page:
    """One tab. Its sessionStorage is empty at first."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.url = ""
        self.refusals_expected: set[int] = set()
        """HTTP statuses whose console messages are no errors of the page."""
        self._sent: list[dict[str, Any]] = []
        self._told: list[str] = []
        driver.switch_to.new_window("tab")
        self.set_width(1200)
        driver.get_log("browser")
        driver.get_log("performance")

    def open(self, url: str, tab: str = "", key: str | None = None) -> None:
        self.url = url
        self.driver.get(f"{url}/{'#' + tab if tab else ''}")
        if key is not None:
            self.refusals_expected.add(401)  # of the call that tells the page that a key is needed
            self.give_key(key)

    def give_key(self, key: str) -> None:
        self.type("#key-input", key + Keys.ENTER)
        self.until(lambda: self.js("return !document.querySelector('.key-form')"))

    def go(self, tab: str) -> None:
        self.click(f"#tabs a[href='#{tab}']")

    def set_width(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def set_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    # --- elements -----------------------------------------------------------------------------------------------------

    def js(self, script: str, *args: object) -> Any:
        return self.driver.execute_script(script, *args)

    def until(self, holds: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        return WebDriverWait(self.driver, timeout_s, 0.05).until(lambda _: holds())

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def count(self, css: str) -> int:
        found: int = self.js("return document.querySelectorAll(arguments[0]).length", css)
        return found

    def one(self, css: str) -> WebElement:
        """The first element, as soon as there is one."""
        self.until(lambda: self.all(css))
        return self.all(css)[0]

    def text(self, css: str) -> str:
        """Text of all such elements; the page may replace them at any time."""
        found: str = self.js(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')", css
        )
        return found

    def until_text(self, css: str, part: str, timeout_s: float = PATIENCE_S) -> str:
        self.until(lambda: part in self.text(css), timeout_s)
        return self.text(css)

    def click(self, css: str) -> None:
        """A click of the page's own event kind: rows may be replaced between finding and clicking them."""
        self.until(
            lambda: self.js("const e = document.querySelector(arguments[0]); e?.click(); return Boolean(e)", css)
        )

    def type(self, css: str, text: str) -> None:
        self.one(css).send_keys(text)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    # --- chats --------------------------------------------------------------------------------------------------------

    def say(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Send a message, and wait until its turn shows its record."""
        turns = len(self.all(".turn.assistant .why-text"))
        self.type("#message", text)
        self.click("#send")
        self.until(lambda: len(self.all(".turn.assistant .why-text")) > turns, timeout_s)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def requests(self) -> list[dict[str, Any]]:
        """Requests that the tab has sent so far."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._sent.append(message["params"]["request"])
        return self._sent

    def complaints(self) -> list[str]:
        """Console messages, without those about refusals that a test expects."""
        statuses = [f"the server responded with a status of {status}" for status in self.refusals_expected]
        for entry in self.driver.get_log("browser"):
            if not any(status in entry["message"] for status in statuses):
                self._told.append(f"{entry['level']}: {entry['message']}")
        return self._told

    def check(self) -> None:
        """No error, no violation of the policy, no request to another host."""
        assert self.complaints() == []
        own = {urlsplit(self.url).netloc}
        hosts = {urlsplit(sent["url"]).netloc for sent in self.requests() if sent["url"].startswith(("http", "ws"))}
        assert hosts <= own

    def screenshot(self, path: Path, height: int) -> None:
        clip = {"x": 0, "y": 0, "width": self.js("return innerWidth"), "height": height, "scale": 1}
        made = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(made["data"]))
