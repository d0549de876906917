"""One file over HTTP: resumed where it stopped, checked while it arrives, and under its name only when it is whole.

What has arrived lies beside the destination in a hidden file named after the expected hash, and survives a cut, a
cancel or a kill; the next transfer of the same bytes goes on from there. Its hash is computed from all of it, what was
there before included, so that nothing wrong or half-written is ever published.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engine.errors import EnvironmentProblem
from models.atomic import publish, remove, require_free_bytes
from models.progress import Cancelled, Progress, Report

_CHUNK_BYTES = 1 << 18
_RATE_SECONDS = 5.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
_RANGE_REFUSED = 416


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a transfer keeps trying when nothing more arrives."""

    fruitless_attempts: int = 6
    first_wait_s: float = 1.0
    """Doubled after each fruitless attempt; a server that names a wait is obeyed instead."""
    longest_wait_s: float = 60.0
    silence_s: float = 10.0

    def wait_s(self, asked_wait_s: float | None, fruitless: int) -> float:
        """Before the next attempt, after `fruitless` ones in a row."""
        wait_s = self.first_wait_s * 2 ** max(0, fruitless - 1) if asked_wait_s is None else asked_wait_s
        return min(wait_s, self.longest_wait_s)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What is to be had, as the server promised it."""

    label: str
    """For messages: repository and file."""
    size_bytes: int
    sha256: str
    """Empty where the server gives none; then only the length is checked."""


OpenFrom = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Opens the response body from a byte on; raises the hub client's errors."""


def transfer(
    remote: RemoteFile,
    destination: Path,
    open_from: OpenFrom,
    report: Report,
    cancel: threading.Event | None,
    patience: Patience,
) -> None:
    """Bring `remote` to `destination`.

    Raises:
        EnvironmentProblem: no room, no connection, or not the promised bytes.
        Cancelled: `cancel` was set.
        huggingface_hub.errors.HfHubHTTPError: the server refused for good.
    """
    from huggingface_hub.errors import HfHubHTTPError

    partial = _partial(destination, remote)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(partial, remote.label):
            for other in destination.parent.glob(f".{glob.escape(destination.name)}.*.partial"):
                if other != partial:
                    remove(other)
            arrived_bytes = partial.stat().st_size if partial.is_file() else 0
            require_free_bytes(destination.parent, remote.size_bytes - arrived_bytes, f"fetching {remote.label}")
            with io.FileIO(partial, "a+") as file:
                _Arrival(remote, file, report, cancel).complete(open_from, patience)
            publish(partial, destination)
    except HfHubHTTPError:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"could not write {destination}: {error.strerror or error}") from error


