"""Make the README's screenshots: start Quorum, ask something, and picture its tabs in light and dark.

Nothing of yours is pictured or touched: conversations and models are in a folder that is there for this run alone.

Run from the repository: `python -m scripts.screenshots`. Needs playwright and a Chromium, as the browser test does.
"""

from __future__ import annotations

import argparse
import tempfile

from playwright.sync_api import Browser, Page, sync_playwright

from scripts.serving import ROOT, find_browser, served

PICTURES = ROOT / "docs" / "screenshots"
PATIENCE_MS = 600_000
WIDTH, HEIGHT = 1280, 800
QUESTION = "Write a Python function that adds the numbers of a list, then write it again with a docstring."
MOST_TOKENS = "160"


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
        _picture(browser, url, "light", asks=True)
        _picture(browser, url, "dark", asks=False)
        browser.close()


def _picture(browser: Browser, url: str, scheme: str, *, asks: bool) -> None:
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light", viewport={"width": WIDTH, "height": HEIGHT}
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.wait_for_selector("#use-starter:visible, #hint:has-text('Enter sends')")
    if page.locator("#use-starter").is_visible():
        page.screenshot(path=PICTURES / f"welcome-{scheme}.png")
        page.locator("#use-starter").click()
        page.wait_for_selector("#hint:has-text('Enter sends')")
    if asks:
        _ask(page)
        _compare(page)
    else:
        page.locator("#chat-list label").first.click()
        page.wait_for_selector("#retry:visible")
    page.wait_for_timeout(1500)
    page.screenshot(path=PICTURES / f"chat-{scheme}.png")
    page.locator("#answer-view label").nth(1).click()
    page.wait_for_selector("#tokens .q-tokens")
    page.wait_for_timeout(700)
    page.screenshot(path=PICTURES / f"tokens-{scheme}.png")
    for name in ("Compare", "Models", "Inside"):
        page.get_by_role("tab", name=name, exact=True).click()
        page.wait_for_timeout(3000)
        page.screenshot(path=PICTURES / f"{name.lower()}-{scheme}.png")
    context.close()


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
    page.get_by_role("tab", name="Chat", exact=True).click()


if __name__ == "__main__":
    main()
