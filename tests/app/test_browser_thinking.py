"""A model that thinks before it answers, in the page: the starter with a template whose examples think."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from models.rewrite import Source, write_model
from tests.app.browser import PATIENCE_MS, Server, answers, ask, serving, set_control, wait_until
from tests.engine.making import TEMPLATE

EXAMPLES = (
    ("Name a fruit.", "They want a fruit. A pear is one.", "A pear."),
    ("Name a town.", "They want a town. Oslo is one.", "Oslo."),
    ("Name a bird.", "They want a bird. A heron is one.", "A heron."),
    ("Name a tree.", "They want a tree. An oak is one.", "An oak."),
)
THINKING = (
    "".join(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n{thought}\n</think>\n\n{answer}"
        "<|im_end|>\n"
        for question, thought, answer in EXAMPLES
    )
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("thinker")
    source = Source(starter)
    tensors = [tensor.carried_over(tensor.name) for tensor in source.tensors]
    write_model(source, home / "thinker.gguf", tensors, {TEMPLATE: THINKING}, lambda _size: None)
    options = ["--no-browser", "--target", str(home / "thinker.gguf"), "--drafters", "ngram,suffix", "--threads", "1"]
    with serving(options, {"QUORUM_HOME": str(home)}) as started:
        yield started


def exported(page: Page) -> list[dict[str, str]]:
    """The turns of the open conversation, as its JSON file tells them."""
    if not page.get_by_role("link", name="JSON").is_visible():
        page.locator("#chat-actions button").first.click()
    with page.expect_download() as download:
        page.get_by_role("link", name="JSON").click()
    turns: list[dict[str, str]] = json.loads(download.value.path().read_text(encoding="utf-8"))["turns"]
    return turns


def test_a_thought_is_folded_kept_apart_and_switched_off(browser: Browser, thinker: Server) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(thinker.url)
    expect(page.locator("#status .q-loaded b")).to_have_text("thinker")
    expect(page.locator("#thinking")).to_be_visible()
    set_control(page, "sampling-section", "temperature", "0")
    set_control(page, "sampling-section", "max-tokens", "60")
    ask(page, "Name a fish.")
    expect(page.locator("#retry")).to_be_visible()
    [turn] = exported(page)
    assert turn["thinking"].strip()
    assert turn["answer"].strip()
    assert "think>" not in turn["thinking"] + turn["answer"]
    fold = page.locator("#chat .thought-group")
    expect(fold).to_have_text("Reasoning")
    expect(answers(page).locator(".message-content")).to_have_text(turn["answer"].strip())
    fold.get_by_role("button").first.press("Enter")
    expect(fold).to_contain_text(turn["thinking"].strip())

    page.get_by_label("Tokens", exact=True).check(force=True)
    expect(page.locator("#tokens .q-tokens")).to_contain_text(turn["thinking"].strip())
    expect(page.locator("#tokens .q-tokens")).to_contain_text(turn["answer"].strip())
    page.get_by_label("Text", exact=True).check(force=True)

    page.get_by_label("Answer at once").check()
    set_control(page, "sampling-section", "max-tokens", "12")
    ask(page, "Name a river.")
    wait_until(lambda: all(turn["finish_reason"] for turn in exported(page)), "the answer's end")
    thinking, at_once = exported(page)
    assert thinking == turn
    assert (at_once["thinking"], bool(at_once["answer"].strip())) == ("", True)
    expect(fold).to_have_count(1)
    page.close()
