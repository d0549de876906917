"""Forecasts against what loading really takes, measured in a process of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf.constants import LlamaFileType

from engine.config import KvType, ModelPlacement, SetConfig
from engine.errors import MemoryShortage, ModelFileError
from models import budget, dry_run
from models.budget import Forecast, PlacedSet, estimate, forecast, place, require_room
from models.derive import write_copy
from models.gguf_file import read_tensors
from tests.models.making import write_tiny_llama

GIGABYTE = 2**30
COPIES: dict[str, tuple[tuple[int, ...], LlamaFileType | None]] = {
    "Q8_0": ((), LlamaFileType.MOSTLY_Q8_0),
    "Q4_0 without a layer": ((14,), LlamaFileType.MOSTLY_Q4_0),
    "Q2_K": ((), LlamaFileType.MOSTLY_Q2_K),
}
LOAD_AND_USE = """
import sys, threading, time
from pathlib import Path
import numpy
from engine.config import KvType, SetConfig
from engine.loader import LoadedSet
from engine.runtime.api import native
from engine.runtime.context import Run

def resident():
    status = Path("/proc/self/status").read_text()
    return [1024 * int(status.split(key)[1].split()[0]) for key in ("RssAnon:", "RssFile:")]

native()
before = resident()
peak = list(before)
is_done = threading.Event()

def watch():
    while not is_done.wait(0.005):
        peak[:] = map(max, peak, resident())

watcher = threading.Thread(target=watch)
watcher.start()
kv_type = KvType[sys.argv[3]] if sys.argv[3] else None
loaded = LoadedSet.load(SetConfig(Path(sys.argv[1]), tuple(sys.argv[4:]), int(sys.argv[2]), kv_type=kv_type))
sequence = loaded.context.allocate()
tokens = list(range(1000, 1000 + loaded.context.settings.batch_tokens))
loaded.context.decode([Run(sequence, tokens, loaded.context.settings.max_outputs)])
for drafter in loaded.panel.models:
    drafter.begin(tokens * 8)
    drafter.start_catch_up(len(tokens) * 8, threading.Event()).result()
is_done.set()
watcher.join()
loaded.close()
print(sum(peak) - sum(before))
"""


@pytest.fixture(scope="session")
def copies(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The starter in other formats and sizes, to be measured beside it."""
    folder = tmp_path_factory.mktemp("copies")
    made = {"Q4_1": starter}
    for name, (layers, file_type) in COPIES.items():
        made[name] = folder / f"{name.replace(' ', '-')}.gguf"
        write_copy(starter, made[name], layers, file_type)
    return made


def used_bytes(target: Path, context_tokens: int, drafters: Sequence[Path], kv_type: KvType | None) -> int:
    """Peak memory of its own plus peak resident file pages, over those of the bare process."""
    kind = kv_type.name if kv_type else ""
    command = [sys.executable, "-c", LOAD_AND_USE, str(target), str(context_tokens), kind, *map(str, drafters)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("target", "context_tokens", "drafters", "kv_type"),
    [
        ("Q4_1", 4096, (), None),
        ("Q8_0", 8192, (), None),
        ("Q4_0 without a layer", 2048, (), None),
        ("Q2_K", 1024, (), None),
        ("Q8_0", 2048, ("Q4_0 without a layer", "Q2_K"), None),
        ("Q4_1", 8192, (), KvType.Q8_0),
    ],
)
def test_forecast_and_estimate_are_within_a_tenth_of_what_is_used(
    copies: dict[str, Path], target: str, context_tokens: int, drafters: tuple[str, ...], kv_type: KvType | None
) -> None:
    paths = [copies[name] for name in drafters]
    used = used_bytes(copies[target], context_tokens, paths, kv_type)
    result = forecast(SetConfig(copies[target], tuple(map(str, paths)), context_tokens, kv_type=kv_type))
    assert not any(need.is_estimate for need in result.needs)
    assert result.peak_bytes == pytest.approx(used, rel=0.1)
    if kv_type is not None:
        return  # an estimate is for choosing among files, before a format is asked for
    estimates = [
        estimate(copies[target], context_tokens, is_target=True),
        *(estimate(path, context_tokens, is_target=False) for path in paths),
    ]
    assert sum(need.peak for need in estimates) == pytest.approx(used, rel=0.1)


def test_free_drafters_cost_nothing_and_the_whole_context_counts(starter: Path) -> None:
    short = forecast(SetConfig(starter, ("ngram", "suffix"), 1024))
    whole = forecast(SetConfig(starter, (), 0))
    assert len(short.needs) == 1
    assert whole.context_tokens == 8192
    assert whole.needs[0].cache == 8 * short.needs[0].cache == 30 * 2 * 3 * 64 * 2 * 8192
    assert short.fits
    assert short.advice == ()
    assert "fits: needs" in short.summary


