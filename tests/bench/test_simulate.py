"""The simulated pool by cases worked out by hand, and by what must hold whatever things cost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import bench_command
from app.bench.recording import Chain, RecordedAnswer, Recording, save
from app.bench.simulate import (
    NOTE,
    Drafting,
    ForeseenAnswer,
    Machine,
    Outcome,
    Scenario,
    Simulation,
    even_answers,
    flat_cost,
    mean_acceptance,
    recorded_answers,
    render_simulated,
)
from app.bench.step_costs import StepCosts
from app.cli import main
from engine.config import MAX_DRAFT_TOKENS
from engine.cost import CALIBRATED_SIZES
from engine.length import LONGEST_DRAFT

MACHINE = Machine(
    target=flat_cost(10.0, 1.0),
    read_ms=2.0,
    drafter=flat_cost(1.0, 0.0),
    drafter_ms=1.0,
    drafter_read_ms=0.0,
    drafter_start_passes=0.0,
    slice_tokens=16,
)
"""A pass takes 9 ms and one more for each token, a drafted token 1 ms for all requests together."""
APART = replace(MACHINE, is_apart=True)


def answers(count: int, prompt_tokens: int = 0, tokens: int = 4, accepted: int = 1) -> tuple[ForeseenAnswer, ...]:
    """Of every draft, the first so many tokens are accepted."""
    one = ForeseenAnswer(prompt_tokens, (accepted,) * tokens, ((0.9, 0.8, 0.7),) * tokens)
    return (one,) * count


def simulate(
    machine: Machine,
    requests: Sequence[ForeseenAnswer],
    concurrency: int,
    drafting: Drafting,
    length: int | None = None,
) -> Outcome:
    return Simulation(machine, requests, concurrency, drafting, length).run()


def test_a_single_request_without_drafts_takes_its_passes() -> None:
    outcome = simulate(MACHINE, answers(1), 1, Drafting.NONE)
    assert (outcome.tokens, outcome.passes, outcome.elapsed_ms) == (4, 4, 40.0)
    assert outcome.tokens_per_second == pytest.approx(100.0)


def test_a_prompt_is_read_alone_before_the_first_answer() -> None:
    outcome = simulate(MACHINE, answers(1, prompt_tokens=50), 1, Drafting.NONE)
    assert outcome.elapsed_ms == 100.0 + 40.0
    assert outcome.parts_ms == pytest.approx({"prefill": 100.0, "verify": 40.0, "other": 0.0, "draft": 0.0})


def test_a_second_prompt_enters_in_slices_with_the_first_answer() -> None:
    # 20 tokens alone 40 ms; a pass of 1 + 15 tokens 25 ms, and the 16th at the price of reading: 27 ms; one of 1 + 4
    # tokens 14 ms; then two passes of both answers, 11 ms each, and two of the second one, 10 ms each.
    outcome = simulate(MACHINE, answers(2, prompt_tokens=20), 2, Drafting.NONE)
    assert outcome.elapsed_ms == pytest.approx(40 + 27 + 14 + 2 * 11 + 2 * 10)
    assert outcome.parts_ms["prefill"] == pytest.approx(40 + 27 * 16 / 17 + 14 * 4 / 5)
    assert (outcome.passes, outcome.carried_answers) == (6, 8)


def test_a_serial_round_drafts_and_then_verifies() -> None:
    # The first token comes without a draft: 10 ms. The second and third by 1 + 11 ms, the fourth is the last: 10 ms.
    outcome = simulate(MACHINE, answers(1), 1, Drafting.SERIAL, 1)
    assert outcome.elapsed_ms == pytest.approx(10 + 12 + 10)
    assert (outcome.tokens, outcome.verified, outcome.accepted) == (4, 1, 1)
    assert outcome.parts_ms == pytest.approx({"prefill": 0.0, "verify": 31.0, "other": 0.0, "draft": 1.0})


def test_what_is_rejected_costs_its_place_and_brings_nothing() -> None:
    outcome = simulate(MACHINE, answers(1, tokens=6, accepted=1), 1, Drafting.SERIAL, 3)
    # 10 ms; 3 drafted of which one is accepted, 3 + 13 ms; as many as there is room for, 2 + 12 ms; the last, 10 ms.
    assert outcome.elapsed_ms == pytest.approx(10 + 16 + 14 + 10)
    assert (outcome.tokens, outcome.verified, outcome.accepted) == (6, 5, 2)


def test_a_draft_takes_its_way_to_the_target() -> None:
    near = simulate(APART, answers(1), 1, Drafting.SERIAL, 1)
    far = simulate(replace(APART, link_ms=7.0), answers(1), 1, Drafting.SERIAL, 1)
    assert far.elapsed_ms == pytest.approx(near.elapsed_ms + 7.0)
    assert far.parts_ms["draft"] == pytest.approx(near.parts_ms["draft"] + 7.0)
    assert far.drafter_busy_ms == pytest.approx(near.drafter_busy_ms)


def test_with_overlap_one_half_is_drafted_for_while_the_other_is_verified() -> None:
    # Both begin without a draft: 11 ms. The first is drafted for, 1 ms, and verified, 11 ms, while the second is
    # drafted for; then each brings its last token: the second's draft 11 ms with the first's last token, 12 ms in all.
    outcome = simulate(APART, answers(2), 2, Drafting.OVERLAPPED, 1)
    assert outcome.elapsed_ms == pytest.approx(11 + 1 + 11 + 12 + 10)
    assert (outcome.tokens, outcome.passes, outcome.overlapped) == (8, 4, 1)
    assert outcome.parts_ms["draft"] == pytest.approx(1.0)


def test_processors_that_share_their_cores_slow_each_other_down() -> None:
    # As above, but the second's draft, 1 ms, takes 2 beside the pass, which ends 1 ms later for it.
    outcome = simulate(MACHINE, answers(2), 2, Drafting.OVERLAPPED, 1)
    assert outcome.elapsed_ms == pytest.approx(11 + 1 + 12 + 12 + 10)
    assert outcome.drafter_busy_ms == pytest.approx(1 + 2)
    assert sum(outcome.parts_ms.values()) == pytest.approx(outcome.elapsed_ms)


@pytest.mark.parametrize("machine", [MACHINE, APART, replace(APART, link_ms=3.0)], ids=["shared", "apart", "linked"])
@pytest.mark.parametrize("length", [None, 1, 4, MAX_DRAFT_TOKENS])
def test_no_token_is_lost_or_made_twice(machine: Machine, length: int | None) -> None:
    requests = tuple(
        answer
        for tokens in (1, 7, 30)
        for answer in even_answers(2, prompt_tokens=40, answer_tokens=tokens, acceptance=0.6, seed=tokens)
    )
    costs = replace(machine, drafter_read_ms=0.1, overhead_ms=0.2)
    for drafting, concurrency in itertools.product(Drafting, (1, 3, 16)):
        outcome = simulate(costs, requests, concurrency, drafting, length)
        assert outcome.tokens == sum(answer.tokens for answer in requests)
        assert outcome.tokens == outcome.carried_answers + outcome.accepted
        assert outcome.accepted <= outcome.verified
        assert sum(outcome.parts_ms.values()) == pytest.approx(outcome.elapsed_ms)
        assert min(outcome.parts_ms.values()) >= 0
        assert outcome.drafter_busy_ms <= outcome.elapsed_ms * (1 + 1e-9)
        assert outcome.mean_batch <= concurrency
        if drafting is not Drafting.OVERLAPPED:
            assert outcome.overlapped == 0


@pytest.mark.parametrize("drafter_ms", [0.2, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("link_ms", [0.0, 5.0])
def test_overlap_is_never_slower_where_batches_stay_equal(drafter_ms: float, link_ms: float) -> None:
    """Twice as many requests, in two halves of which each is as large as a serial round's batch."""
    machine = replace(APART, drafter_ms=drafter_ms, link_ms=link_ms)
    requests = answers(4, tokens=121, accepted=3)
    serial = simulate(machine, requests, 4, Drafting.SERIAL, 3)
    overlapped = simulate(machine, requests * 2, 8, Drafting.OVERLAPPED, 3)
    assert overlapped.tokens_per_second >= serial.tokens_per_second
    # It hides all but the shorter of the two, once both halves are under way.
    draft_ms, verify_ms = 3 * drafter_ms, 9.0 + 16
    limit = (draft_ms + link_ms + verify_ms) / max(draft_ms, verify_ms, (draft_ms + link_ms + verify_ms) / 2)
    assert overlapped.tokens_per_second / serial.tokens_per_second <= limit * 1.01


