"""Loading: every file that cannot be used is refused with its own reason, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import memory
from engine.config import ModelPlacement, SetConfig, Speculation
from engine.errors import IncompatibleDrafter, MemoryShortage, ModelFileError, QuorumError, SettingError
from engine.loader import LoadedSet
from engine.runtime.api import native
from engine.runtime.model import LoadCancelled, Model
from engine.session import Session
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings, tokens_of
from tests.engine.making import ARCHITECTURE, TEMPLATE, TOKENS, patched_copy, write_tiny_mamba

ONE_THREAD = ModelPlacement(threads=1)


class Handles:
    """Native handles made and freed since it was put in place."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @property
    def open_models(self) -> int:
        return self.counts["llama_model_load_from_file"] - self.counts["llama_model_free"]

    @property
    def open_contexts(self) -> int:
        return self.counts["llama_init_from_model"] - self.counts["llama_free"]


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handles]:
    """Counts what is opened and closed; none may be left open at the end."""
    handles = Handles()
    lib = native().lib

    def counted(name: str) -> Any:
        call = getattr(lib, name)

        def counting(*arguments: object) -> Any:
            result = call(*arguments)
            handles.counts[name] += name.endswith("free") or bool(result)
            return result

        return counting

    for name in ("llama_model_load_from_file", "llama_model_free", "llama_init_from_model", "llama_free"):
        monkeypatch.setattr(lib, name, counted(name))
    yield handles
    assert (handles.open_models, handles.open_contexts) == (0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drafter-")]


def config(target: Path, *drafters: Path | str, context_tokens: int = 256, cost_file: Path | None = None) -> SetConfig:
    return SetConfig(target, tuple(map(str, drafters)), context_tokens, ONE_THREAD, cost_file=cost_file)


@pytest.fixture(scope="module")
def bad_files(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    data = starter.read_bytes()
    files = {name: folder / f"{name}.gguf" for name in ("missing", "directory", "empty", "not-gguf")}
    files["directory"].mkdir()
    files["empty"].touch()
    files["not-gguf"].write_bytes(b"PK\x03\x04" + data[4:1000])
    for name, size_bytes in (("magic-only", 4), ("header-cut", 100_000), ("weights-cut", len(data) - 5_000_000)):
        files[name] = folder / f"{name}.gguf"
        files[name].write_bytes(data[:size_bytes])
    files["unknown"] = patched_copy(starter, folder / "unknown.gguf", ARCHITECTURE, "lemon")
    files["template"] = patched_copy(starter, folder / "template.gguf", TEMPLATE, "{% if messages %}no end")
    return files


REASONS = {
    "missing": "does not exist",
    "directory": "is a directory",
    "empty": "is empty",
    "not-gguf": "is not a GGUF file",
    "magic-only": "incomplete|could not be loaded",
    "header-cut": "incomplete|could not be loaded",
    "weights-cut": "incomplete or damaged; fetch it again",
    "unknown": "an architecture this llama.cpp does not know.*lemon",
    "template": "chat template that cannot be read",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_target_that_cannot_be_used_is_refused_with_the_reason(
    bad_files: dict[str, Path], handles: Handles, name: str
) -> None:
    with pytest.raises(ModelFileError, match=REASONS[name]) as raised:
        LoadedSet.load(config(bad_files[name]))
    message = str(raised.value)
    assert str(bad_files[name]) in message
    assert "\n" not in message


@pytest.mark.parametrize("name", [name for name in REASONS if name != "template"])
def test_a_drafter_that_cannot_be_used_is_refused_and_nothing_stays(
    starter: Path, bad_files: dict[str, Path], handles: Handles, name: str
) -> None:
    with pytest.raises(ModelFileError, match=REASONS[name]):
        LoadedSet.load(config(starter, "ngram", bad_files[name]))
    assert handles.counts["llama_model_free"] >= 1


def test_a_drafter_of_another_vocabulary_is_refused_with_the_token(
    starter: Path, handles: Handles, tmp_path: Path
) -> None:
    other = patched_copy(starter, tmp_path / "other.gguf", TOKENS, "qzxwqzxwqzxw", item=1007)
    with pytest.raises(
        IncompatibleDrafter, match=r"other cannot draft .* token 1007 is 'led' in the target and 'qzx' in the drafter"
    ):
        LoadedSet.load(config(starter, other))


def test_a_recurrent_drafter_is_declined(starter: Path, handles: Handles, tmp_path: Path) -> None:
    mamba = write_tiny_mamba(starter, tmp_path / "mamba.gguf")
    with pytest.raises(IncompatibleDrafter, match="recurrent"):
        LoadedSet.load(config(starter, mamba))


def test_names_that_mean_nothing_are_refused(starter: Path, handles: Handles) -> None:
    with pytest.raises(ModelFileError, match=r"no drafter is called 'quick'; use ngram, suffix"):
        LoadedSet.load(config(starter, "quick"))
    with pytest.raises(SettingError, match="named twice: ngram"):
        config(starter, "ngram", "suffix", "ngram")
    with pytest.raises(SettingError, match="64 tokens or more"):
        config(starter, context_tokens=63)


def test_a_context_that_memory_cannot_hold_is_refused_with_both_figures(starter: Path, handles: Handles) -> None:
    with pytest.raises(MemoryShortage, match=r"context of 2000000000 tokens needs about \d+\.\d GB and \d+\.\d GB are"):
        LoadedSet.load(config(starter, context_tokens=2_000_000_000))


def test_weights_that_memory_cannot_hold_are_refused_before_they_are_read(
    starter: Path, handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory:
        available = 2**20

    monkeypatch.setattr(psutil, "virtual_memory", NoMemory)
    with pytest.raises(MemoryShortage, match=r"needs about 0\.3 GB and 0\.0 GB are free"):
        LoadedSet.load(config(starter))
    assert handles.counts["llama_model_load_from_file"] == 0


def test_a_drafters_cache_that_memory_cannot_hold_is_refused_before_it_is_made(
    starter: Path, draft_models: dict[str, Path], handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        """Room for the target and for the drafter's weights; not for its cache of 8,000 tokens."""

        @property
        def available(self) -> int:
            return 300 * 2**20 if handles.open_contexts else 2**33

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(MemoryShortage, match=r"few-bits\.gguf: a drafter's context of 82\d\d tokens needs about"):
        LoadedSet.load(config(starter, draft_models["few-bits"], context_tokens=8192))
    probed_and_kept = 3
    assert handles.counts["llama_model_load_from_file"] == 2
    assert handles.counts["llama_init_from_model"] <= probed_and_kept


@pytest.mark.parametrize(("gpu_layers", "share"), [(0, 1.0), (10, 2 / 3), (30, 0.0), (-1, 0.0)])
def test_what_lies_on_a_gpu_needs_no_main_memory(
    starter: Path, monkeypatch: pytest.MonkeyPatch, gpu_layers: int, share: float
) -> None:
    placement = ModelPlacement(1, gpu_layers)
    with contextlib.closing(Model(starter)) as model:
        cache_bytes = model.kv_bytes_per_token * 1000
        whole = (starter.stat().st_size, cache_bytes)
        assert _in_memory(starter, model, placement) == whole, "without a GPU the number of layers means nothing"
        monkeypatch.setattr(memory, "has_gpu", lambda: True)
        assert _in_memory(starter, model, placement) == pytest.approx([size * share for size in whole], abs=1)


def _in_memory(path: Path, model: Model, placement: ModelPlacement) -> tuple[int, int]:
    """Of weights and of a cache of 1,000 tokens, without buffers."""
    sizes = (memory.weights_in_memory(path, placement), memory.cache_in_memory(model, placement, 1000))
    return sizes[0] - memory.COMPUTE_BUFFER_BYTES, sizes[1] - memory.COMPUTE_BUFFER_BYTES


def test_a_load_can_be_cancelled_in_every_phase(starter: Path, draft_models: dict[str, Path], handles: Handles) -> None:
    wanted = config(starter, draft_models["few-bits"])
    phases: list[str] = []
    LoadedSet.load(wanted, lambda phase, _share: phases.append(phase)).close()
    assert list(dict.fromkeys(phases)) == [
        f"Loading {starter.name}",
        "Comparing cache formats",
        "Loading drafter few-bits",
        "Measuring this machine",
    ]
    for phase in dict.fromkeys(phases):
        cancel = threading.Event()

        def stop_in(current: str, _share: float, phase: str = phase, cancel: threading.Event = cancel) -> None:
            if current == phase:
                cancel.set()

        with pytest.raises(LoadCancelled):
            LoadedSet.load(wanted, stop_in, cancel)


def test_what_was_loaded_before_keeps_working(starter: Path, bad_files: dict[str, Path], handles: Handles) -> None:
    loaded = LoadedSet.load(config(starter))
    session = Session(loaded)
    prompt = tokens_of(loaded, "The harbour was quiet")

    def say() -> tuple[int, ...]:
        return answer(session.generate(prompt, settings(PLAIN, GREEDY, 8), never())).token_ids

    before = say()
    for name in bad_files:
        with pytest.raises(QuorumError):
            LoadedSet.load(config(bad_files[name]))
    assert say() == before
    loaded.close()


def test_loading_again_and_again_closes_everything_and_does_not_grow(
    starter: Path, draft_models: dict[str, Path], handles: Handles, tmp_path: Path
) -> None:
    wanted = config(starter, "suffix", draft_models["few-bits"], cost_file=tmp_path / "costs.json")
    process = psutil.Process()
    sizes_bytes = []
    for _ in range(5):
        loaded = LoadedSet.load(wanted)
        session = Session(loaded)
        answer(session.generate(tokens_of(loaded, "Hello"), settings(max_tokens=2), never()))
        loaded.close()
        loaded.close()
        del loaded, session
        gc.collect()
        sizes_bytes.append(process.memory_info().rss)
    assert handles.counts["llama_model_load_from_file"] == 10
    assert sizes_bytes[-1] - sizes_bytes[1] < 40 * 2**20  # a set takes several times as much


def test_drafters_of_one_name_are_told_apart(
    starter: Path, draft_models: dict[str, Path], handles: Handles, tmp_path: Path
) -> None:
    paths = [tmp_path / folder / "copy.gguf" for folder in ("first", "second")]
    paths.append(tmp_path / "ngram.gguf")
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(draft_models["few-bits"])
    loaded = LoadedSet.load(config(starter, "ngram", *paths))
    assert loaded.panel.names == ("ngram", "copy", "second/copy", f"{tmp_path.name}/ngram")
    loaded.close()


def test_a_drafter_runs_where_it_is_placed(
    starter: Path, draft_models: dict[str, Path], handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib, asked = native().lib, []
    load = lib.llama_model_load_from_file

    def noting(path: bytes, parameters: Any) -> Any:
        asked.append((Path(path.decode()).stem, parameters.n_gpu_layers))
        return load(path, parameters)

    monkeypatch.setattr(lib, "llama_model_load_from_file", noting)
    few = str(draft_models["few-bits"])
    placements = ((few, ModelPlacement(threads=1, gpu_layers=0)),)
    LoadedSet.load(SetConfig(starter, (few,), 256, ONE_THREAD, drafter_placements=placements)).close()
    assert asked == [(starter.stem, 999), ("few-bits", 0)]
    with pytest.raises(SettingError, match="no drafter of this set: other"):
        SetConfig(starter, drafter_placements=(("other", ONE_THREAD),))


def test_costs_are_measured_once_and_kept(starter: Path, handles: Handles, tmp_path: Path) -> None:
    wanted = config(starter, cost_file=tmp_path / "costs.json")
    phases: list[list[str]] = []
    for _ in range(2):
        phases.append([])
        loaded = LoadedSet.load(wanted, lambda phase, _share: phases[-1].append(phase))
        assert loaded.learning.cost.is_calibrated
        loaded.close()
    assert "Measuring this machine" in phases[0]
    assert "Measuring this machine" not in phases[1]


def test_a_recurrent_target_decodes_plainly_and_says_why(starter: Path, handles: Handles, tmp_path: Path) -> None:
    """It cannot roll back: drafts are off, and a follow-up reads everything again, to the same effect."""
    loaded = LoadedSet.load(config(write_tiny_mamba(starter, tmp_path / "mamba.gguf"), "ngram", "suffix"))
    session = Session(loaded)
    drafting = settings(max_tokens=12)
    prompt = tokens_of(loaded, "one two one two one two one")
    first = answer(session.generate(prompt, drafting, never()))
    auto = answer(session.generate(prompt, settings(Speculation(), GREEDY, 12), never()))
    assert auto.token_ids == first.token_ids
    assert (auto.metrics.verified, auto.metrics.plain_steps) == (0, len(auto.token_ids))
    assert auto.state.reason == "off: this model cannot take back rejected tokens"
    longer = [*session.tokens, *prompt]
    follow_up = answer(session.generate(longer, drafting, never()))
    fresh_session = Session(loaded)
    assert follow_up.token_ids == answer(fresh_session.generate(longer, drafting, never())).token_ids
    cancel = threading.Event()
    cancel.set()
    answer(session.generate([*longer, *prompt], drafting, cancel))
    assert answer(session.generate(longer, drafting, never())).token_ids == follow_up.token_ids
    loaded.close()