class _Arrival:
    """What has arrived of one file."""

    def __init__(self, remote: RemoteFile, file: io.FileIO, report: Report, cancel: threading.Event | None) -> None:
        self._remote = remote
        self._file = file
        self._report = report
        self._cancel = cancel
        self._digest = hashlib.sha256()
        self._done_bytes = 0
        self._rate = _Rate()

    def complete(self, open_from: OpenFrom, patience: Patience) -> None:
        self._take_up()
        furthest_bytes = self._done_bytes
        fruitless = 0
        while self._done_bytes < self._remote.size_bytes:
            reason, asked_wait_s = self._receive(open_from)
            fruitless = 0 if self._done_bytes > furthest_bytes else fruitless + 1
            furthest_bytes = max(furthest_bytes, self._done_bytes)
            if self._done_bytes < self._remote.size_bytes:
                if fruitless >= patience.fruitless_attempts:
                    raise EnvironmentProblem(
                        f"{self._remote.label} stopped arriving at {self._done_bytes:,} of "
                        f"{self._remote.size_bytes:,} bytes ({reason}); run it again to go on from there"
                    )
                self._pause(asked_wait_s, fruitless, patience)
        self._check()

    def _take_up(self) -> None:
        """Hash what an earlier transfer left."""
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            self._stop_if_asked()
            self._digest.update(chunk)
            self._done_bytes += len(chunk)
            self._report(Progress(f"checking {self._remote.label}", self._done_bytes, self._remote.size_bytes))
        if self._done_bytes > self._remote.size_bytes:
            self._start_over()

    def _receive(self, open_from: OpenFrom) -> tuple[str, float | None]:
        """Take what one response brings; returns why it ended and how long the server asks to wait."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        self._stop_if_asked()
        try:
            with open_from(self._done_bytes) as response:
                if self._done_bytes and response.status_code != 206:
                    self._start_over()
                for chunk in response.iter_bytes():
                    self._take(chunk)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == _RANGE_REFUSED and self._done_bytes:
                self._start_over()
                return "the server would not continue it", 0
            if status not in TRANSIENT:
                raise
            return f"the server answered {status}", retry_after_s(error.response.headers.get("Retry-After", ""))
        except HTTPError as error:
            return f"the connection failed: {error or type(error).__name__}", None
        return "the connection ended early", None

    def _take(self, chunk: bytes) -> None:
        self._stop_if_asked()
        if self._done_bytes + len(chunk) > self._remote.size_bytes:
            self._start_over()
            raise EnvironmentProblem(
                f"{self._remote.label} is longer than the {self._remote.size_bytes:,} bytes that were announced, so it "
                "was not kept; try again later"
            )
        try:
            _write(self._file, chunk)
        except OSError as error:
            # The hash has not seen the chunk: cut off whatever part of it was written.
            with contextlib.suppress(OSError):
                self._file.truncate(self._done_bytes)
            if error.errno == errno.ENOSPC:
                missing_bytes = self._remote.size_bytes - self._done_bytes
                raise EnvironmentProblem(
                    f"the disk is full; {self._remote.label} needs {missing_bytes / 1e6:,.0f} MB more. Free some space "
                    "and run it again to go on from there"
                ) from error
            raise
        self._digest.update(chunk)
        self._done_bytes += len(chunk)
        self._rate.add(len(chunk))
        self._report(
            Progress(
                f"downloading {self._remote.label}",
                self._done_bytes,
                self._remote.size_bytes,
                self._rate.bytes_per_second,
            )
        )

    def _check(self) -> None:
        found = self._digest.hexdigest()
        if self._remote.sha256 and found != self._remote.sha256:
            self._start_over()
            raise EnvironmentProblem(
                f"{self._remote.label} arrived with the wrong contents (sha256 {found}, promised "
                f"{self._remote.sha256}), so it was not kept; run it again, and if it recurs, look for a proxy that "
                "changes downloads"
            )

    def _pause(self, asked_wait_s: float | None, fruitless: int, patience: Patience) -> None:
        wait_s = patience.wait_s(asked_wait_s, fruitless)
        phase = f"waiting {wait_s:.0f} s for the server of {self._remote.label}"
        self._report(Progress(phase, self._done_bytes, self._remote.size_bytes))
        pause(wait_s, self._cancel)

    def _start_over(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self._done_bytes = 0

    def _stop_if_asked(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled(
                f"fetching {self._remote.label} was stopped; what has arrived is kept, and fetching it again goes on "
                "from there"
            )


class _Rate:
    """Bytes per second over the last few seconds."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._recent_bytes = 0
        self._since = time.monotonic()

    def add(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._arrivals.append((now, size_bytes))
        self._recent_bytes += size_bytes
        while now - self._arrivals[0][0] > _RATE_SECONDS:
            self._since, dropped_bytes = self._arrivals.popleft()
            self._recent_bytes -= dropped_bytes

    @property
    def bytes_per_second(self) -> float:
        return self._recent_bytes / max(1e-3, time.monotonic() - self._since)


def _write(file: io.FileIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _partial(destination: Path, remote: RemoteFile) -> Path:
    """Named after the bytes expected, so that those of another version are never continued with."""
    identity = remote.sha256[:16] or f"{remote.size_bytes}-bytes"
    return destination.with_name(f".{destination.name}.{identity}.partial")


@contextlib.contextmanager
def _claimed(partial: Path, label: str) -> Iterator[None]:
    """Keep other processes and threads from the same partial file."""
    lock = FileLock(partial.with_name(f"{partial.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise EnvironmentProblem(f"{label} is being fetched already; wait for that to end") from None
    try:
        yield
    finally:
        lock.release()
        remove(Path(lock.lock_file))


def pause(wait_s: float, cancel: threading.Event | None) -> None:
    """Wait, or less when asked to stop."""
    if cancel is None:
        time.sleep(wait_s)
    else:
        cancel.wait(wait_s)


def retry_after_s(value: str) -> float | None:
    return float(value) if value.isdigit() else None
