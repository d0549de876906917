"""From what a user picks, on the command line or in the page, to the set that is loaded."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.choices import SetChoice, preparation
from app.options import common_options, set_choice
from engine.config import KvType, default_threads
from engine.errors import MemoryShortage, ModelFileError, SettingError
from models import budget


@pytest.fixture(autouse=True)
def _use_home(starter_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORUM_HOME", str(starter_home))


@pytest.fixture
def drafters(draft_models: dict[str, Path]) -> tuple[str, str]:
    return str(draft_models["few-bits"]), str(draft_models["no-layer-14"])


def parsed(*arguments: str) -> SetChoice:
    parser = argparse.ArgumentParser(parents=[common_options(with_defaults=True)], allow_abbrev=False)
    return set_choice(parser.parse_args(arguments))


def test_each_model_runs_where_and_with_as_many_threads_as_it_is_told(starter: Path, drafters: tuple[str, str]) -> None:
    first, second = drafters
    choice = parsed("--threads", "3", "--drafter-threads", f"{first}=1", "--drafter-gpu-layers", f"{second}=7")
    config = choice.config(starter, ("ngram", first, second)).config
    placed = [config.placement, config.placement_of(first), config.placement_of(second)]
    assert [placement.threads for placement in placed] == [3, 1, 3]
    assert [placement.gpu_layers for placement in placed] == [-1, -1, 7]
    unsaid = SetChoice().config(starter, (first,)).config
    assert unsaid.placement_of(first).threads == unsaid.placement.threads == default_threads()


def test_threads_of_its_own_leave_a_drafter_where_it_was_put(
    starter: Path, drafters: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose GPU is in name only, and too small for more than a drafter."""
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    first, _ = drafters
    monkeypatch.setattr(budget, "_free_gpu_bytes", lambda: 2**20)
    config = SetChoice(drafter_threads=((first, 1),)).config(starter, drafters).config
    assert [config.placement_of(name).gpu_layers for name in drafters] == [0, 0]
    monkeypatch.setattr(budget, "_free_gpu_bytes", lambda: 2**34)
    config = SetChoice(drafter_threads=((first, 1),)).config(starter, drafters).config
    assert [config.placement_of(name).gpu_layers for name in drafters] == [-1, -1]
    assert [config.placement_of(name).threads for name in drafters] == [1, default_threads()]


def test_the_format_of_the_cache_can_be_named(starter: Path) -> None:
    assert parsed("--kv-type", "q8_0").config(starter, ()).config.kv_type is KvType.Q8_0
    assert parsed().config(starter, ()).config.kv_type is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--drafter-threads", "starter=many"), "--drafter-threads takes NAME=N with N from 1, found 'starter=many'"),
        (("--drafter-gpu-layers", "3"), "--drafter-gpu-layers takes NAME=N with N from -1"),
    ],
)
def test_a_placement_that_cannot_be_read_is_refused(options: tuple[str, str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        parsed(*options)


def test_a_placement_of_what_is_not_there_or_out_of_range_is_refused(starter: Path, drafters: tuple[str, str]) -> None:
    with pytest.raises(ModelFileError, match="no installed model is called 'nobody'"):
        parsed("--drafter-threads", "nobody=2")
    with pytest.raises(SettingError, match="threads must be from 1 to 512, found 0"):
        parsed("--drafter-threads", f"{drafters[0]}=0").config(starter, drafters)
    with pytest.raises(SettingError, match="is no drafter of this set"):
        parsed("--drafter-threads", f"{drafters[0]}=2").config(starter, drafters[1:])


def test_a_set_that_finds_no_room_is_refused_before_it_is_loaded(
    starter: Path, drafters: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = preparation(SetChoice(drafters=drafters, context_tokens=8192))
    config = prepare(lambda _phase, _share: None, threading.Event())
    assert config.drafters == drafters
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=600 * 2**20))
    with pytest.raises(
        MemoryShortage, match=r"leaving out all drafters that are files, and a context of \d+ tokens .* make it fit"
    ):
        prepare(lambda _phase, _share: None, threading.Event())
