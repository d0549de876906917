"""What the Models tab shows, made from plain data."""

from __future__ import annotations

from pathlib import Path

from app import models_view
from app.errands import Errand
from app.jobs import in_phases
from engine.config import ModelPlacement, SetConfig
from models.budget import Forecast, MemoryNeed, PlacedSet
from models.catalogue import Machine, MachineKind, Offer, recommended
from models.progress import Cancelled, Progress

GIGABYTE = 2**30
TARGET, DRAFTER = Path("/models/target.gguf"), Path("/models/<b>.gguf")


def need(path: Path, *, is_target: bool = False, gpu: int = 0) -> MemoryNeed:
    return MemoryNeed(path, is_target, GIGABYTE, 0, 0, 0, 0, gpu, is_estimate=False)


def test_memory_says_where_each_model_runs() -> None:
    placements = ((str(DRAFTER), ModelPlacement(threads=1, gpu_layers=-1)),)
    config = SetConfig(TARGET, (str(DRAFTER),), 4096, ModelPlacement(4, 0), drafter_placements=placements)
    foreseen = Forecast((need(TARGET, is_target=True), need(DRAFTER, gpu=GIGABYTE)), 4096, 8 * GIGABYTE, 2 * GIGABYTE)
    html = models_view.memory(foreseen, PlacedSet(config, "The GPU has 2.0 GB free"))
    assert "target 1.00 GB; on the CPU with 4 threads<" in html
    assert "&lt;b&gt; 1.00 GB; all layers on the GPU, taking 1.00 GB there; 1 thread<" in html
    assert "<b>" not in html
    assert "✓ Fits: needs 2.0 GB of memory, 8.0 GB are free; 1.0 GB on the GPU, 2.0 GB free there. The GPU has" in html


def test_what_suits_a_machine_comes_with_its_reasons() -> None:
    office = Machine(MachineKind.CPU, 16)
    assert "Q4_0 is first choice for a CPU" in models_view.recommendation(office, recommended(office))
    large = Machine(MachineKind.GPU, 24)
    assert "Q4_0 is first choice" not in models_view.recommendation(large, recommended(large))
    assert "the starter is what runs well here" in models_view.recommendation(Machine(MachineKind.CPU, 2), ())


def test_a_target_without_drafters_is_told_how_to_get_one() -> None:
    assert "fetch a/b:Q4_0, which is of its family, or make" in models_view.no_drafter((Offer("a/b", "Q4_0", 0.1),))
    assert "for this target: make a drafter" in models_view.no_drafter(())


def test_a_fetch_shows_its_pace_and_a_stop_what_is_kept() -> None:
    def work(report: object, _: object) -> str:
        raise Cancelled("fetching a/b was stopped; what has arrived is kept")

    errand = Errand(work)
    in_phases(errand.report)(Progress("downloading a/b", 25_000_000, 100_000_000, 5_000_000))
    assert "Downloading a/b: 25 of 100 MB, 5 MB/s, 0:15 left" in models_view.errand(errand)
    errand.run()
    assert "Fetching a/b was stopped; what has arrived is kept." in models_view.errand(errand)
    never = Errand(work)
    never.cancel()
    assert "Stopped before it began." in models_view.errand(never)
