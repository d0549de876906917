"""What was measured on this machine, kept on disk: one JSON file of entries, read anew each time and replaced whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from engine.config import SetConfig
from engine.runtime.api import native
from engine.runtime.devices import has_gpu


def target_key(config: SetConfig, threads: int, *more: object) -> str:
    """Identity of a set's target and of what its passes depend on here, and of whatever more is given."""
    status = config.target.stat()
    parts = (
        config.target.name,
        status.st_size,
        status.st_mtime_ns,
        native().version,
        f"threads={threads}",
        f"gpu={config.placement.gpu_layers if has_gpu() else 0}",
        *more,
    )
    return " | ".join(map(str, parts))


class StoredEntries:
    """Entries by key. A file that is missing, damaged or of another version has none."""

    def __init__(self, path: Path | None, version: int) -> None:
        """Args:
        path: None keeps nothing.
        version: Of the entries' form.
        """
        self._path = path
        self._version = version

    def get(self, key: str) -> Any:
        """The entry as it was put; None where there is none."""
        return self._read().get(key)

    def put(self, key: str, entry: Any) -> None:
        """Write the entry beside the others; a reader sees the old file or the new one.

        What cannot be written is measured again next time, which is no reason to fail now.
        """
        if self._path is None:
            return
        entries = self._read()
        entries[key] = entry
        partial = self._path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"version": self._version, "entries": entries}, indent=1), encoding="utf-8")
            os.replace(partial, self._path)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("version") != self._version:
            return {}
        entries = data.get("entries")
        return entries if isinstance(entries, dict) else {}
