"""`launch.py serve` as a process: from its first line to its end, with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from scripts.serving import ROOT
from tests.app.browser import serving
from tests.app.conftest import PATIENCE_S
from tests.engine.making import write_tiny_llama

ENDLESS = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "logit_bias": {"1": -100}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def options(tiny: Path) -> list[str]:
    return ["serve", "--target", str(tiny), "--threads", "1", "--ctx", "0", "--port", "18431"]


def test_it_serves_until_it_is_interrupted_and_lets_answers_end(tiny: Path, tmp_path: Path) -> None:
    """`serving` interrupts it on leaving, waits for its end, and looks for tracebacks."""
    environment = {"QUORUM_HOME": str(tmp_path), "QUORUM_API_KEY": "secret"}
    ended: list[str] = []
    with httpx.Client(timeout=PATIENCE_S, headers={"authorization": "Bearer secret"}) as http:
        with serving([*options(tiny), "--max-tokens", "2000"], environment) as server:
            assert httpx.get(f"{server.url}/models").status_code == 401
            assert http.get(f"{server.url}/models").json()["data"][0]["id"] == "tiny"
            request = http.build_request("POST", f"{server.url}/chat/completions", json=ENDLESS)
            stream = http.send(request, stream=True)
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("data:"))
        ended = [line for line in lines if line.startswith("data:")]
    assert (
        ended[-1] == "data: [DONE]"
        or "shutting down" in json.loads(ended[-1].removeprefix("data:"))["error"]["message"]
    )


def test_it_answers_to_the_names_it_was_given_and_to_no_other(tiny: Path, tmp_path: Path) -> None:
    named = ["--allow-host", "desk.example", "--allow-host", "192.0.2.7"]
    with serving([*options(tiny), *named], {"QUORUM_HOME": str(tmp_path)}) as server:
        url = f"{server.url}/chat/completions"
        body = {**ENDLESS, "stream": False, "max_tokens": 2}
        served = {"desk.example:18431", "DESK.example", "192.0.2.7", "localhost:1"}
        for host in served | {"other.example", "desk.example.other.example", "192.0.2.8", "x@desk.example"}:
            response = httpx.post(url, json=body, headers={"host": host}, timeout=PATIENCE_S)
            assert response.status_code == (200 if host in served else 403), host
        own, foreign = "http://desk.example:18431", "http://other.example:18431"
        for origin, status in ((own, 200), (foreign, 403)):
            headers = {"host": "desk.example:18431", "origin": origin}
            assert httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S).status_code == status


def test_a_second_interrupt_ends_it_at_once(tiny: Path, tmp_path: Path) -> None:
    environment = os.environ | {"QUORUM_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "launch.py", *options(tiny)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = next(line for line in process.stdout if "ready at" in line).split("ready at ")[1].split()[0]
    with httpx.stream("POST", f"{url}/chat/completions", json=ENDLESS, timeout=PATIENCE_S) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "nothing-like-it"], "nothing-like-it"),
        (["--api-key", " "], "--api-key needs a key"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_line(tiny: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    command = [sys.executable, "launch.py", *options(tiny), *arguments]
    environment = os.environ | {"QUORUM_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    command = [sys.executable, "launch.py", "serve", "--target", str(broken), "--port", "18432"]
    environment = os.environ | {"QUORUM_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert "broken.gguf" in ended.stderr
    assert "ready" not in ended.stdout
