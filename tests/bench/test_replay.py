"""A replay takes the very steps that the real run takes; only its clock is its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from app.bench.prompts import Prompt
from app.bench.recording import CHAIN_TOKENS, RecordedAnswer, load, record_answers, record_chains, save
from app.bench.replay import ReplayCosts, replay
from engine.config import GenerationSettings, LookAhead, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.cost import CALIBRATED_SIZES
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished, Metrics

PROMPTS = (
    Prompt("boats", "chat", (Message("user", "Name some kinds of boats and what they are for."),)),
    Prompt("letter", "chat", (Message("user", "Write a short letter to a neighbour about a lost cat."),)),
)
GREEDY = Sampling(temperature=0)
ANSWER_TOKENS = 40


def costs(pass_ms: float = 20.0, draft_ms: float = 4.0) -> ReplayCosts:
    names = ("few-bits", "hostile")
    return ReplayCosts(
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
    recorded = record_answers(loaded, PROMPTS, GREEDY, ANSWER_TOKENS, lambda _phase, _share: None)
    for name in ("few-bits", "hostile"):
        record_chains(draft_models[name], recorded, 1, lambda _phase, _share: None)
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


def test_a_recording_survives_its_file(answers: list[RecordedAnswer], tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    save(path, answers)
    assert load(path) == answers
    assert all(len(chain.tokens) == CHAIN_TOKENS for chain in answers[0].chains["hostile"])
    assert len(answers[0].chains["hostile"]) == len(answers[0].answer)
