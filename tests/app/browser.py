"""What tests of the page have in common: a server as a user starts it, a browser, and what users do in the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from playwright.sync_api import Locator, Page, expect

import scripts.serving
from scripts.serving import ROOT

PATIENCE_MS = 180_000
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@dataclass
class Server:
    """`launch.py`, running."""

    url: str
    said: list[str]
    process: subprocess.Popen[str]
    was_killed: bool = False

    def kill(self) -> None:
        """End it as a power cut does."""
        self.was_killed = True
        self.process.kill()
        self.process.wait(60)


def find_browser() -> str:
    """A Chromium of this machine; skips the test where there is none."""
    try:
        return scripts.serving.find_browser()
    except SystemExit as reason:
        pytest.skip(str(reason))


@contextmanager
def serving(options: list[str], environment: dict[str, str]) -> Iterator[Server]:
    """Start `launch.py`, wait until it is ready, and end it afterwards as Ctrl-C does."""
    process = subprocess.Popen(
        [sys.executable, "launch.py", *options],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    url = ""
    while not url:
        line = process.stdout.readline()
        assert line, f"the server ended: {''.join(said)}"
        said.append(line)
        if match := re.search(r"ready at (http://\S+)", line):
            url = match[1]
    server = Server(url, said, process)
    try:
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert "Traceback" not in rest, rest
    assert server.was_killed or process.returncode in (0, 130)


def send(page: Page, text: str) -> None:
    page.locator("#message textarea").fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> None:
    """Send, and wait until the question stands in the conversation."""
    questions = page.locator("#chat .user.message").count()
    send(page, text)
    expect(page.locator("#chat .user.message")).to_have_count(questions + 1)


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def set_control(page: Page, section: str, control: str, value: str) -> None:
    """Fill a control, unfolding its section if need be."""
    box = page.locator(f"#{control} :is(input:not([type=range]), textarea)")
    if not box.is_visible():
        page.locator(f"#{section} button").first.click()
    box.fill(value)
    box.press("Tab")
    settle(page)


def choose(page: Page, control: str, name: str) -> None:
    """Choose from a list, unfolding the sampling controls that it fills."""
    if not page.locator("#temperature").is_visible():
        page.locator("#sampling-section button").first.click()
    page.locator(f"#{control} input").click()
    page.get_by_role("option", name=name, exact=True).click()


def tab_to(page: Page, goal: Locator, most: int = 100) -> None:
    """Press Tab until the goal has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if goal.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{goal} cannot be reached with the Tab key")


def settle(page: Page) -> None:
    """The page takes a value over a moment after it was typed, by its own clock; nobody clicks on within it."""
    page.evaluate("() => new Promise((done) => setTimeout(done, 1000))")


def answers(page: Page) -> Locator:
    return page.locator("#chat .bot.message")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def answer_longer_than(page: Page, characters: int, index: int = -1) -> str:
    """Wait until so much of an answer is there; what is there then."""
    answer = answers(page).nth(index)
    wait_until(
        lambda: (
            answers(page).count() > 0
            and not answer.locator(".q-wait").count()
            and len(answer.inner_text()) > characters
        ),
        f"{characters} characters of an answer",
    )
    return answer.inner_text()
