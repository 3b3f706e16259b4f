"""Prefixes and requests on the page."""

from __future__ import annotations

import httpx
from browsing import Page
from selenium.webdriver.common.keys import Keys
from servers import Served

SHARED = "The chronicle of Tarnwick was kept at the inn, and everyone wrote in it what they had to tell. " * 3


def node_with(page: Page, text: str) -> str:
    """Key of the node whose text has this, selected."""
    keys: list[str] = page.js("return [...document.querySelectorAll('.node')].map(n => n.dataset.key)")
    for key in reversed(keys):
        page.click(f".node[data-key='{key}']")
        page.until(lambda: page.text(".prefix-text") not in ("", "…"))
        if text in page.js("return document.querySelector('.prefix-text').lastChild.textContent"):
            return key
    raise AssertionError(f"no node has {text!r}")


def test_prefixes_are_pinned_unpinned_and_dropped(page: Page, server: Served) -> None:
    server.chat(SHARED + "Who wrote first?")
    server.chat(SHARED + "Which page is torn?")
    page.open(server.url, "prefixes")
    page.one(".node")
    page.until(lambda: "torn" in _all_texts(server))
    key = node_with(page, "torn")
    assert page.all(".node-bar .own")
    page.click("#pin")
    page.until_text(".outcome", "Pinned")
    page.until_text(f".node[data-key='{key}'] .badges", "pinned")
    page.until(lambda: not page.one("#unpin").get_attribute("disabled"))
    page.click("#unpin")
    page.until(lambda: "pinned" not in page.text(f".node[data-key='{key}'] .badges"))
    page.click("#drop")
    page.until_text(".confirm", "Drop this node")
    assert page.all(f".node[data-key='{key}']")
    page.click("#drop-sure")
    page.until_text(".outcome", "Dropped")
    page.until(lambda: not page.all(f".node[data-key='{key}']"))


def _all_texts(server: Served) -> str:
    nodes = httpx.get(f"{server.url}/v1/hybridkv/prefixes").json()["nodes"]
    return "".join(httpx.get(f"{server.url}/v1/hybridkv/prefixes/{node['key']}").text for node in nodes)


def test_the_tree_by_keyboard(page: Page, server: Served) -> None:
    server.chat(SHARED + "Who wrote first?")
    server.chat(SHARED + "Which page is torn?")
    page.open(server.url, "prefixes")
    page.until(lambda: page.all(".node[aria-expanded='true']"))
    closed = "return document.activeElement.getAttribute('aria-expanded')"
    page.js("document.querySelector('.node[aria-expanded]').click()")
    before = len(page.all(".node"))
    page.press(Keys.ARROW_LEFT)
    page.until(lambda: page.js(closed) == "false")
    assert len(page.all(".node")) < before
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: page.js(closed) == "true")
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: int(page.js("return document.activeElement.getAttribute('aria-level')")) > 1)
    page.press(Keys.ENTER)
    page.until(lambda: page.js("return document.activeElement.getAttribute('aria-selected')") == "true")
    page.one("#pin")


def test_requests_appear_and_lead_to_their_records(page: Page, server: Served) -> None:
    page.open(server.url, "requests")
    page.one("canvas.chart")
    steps = "return Number(document.querySelectorAll('canvas.chart')[1].dataset.steps ?? 0)"
    before = page.js(steps)
    server.chat(SHARED + "Is it a long one?")
    again = server.chat(SHARED + "Is it a long one, really?")
    page.one(f"tr[data-id='{again['id']}']")
    page.until(lambda: page.js(steps) > before)
    assert page.all(f"tr[data-id='{again['id']}'] .source-memory")
    page.click(f"tr[data-id='{again['id']}'] a")
    assert page.one("h1.id").text == again["id"]
    page.one(".why-list")
    assert page.all(".record .bar.tall .source-memory")
    assert "full attention" in page.text(".record table")
    assert "first token" in page.text(".gantt")
    assert '"prompts"' in page.text(".raw pre")


def test_a_record_opens_by_its_address(page: Page, server: Served) -> None:
    made = server.chat(SHARED)["id"]
    page.open(server.url, f"requests/{made}")
    assert page.one("h1.id").text == made
    page.driver.back()
    page.refusals_expected = {404}
    page.open(server.url, "requests/no-such-request")
    page.until_text("#no-record", "no-such-request")


def test_a_long_prompt_is_folded(page: Page, server: Served) -> None:
    made = server.chat(" ".join(str(n) for n in range(800)))["id"]
    page.open(server.url, f"requests/{made}")
    page.click(".record details:not(.raw) summary")
    page.one(".tokens .fold")
    tokens = page.count(".tokens .token")
    assert 100 < tokens < 1000
    for _ in range(12):
        page.js("document.querySelector('.tokens .fold')?.click()")
    page.until(lambda: page.count(".tokens .token") > 1000)
    assert page.count(".tokens .token") <= 3000
    assert page.count(".tokens .fold") == 1
