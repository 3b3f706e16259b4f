"""Pictures of the page for the documentation: `make screenshots`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browsing import Page, start_browser
from servers import Served

from hybridkv.demo import demo_document

WIDTH = 1200
MAX_BYTES = 150_000


def take(page: Page, path: Path, height: int) -> None:
    page.set_width(WIDTH, height)
    page.js("document.activeElement.blur(); scrollTo(0, 0); document.documentElement.style.scrollbarGutter = 'auto'")
    page.until(lambda: True)
    page.screenshot(path, height)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size} bytes: make the picture smaller than {MAX_BYTES}")


def ask(served: Served, system: str, question: str) -> str:
    """A chat; returns the id of its reply."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    reply: str = served.chat("", messages=messages)["id"]
    return reply


def draw(page: Page, served: Served, folder: Path) -> None:
    paragraphs = demo_document().split("\n\n")
    beginning, later = "\n\n".join(paragraphs[:5]), "\n\n".join(paragraphs[6:8])
    ask(served, beginning, "Where does Jonas Reed live?")
    served.stop()  # then the store alone has the prompt
    served.launch()
    served.wait()
    page.open(served.url)
    page.js("document.getElementById('system').value = arguments[0]", beginning)
    page.say("What does Mira Holt do?")
    page.say("Which pet does Clara Finch have?")
    page.one(".turn.assistant:last-child .token")
    page.js("[...document.querySelectorAll('.tokens')].at(-1).scrollTop = 1e6")
    take(page, folder / "ui-chat.png", 900)
    for question in ("Where does Jonas Reed live?", "Which pet does Clara Finch have?", "When does the train leave?"):
        ask(served, beginning, question)
    for number in range(3):
        ask(served, later + f" Page {number} ends here.", "What is the access code of the green door?")
    cut = ask(served, "\n\n".join(paragraphs[:3]) + " Here the page is torn.", "Where does Jonas Reed live?")
    page.go("prefixes")
    page.one(".node")
    page.click(".node")
    page.until(lambda: page.text(".prefix-text") not in ("", "…"))
    page.click("#pin")
    page.until_text(".badges", "pinned")
    take(page, folder / "ui-prefixes.png", 700)
    page.go("memory")
    page.one("table tbody tr")
    take(page, folder / "ui-memory.png", 800)
    page.open("about:blank")
    page.open(served.url, f"requests/{cut}")
    page.one(".gantt")
    take(page, folder / "ui-request.png", 1050)


def main() -> None:
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        served = Served("--store", f"file://{scratch}/store?size=1GiB")
        try:
            served.wait()
            driver = start_browser(Path(scratch) / "profile")
            try:
                draw(Page(driver), served, folder)
            finally:
                driver.quit()
        finally:
            served.stop()


if __name__ == "__main__":
    main()