def test_overlap_changes_nothing_for_a_single_request() -> None:
    requests = even_answers(3, 20, 40, 0.7, seed=1)
    serial, overlapped = (simulate(APART, requests, 1, drafting) for drafting in (Drafting.SERIAL, Drafting.OVERLAPPED))
    assert overlapped.elapsed_ms == pytest.approx(serial.elapsed_ms)
    assert overlapped.overlapped == 0


@pytest.mark.parametrize("drafting", [Drafting.SERIAL, Drafting.OVERLAPPED])
def test_a_free_and_perfect_drafter_reaches_the_ceiling(drafting: Drafting) -> None:
    machine = replace(APART, drafter_ms=0.0)
    whole_passes = 10
    requests = even_answers(1, 0, 1 + whole_passes * (LONGEST_DRAFT + 1), 1.0, seed=1)
    outcome = simulate(machine, requests, 1, drafting)
    ceiling_ms = min(machine.pass_ms(1 + length, 0, 1) / (1 + length) for length in range(LONGEST_DRAFT + 1))
    assert outcome.elapsed_ms == pytest.approx(10 + ceiling_ms * (requests[0].tokens - 1))
    assert outcome.accepted == outcome.verified


def test_a_hostile_drafter_is_left_out() -> None:
    requests = even_answers(4, 30, 40, 0.0, seed=1)
    plain = simulate(MACHINE, requests, 4, Drafting.NONE)
    for drafting in (Drafting.SERIAL, Drafting.OVERLAPPED):
        outcome = simulate(MACHINE, requests, 4, drafting)
        assert outcome.elapsed_ms == plain.elapsed_ms
        assert outcome.verified == 0


