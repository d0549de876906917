"""Make the README's screenshots: start Quorum, ask something, and picture its tabs in light and dark.

Nothing of yours is pictured or touched: conversations and models are in a folder that is there for this run alone.

Run from the repository: `python -m scripts.screenshots`. Needs playwright and a Chromium, as the browser test does.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

from scripts.serving import ROOT, find_browser, served

PICTURES = ROOT / "docs" / "screenshots"
PATIENCE_MS = 600_000
WIDTH, HEIGHT = 1280, 800
QUESTION = "Write a Python function that adds the numbers of a list, then write it again with a docstring."
MOST_TOKENS = "160"
READY = "#hint:has-text('Enter sends')"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", nargs="*", help="for launch.py, after --, such as -- --target MODEL --drafters LIST")
    options = parser.parse_args().options
    executable = find_browser()
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, served(options, home) as url:
        _picture_all(url, executable)


def _picture_all(url: str, executable: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        with _opened(browser, url, "light") as page:
            if page.locator("#use-starter").is_visible():
                page.screenshot(path=PICTURES / "welcome-light.png")
                page.locator("#use-starter").click()
                page.wait_for_selector(READY)
                _make_a_drafter(page)
            _ask(page)
        for scheme in SCHEMES:
            with _opened(browser, url, scheme) as page:
                _picture_answer(page, scheme)
                _picture_tabs(page, scheme, ("Models", "Inside"))
        # Last, since it leaves a set that has seen nothing yet.
        with _opened(browser, url, "light") as page:
            _compare(page)
        for scheme in SCHEMES:
            with _opened(browser, url, scheme) as page:
                _picture_tabs(page, scheme, ("Compare",))
        browser.close()


@contextlib.contextmanager
def _opened(browser: Browser, url: str, scheme: Literal["light", "dark"]) -> Iterator[Page]:
    with browser.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT}) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        page.wait_for_selector(f"#use-starter:visible, {READY}")
        yield page


def _picture_answer(page: Page, scheme: str) -> None:
    page.locator("#chat-list label").first.click()
    page.wait_for_selector("#retry:visible")
    page.wait_for_timeout(1500)
    page.screenshot(path=PICTURES / f"chat-{scheme}.png")
    page.locator("#answer-view label").nth(1).click()
    page.wait_for_selector("#tokens .q-tokens")
    page.wait_for_timeout(700)
    page.screenshot(path=PICTURES / f"tokens-{scheme}.png")


def _picture_tabs(page: Page, scheme: str, names: Sequence[str]) -> None:
    for name in names:
        page.get_by_role("tab", name=name, exact=True).click()
        page.wait_for_timeout(3000)
        page.screenshot(path=PICTURES / f"{name.lower()}-{scheme}.png")


def _make_a_drafter(page: Page) -> None:
    """Out of the starter; so that there is a draft model to be seen at work."""
    page.get_by_role("tab", name="Models", exact=True).click()
    page.locator("#derive-drafter").click()
    page.locator("#drafter-set label").nth(2).locator("input").check()
    page.locator("#load-model").click()
    page.wait_for_selector("#status .q-progress")
    page.wait_for_selector("#status:not(:has(.q-progress)) .q-loaded")
    page.get_by_role("tab", name="Chat", exact=True).click()


def _ask(page: Page) -> None:
    page.locator("#sampling-section button").first.click()
    page.locator("#temperature input[type=number]").fill("0")
    page.locator("#max-tokens :is(input, textarea)").fill(MOST_TOKENS)
    page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    page.locator("#sampling-section button").first.click()
    page.locator("#message textarea").fill(QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector("#retry:visible")


def _compare(page: Page) -> None:
    page.get_by_role("tab", name="Compare", exact=True).click()
    page.wait_for_selector("#compare-sets label")
    page.locator("#compare-tokens :is(input, textarea)").fill("64")
    page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    page.locator("#compare-start").click()
    page.wait_for_selector("#advice")
    page.wait_for_selector("#compare-start:visible")


if __name__ == "__main__":
    main()
