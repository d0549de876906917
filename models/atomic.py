"""Files that are either whole or absent, whatever happens while they are written.

A file is written under a temporary name beside its destination, flushed to the disk and renamed. The temporary name
carries the writer's process id: two processes never share one, and what a killed process left is removed by the next.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from engine.errors import EnvironmentProblem

SUFFIX = ".part"


def temporary_beside(destination: Path) -> Path:
    """A name of our own in the same folder, which must exist."""
    clear_leftovers(destination)
    return destination.with_name(f".{destination.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}")


def clear_leftovers(destination: Path) -> None:
    """Remove what processes that no longer run had begun to write for this destination."""
    for leftover in destination.parent.glob(f".{glob.escape(destination.name)}.*{SUFFIX}"):
        process_id = leftover.name.removesuffix(SUFFIX).rpartition(".")[2].partition("-")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            remove(leftover)


@contextlib.contextmanager
def scratch_beside(destination: Path) -> Iterator[Path]:
    """A path for something needed on the way to `destination`, which vanishes when the block ends."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(destination)
    try:
        yield temporary
    except OSError as error:
        raise EnvironmentProblem(f"could not write {destination}: {error.strerror or error}") from error
    finally:
        remove(temporary)


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """A path to write to, which becomes `destination` when the block ends well and vanishes when it does not."""
    with scratch_beside(destination) as temporary:
        yield temporary
        publish(temporary, destination)


def publish(temporary: Path, destination: Path) -> None:
    """Flush a finished file to the disk and give it its name."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, destination)


def write_json(destination: Path, value: object) -> None:
    with replacing(destination) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_free_bytes(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse before the first byte is written rather than after the last that fits."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            f"{purpose} needs {needed_bytes / 1e6:,.0f} MB of disk, and {folder} has {free_bytes / 1e6:,.0f} MB free; "
            "free some space, or set QUORUM_HOME to a folder on another disk"
        )


def remove(path: Path) -> None:
    """Delete a file or a folder, or nothing; a file in use elsewhere stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
