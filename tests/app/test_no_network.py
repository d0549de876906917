"""Without a network: nothing that Quorum or its page does by itself asks for one, and what needs one says so.

The server's Python, and every Python that it starts, is kept from reaching any other machine and writes down whom it
tried to reach. The browser has a proxy for all that is not on this machine, which writes down what it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Error, Page, expect, sync_playwright

from engine.config import SetConfig
from tests.app.browser import (
    ARGUMENTS,
    PATIENCE_MS,
    Server,
    answer_longer_than,
    ask,
    find_browser,
    open_tab,
    send,
    serving,
    set_control,
)
from tests.conftest import with_model

WALL = """
import os, sys

HERE = (None, "", "localhost", "127.0.0.1", "::1")


def refuse(event, arguments):
    if event == "socket.connect":
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in HERE:
        with open(os.environ["WALL_LOG"], "a") as log:
            log.write(f"{host}\\n")
        raise OSError(101, "Network is unreachable")


sys.addaudithook(refuse)
"""


@dataclass
class Wall:
    """What keeps a Python on this machine."""

    environment: dict[str, str]
    log: Path

    @property
    def tried(self) -> list[str]:
        """Whom it tried to reach."""
        return self.log.read_text().split()


@pytest.fixture
def wall(tmp_path: Path) -> Wall:
    folder = tmp_path / "wall"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WALL)
    log = folder / "tried.txt"
    log.touch()
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    index = {"PIP_INDEX_URL": "https://index.example/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    return Wall({"PYTHONPATH": os.pathsep.join(paths), "WALL_LOG": str(log), **index}, log)


@pytest.fixture
def walled_page(asked_of_proxy: tuple[int, list[str]]) -> Iterator[Page]:
    """A page of a browser for which all but this machine lies behind the proxy."""
    executable = find_browser()
    port, _ = asked_of_proxy
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=[*ARGUMENTS, f"--proxy-server=http://127.0.0.1:{port}"]
        )
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


@pytest.fixture
def asked_of_proxy() -> Iterator[tuple[int, list[str]]]:
    """A proxy that refuses everything; its port, and the first lines of what it was asked."""
    asked: list[str] = []

    class Refuses(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode("latin-1").strip())
            self.wfile.write(b"HTTP/1.1 502 Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuses) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy.server_address[1], asked
        proxy.shutdown()


CHROMIUMS_OWN = re.compile(
    r"^CONNECT (accounts|clients\d*|android\.clients|content-autofill|update|[a-z-]*optimization[a-z-]*)"
    r"\.google(apis)?\.com:443 "
    # Its updater's next attempts, once that was refused.
    r"|^POST http://update\.googleapis\.com/service/update2/json\?cup2key="
    r"|^(CONNECT redirector\.gvt1\.com:443 |GET http://redirector\.gvt1\.com/)"
)
"""What the browser asks for itself, whatever page it shows."""


def foreign(asked: list[str]) -> list[str]:
    """What the page is to blame for."""
    return [line for line in asked if not CHROMIUMS_OWN.match(line)]


def served(wall: Wall, home: Path, *options: str) -> AbstractContextManager[Server]:
    return serving(["--no-browser", "--threads", "1", *options], {**wall.environment, "QUORUM_HOME": str(home)})


def test_the_wall_and_the_proxy_would_tell(
    walled_page: Page, wall: Wall, asked_of_proxy: tuple[int, list[str]]
) -> None:
    """What writes nothing down proves nothing."""
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    ended = subprocess.run([sys.executable, "-c", reach], env=os.environ | wall.environment, capture_output=True)
    assert b"unreachable" in ended.stderr
    assert set(wall.tried) == {"192.0.2.1"}
    with contextlib.suppress(Error):
        walled_page.goto("http://font.example/a.woff2")
    assert foreign(asked_of_proxy[1]) == ["GET http://font.example/a.woff2 HTTP/1.1"]


def test_no_request_leaves_this_machine(
    walled_page: Page, wall: Wall, asked_of_proxy: tuple[int, list[str]], set_config: SetConfig, tmp_path: Path
) -> None:
    """The whole page is used, and shown an image, a font and a formula that a model might name."""
    with served(wall, with_model(tmp_path / "home", set_config.target)) as server:
        page = walled_page
        failed: dict[str, str | None] = {}
        page.on("requestfailed", lambda request: failed.update({request.url: request.failure}))
        page.goto(server.url)
        expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
        set_control(page, "sampling-section", "max-tokens", "12")
        ask(page, "![pixel](https://pixel.example/a.png) $$\\frac{1}{2}$$ <link href='https://font.example/a.css'>")
        expect(page.locator("#retry")).to_be_visible()
        for tab in ("Compare", "Models", "Inside"):
            open_tab(page, tab)
            page.wait_for_load_state("networkidle")
        page.reload()
        expect(page.locator("#chat .user.message")).to_have_count(1)
    assert foreign(asked_of_proxy[1]) == []
    assert failed.get("https://pixel.example/a.png") == "csp", "the page would have asked for the image"
    assert wall.tried == []


def test_a_first_start_without_network_says_what_to_do(walled_page: Page, wall: Wall, tmp_path: Path) -> None:
    """No model is here and none can be fetched: every tab says so in its own words, and it can be tried again."""
    with served(wall, tmp_path / "home") as server:
        page = walled_page
        page.goto(server.url)
        expect(page.locator("#welcome")).to_contain_text("Welcome.")
        expect(page.locator("#hint")).to_contain_text("No model is loaded")
        assert wall.tried == []
        page.locator("#use-starter").click()
        alert = page.locator("#status .q-alert")
        expect(alert).to_contain_text("pip could not fetch the starter model")
        expect(alert).to_contain_text("To bring it by hand")
        expect(page.locator("#load-again")).to_be_visible()
        expect(page.locator("#welcome")).to_be_hidden()
        send(page, "Name a colour.")
        expect(page.locator("#notice .q-alert")).to_contain_text("no model is loaded")
        expect(page.locator("#message textarea")).to_have_value("Name a colour.")
        open_tab(page, "Compare")
        expect(page.locator("#compare-unfit")).to_contain_text("load a model first")
        open_tab(page, "Inside")
        expect(page.locator("#inside .q-empty")).to_contain_text("Load a model")
        open_tab(page, "Models")
        expect(page.locator("#installed .q-empty")).to_contain_text("No model is installed")
        assert "Traceback" not in page.inner_text("body")
    assert set(wall.tried) == {"index.example"}


def test_models_that_are_here_need_no_network(
    walled_page: Page, wall: Wall, set_config: SetConfig, tmp_path: Path
) -> None:
    with served(wall, tmp_path / "home", "--target", str(set_config.target)) as server:
        page = walled_page
        page.goto(server.url)
        expect(page.locator("#status .q-loaded b")).to_contain_text("SmolLM2")
        ask(page, "Name a colour.")
        answer_longer_than(page, 2)
        page.keyboard.press("Escape")
    assert wall.tried == []