def test_a_drafter_reads_only_what_is_repaid() -> None:
    requests = even_answers(1, 100, 40, 0.8, seed=1)
    cheap = simulate(replace(MACHINE, drafter_read_ms=0.01), requests, 1, Drafting.SERIAL)
    dear = simulate(replace(MACHINE, drafter_read_ms=1000.0), requests, 1, Drafting.SERIAL)
    assert cheap.verified > 0
    assert dear.verified == 0


def test_a_drafter_reads_a_prompt_once() -> None:
    requests = answers(1, prompt_tokens=20, tokens=7)
    free = simulate(MACHINE, requests, 1, Drafting.SERIAL, 1)
    reading = simulate(replace(MACHINE, drafter_read_ms=0.5), requests, 1, Drafting.SERIAL, 1)
    assert free.verified == 3
    assert reading.elapsed_ms == pytest.approx(free.elapsed_ms + 20 * 0.5)
    assert reading.drafter_busy_ms == pytest.approx(free.drafter_busy_ms + 20 * 0.5)


def test_a_drafter_too_slow_to_wait_for_drafts_beside_the_target() -> None:
    requests = even_answers(2, 0, 40, 0.7, seed=1)
    machine = replace(APART, drafter_ms=8.0)
    assert simulate(machine, requests, 2, Drafting.SERIAL).verified == 0
    assert simulate(machine, requests, 2, Drafting.OVERLAPPED).verified > 0


def test_no_pass_is_larger_than_the_pools() -> None:
    requests = answers(40, tokens=30, accepted=3)
    outcome = simulate(MACHINE, requests, 40, Drafting.SERIAL, 3)
    assert outcome.verified == 0, "a pass holds 32 tokens, or as many as there are answers"


