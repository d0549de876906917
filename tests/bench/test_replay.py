"""A replay takes the very steps that the real run takes; only its clock is its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from app.bench.configuration import Configuration, parse_configurations
from app.bench.prompts import Prompt
from app.bench.recording import CHAIN_TOKENS, RecordedAnswer, Recording, load, record_answers, record_chains, save
from app.bench.replay import replay
from app.bench.replayed import best_in_hindsight, replay_rows
from app.bench.step_costs import StepCosts, measure_step_costs
from engine.config import GenerationSettings, LookAhead, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.cost import CALIBRATED_SIZES
from engine.errors import SettingError
from engine.length import LONGEST_DRAFT
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished, Metrics
from models.progress import Cancelled

PROMPTS = (
    Prompt("boats", "chat", (Message("user", "Name some kinds of boats and what they are for."),)),
    Prompt("letter", "chat", (Message("user", "Write a short letter to a neighbour about a lost cat."),)),
)
GREEDY = Sampling(temperature=0)
ANSWER_TOKENS = 40


def costs(pass_ms: float = 20.0, draft_ms: float = 4.0) -> StepCosts:
    names = ("few-bits", "hostile")
    return StepCosts(
        pass_ms={size: pass_ms * (0.8 + 0.2 * size) for size in CALIBRATED_SIZES},
        draft_ms=dict.fromkeys(names, draft_ms),
        read_ms=dict.fromkeys(names, draft_ms / 4),
    )


def speculation(policy: str) -> Speculation:
    return Speculation(Policy.parse(policy), look_ahead=LookAhead.OFF)


@pytest.fixture(scope="module")
def loaded(starter: Path, draft_models: dict[str, Path]) -> LoadedSet:
    return LoadedSet.load(SetConfig(starter, (str(draft_models["few-bits"]), "ngram"), 1024, ModelPlacement(threads=1)))


@pytest.fixture(scope="module")
def answers(loaded: LoadedSet, draft_models: dict[str, Path]) -> list[RecordedAnswer]:
    recorded = record_answers(loaded, PROMPTS, GREEDY, ANSWER_TOKENS, lambda _phase, _share: None, threading.Event())
    for name in ("few-bits", "hostile"):
        record_chains(draft_models[name], recorded, 1, lambda _phase, _share: None, threading.Event())
    return recorded


def really(loaded: LoadedSet, prompt: Prompt, drafters: tuple[str, ...], policy: str) -> Metrics:
    part = loaded.with_drafters(drafters)
    part.panel.forget()
    session = Session(part)
    settings = GenerationSettings(GREEDY, speculation(policy), ANSWER_TOKENS)
    *_, last = session.chat(prompt.messages, settings, threading.Event())
    session.close()
    assert isinstance(last, Finished)
    return last.metrics


POLICIES = ("fixed:1", "fixed:3", "fixed:7")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_look_up_drafter_takes_the_same_steps_as_for_real(
    loaded: LoadedSet, answers: list[RecordedAnswer], policy: str
) -> None:
    replayed = replay(answers, ("ngram",), speculation(policy), costs())
    for prompt, answer in zip(PROMPTS, replayed, strict=True):
        real = really(loaded, prompt, ("ngram",), policy)
        counts = ("verify_steps", "plain_steps", "verified", "accepted", "corrected", "bonus", "plain")
        assert [getattr(answer.metrics, name) for name in counts] == [getattr(real, name) for name in counts]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draft_model_takes_as_many_steps_as_for_real(
    loaded: LoadedSet, answers: list[RecordedAnswer], policy: str
) -> None:
    """Drafters are not bit-exact: recorded in batches, a near-tie may fall to the other side."""
    replayed = replay(answers, ("few-bits",), speculation(policy), costs())
    real = [really(loaded, prompt, ("few-bits",), policy) for prompt in PROMPTS]
    foretold = sum(answer.metrics.verify_steps for answer in replayed)
    assert foretold == pytest.approx(sum(metrics.verify_steps for metrics in real), rel=0.08)


def test_plain_decoding_takes_its_own_time(answers: list[RecordedAnswer]) -> None:
    for answer in replay(answers, ("few-bits",), speculation("off"), costs()):
        assert answer.ratio_to_plain == pytest.approx(1)


def test_a_replay_gives_the_same_twice(answers: list[RecordedAnswer]) -> None:
    names = ("few-bits", "hostile", "ngram", "suffix")
    first, second = (replay(answers, names, speculation("auto"), costs()) for _ in range(2))
    assert first == second


def test_a_hostile_drafter_is_rested(answers: list[RecordedAnswer]) -> None:
    for answer in replay(answers * 3, ("hostile",), speculation("auto"), costs(draft_ms=10.0))[2:]:
        assert answer.metrics.plain_steps > answer.metrics.verify_steps


def recording(answers: list[RecordedAnswer]) -> Recording:
    return Recording({"machine": "this one"}, ("few-bits", "hostile", "ngram"), costs(), tuple(answers))


def test_a_recording_survives_its_file(answers: list[RecordedAnswer], tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    save(path, recording(answers))
    assert load(path) == recording(answers)
    assert all(len(chain.tokens) == CHAIN_TOKENS for chain in answers[0].chains["hostile"])
    assert len(answers[0].chains["hostile"]) == len(answers[0].answer)


@pytest.mark.parametrize("text", ["", "[]", '{"about": {}, "drafters": [], "costs": {"pass_ms": 3}, "answers": []}'])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match=r"other.json is no recording"):
        load(path)


def test_rows_of_a_replay_stand_against_plain(answers: list[RecordedAnswer]) -> None:
    configurations = parse_configurations("fixed:3,drafters=few-bits;fixed:3,drafters=hostile", Configuration())
    rows = replay_rows(recording(answers), configurations, threading.Event())
    assert [row.config for row in rows] == [
        *["plain"] * 2,
        *["fixed:3,drafters=few-bits"] * 2,
        *["fixed:3,drafters=hostile"] * 2,
    ]
    ratios = {row.config: row.ratio_to_plain for row in rows if row.prompt_id == "boats"}
    assert ratios["plain"] == pytest.approx(1)
    good, bad = ratios["fixed:3,drafters=few-bits"], ratios["fixed:3,drafters=hostile"]
    assert good is not None
    assert bad is not None
    assert bad < 1 < good


def test_a_drafter_that_was_not_recorded_is_named(answers: list[RecordedAnswer]) -> None:
    (configuration,) = parse_configurations("auto;fixed:1,drafters=nobody", Configuration())[1:]
    with pytest.raises(SettingError, match="'nobody' was not recorded; there are few-bits, hostile, ngram"):
        replay_rows(recording(answers), [configuration], threading.Event())


def test_the_best_in_hindsight_is_the_best_of_all_fixed_settings(answers: list[RecordedAnswer]) -> None:
    part = Recording({}, ("few-bits", "hostile"), costs(), tuple(answers))
    best = best_in_hindsight(part, lambda _phase, _share: None, threading.Event())["chat"]
    assert len(best) == 3
    assert [setting.ratio for setting in best] == sorted((setting.ratio for setting in best), reverse=True)
    assert best[0].drafters == ("few-bits",)
    rows = replay_rows(part, parse_configurations("fixed:3,drafters=few-bits", Configuration()), threading.Event())
    ratios = sorted(row.ratio_to_plain for row in rows if row.config != "plain" and row.ratio_to_plain)
    assert best[0].ratio >= sum(ratios) / 2


def test_costs_are_those_of_real_steps(loaded: LoadedSet, answers: list[RecordedAnswer]) -> None:
    """Times are this machine's own; what they were taken of is not."""
    found = measure_step_costs(loaded, [answers[0].prompt], lambda _phase, _share: None, threading.Event())
    assert set(found.pass_ms) >= {*range(1, LONGEST_DRAFT + 2)}
    assert set(found.draft_ms) == set(found.read_ms) == {"few-bits"}
    assert found.pass_ms[16] > found.pass_ms[1] > 0
    assert found.target_ms(1, 100) == pytest.approx(found.pass_ms[1] + 100 * found.slope_ms)


def test_a_cancelled_recording_keeps_nothing(loaded: LoadedSet) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        record_answers(loaded, PROMPTS, GREEDY, ANSWER_TOKENS, lambda _phase, _share: None, cancel)


def test_a_limit_counts_the_answers_of_a_category(loaded: LoadedSet) -> None:
    silent = lambda _phase, _share: None  # noqa: E731
    recorded = record_answers(loaded, PROMPTS, GREEDY, ANSWER_TOKENS, silent, threading.Event(), 1)
    assert [answer.prompt_id for answer in recorded] == ["boats"]
