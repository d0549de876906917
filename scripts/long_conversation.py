"""Measure how a conversation of many turns feels: from the key that sends a question to the first visible word of its
answer, beside what the model itself takes to that word, with one turn and with many.

Run from the repository: `python -m scripts.long_conversation -- --target MODEL --threads 2`. Needs playwright and a
Chromium, as the browser tests do. Conversations are in a folder that is there for this run alone.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, sync_playwright

from app.conversations import Conversations, Turn
from engine.types import FinishReason
from scripts.serving import find_browser, served

PATIENCE_MS = 600_000
MARK_FIRST_WORD = """() => {
    window.sentAt = window.firstAt = null;
    document.addEventListener("keydown", (event) => {
        if (event.key === "Enter") { window.sentAt = performance.now(); window.firstAt = null; }
    }, true);
    new MutationObserver(() => {
        if (window.sentAt === null || window.firstAt !== null) return;
        const answers = document.querySelectorAll("#chat .bot.message");
        const questions = document.querySelectorAll("#chat .user.message");
        const last = answers[answers.length - 1];
        const asked = questions[questions.length - 1];
        if (!asked?.innerText.includes(window.expected) || !last || last.querySelector(".q-wait")) return;
        if (!(asked.compareDocumentPosition(last) & Node.DOCUMENT_POSITION_FOLLOWING) || !last.innerText.trim()) return;
        requestAnimationFrame(() => { window.firstAt ??= performance.now(); });
    }).observe(document.querySelector("#chat"), { childList: true, subtree: true, characterData: true });
}"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--questions", type=int, default=8, help="of each conversation")
    parser.add_argument("options", nargs="*", help="for launch.py, after --, such as -- --target MODEL --threads 2")
    args = parser.parse_args()
    executable = find_browser()
    with tempfile.TemporaryDirectory() as home:
        names = {turns: fill(Path(home), turns) for turns in (1, args.turns)}
        with served(args.options, home) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
            waits = {}
            for turns, name in names.items():
                page = browser.new_page()
                page.set_default_timeout(PATIENCE_MS)
                page.goto(url)
                waits[turns] = _waits(page, name, turns, args.questions)
                page.close()
            browser.close()
    beyond = {turns: median(seen - model for seen, model in own) for turns, own in waits.items()}
    for turns, own in waits.items():
        seen, model = (median(column) for column in zip(*own, strict=True))
        print(f"{turns:4} turns: first word seen after {seen:.2f} s, of which the model took {model:.2f} s")
    few, many = beyond[1], beyond[args.turns]
    seen_at_first = median(seen for seen, _ in waits[1])
    growth = 100 * (many - few) / seen_at_first
    print(f"beyond the model {few:.3f} s and {many:.3f} s: {growth:+.0f} % of the wait with one turn")


def fill(home: Path, turns: int, name: str = "") -> str:
    """Keep a conversation of so many short turns; returns its name."""
    (home / "data").mkdir(parents=True, exist_ok=True)
    conversations = Conversations(home / "data" / "conversations.sqlite3")
    conversation_id = conversations.create().id
    for number in range(turns):
        question = f"Question {number + 1} of {turns}: what follows?"
        index = conversations.add_turn(conversation_id, question, "")
        assert index is not None
        answer = f"After {number} follows **{number + 1}**.\n\n- as `{number} + 1`\n- and so on"
        conversations.set_turn(conversation_id, index, Turn(question, answer, FinishReason.STOP, model="made"))
    name = name or f"{turns} turns"
    conversations.rename(conversation_id, name)
    conversations.close()
    return name


def _waits(page: Page, name: str, turns: int, questions: int) -> list[tuple[float, float]]:
    """For each question the seconds to the first visible word, and those that the model took to it."""
    page.wait_for_selector("#hint:has-text('Enter sends')")
    page.locator("#sampling-section button").first.click()
    page.locator("#temperature input[type=number]").fill("0")
    page.locator("#max-tokens :is(input, textarea)").fill("24")
    page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    page.locator("#chat-list").get_by_text(name, exact=True).click()
    page.locator("#chat .user.message", has_text=f"Question {turns} of").wait_for()
    page.evaluate(MARK_FIRST_WORD)
    waits = []
    for number in range(questions + 1):
        question = f"What is the number {number}?"
        page.evaluate(f"window.expected = '{question}'")
        page.locator("#message textarea").fill(question)
        page.keyboard.press("Enter")
        page.wait_for_function("window.firstAt !== null")
        page.wait_for_selector("#retry:visible")
        seen = float(page.evaluate("window.firstAt - window.sentAt")) / 1000
        footer = page.locator("#live").inner_text()
        model = float(re.search(r"first token after ([\d.]+) s", footer)[1])  # type: ignore[index]
        if number:  # the first question reads the whole conversation
            waits.append((seen, model))
    return waits


if __name__ == "__main__":
    main()
