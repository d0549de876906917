"""The arithmetic of the figures, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.bench.row import LOOP_SHARE, Row, compare, distinct_share
from app.bench.summary import figures, summarise
from tests.bench.making import peer_row, row


def summary_of(*rows: Row, peers: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    return summarise(compare(rows), peers, seed=1)


def test_distinct_share_counts_four_grams() -> None:
    assert distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert distinct_share([1, 2, 1, 2, 1, 2, 1]) == 0.5  # 1212 2121 1212 2121
    assert distinct_share([7, 7, 7]) == 1.0


def test_a_ratio_is_taken_within_its_round() -> None:
    rows = compare(
        [
            row("a", "plain", 10),
            row("a", "auto", 15),
            row("a", "plain", 20, round_number=2),
            row("a", "auto", 50, round_number=2),
            row("a", "auto", 50, round_number=3),
        ]
    )
    assert [own.ratio_to_plain for own in rows] == [1.0, 1.5, 1.0, 2.5, None]


def test_identity_is_by_tokens_for_ours_and_by_text_for_a_peer() -> None:
    rows = compare(
        [
            row("a", "plain", 10),
            row("a", "auto", 15, answer="another"),
            peer_row("a", "peer", 12),
            replace(peer_row("a", "sampling peer", 12), text_sha256=""),
        ]
    )
    assert [own.identical_to_plain for own in rows] == [True, False, True, None]


def test_rounds_then_prompts_then_categories() -> None:
    """chat: medians 1.5 and 2.5 of two prompts, so 2.0; story: 1.0; overall 1.5, though chat has twice the prompts."""
    ratios = {("chat", "a"): (1.0, 1.5, 9.0), ("chat", "b"): (2.0, 2.5, 3.0), ("story", "c"): (1.0, 1.0, 1.0)}
    rows = []
    for (category, prompt_id), own in ratios.items():
        for round_number, ratio in enumerate(own, start=1):
            rows.append(row(prompt_id, "plain", 10, category=category, round_number=round_number))
            rows.append(row(prompt_id, "auto", 10 * ratio, category=category, round_number=round_number))
    ratio = summary_of(*rows).named("auto").ratio
    assert ratio is not None
    assert {category: estimate.value for category, estimate in ratio.by_category.items()} == {"chat": 2.0, "story": 1.0}
    assert ratio.overall.value == pytest.approx(1.5)
    assert ratio.overall.prompts == 3
    assert ratio.worst_category == "story"


def test_the_interval_comes_from_drawing_prompts() -> None:
    """Two prompts with 1 and 3 are drawn as 1, 2 or 3; a lone prompt has no spread."""
    found = figures({"chat": {"a": [1.0], "b": [3.0]}, "story": {"c": [2.0]}}, seed=1)
    assert found is not None
    chat, story = found.by_category["chat"], found.by_category["story"]
    assert (chat.value, chat.low, chat.high) == (2.0, 1.0, 3.0)
    assert (story.value, story.low, story.high) == (2.0, 2.0, 2.0)
    assert (found.overall.low, found.overall.high) == (1.5, 2.5)
    assert figures({"chat": {"a": [1.0], "b": [3.0]}, "story": {"c": [2.0]}}, seed=1) == found


def test_loops_count_in_no_figure_and_are_listed() -> None:
    summary = summary_of(
        row("a", "plain", 10),
        row("a", "auto", 15),
        row("loop", "plain", 10, distinct=LOOP_SHARE - 0.01),
        row("loop", "auto", 90, distinct=LOOP_SHARE - 0.01),
    )
    auto = summary.named("auto")
    assert auto.rows == 1
    assert auto.ratio is not None
    assert auto.ratio.overall.value == 1.5
    (loop,) = summary.loops
    assert (loop.prompt_id, loop.distinct_4gram, loop.ratios) == ("loop", pytest.approx(0.59), {"auto": 9.0})


def test_the_plain_answer_alone_decides_what_is_a_loop() -> None:
    summary = summary_of(row("a", "plain", 10, distinct=LOOP_SHARE), row("a", "auto", 15, distinct=0.1))
    assert summary.named("auto").rows == 1
    assert summary.loops == ()


def test_a_category_of_loops_alone_is_left_out() -> None:
    summary = summary_of(
        row("a", "plain", 10),
        row("a", "auto", 20),
        row("b", "plain", 10, category="story", distinct=0.1),
        row("b", "auto", 90, category="story", distinct=0.1),
    )
    ratio = summary.named("auto").ratio
    assert list(ratio.by_category) == ["chat"]
    assert ratio.overall.value == 2.0


def test_each_exactness_has_its_own_baseline() -> None:
    fast = "plain,exactness=fast"
    summary = summary_of(
        row("a", "plain", 10),
        row("a", "auto", 20),
        row("a", fast, 20, baseline=fast),
        row("a", "auto,exactness=fast", 30, baseline=fast),
    )
    assert summary.named("auto").ratio.overall.value == 2.0
    assert summary.named("auto,exactness=fast").ratio.overall.value == 1.5
    assert [config.config for config in summary.configs if config.is_baseline] == ["plain", fast]


def test_total_and_first_token_are_compared_too() -> None:
    """Plain takes 0.5 + 10 s; auto 0.5 + 5 s and its first token 0.75 s instead of 0.5."""
    auto = replace(row("a", "auto", 20), time_to_first_token_seconds=0.75)
    summary = summary_of(row("a", "plain", 10), auto)
    named = summary.named("auto")
    assert named.total_ratio.overall.value == pytest.approx(10.5 / 5.5)
    assert named.first_token_ratio.overall.value == pytest.approx(1.5)


def test_total_time_of_another_text_says_nothing() -> None:
    summary = summary_of(row("a", "plain", 10), row("a", "auto", 20, answer="shorter"))
    assert summary.named("auto").total_ratio is None


def test_counts_are_added_before_rates_are_taken() -> None:
    """Rates of rows must not be averaged: 8 of 10 and 1 of 30 tokens are 9 of 40."""
    long = replace(
        row("a", "auto", 20),
        verified=10,
        accepted=8,
        verify_passes=4,
        accepted_by_position=(4, 4),
        length_histogram={"2": 4, "10": 1},
    )
    short = replace(
        row("b", "auto", 20),
        verified=30,
        accepted=1,
        verify_passes=12,
        accepted_by_position=(1,),
        length_histogram={"2": 12},
    )
    named = summary_of(row("a", "plain", 10), row("b", "plain", 10), long, short).named("auto")
    assert named.acceptance == 9 / 40
    assert named.mean_accepted_length == 1 + 9 / 16
    assert named.acceptance_by_position == (5 / 16, 4 / 16)
    assert list(named.lengths.items()) == [("2", 16), ("10", 1)]


def test_python_time_is_per_pass() -> None:
    split = {"plan": 0.002, "draft": 9.0, "vote": 0.001, "verify": 9.0, "sample": 9.0, "other": 0.003}
    auto = replace(row("a", "auto", 20), verify_passes=2, plain_passes=1, time_split_seconds=split)
    assert summary_of(row("a", "plain", 10), auto).named("auto").python_ms_per_pass == pytest.approx(2.0)


def test_a_peer_is_met_at_its_best() -> None:
    """Setting x: chat 1.2, story 1.0; y: chat 0.9, story 1.2. x is best overall (1.1), y in stories."""
    rows = [
        row("a", "plain", 10),
        row("b", "plain", 10, category="story"),
        row("a", "auto", 24),
        row("b", "auto", 15, category="story"),
        peer_row("a", "x", 12),
        peer_row("b", "x", 10, category="story"),
        peer_row("a", "y", 9),
        peer_row("b", "y", 12, category="story"),
    ]
    peer = summary_of(*rows, peers=("x", "y")).peer
    assert peer.best_setting == "x"
    assert peer.best_by_category == {"chat": "x", "story": "y"}
    assert peer.against_best["auto"].by_category["chat"].value == pytest.approx(2.0)
    assert peer.against_best["auto"].overall.value == pytest.approx(1.75)
    assert peer.against_best["plain"].overall.value == pytest.approx((10 / 12 + 1) / 2)
    assert peer.against_best_of_category["auto"] == {"chat": pytest.approx(2.0), "story": pytest.approx(1.25)}


def test_a_peer_is_met_in_the_same_round() -> None:
    rows = [
        row("a", "plain", 10),
        row("a", "auto", 20),
        row("a", "plain", 20, round_number=2),
        row("a", "auto", 40, round_number=2),
        peer_row("a", "x", 10),
        peer_row("a", "x", 20, round_number=2),
    ]
    peer = summary_of(*rows, peers=("x",)).peer
    assert peer.against_best["auto"].overall.value == 2.0


def test_nothing_to_compare_gives_no_figure() -> None:
    summary = summary_of(row("a", "auto", 20))
    assert summary.named("auto").ratio is None
    assert summary.peer is None
