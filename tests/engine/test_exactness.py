"""The exactness probe: it finds the starter bit-equal, tells when something is not, and by how much margins move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.config import KvType
from engine.exactness import (
    PROBED_BATCHES,
    PROBED_STARTS,
    SHORT_BATCHES,
    ExactnessReport,
    Finding,
    MarginShift,
    Way,
    margin_shifts,
    probe,
)
from engine.loader import LoadedSet
from engine.runtime.context import Context, ContextSettings
from engine.runtime.devices import has_gpu
from engine.runtime.model import Model

cpu_only = pytest.mark.skipif(has_gpu(), reason="a GPU is another matter")
SHALLOW, DEEP = PROBED_STARTS


@cpu_only
def test_the_starter_is_bit_equal_in_every_way_shallow_and_deep(everything: LoadedSet) -> None:
    shares: list[float] = []
    lengths = dict(everything.context._lengths)
    report = probe(everything.context, is_thorough=True, progress=shares.append)
    assert report.is_exact
    assert report.summary.startswith("bit-equal in every batch size probed; also token trees, several requests")
    assert (report.kv_type, report.threads, report.margin_shift) == ("BF16_F16", 2, None)
    places = {(finding.size, finding.first_position) for finding in report.of(Way.BATCH)}
    assert places == {(size, start) for size in PROBED_BATCHES for start in PROBED_STARTS}
    for way in (Way.TREE, Way.THREADS, Way.CHANGING_THREADS, Way.AFTER_PREFILL):
        assert [finding.first_position for finding in report.of(way)] == [SHALLOW, DEEP]
    assert [finding.size for finding in report.of(Way.PREFILL)] == [64, everything.context.settings.batch_tokens]
    requests = [(one.first_position, one.size, one.compared_rows) for one in report.of(Way.REQUESTS)]
    assert requests == [(SHALLOW, 12, 96), (SHALLOW, 15, 120), (SHALLOW, 8, 64), (DEEP, 12, 96)]
    assert [finding.size for finding in report.of(Way.AFTER_CARRY)] == [2, 4, 8, 16]
    assert report.compared_rows > 1000
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert everything.context._lengths == lengths, "other sequences are untouched, and its own is given back"


@cpu_only
def test_a_short_probe_compares_what_decides_how_a_set_is_loaded(everything: LoadedSet) -> None:
    lengths = dict(everything.context._lengths)
    report = probe(everything.context, is_thorough=False)
    assert report.is_exact
    found = [(finding.way, finding.size, finding.compared_rows) for finding in report.findings]
    requests = [(Way.REQUESTS, 15, 15), (Way.REQUESTS, 8, 8)]
    batches = [(Way.BATCH, size, 16) for size in SHORT_BATCHES]
    assert found == [(Way.PREFILL, 64, 16), *batches, *requests, (Way.TREE, 4, 16)]
    assert report.in_words(Way.REQUESTS) == "bit-equal in 23 rows"
    assert report.equal_batches == SHORT_BATCHES
    assert report.is_equal(Way.BATCH, Way.PREFILL, Way.TREE, Way.REQUESTS)
    assert not report.is_equal(Way.AFTER_CARRY), "it was not compared"
    assert report.one_token_ms > 0
    assert everything.context._lengths == lengths


@cpu_only
@pytest.mark.parametrize(
    ("kv_type", "threads", "batches", "reading"), [(KvType.F16, 2, False, False), (KvType.F16, 1, True, False)]
)
def test_a_short_probe_finds_what_differs_deep_in_the_cache_and_in_prompts(
    starter: Path, kv_type: KvType, threads: int, batches: bool, reading: bool
) -> None:
    model = Model(starter)
    settings = ContextSettings(768, kv_type, threads, max_outputs=32, max_sequences=16, batch_tokens=128)
    context = Context(model, settings)
    report = probe(context, is_thorough=False)
    assert report.is_equal(Way.BATCH) is batches
    assert report.is_equal(Way.PREFILL) is reading
    assert report.equal_batches == (SHORT_BATCHES if batches else ())
    assert context._lengths == {}
    model.close()


@cpu_only
def test_a_cache_that_is_split_over_threads_beyond_512_cells_is_found_unequal(starter: Path) -> None:
    model = Model(starter, gpu_layers=0)
    try:
        settings = ContextSettings(1024, KvType.F16, 2, max_outputs=32, max_sequences=16, batch_tokens=128)
        report = probe(Context(model, settings), is_thorough=True)
    finally:
        model.close()
    assert not report.is_exact
    for finding in report.of(Way.BATCH):
        assert finding.is_equal is (finding.first_position == SHALLOW), finding
    assert not any(finding.is_equal for finding in report.of(Way.PREFILL)), "another kernel reads prompts"
    shift = report.margin_shift
    assert shift is not None
    assert 0 < shift.median < shift.percentile_95 < shift.greatest < 3
    assert shift.rows == sum(finding.compared_rows - finding.equal_rows for finding in report.findings)
    assert report.summary.startswith("not bit-equal: batches, token trees")
    assert f"from position {DEEP}; margins move" in report.in_words(Way.BATCH)


def finding(size: int, equal_rows: int, difference: float, changed_choices: int = 0) -> Finding:
    shift = MarginShift(48 - equal_rows, difference / 4, difference / 2, difference) if difference else None
    return Finding(Way.BATCH, size, 0, 48, equal_rows, difference, changed_choices, shift)


def test_one_row_that_differs_is_enough_and_is_reported() -> None:
    findings = (finding(2, 48, 0.0), finding(4, 47, 0.25), finding(8, 0, 1.234, 3))
    report = ExactnessReport("F16", 2, True, findings, MarginShift(49, 0.25, 0.5, 1.234))
    assert not report.is_exact
    assert report.summary == (
        "not bit-equal: batches of 4, 8; the margin of the best token moves by 0.25 (median), 0.5 (95 %), "
        "1.2 at most; 3 of 144 choices change"
    )
    assert report.in_words(Way.BATCH) == (
        "49 of 144 rows differ of 4, 8, from position 0; margins move by up to 1.2; 3 choices change"
    )


def test_a_model_that_nothing_is_drafted_for_has_nothing_to_compare() -> None:
    report = ExactnessReport("BF16", 2, True, (), None)
    assert report.is_exact
    assert "nothing is drafted" in report.summary


def test_margins_are_those_of_the_two_tokens_that_plain_decoding_finds_best() -> None:
    reference = np.array([[5.0, 4.0, 0.0], [1.0, 3.0, 2.5]], np.float32)
    rows = np.array([[5.0, 4.0, 9.0], [7.0, 2.5, 3.0]], np.float32)
    assert margin_shifts(reference, rows).tolist() == [0.0, 1.0]
    assert margin_shifts(reference[:0], rows[:0]).tolist() == []
    shift = MarginShift.of(np.arange(101, dtype=np.float32))
    assert (shift.rows, shift.median, shift.percentile_95, shift.greatest) == (101, 50.0, 95.0, 100.0)
