"""Copies with fewer bits, made in a process of their own: llama.cpp cannot be interrupted, a process can be ended.

`python -m models.quantising SOURCE DESTINATION FORMAT THREADS` is that process. A copy is whole or absent, whenever
the process ends.
"""

from __future__ import annotations

import contextlib
import glob
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from engine.config import default_threads
from engine.errors import ModelFileError, QuorumError
from engine.runtime.quantize import quantize
from models.atomic import SUFFIX, clear_leftovers
from models.gguf_file import read_header
from models.progress import Progress, Report, no_report, stop_if_asked

_POLL_SECONDS = 0.1
_REFUSED = 3
"""Exit status of a process that said on stderr why it could not do it."""


def quantized_copy(
    source: Path,
    destination: Path,
    file_type: LlamaFileType,
    report: Report = no_report,
    cancel: threading.Event | None = None,
) -> None:
    """Write `source` to `destination` in format `file_type`; the folder must exist.

    Raises:
        ModelFileError: llama.cpp cannot do it; the message says why.
        Cancelled: `cancel` was set; takes effect within a fraction of a second.
    """
    phase = f"quantising {destination.name}"
    expected_bytes = _expected_bytes(source, file_type)
    arguments = [str(source.resolve()), str(destination.resolve()), str(int(file_type)), str(default_threads())]
    with _ended(
        subprocess.Popen(
            [sys.executable, "-m", "models.quantising", *arguments],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ),
        destination,
    ) as process:
        while True:
            stop_if_asked(cancel, phase)
            report(Progress(phase, min(_written_bytes(destination, process.pid), expected_bytes), expected_bytes))
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, reason = process.communicate(timeout=_POLL_SECONDS)
                break
    if process.returncode == _REFUSED:
        raise ModelFileError(reason.strip())
    if process.returncode != 0:
        lines = reason.strip().splitlines() or ["it gave no reason"]
        raise ModelFileError(
            f"{source} could not be quantised: the process that did it ended with status {process.returncode} "
            f"({lines[-1]})"
        )


def _expected_bytes(source: Path, file_type: LlamaFileType) -> int:
    """Roughly the size of the copy: all weights in the format, which a few of them do not take."""
    format_name = file_type.name.removeprefix("MOSTLY_")
    names = (format_name, format_name[:-2])
    stored = next((GGMLQuantizationType[name] for name in names if name in GGMLQuantizationType.__members__), None)
    facts = read_header(source)
    if stored is None:
        return facts.size_bytes
    block_values, block_bytes = GGML_QUANT_SIZES[stored]
    return max(1, int(facts.parameter_count * block_bytes // block_values))


def _written_bytes(destination: Path, process_id: int) -> int:
    """What the process has written so far; its temporary file carries its id."""
    pattern = f".{glob.escape(destination.name)}.{process_id}-*{SUFFIX}"
    size_bytes = 0
    for path in destination.parent.glob(pattern):
        with contextlib.suppress(OSError):
            size_bytes += path.stat().st_size
    return size_bytes


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], destination: Path) -> Iterator[subprocess.Popen[str]]:
    """The process has ended when the block has, however the block ends, and has left nothing half-written."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        clear_leftovers(destination)


def main() -> None:
    source, destination, file_type, threads = sys.argv[1:]
    try:
        quantize(Path(source), Path(destination), int(file_type), int(threads))
    except QuorumError as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
