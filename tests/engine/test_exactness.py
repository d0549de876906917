"""The exactness probe: it finds the starter bit-equal, and tells when something is not."""

from __future__ import annotations

import pytest

from engine.exactness import LONG_PROBE_START, PROBED_BATCHES, ExactnessReport, SizeFinding, probe
from engine.loader import LoadedSet
from engine.runtime.devices import has_gpu


@pytest.mark.skipif(has_gpu(), reason="a GPU is another matter")
def test_the_starter_is_bit_equal_in_every_batch_size_shallow_and_deep(everything: LoadedSet) -> None:
    shares: list[float] = []
    lengths = dict(everything.context._lengths)
    report = probe(everything.context, reaches_beyond_512=True, progress=shares.append)
    assert report.is_exact
    assert report.summary == "bit-equal in every batch size probed"
    assert (report.kv_type, report.threads) == ("BF16", 2)
    places = {(finding.batch_tokens, finding.first_position) for finding in report.findings}
    assert places == {(size, start) for size in PROBED_BATCHES for start in (0, LONG_PROBE_START)}
    assert all(finding.equal_rows == finding.compared_rows == 48 for finding in report.findings)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert everything.context._lengths == lengths, "other sequences are untouched, and its own is given back"


def finding(size: int, equal_rows: int, difference: float) -> SizeFinding:
    return SizeFinding(size, 0, 48, equal_rows, difference, changed_choices=0)


def test_one_row_that_differs_is_enough_and_is_reported() -> None:
    report = ExactnessReport("F16", 2, (finding(2, 48, 0.0), finding(4, 47, 0.25), finding(8, 0, 1.234)))
    assert not report.is_exact
    assert report.summary == "not bit-equal in batches of 4, 8: logits differ by up to 1.2"