def test_weights_that_are_copied_count_twice_at_the_peak_and_once_afterwards(copies: dict[str, Path]) -> None:
    path = copies["Q4_0 without a layer"]
    (need,) = forecast(SetConfig(path, (), 1024)).needs
    copied = sum(tensor.size_bytes for tensor in read_tensors(path) if tensor.type == "Q4_0")
    assert need.repacked in (0, copied)  # which of them depends on the CPU
    assert need.mapped == path.stat().st_size
    assert need.peak - need.lasting == need.repacked


def test_what_a_dry_run_does_not_say_is_estimated(starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (known,) = forecast(SetConfig(starter)).needs
    monkeypatch.setattr(dry_run.sys, "executable", "/nonexistent")  # type: ignore[attr-defined]
    (estimated,) = forecast(SetConfig(starter)).needs
    assert (known.is_estimate, estimated.is_estimate) == (False, True)
    assert estimated.peak == pytest.approx(known.peak, rel=0.1)


def test_one_model_that_cannot_be_laid_out_does_not_spoil_the_others(starter: Path, tmp_path: Path) -> None:
    strange = write_tiny_llama(tmp_path / "strange.gguf", layer_count=2, architecture="unheard-of")
    needs = forecast(SetConfig(starter, (str(strange), str(starter)), 1024)).needs
    assert [need.is_estimate for need in needs] == [False, True, False]


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no such model file: .*missing\.gguf"):
        forecast(SetConfig(tmp_path / "missing.gguf"))


def test_too_little_memory_brings_advice(copies: dict[str, Path]) -> None:
    config = SetConfig(copies["Q8_0"], (str(copies["Q2_K"]), str(copies["Q4_1"])), 8192)
    needed = forecast(config).lasting_bytes + budget.RESERVE_BYTES

    def advice(free_bytes: int) -> list[str]:
        result = forecast(config, free_bytes)
        assert not result.fits
        assert "does not fit: needs" in result.summary
        return list(result.advice)

    bits, context, drafters = advice(needed - 2**20)
    assert bits == "a cache of 8 bits (--kv-type q8_0) would free 84 MB and make it fit"
    assert context.startswith("a context of 4096 tokens (--ctx) would free 270 MB")
    assert drafters == "leaving out Q2_K would make it fit" or "Q4_1" in drafters
    assert advice(needed - 400 * 2**20)[0].startswith("a context of 2048 tokens")
    assert "and" in advice(needed - 500 * 2**20)[-1]
    (both,) = advice(needed - 750 * 2**20)
    assert both.startswith("leaving out all drafters that are files, and a context of ")
    (last,) = advice(10 * 2**20)
    assert last.startswith("choose a smaller model, or fewer bits, than Q8_0.gguf")


def test_a_context_that_no_model_is_made_for_is_refused_by_the_header_alone(starter: Path) -> None:
    """A dry run would take half a minute over it, and whoever waits sees nothing."""
    result = forecast(SetConfig(starter, (), 99_999_999))
    assert [need.is_estimate for need in result.needs] == [True]
    assert not result.fits
    assert result.advice == (f"{starter.name} was made for a context of 8192 tokens (--ctx)",)


def test_advice_is_true(copies: dict[str, Path]) -> None:
    path = copies["Q8_0"]
    # A megabyte short: what is measured on the way differs by some pages from one forecast to the next.
    free_bytes = forecast(SetConfig(path, (), 8192)).lasting_bytes + budget.RESERVE_BYTES - 2**20
    bits, context = forecast(SetConfig(path, (), 8192), free_bytes).advice
    assert "--kv-type q8_0" in bits
    assert forecast(SetConfig(path, (), 8192, kv_type=KvType.Q8_0), free_bytes).fits
    tokens = int(context.split()[3])
    assert forecast(SetConfig(path, (), tokens), free_bytes).fits


def test_a_set_without_room_is_refused_with_advice_and_the_replaced_one_makes_room(
    copies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SetConfig(copies["Q8_0"], (str(copies["Q2_K"]),), 8192)
    needed = forecast(config).lasting_bytes + budget.RESERVE_BYTES
    looks: list[SetConfig] = []

    def looked(config: SetConfig) -> Forecast:
        looks.append(config)
        return foreseen(config)

    foreseen = budget._foreseen
    monkeypatch.setattr(budget, "_foreseen", looked)

    def free(size_bytes: float) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size_bytes))

    free(2 * needed)
    require_room(config)
    assert looks == [], "the headers alone were enough to tell"
    free(needed + 2**20)
    require_room(config)
    assert looks == [config]
    free(needed - 2**20)
    with pytest.raises(MemoryShortage, match=r"Q8_0\.gguf with its drafters does not fit: needs .*; a cache of 8 bits"):
        require_room(config)
    require_room(config, replaced=SetConfig(copies["Q4_1"], (), 1024))


