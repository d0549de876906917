"""Rows on disk while a run lasts: one JSON line each beside the result, so that neither Ctrl-C nor a kill loses one.

The first line says what the run measures; a run can only be continued with the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from app.bench.row import Row, row_document, row_from
from engine.errors import EnvironmentProblem, SettingError

SUFFIX = ".partial.jsonl"


class Journal:
    """Finished rows in the order in which they came; kept in memory alone where there is no result file."""

    def __init__(self, rows: list[Row], path: Path | None, file: IO[str] | None) -> None:
        """Use `start` or `resume` instead."""
        self.rows = rows
        self._path = path
        self._file = file

    @classmethod
    def start(cls, result: Path | None, settings: Mapping[str, Any]) -> Journal:
        """Begin a new run.

        Raises:
            SettingError: an unfinished run lies there.
            EnvironmentProblem: the folder cannot be written to.
        """
        if result is None:
            return cls([], None, None)
        path = journal_path(result)
        if path.exists():
            raise SettingError(f"an unfinished run lies in {path}; continue it with --resume, or delete the file")
        journal = cls([], path, _open(path, "w"))
        journal._write({"settings": settings})
        return journal

    @classmethod
    def resume(cls, result: Path | None, settings: Mapping[str, Any]) -> Journal:
        """Continue the unfinished run, or begin one where there is none.

        Raises:
            SettingError: no result file is named, or the unfinished run measured something else.
        """
        if result is None:
            raise SettingError("--resume needs the result file of the run to continue: --json OUT or --csv OUT")
        path = journal_path(result)
        if not path.exists():
            return cls.start(result, settings)
        lines = path.read_text(encoding="utf-8").split("\n")
        complete = [line for line in lines[:-1] if line]  # what a kill cut off has no line end
        found = json.loads(complete[0])["settings"] if complete else settings
        wanted = json.loads(json.dumps(settings))
        for name in dict.fromkeys((*found, *wanted)):
            if found.get(name) != wanted.get(name):
                raise SettingError(
                    f"the unfinished run in {path} has {name} {found.get(name)!r}, this one {wanted.get(name)!r}; "
                    "repeat its settings, or delete the file"
                )
        path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
        rows = [row_from(json.loads(line)) for line in complete[1:]]
        journal = cls(rows, path, _open(path, "a"))
        if not complete:
            journal._write({"settings": settings})
        return journal

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(row_document(row))

    def close(self) -> None:
        """Keep the file: the run may be continued."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Close, and delete the file: the result holds all rows."""
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, document: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(document, ensure_ascii=False) + "\n")
            self._file.flush()


def journal_path(result: Path) -> Path:
    """Where the rows of an unfinished run are."""
    return result.with_name(result.name + SUFFIX)


def _open(path: Path, mode: str) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