def test_even_answers_hold_what_was_asked_for() -> None:
    requests = even_answers(20, 5, 200, 0.7, seed=3)
    assert requests == even_answers(20, 5, 200, 0.7, seed=3)
    assert requests != even_answers(20, 5, 200, 0.7, seed=4)
    assert mean_acceptance(requests) == pytest.approx(0.7, abs=0.03)
    assert mean_acceptance(even_answers(2, 5, 20, 1.0, seed=1)) == 1.0
    assert mean_acceptance(even_answers(2, 5, 20, 0.0, seed=1)) == 0.0


def recording() -> Recording:
    """Three tokens; the drafter guesses the first two of each draft that begins at the start, and nothing after."""
    chains = (
        Chain((7, 8, 1), (0.9, 0.8, 0.3), (0.1, 0.1, 0.1)),
        Chain((5, 9, 1), (0.4, 0.8, 0.3), (0.1, 0.1, 0.1)),
        Chain((9, 2, 1), (0.9, 0.1, 0.3), (0.1, 0.1, 0.1)),
    )
    answer = RecordedAnswer("one", "chat", (1, 2, 3, 4), (7, 8, 9), {"small": chains})
    costs = StepCosts({size: 9.0 + size for size in CALIBRATED_SIZES}, {"small": 1.0}, {"small": 0.0})
    return Recording({}, ("small", "ngram"), costs, (answer,))


def test_recorded_chains_are_judged_by_the_recorded_answer() -> None:
    one, again = recorded_answers(recording().answers, "small", 2)
    assert one == again
    assert (one.prompt_tokens, one.accepted) == (4, (2, 0, 1))
    for own in one.survivals:
        assert all(0 < later <= earlier <= 1 for earlier, later in itertools.pairwise(own))


def test_what_is_printed_and_written_says_that_it_is_simulated() -> None:
    scenario = Scenario("small", APART, even_answers(4, 10, 20, 0.7, seed=1))
    outcomes = scenario.outcomes((1, 4), None)
    assert [(one.concurrency, one.drafting) for one in outcomes] == list(itertools.product((1, 4), Drafting))
    assert render_simulated(scenario, outcomes).startswith(NOTE)
    document = scenario.document(outcomes)
    assert document["simulated"] is True
    assert all(row["simulated"] is True for row in document["rows"])
    assert set(document["overlap_gain"]) == {1, 4}
    assert document["overlap_gain"][1] == pytest.approx(1.0)


def run(capsys: pytest.CaptureFixture[str], result: Path, *options: object) -> tuple[str, Any]:
    assert main(["bench", "--simulate", "--json", str(result), *map(str, options)]) == 0
    return capsys.readouterr().out, json.loads(result.read_text(encoding="utf-8"))


def test_the_command_predicts_a_what_if_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--target-ms 20 --target-slope-ms 0.1 --drafter-ms 3 --drafter-slope-ms 1 --drafters-apart --link-ms 0.5"
    text, document = run(capsys, tmp_path / "out.json", *options.split(), "--max-tokens", 12, "--requests", 4)
    assert text.startswith(NOTE)
    assert (document["simulated"], document["note"]) == (True, NOTE)
    (scenario,) = document["scenarios"]
    assert [row["concurrency"] for row in scenario["rows"]] == [n for n in (1, 2, 4, 8, 16) for _ in Drafting]
    assert scenario["costs"]["target_ms"]["3"] == pytest.approx(20.2)
    assert scenario["costs"]["drafter_ms"]["2"] == pytest.approx(4.0)
    assert (scenario["costs"]["link_ms"], scenario["costs"]["drafters_apart"]) == (0.5, True)
    assert all(row["tokens"] == 48 for row in scenario["rows"])


