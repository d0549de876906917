"""Measure what the page costs: tokens per second of the engine alone, with the page's stream read by a program that
draws nothing, and with a headless Chromium that shows it on the same cores.

Every answer is to the same question, greedy and of the same length, so that only the reader differs; the three ways
take turns, another one first each time. Medians are printed, and how much slower than the engine alone each is.

Run from the repository: `python -m scripts.ui_cost -- --target MODEL --threads 2 --policy off`. Needs playwright and a
Chromium, as the browser tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

from app.layout import TEXT_VIEW
from app.page_state import TURNS_AT_FIRST
from app.page_stream import PATH
from scripts.serving import ROOT, find_browser, served

PATIENCE_S = 600
PAUSE_S = 0.1
QUESTION = "Write a long story about a lighthouse keeper and the sea, in many chapters."
SPEED = re.compile(r'id=\\?"tokens-per-second\\?">([\d.]+)<')


def main() -> None:
    """Measure in rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("options", nargs="*", help="for launch.py, after --, such as -- --target MODEL --threads 2")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        home = os.environ.get("QUORUM_HOME") or stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(served(args.options, home))
        _wait_for_model(url)
        ways: dict[str, Callable[[], float]] = {
            "engine alone": lambda: _alone(args.options, home, args.tokens),
            "stream read, not drawn": lambda: _read(url, args.tokens),
            "headless Chromium": lambda: _shown(url, args.tokens),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(-1, args.rounds):
            names = [*ways]
            for name in names[turn % 3 :] + names[: turn % 3]:
                speed = ways[name]()
                if turn >= 0:  # the first round warms up
                    speeds[name].append(speed)
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    alone = median(speeds["engine alone"])
    for name, own in speeds.items():
        loss = 100 * (1 - median(own) / alone)
        print(f"{name:24}{median(own):8.2f} tokens/s   {loss:+.1f} % lost   ({', '.join(f'{one:.1f}' for one in own)})")


def _wait_for_model(url: str) -> None:
    while httpx.get(f"{url}/health").json()["model"] is None:
        time.sleep(PAUSE_S)


def _alone(options: list[str], home: str, tokens: int) -> float:
    """The engine's own figure, with no server in its process; the server rests meanwhile."""
    command = [sys.executable, "launch.py", *options, "chat", QUESTION, "--json"]
    asked = ["--temperature", "0", "--max-tokens", str(tokens)]
    answered = subprocess.run(
        [*command, *asked], cwd=ROOT, env=os.environ | {"QUORUM_HOME": home}, stdout=subprocess.PIPE, check=True
    )
    document = json.loads(answered.stdout)
    _require(len(document["token_ids"]), tokens)
    return float(document["timings"]["tokens_per_second"])


def _read(url: str, tokens: int) -> float:
    """Ask as the page does, and take its stream in without drawing it."""
    client = _Client(url)
    conversation, _, notice = client.run("send", _changed(tokens))
    if notice:
        sys.exit(f"the page refused the question: {notice}")
    client.follow(conversation)
    return _speed(client.follow(conversation))


def _shown(url: str, tokens: int) -> float:
    """Ask in a browser that shows the answer as it comes."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(url)
        page.wait_for_selector("#hint:has-text('Enter sends')")
        page.locator("#sampling-section button").first.click()
        _fill(page, "temperature", "0")
        _fill(page, "max-tokens", str(tokens))
        page.locator("#message textarea").fill(QUESTION)
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop:visible")
        page.wait_for_selector("#retry:visible")
        speed = _speed(page.content())
        browser.close()
    return speed


def _fill(page: Page, control: str, value: str) -> None:
    page.locator(f"#{control} :is(input:not([type=range]), textarea)").fill(value)
    page.keyboard.press("Tab")
    page.wait_for_timeout(1000)


def _changed(tokens: int) -> dict[str, Any]:
    return {"message": QUESTION, "temperature": 0, "max-tokens": str(tokens)}


def _speed(text: str) -> float:
    found = SPEED.search(text)
    if found is None:
        sys.exit("the live panel has no speed")
    return float(found[1])


def _require(found: int, expected: int) -> None:
    if found != expected:
        sys.exit(f"an answer ended after {found} tokens and not {expected}; ask for fewer with --tokens")


class _Client:
    """The page's own requests, made by a program."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = uuid.uuid4().hex
        config = httpx.get(f"{url}/config").json()
        self._components = {component["id"]: component["props"] for component in config["components"]}
        self._events = config["dependencies"]

    def run(self, button: str, changed: dict[str, Any]) -> list[Any]:
        """What a click on a button brings about, with some controls set otherwise than at first."""
        (target,) = (key for key, props in self._components.items() if props.get("elem_id") == button)
        event = next(event for event in self._events if [target, "click"] in event["targets"])
        self._asked = event["id"]
        data = [
            changed.get(self._components[key].get("elem_id"), self._components[key].get("value"))
            for key in event["inputs"]
        ]
        answered = httpx.post(f"{self._url}/gradio_api/run/predict", json=self._request(event["id"], data))
        answered.raise_for_status()
        return list(answered.json()["data"])

    def follow(self, conversation: str) -> str:
        """All that is streamed until all is quiet."""
        asked: dict[str, str | int] = {"conversation": conversation, "words": "", "view": TEXT_VIEW}
        asked |= {"turns": TURNS_AT_FIRST, "listed": 1}
        with httpx.stream("GET", f"{self._url}{PATH}", params=asked, timeout=PATIENCE_S) as stream:
            return "\n".join(stream.iter_lines())

    def _request(self, event: int, data: list[Any]) -> dict[str, Any]:
        return {"data": data, "event_data": None, "fn_index": event, "session_hash": self._session, "trigger_id": None}


if __name__ == "__main__":
    main()
