"""The cost model: what it believes between and beyond what was measured, how it learns, and how it is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost import (
    CALIBRATED_SIZES,
    DRAFT_START_PASSES,
    OUTLIER_FACTOR,
    SLOPE_FROM_TOKENS,
    CostModel,
    CostStore,
)

CURVE = {1: 10.0, 2: 16.0, 4: 16.0, 8: 28.0}


def measured(curve: dict[int, float] | None = None) -> CostModel:
    cost = CostModel()
    for size, elapsed_ms in (curve or CURVE).items():
        cost.set_base(size, elapsed_ms)
    return cost


def test_sizes_between_measured_ones_are_interpolated_and_the_last_rate_holds_beyond() -> None:
    cost = measured()
    assert cost.verify_ms(4, 0) == 16.0
    assert cost.verify_ms(3, 0) == 16.0
    assert cost.verify_ms(6, 0) == 22.0
    assert cost.verify_ms(16, 0) == 56.0
    assert cost.curve(0, 3) == (10.0, 16.0, 16.0)


def test_a_pass_never_costs_more_than_single_passes() -> None:
    cost = measured({1: 10.0, 2: 50.0, 3: 20.0})
    assert cost.verify_ms(2, 0) == 20.0


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 8000), st.floats(0.01, 5000)),
        max_size=80,
    )
)
def test_whatever_is_observed_costs_stay_positive_and_below_single_passes(
    observations: list[tuple[int, int, float]],
) -> None:
    cost = measured()
    for tokens, context_tokens, elapsed_ms in observations:
        cost.observe_verify(tokens, context_tokens, elapsed_ms)
    for tokens in (1, 2, 3, 5, 16, 32):
        for context_tokens in (0, 300, 8000):
            single = cost.verify_ms(1, context_tokens)
            assert 0 < cost.verify_ms(tokens, context_tokens) <= tokens * single * (1 + 1e-9)


def test_real_passes_refine_the_curve_at_their_own_size() -> None:
    cost = measured()
    for _ in range(60):
        cost.observe_verify(4, 100, 20.0)
    assert cost.verify_ms(4, 0) == pytest.approx(20.0, rel=0.02)
    assert cost.verify_ms(8, 0) == pytest.approx(28.0, rel=0.1)  # a little is put down to the machine


def test_a_size_dearer_than_single_passes_is_learnt_as_it_is_and_does_not_drift() -> None:
    cost = measured({1: 10.0, 2: 21.0})
    for _ in range(2000):
        cost.observe_verify(2, 0, 25.0)
    stored = {tokens: value for _, tokens, value in cost.to_dict()["base"]}
    assert stored[2] == pytest.approx(25.0, rel=0.05)


def test_an_outlier_counts_as_a_few_times_the_expected_at_most() -> None:
    hit, capped = measured(), measured()
    hit.observe_verify(4, 0, 1e6)
    capped.observe_verify(4, 0, OUTLIER_FACTOR * 16.0)
    assert hit.verify_ms(4, 0) == capped.verify_ms(4, 0) < 2 * 16.0


def test_longer_contexts_cost_more_once_seen_and_short_ones_teach_nothing_about_that() -> None:
    cost = measured()
    for _ in range(50):
        cost.observe_verify(1, SLOPE_FROM_TOKENS - 1, 12.0)
    assert cost.verify_ms(1, 4000) == cost.verify_ms(1, 0)
    # Alternate, so that the weights' time and attention's can be told apart: 10 ms + 0.005 ms a token.
    for _ in range(400):
        cost.observe_verify(1, 0, 10.0)
        cost.observe_verify(1, 4000, 30.0)
    assert cost.verify_ms(1, 0) == pytest.approx(10.0, rel=0.25)
    assert cost.verify_ms(1, 4000) == pytest.approx(30.0, rel=0.1)


def test_an_unknown_set_of_drafters_is_thought_to_take_turns_until_measured() -> None:
    cost = measured()
    cost.observe_draft(["a"], 4, 2.0 * (4 + DRAFT_START_PASSES))
    cost.observe_draft(["b"], 2, 3.0 * (2 + DRAFT_START_PASSES))
    assert cost.draft_ms(["b", "a"]) == pytest.approx(5.0)
    cost.observe_draft(["b", "a"], 9, 3.0 * (9 + DRAFT_START_PASSES))
    assert cost.draft_ms(["a", "b"]) == pytest.approx(3.0)
    assert cost.draft_ms([]) == 0.0


def test_a_draft_for_which_much_was_read_first_counts_little() -> None:
    cost = measured()
    for _ in range(20):
        cost.observe_draft(["a"], 3, 4.0 * (3 + DRAFT_START_PASSES))
    cost.observe_draft(["a"], 1, 80.0)
    assert 4.0 < cost.draft_ms(["a"]) < 4.3


def test_short_and_long_drafts_teach_the_same() -> None:
    cost = measured()
    for passes in (1, 3, 15):
        cost.observe_draft(["a"], passes, 4.0 * (passes + DRAFT_START_PASSES))
    assert cost.draft_ms(["a"]) == pytest.approx(4.0)
    assert cost.drafting_curve(["a"], 3)[3] == pytest.approx(4.0 * (3 + DRAFT_START_PASSES))


def test_what_a_drafter_read_before_it_drafted_is_not_put_down_to_its_passes() -> None:
    cost = measured()
    cost.observe_read("a", 10, 10.0)
    cost.observe_draft(["a"], 3, 4.0 * (3 + DRAFT_START_PASSES))
    cost.observe_draft(["a"], 3, 4.0 * (3 + DRAFT_START_PASSES) + 12.0, extra_tokens=12)
    assert cost.draft_ms(["a"]) == pytest.approx(4.0)


def test_a_draft_without_a_pass_teaches_nothing() -> None:
    cost = measured()
    cost.observe_draft(["a"], 0, 50.0)
    cost.observe_read("a", 0, 50.0)
    assert cost.to_dict()["draft"] == cost.to_dict()["read"] == {}


def test_calibration_is_complete_only_with_every_size() -> None:
    cost = CostModel()
    for size in CALIBRATED_SIZES:
        assert not cost.is_calibrated
        cost.set_base(size, float(size))
    assert cost.is_calibrated


def test_a_stored_model_comes_back_as_it_was(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "deep" / "costs.json")
    cost = measured()
    cost.observe_verify(1, 2000, 14.0)
    cost.observe_draft(["a", "b"], 3, 9.0)
    cost.observe_read("a", 100, 70.0)
    store.save("this machine", cost)
    store.save("another", measured({1: 1.0}))
    restored = store.load("this machine")
    assert restored is not None
    assert restored.to_dict() == cost.to_dict()
    assert store.load("unknown") is None
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


GOOD_ENTRY: dict[str, Any] = {"base": [[1, 1, 10.0]], "slope": 0.0, "draft": {}, "read": {}, "draft_threads": {}}
BAD_ENTRIES: tuple[Any, ...] = (
    7,
    [],
    "text",
    {},
    GOOD_ENTRY | {"base": [[1, 1]]},
    GOOD_ENTRY | {"base": [[1, 1, "fast"]]},
    GOOD_ENTRY | {"base": [[1, 1, -3.0]]},
    GOOD_ENTRY | {"base": [[1, 1, float("nan")]]},
    GOOD_ENTRY | {"base": [[1, float("inf"), 1.0]]},
    GOOD_ENTRY | {"base": None},
    GOOD_ENTRY | {"slope": -1.0},
    GOOD_ENTRY | {"slope": None},
    GOOD_ENTRY | {"draft": ["a", 1.0]},
    GOOD_ENTRY | {"draft": 3},
    GOOD_ENTRY | {"read": {"a": float("inf")}},
    GOOD_ENTRY | {"draft_threads": {"a": "many"}},
)
DAMAGED = [
    "",
    "{",
    "[]",
    "\x00\x01",
    json.dumps({"version": 4}),
    json.dumps({"version": 1, "entries": {"key": GOOD_ENTRY}}),
    json.dumps({"version": 4, "entries": []}),
    *(json.dumps({"version": 4, "entries": {"key": entry}}) for entry in BAD_ENTRIES),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    store = CostStore(path)
    assert store.load("key") is None
    store.save("key", measured())
    restored = store.load("key")
    assert restored is not None
    assert restored.verify_ms(4, 0) == 16.0


def test_an_undamaged_entry_like_those_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"version": 4, "entries": {"key": GOOD_ENTRY}}))
    assert CostStore(path).load("key") is not None


def test_a_save_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    store = CostStore(path)
    store.save("key", measured())
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    store.save("key", measured({1: 99.0}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_keeps_nothing_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CostStore(tmp_path / "file" / "costs.json")
    store.save("key", measured())
    assert store.load("key") is None


def test_without_a_path_nothing_is_kept() -> None:
    store = CostStore(None)
    store.save("key", measured())
    assert store.load("key") is None


def test_a_drafter_uses_the_fewest_threads_that_are_as_fast() -> None:
    cost = measured()
    assert cost.draft_threads("a") is None
    cost.set_drafter("a", {1: 6.2, 2: 6.0, 4: 9.0})
    assert cost.draft_threads("a") == 1
    assert cost.draft_ms(("a",)) == 6.2
    cost.set_drafter("a", {1: 9.0, 2: 6.0, 4: 5.9})
    assert cost.draft_threads("a") == 2
    restored = CostModel.from_dict(cost.to_dict())
    assert restored.draft_threads("a") == 2


def test_a_machine_that_was_busy_when_it_was_measured_is_not_believed_to_be_slow_for_ever() -> None:
    cost = measured({size: 4 * elapsed_ms for size, elapsed_ms in CURVE.items()})
    for _ in range(60):
        cost.observe_verify(1, 0, CURVE[1])
    assert cost.verify_ms(1, 0) == pytest.approx(CURVE[1], rel=0.05)
    assert cost.verify_ms(16, 0) < 2.5 * measured().verify_ms(16, 0)  # not one of those was seen
    restored = CostModel.from_dict(cost.to_dict())
    assert restored.verify_ms(16, 0) == pytest.approx(cost.verify_ms(16, 0))
