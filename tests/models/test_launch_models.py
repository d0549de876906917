"""`launch.py models` as a user runs it: a process of its own, its streams, its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.folders import models_folder
from tests.models.hub_server import hub_server, slowly
from tests.models.making import write_tiny_llama

LAUNCH = [sys.executable, str(Path(__file__).parents[2] / "launch.py"), "models"]


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True)


def test_results_go_to_stdout_and_llama_cpp_stays_quiet(home: Path) -> None:
    target = write_tiny_llama(models_folder() / "Tiny-F16.gguf", layer_count=3)
    finished = launched("derive", str(target), "--drop", "1", "--bits", "q8_0")
    assert finished.returncode == 0
    assert finished.stdout.endswith("Tiny-without-1-Q8_0.gguf\n")
    phases = finished.stderr.splitlines()
    assert [phase.split()[0] for phase in phases[:-2]] == ["checking", "copying", "quantising", "checking"]
    assert phases[-2].startswith("Tiny-without-1-Q8_0: ")
    assert phases[-1].startswith("it is offered as a drafter of Tiny-F16 from now on")


def test_a_user_error_is_one_line_and_exit_code_2(home: Path) -> None:
    finished = launched("pair", "nothing")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("error: no model file and no installed model is called 'nothing'")
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process on Windows")
def test_ctrl_c_stops_a_download_with_exit_code_130(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as hub:
        hub.repositories["a/b"] = {"model-Q4_0.gguf": bytes(20_000_000)}
        hub.answers = [slowly]
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        process = subprocess.Popen([*LAUNCH, "fetch", "a/b"], stderr=subprocess.PIPE, text=True)
        while not any(path.stat().st_size for path in models_folder().rglob("*.partial")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(models_folder().rglob("*.gguf"))
