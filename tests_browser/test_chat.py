"""Chats on the page, and where their prompts came from."""

from __future__ import annotations

import threading
import time

from browsing import Page
from conftest import HOSTILE_NAME, OPERATOR
from selenium.webdriver.common.keys import Keys
from servers import Served

FACTS = "Mira Holt is a baker. Tom Arden is a teacher. He lives in Fenwick. The bakery opens at six in the morning."
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"


def last_turn(part: str) -> str:
    return f".turn.assistant:last-child {part}"


def test_the_second_turn_shows_what_memory_had(page: Page, server: Served) -> None:
    page.open(server.url)
    page.type("#system", FACTS)
    page.say("What does Mira Holt do?")
    assert "baker" in page.text(last_turn(".text"))
    page.say("Where does Tom Arden live?")
    assert "Fenwick" in page.text(last_turn(".text"))
    cached = int(page.text(last_turn(".cached b")))
    assert cached > 0
    page.until(lambda: page.count(last_turn(".token-memory")) == cached)
    assert page.all(last_turn(".token-computed"))
    assert page.all(last_turn(".break"))
    assert page.all(last_turn(".bar .source-memory"))
    assert "first token after" in page.text(last_turn(".numbers"))
    assert page.text(last_turn(".why-text")).endswith(".")
    assert "Mira" in page.text(last_turn(".token-memory")).replace("\n", "")
    page.click(last_turn(".why a"))
    page.one(".why-list")


def test_text_appears_while_it_is_made(page: Page, server: Served) -> None:
    page.open(server.url)
    page.js("""window.lengths = new Set();
      new MutationObserver(() => lengths.add(document.querySelector('.turn.assistant .text')?.textContent.length))
        .observe(document.getElementById('log'), { childList: true, subtree: true, characterData: true })""")
    page.say("Tell me about the harbour.")
    assert page.js("return lengths.size") >= 3


def test_stop_regenerate_and_new_conversation(page: Page, server: Served) -> None:
    page.open(server.url)
    page.js("document.getElementById('max-tokens').value = 2000; document.getElementById('temperature').value = 2")
    page.type("#message", "Tell a long story." + Keys.ENTER)
    page.until(lambda: page.text(".turn.assistant .text"))
    page.click("#stop")
    page.until(lambda: not page.one("#send").get_attribute("disabled"))
    page.until_text(".turn.assistant .facts", "")
    page.js("document.getElementById('max-tokens').value = 8; document.getElementById('temperature').value = 0")
    page.click("#regenerate")
    page.until(lambda: page.all(".turn.assistant .why-text"))
    assert len(page.all(".turn")) == 2
    page.click("#new")
    assert not page.all(".turn")


def test_markup_stays_text(page: Page, keyed: Served) -> None:
    page.open(keyed.url, "chat", OPERATOR)
    assert page.text("#model") == HOSTILE_NAME
    page.type("#system", HOSTILE)
    page.say(HOSTILE)
    assert page.text(".turn.user .text") == HOSTILE
    page.until_text(".tokens", "onerror")
    page.click(".why a")
    page.one(".record h1.id")
    page.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.until_text(".tokens", "onerror")
    page.go("requests")
    page.one(".records tbody tr")
    page.go("prefixes")
    page.until(lambda: page.all(".node"))
    found = [
        key
        for key in page.js("return [...document.querySelectorAll('.node')].map(n => n.dataset.key)")
        if opens_with_markup(page, key)
    ]
    assert found
    assert not page.all("main img, main script")
    assert page.js("return window.hacked === undefined")
    assert not [sent for sent in page.requests() if sent["url"].endswith("/x")]


def opens_with_markup(page: Page, key: str) -> bool:
    page.click(f".node[data-key='{key}']")
    page.until(lambda: page.text(".prefix-text") not in ("", "…"))
    return "<script>" in page.text(".prefix-text")


def test_the_page_reconnects_and_the_store_still_has_the_prompt(page: Page, stored: Served) -> None:
    page.open(stored.url, "memory", OPERATOR)
    page.go("chat")
    page.type("#system", FACTS * 3)
    page.say("What does Mira Holt do?")
    page.go("memory")
    page.until(lambda: page.text("#connection") == "live")
    stored.stop()
    page.until(lambda: "reconnecting" in page.text("#connection"))
    stored.launch()
    stored.wait()
    page.until(lambda: page.text("#connection") == "live")
    page.complaints().clear()  # the browser logs refused connections by itself
    page.go("chat")
    page.say("Where does Tom Arden live?")
    page.until(lambda: page.all(last_turn(".token-store")))
    assert page.all(last_turn(".bar .source-store"))
    page.click(last_turn(".why a"))
    page.until_text(".record", "loaded up to")


def test_the_map_changes_while_requests_run(page: Page, server: Served) -> None:
    page.open(server.url, "memory")
    before = page.until_text(".sizes", "used")
    earlier = page.one(".memory").get_attribute("data-time")
    thread = threading.Thread(target=server.chat, args=("A long text about nothing. " * 30,))
    thread.start()
    page.until(lambda: page.text(".sizes") != before)
    thread.join()
    assert page.one(".memory").get_attribute("data-time") != earlier
    assert page.js("const c = document.querySelector('.map'); return c.width > 100 && c.height > 20")
    assert (
        page.js("""const c = document.querySelector('.map');
      return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size""")
        > 2
    )


def test_a_hidden_page_reads_no_events(page: Page, server: Served) -> None:
    page.open(server.url, "memory")
    page.one("table tbody tr")
    hide = "Object.defineProperty(document, 'visibilityState', { value: arguments[0], configurable: true });"
    page.js(hide + "document.dispatchEvent(new Event('visibilitychange'))", "hidden")
    before = page.one(".memory").get_attribute("data-time")
    server.chat("Nobody looks at the map now.")
    time.sleep(1.0)  # longer than the time between two events
    assert page.one(".memory").get_attribute("data-time") == before
    page.js(hide + "document.dispatchEvent(new Event('visibilitychange'))", "visible")
    page.until(lambda: page.one(".memory").get_attribute("data-time") != before)


def test_arrow_keys_in_the_map_tell_the_cells(page: Page, server: Served) -> None:
    server.chat("Something for the map.")
    page.open(server.url, "memory")
    page.one("table tbody tr")
    page.js("document.querySelector('.map').focus()")
    page.press(Keys.HOME)
    page.until_text(".memory .readout", "0: the null slab")
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: "0: the null slab" not in page.text(".memory .readout"))
    second = page.text(".memory .readout")
    page.press(Keys.ARROW_DOWN)
    page.until(lambda: page.text(".memory .readout") != second)
    cells = page.js("return Number(document.querySelector('.map').dataset.cells)")
    page.press(Keys.END)
    page.until(lambda: page.text(".memory .readout").startswith(f"Slab {cells - 1}: "))
