"""The frame of the page: what loads, keys, tabs, widths, colours."""

from __future__ import annotations

import httpx
import pytest
from browsing import Page
from conftest import KEYS, OPERATOR
from selenium.webdriver.common.keys import Keys
from servers import Served

TABS = ("chat", "memory", "prefixes", "requests")

# Contrast of every visible text against the nearest background, as WCAG computes it.
_LOW_CONTRAST = """
const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const background = (e) => {
  for (; e; e = e.parentElement) {
    const color = numbers(getComputedStyle(e).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const low = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !e.checkVisibility() || e.disabled || e.closest(".visually-hidden, noscript, script, option")) continue;
  const [a, b] = [light(numbers(getComputedStyle(e).color)), light(background(e))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) low.push(`${contrast.toFixed(2)} ${e.className} ${e.textContent.slice(0, 30)}`);
}
return low;
"""


def fill(page: Page, server: Served) -> None:
    """Open the page with something in every tab."""
    server.chat("Which colours and widths does a page have?")
    page.open(server.url)
    page.say("What does Mira Holt do?")


def visit(page: Page, tab: str) -> None:
    page.go(tab)
    shown = {"chat": "#message", "memory": "table tbody tr", "prefixes": ".node", "requests": ".records tbody tr"}
    page.one(shown[tab])


def test_the_shell_needs_no_key_and_nothing_from_elsewhere(page: Page, keyed: Served) -> None:
    page.refusals_expected = {401}
    page.open(keyed.url)
    page.one("#key-input")
    paths = [sent["url"].removeprefix(keyed.url) for sent in page.requests()]
    assert "/" in paths
    assert "/ui/app.js" in paths
    assert [path for path in paths if path.startswith("/v1")] == ["/v1/hybridkv/whoami"]


def test_a_wrong_key_is_told_and_no_key_is_in_a_url(page: Page, keyed: Served) -> None:
    page.refusals_expected = {401}
    page.open(keyed.url, "memory")
    page.type("#key-input", "wrong-key" + Keys.ENTER)
    page.until_text(".key-form .error", "does not know this key")
    page.give_key(KEYS[0])
    page.one("table tbody tr")
    assert not [sent["url"] for sent in page.requests() if "-key" in sent["url"]]
    assert page.js("return localStorage.length + document.cookie.length") == 0
    page.driver.refresh()
    page.one("table tbody tr")
    page.click("#key")
    page.one("#key-input")
    assert page.js("return sessionStorage.length") == 0


def test_all_tabs_by_keyboard_alone(page: Page, server: Served) -> None:
    fill(page, server)
    page.open("about:blank")
    page.open(server.url)
    page.one("#message")
    focused = (
        "return [document.activeElement.textContent.trim(), getComputedStyle(document.activeElement).outlineStyle]"
    )
    page.press(Keys.TAB)
    assert page.js(focused)[0] == "Skip to content"
    page.press(Keys.ENTER)
    assert page.js("return document.activeElement.id") == "main"
    for tab in ("Memory", "Prefixes", "Requests"):
        page.js("document.getElementById('skip').focus()")
        for _ in range(10):
            page.press(Keys.TAB)
            if page.js(focused)[0] == tab:
                break
        assert page.js(focused) == [tab, "solid"]
        page.press(Keys.ENTER)
        page.until(lambda tab=tab: page.text("#tabs a[aria-current]") == tab)
    page.until(lambda: page.all(".records tbody a"))
    for _ in range(30):
        page.press(Keys.TAB)
        if page.js("return Boolean(document.activeElement.closest('.records'))"):
            break
    page.press(Keys.ENTER)
    page.one(".record h1.id")


@pytest.mark.parametrize("tab", ["constructor", "no-such-tab/1", "requests/%E0%A4", "requests/a%2Fb%3Fc"])
def test_odd_addresses_do_no_harm(page: Page, server: Served, tab: str) -> None:
    page.refusals_expected = {404}
    page.open(server.url, tab)
    page.one("#no-record" if tab.startswith("requests") else "#message")


def test_a_narrow_page_does_not_scroll_sideways(page: Page, server: Served) -> None:
    page.set_width(360, 740)
    fill(page, server)
    for tab in TABS:
        visit(page, tab)
        if tab == "prefixes":
            page.click(".node")
            page.one("#pin")
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), tab
    page.click(".records tbody a")
    page.one(".record h1.id")
    page.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.one(".tokens .token")
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Page, server: Served, scheme: str) -> None:
    page.set_scheme(scheme)
    fill(page, server)
    is_dark = page.js("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert is_dark == (scheme == "dark")
    for tab in TABS:
        visit(page, tab)
        assert page.js(_LOW_CONTRAST) == [], tab
    page.click(".records tbody a")
    page.one(".record h1.id")
    assert page.js(_LOW_CONTRAST) == []


def test_a_normal_key_sees_its_own_requests_and_no_prefixes(page: Page, keyed: Served) -> None:
    mine = keyed.chat("A question of the first key.", KEYS[0])["id"]
    other = keyed.chat("A question of the second key.", KEYS[1])["id"]
    page.refusals_expected.add(404)
    page.open(keyed.url, "requests", KEYS[0])
    page.one(f"tr[data-id='{mine}']")
    assert not page.all(f"tr[data-id='{other}']")
    page.go("prefixes")
    page.until_text("#refusal", "--operator-key")
    page.open(keyed.url, f"requests/{other}")
    page.until_text("#no-record", other)
    assert "second key" not in page.text("main")


def test_the_operator_sees_all_requests(page: Page, keyed: Served) -> None:
    other = keyed.chat("A question of the second key.", KEYS[1])["id"]
    page.open(keyed.url, "requests", OPERATOR)
    page.one(f"tr[data-id='{other}']")
    page.go("prefixes")
    page.one(".node")


def test_a_server_without_the_page(without_page: Served) -> None:
    assert httpx.get(f"{without_page.url}/").status_code == 404
    assert httpx.get(f"{without_page.url}/ui/app.js").status_code == 404
    assert httpx.get(f"{without_page.url}/v1/hybridkv/whoami").status_code == 200


def test_where_only_the_operator_has_a_key_chats_need_none(page: Page, stored: Served) -> None:
    page.open(stored.url)
    page.type("#message", "Who are you?" + Keys.ENTER)
    page.until_text(".turn.assistant .facts", "No record of this request: give a key")
    page.go("requests")
    page.give_key(OPERATOR)
    page.one(".records tbody tr")
    page.refusals_expected = {401}
    page.click("#key")
    page.one("#key-input")
    page.go("chat")
    page.one("#message")
