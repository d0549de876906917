"""What the scripts have in common: Quorum as a user starts it, and the browser that shows it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
READY = re.compile(r"ready at (http://\S+)")


def find_browser() -> str:
    """A Chromium of this machine; ends the program where there is none."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        sys.exit(f"no Chromium on this machine (looked for {', '.join(BROWSERS)})")
    return executable


@contextlib.contextmanager
def served(options: Sequence[str], home: str) -> Iterator[str]:
    """Quorum with its folders under `home`; its address once it is ready. Ended afterwards as Ctrl-C does."""
    process = subprocess.Popen(
        [sys.executable, "-u", "launch.py", "--no-browser", *options],
        cwd=ROOT,
        env=os.environ | {"QUORUM_HOME": home},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next((match[1] for line in process.stdout if (match := READY.search(line))), "")
        if not url:
            sys.exit("the server ended before it was ready")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