def test_layers_on_a_gpu_count_there(starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    config = SetConfig(starter, (), 1024, ModelPlacement(gpu_layers=-1))
    (need,) = forecast(config, GIGABYTE, GIGABYTE).needs
    assert need.gpu > starter.stat().st_size * 0.9
    assert need.cache == 0
    half = forecast(SetConfig(starter, (), 1024, ModelPlacement(gpu_layers=15)), GIGABYTE, GIGABYTE).needs[0]
    assert half.gpu == pytest.approx(need.gpu / 2, abs=1)
    result = forecast(config, 8 * GIGABYTE, need.gpu // 2)
    assert not result.fits
    assert result.advice == ("15 layers on the GPU (--gpu-layers) would put the rest of the target in main memory",)
    assert "on the GPU" in result.summary


def test_a_drafter_is_counted_where_it_is_placed(starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    placements = ((str(starter), ModelPlacement(gpu_layers=-1)),)
    config = SetConfig(starter, (str(starter),), 1024, ModelPlacement(gpu_layers=0), drafter_placements=placements)
    target, drafter = forecast(config, GIGABYTE, GIGABYTE).needs
    assert target.gpu == 0 < drafter.gpu
    assert drafter.cache == 0 < target.cache


@pytest.fixture
def placed_set(copies: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> SetConfig:
    """A target of 30 layers with two drafters, on a machine whose GPU is in name only."""
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    return SetConfig(copies["Q8_0"], ("ngram", str(copies["Q4_0 without a layer"]), str(copies["Q2_K"])), 1024)


def layers_of(placed: PlacedSet) -> tuple[int, ...]:
    """Of the target and of each model drafter."""
    config = placed.config
    return (
        config.placement.gpu_layers,
        *(config.placement_of(name).gpu_layers for name in config.drafters if name != "ngram"),
    )


def on_gpu(config: SetConfig) -> list[int]:
    return [need.gpu for need in forecast(config, GIGABYTE, GIGABYTE).needs]


def room(size_bytes: float) -> int:
    """Free GPU memory of which so much is filled."""
    return math.ceil(size_bytes / budget._GPU_SHARE_TO_FILL) + 1


def test_without_a_gpu_nothing_is_placed(starter: Path) -> None:
    config = SetConfig(starter, (str(starter),), 1024)
    assert place(config) == PlacedSet(config, "")


def test_everything_goes_to_the_gpu_where_it_finds_room(placed_set: SetConfig) -> None:
    placed = place(placed_set, free_gpu_bytes=room(sum(on_gpu(placed_set))))
    assert placed.config == placed_set
    assert placed.reason.startswith("All models run on the GPU")


def test_drafters_come_first_and_then_as_many_layers_as_fit(placed_set: SetConfig) -> None:
    target, *drafters = on_gpu(placed_set)
    placed = place(placed_set, free_gpu_bytes=room(sum(drafters) + target * 10.5 / 30))
    assert layers_of(placed) == (10, -1, -1)
    assert "which run most often, then 10 of the target's 30 layers" in placed.reason
    assert sum(on_gpu(placed.config)) <= sum(drafters) + target * 10.5 / 30
    tight = place(placed_set, free_gpu_bytes=room(min(drafters)))
    assert sorted(layers_of(tight)) == [-1, 0, 0]
    none = place(placed_set, free_gpu_bytes=2**20)
    assert layers_of(none) == (0, 0, 0)
    assert "too little" in none.reason


def test_a_drafter_that_takes_more_room_than_it_is_worth_stays_off(
    placed_set: SetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a long context a drafter's cache and buffers are larger than its weights."""
    monkeypatch.setattr(budget, "_weights_bytes", lambda path: 10**9 if path == placed_set.target else 10**6)
    target, *_ = on_gpu(placed_set)
    placed = place(placed_set, free_gpu_bytes=room(target))
    assert layers_of(placed) == (-1, 0, 0)
    assert "the whole target there" in placed.reason


def test_what_the_user_places_stays_there(placed_set: SetConfig) -> None:
    few = placed_set.drafters[2]
    config = replace(placed_set, drafter_placements=((few, ModelPlacement(gpu_layers=0)),))
    target, other, none = on_gpu(config)
    assert none == 0
    assert layers_of(place(config, free_gpu_bytes=room(other + target / 3))) == (10, -1, 0)


def test_the_replaced_set_makes_room(placed_set: SetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_free_gpu_bytes", lambda: room(0))
    assert layers_of(place(placed_set)) == (0, 0, 0)
    assert layers_of(place(placed_set, replaced=replace(placed_set, context_tokens=4096))) == (-1, -1, -1)
