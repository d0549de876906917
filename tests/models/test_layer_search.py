"""Agreement and the search for layers to spare, on the real starter with as little text as will do."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType

from engine.errors import ModelFileError, SettingError
from models import agreement as agreement_module
from models import layer_search
from models.agreement import Agreement, Answer, agreement, pass_times_ms, write_text
from models.derive import default_layers, derive, list_derived, write_copy
from models.expand import Expansion, expand
from models.gguf_file import read_header
from models.layer_search import Measured, search
from models.progress import Cancelled, Progress
from tests.models.making import write_tiny_llama


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait busily, which a loaded machine punishes."""
    monkeypatch.setattr(agreement_module, "default_threads", lambda: 1)


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers to spare and a few tokens of text."""
    monkeypatch.setattr(layer_search, "_TOKENS_EACH", 4)
    monkeypatch.setattr(layer_search, "_candidates", lambda _: iter((3, 17, 20)))


def test_the_target_writes_varied_text_and_agrees_with_itself(starter: Path, tmp_path: Path) -> None:
    text = write_text(starter, tokens_each=12, seconds=600)
    assert len(text) == len(agreement_module.PROMPTS)
    assert all(1 <= len(answer.choices) <= 12 for answer in text)
    assert any(answer.choices != answer.tokens[-len(answer.choices) :] for answer in text)
    assert write_text(starter, tokens_each=12, seconds=600) == text
    itself = agreement(starter, text)
    assert itself.compared_tokens == sum(len(answer.choices) for answer in text)
    assert itself.share > 0.9
    hostile = tmp_path / "hostile.gguf"
    write_copy(starter, hostile, tuple(range(4, 26)), None)
    assert agreement(hostile, text).share < 0.5


def test_no_time_still_gives_some_text(starter: Path) -> None:
    assert [len(answer.choices) for answer in write_text(starter, tokens_each=50, seconds=0)] == [1] * 6


def test_a_pass_of_a_shorter_model_costs_less(starter: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    write_copy(starter, short, tuple(range(2, 28)), None)
    whole_ms, short_ms = pass_times_ms([starter, short])
    assert 0 < short_ms < whole_ms


def test_the_search_keeps_the_copy_that_agrees_most(home: Path, starter: Path, few_trials: None) -> None:
    readings: list[Progress] = []
    result = search(starter, None, 600, readings.append)
    assert result.is_complete
    assert {trial.dropped_layers for trial in result.trials} == {(3,), (17,), (20,)}
    best = max(result.trials, key=lambda trial: trial.agreement)
    assert result.made.dropped_layers in (best.dropped_layers, default_layers(30))
    assert result.after.agreement >= result.before.agreement
    assert result.before.dropped_layers == default_layers(30)
    assert (result.made.agreement, result.made.cost_ratio) == (result.after.agreement, result.after.cost_ratio)
    assert list_derived(starter) == (result.made,)
    assert sum("agreement, best" in reading.phase for reading in readings) == 3
    assert list(home.rglob("*.part")) == []


def test_copies_are_tried_in_the_format_asked_for(
    home: Path, starter: Path, few_trials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def noted(path: Path, text: Sequence[Answer], cancel: threading.Event | None = None) -> Agreement:
        tried.append(read_header(path).quantisation)
        return agreement(path, text, cancel)

    monkeypatch.setattr(layer_search, "agreement", noted)
    result = search(starter, LlamaFileType.MOSTLY_Q8_0, 600)
    assert tried == ["Q8_0"] * 5 + ["Q4_1"]
    assert result.made.quantisation == "Q8_0"
    assert sorted(path.suffix for path in home.rglob("*") if path.is_file()) == [".gguf", ".json", ".json"]


def test_a_search_out_of_time_keeps_what_it_has(home: Path, starter: Path, few_trials: None) -> None:
    usual = derive(starter, default_layers(30))
    result = search(starter, None, 0)
    assert not result.is_complete
    assert len(result.trials) == 1
    assert usual.path.exists()


def test_a_stopped_search_leaves_nothing(home: Path, starter: Path, few_trials: None) -> None:
    cancel = threading.Event()

    def stop_at_the_first_trial(progress: Progress) -> None:
        if "agreement, best" in progress.phase:
            cancel.set()

    with pytest.raises(Cancelled):
        search(starter, None, 600, stop_at_the_first_trial, cancel)
    assert [name for _, _, files in os.walk(home) for name in files if name != "hashes.json"] == []


def test_two_layers_are_chosen_one_after_the_other(home: Path, starter: Path, few_trials: None) -> None:
    result = search(starter, None, 600, drop_count=2)
    singles = [trial for trial in result.trials if len(trial.dropped_layers) == 1]
    pairs = [trial for trial in result.trials if len(trial.dropped_layers) == 2]
    best = max(singles, key=lambda trial: trial.agreement).dropped_layers
    assert (len(singles), len(pairs)) == (3, 2)
    assert all(set(best) < set(trial.dropped_layers) for trial in pairs)
    assert len(result.made.dropped_layers) == 2


def test_the_gain_is_that_of_the_best_draft_length() -> None:
    assert Measured((), agreement=1.0, cost_ratio=0.0, size_bytes=0).best_speedup == 17
    assert Measured((), agreement=0.5, cost_ratio=1.0, size_bytes=0).best_speedup == 1
    assert Measured((), agreement=0.8, cost_ratio=0.5, size_bytes=0).best_speedup == pytest.approx(1.22)


def test_likely_layers_come_first_and_the_ends_are_kept() -> None:
    order = list(layer_search._candidates(30))
    assert order[0] == 18
    assert sorted(order) == list(range(2, 28))


def test_what_cannot_be_searched_is_refused(home: Path, starter: Path, tmp_path: Path) -> None:
    expansion = tmp_path / "expansion.gguf"
    expand(starter, expansion, Expansion(expansion.name, "test", extra_layers=1, feed_forward=1536))
    with pytest.raises(SettingError, match="is an expansion"):
        search(expansion, None)
    for count in (0, 27):
        with pytest.raises(SettingError, match="can spare from 1 to 26 layers"):
            search(starter, None, drop_count=count)
    for name, layers, architecture in [("hybrid", 8, "lfm2"), ("shallow", 4, "llama")]:
        path = write_tiny_llama(tmp_path / f"{name}.gguf", layers, architecture=architecture)
        with pytest.raises(ModelFileError, match="no layers that can be left out"):
            search(path, None)