def test_the_command_takes_chains_and_costs_from_a_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(tmp_path / "recording.json", recording())
    fixed = ("--replay", tmp_path / "recording.json", "--concurrent", "1,2", "--requests", 2)
    _, document = run(capsys, tmp_path / "out.json", *fixed, "--policy", "fixed:2")
    (scenario,) = document["scenarios"]
    assert scenario["drafter"] == "small"
    assert scenario["answer_tokens"] == [3, 3]
    assert scenario["costs"]["target_ms"]["4"] == pytest.approx(13.0)
    assert [row["tokens"] for row in scenario["rows"]] == [6] * 6
    _, document = run(capsys, tmp_path / "out.json", *fixed, "--accepted", 1, "--target-ms", 50)
    (scenario,) = document["scenarios"]
    assert scenario["mean_acceptance"] == 1.0
    assert scenario["costs"]["target_ms"]["4"] == pytest.approx(50.0)
    assert scenario["costs"]["drafter_ms"]["2"] == pytest.approx(1.1), "the drafter's passes grow as they did there"


def test_the_command_takes_the_costs_that_were_measured_for_a_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = flat_cost(30.0, 2.0)
    cost.set_drafter("small", {1: 3.0})
    models: list[SimpleNamespace] = [SimpleNamespace(name="small")]
    loaded = SimpleNamespace(
        learning=SimpleNamespace(cost=cost), panel=SimpleNamespace(models=models), close=lambda: None
    )
    config = SimpleNamespace(target=Path("large.gguf"))
    monkeypatch.setattr(bench_command, "preparation", lambda _choice: lambda _report, _cancel: config)
    monkeypatch.setattr(bench_command, "LoadedSet", SimpleNamespace(load=lambda *_args: loaded))
    _, document = run(capsys, tmp_path / "out.json", "--requests", 2, "--max-tokens", 5)
    assert document["costs_from"] == "measured for large.gguf"
    (scenario,) = document["scenarios"]
    assert scenario["drafter"] == "small"
    assert scenario["costs"]["target_ms"]["16"] == pytest.approx(60.0)
    assert scenario["costs"]["read_ms"] == pytest.approx(60 / 16)
    assert scenario["costs"]["drafter_ms"]["2"] == pytest.approx(3 * 32 / 30)
    models.clear()
    assert main(["bench", "--simulate"]) != 0
    assert "draft model" in capsys.readouterr().err


def test_a_policy_that_is_not_simulated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--simulate", "--target-ms", "9", "--drafter-ms", "1", "--policy", "minions"]) != 0
    assert "minions" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--accepted=1.2", "--target-ms=0", "--link-ms=-1", "--drafter-ms=nan"])
def test_what_cannot_be_is_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--simulate", option])


def test_requests_that_begin_alike_read_it_once() -> None:
    one = ForeseenAnswer(20, (0,) * 4, ((0.5,),) * 4, prompt=tuple(range(20)))
    other = replace(one, prompt=(*range(12), *range(50, 58)))
    stranger = replace(one, prompt=tuple(range(90, 110)))
    # 20 tokens alone, 40 ms; a pass of 1 + 8 tokens, then three of both answers, and one of the second one.
    alike = simulate(MACHINE, (one, other), 2, Drafting.NONE)
    assert alike.elapsed_ms == pytest.approx(40 + 18 + 3 * 11 + 10)
    apart = simulate(MACHINE, (one, stranger), 2, Drafting.NONE)
    assert apart.elapsed_ms == pytest.approx(40 + 27 + 14 + 2 * 11 + 2 * 10)


def test_slices_are_larger_while_others_wait_to_be_read() -> None:
    # 40 tokens alone. Then one answer and 32 tokens of the second prompt, for the third is read after it: 16 in all at
    # the price of the pass, 17 at that of reading. Then 1 + 8; twice 2 + 16, of which 2 at that of reading; 2 + 8.
    outcome = simulate(MACHINE, answers(3, prompt_tokens=40, tokens=9), 3, Drafting.NONE)
    first = 80 + (25 + 17 * 2) + 18 + 2 * (25 + 2 * 2) + 19
    # The first has 4 to go then, the second 6 and the third 9: 4 passes of all, 2 of two, 3 of one.
    assert outcome.elapsed_ms == pytest.approx(first + 4 * 12 + 2 * 11 + 3 * 10)
