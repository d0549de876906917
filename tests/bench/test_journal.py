"""Rows outlive whatever ends the run, and only what measures the same is put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.bench.journal import Journal, journal_path
from engine.errors import EnvironmentProblem, SettingError
from tests.bench.making import row

SETTINGS = {"target": "abc", "drafters": ["ngram"], "seed": 1}


def test_a_row_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path / "deep" / "out.json", SETTINGS)
    journal.add(row("a", "plain", 10))
    lines = journal_path(tmp_path / "deep" / "out.json").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    journal.close()


def test_resumes_with_the_very_rows(tmp_path: Path) -> None:
    rows = [row("a", "plain", 10), row("a", "auto", 15, round_number=2)]
    journal = Journal.start(tmp_path / "out.json", SETTINGS)
    for own in rows:
        journal.add(own)
    journal.close()
    resumed = Journal.resume(tmp_path / "out.json", SETTINGS)
    assert resumed.rows == rows
    resumed.add(row("b", "plain", 11))
    resumed.close()
    again = Journal.resume(tmp_path / "out.json", SETTINGS)
    assert [own.prompt_id for own in again.rows] == ["a", "a", "b"]
    again.close()


@pytest.mark.parametrize("kept_bytes", [5, 90, -10])
def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path, kept_bytes: int) -> None:
    """The kill came in the first line, right after it, or in the last row."""
    result = tmp_path / "out.json"
    journal = Journal.start(result, SETTINGS)
    journal.add(row("a", "plain", 10))
    journal.add(row("a", "auto", 15))
    journal.close()
    whole = journal_path(result).read_bytes()
    journal_path(result).write_bytes(whole[:kept_bytes])
    resumed = Journal.resume(result, SETTINGS)
    assert len(resumed.rows) == (1 if kept_bytes < 0 else 0)
    resumed.add(row("a", "auto", 16))
    resumed.close()
    assert Journal.resume(result, SETTINGS).rows[-1].tokens_per_second == 16


def test_other_settings_are_named_and_refused(tmp_path: Path) -> None:
    Journal.start(tmp_path / "out.json", SETTINGS).close()
    with pytest.raises(SettingError, match="has seed 1, this one 2"):
        Journal.resume(tmp_path / "out.json", {**SETTINGS, "seed": 2})


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path / "out.json", SETTINGS)
    journal.close()
    with pytest.raises(SettingError, match="--resume, or delete"):
        Journal.start(tmp_path / "out.json", SETTINGS)
    journal.remove()
    Journal.start(tmp_path / "out.json", SETTINGS).close()


def test_resuming_needs_a_result_and_begins_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--json OUT or --csv OUT"):
        Journal.resume(None, SETTINGS)
    fresh = Journal.resume(tmp_path / "out.json", SETTINGS)
    assert fresh.rows == []
    fresh.close()


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        Journal.start(tmp_path / "file" / "out.json", SETTINGS)
