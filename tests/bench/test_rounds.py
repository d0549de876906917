"""The order of a round, and on a real model: what one run leaves behind for the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from app.bench.configuration import Configuration
from app.bench.prompts import Prompt
from app.bench.rounds import (
    Contestant,
    Task,
    check_prompts,
    measure,
    run_round,
    schedule_first_round,
    schedule_round,
    warm_up,
)
from engine.config import ModelPlacement, Policy, PolicyKind, Sampling, SetConfig, Speculation
from engine.errors import PromptError
from engine.loader import LoadedSet
from engine.runtime.template import Message

GREEDY = Sampling(temperature=0, seed=1)
PLAIN = Configuration(Speculation(Policy(PolicyKind.OFF)))


def prompt(prompt_id: str, text: str = "Name a few birds.") -> Prompt:
    return Prompt(prompt_id, "chat", (Message("user", text),))


def fixed(length: int) -> Configuration:
    return Configuration(Speculation(Policy(PolicyKind.FIXED, length)))


@pytest.fixture(scope="module")
def loaded(
    starter: Path, draft_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedSet]:
    config = SetConfig(
        target=starter,
        drafters=("ngram", "suffix", str(draft_models["no-layer-14"])),
        context_tokens=512,
        placement=ModelPlacement(threads=1),
        cost_file=tmp_path_factory.mktemp("costs") / "costs.json",
    )
    made = LoadedSet.load(config)
    yield made
    made.close()


def test_all_contestants_answer_a_prompt_before_the_next_and_take_turns_at_being_first() -> None:
    nothing_loaded = cast(LoadedSet, None)
    contestants = [Contestant(own, nothing_loaded) for own in (PLAIN, fixed(1), fixed(3))]
    prompts = [prompt(name) for name in "abcd"]
    tasks = [list(schedule_round(prompts, contestants, number)) for number in (1, 2)]
    assert [[task.prompt.id for task in own] for own in tasks] == [[*"aaabbbcccddd"]] * 2
    assert [own[start].contestant.name for own in tasks for start in (0, 3, 6, 9)] == [
        *("plain", "fixed:1", "fixed:3", "plain"),
        *("fixed:1", "fixed:3", "plain", "fixed:1"),
    ]
    for own in tasks:
        for start in (0, 3, 6, 9):
            assert {task.contestant.name for task in own[start : start + 3]} == {"plain", "fixed:1", "fixed:3"}


def test_a_prompt_that_loops_gives_its_place_to_the_next_of_its_category() -> None:
    nothing_loaded = cast(LoadedSet, None)
    contestants = [Contestant(own, nothing_loaded) for own in (PLAIN, fixed(1), fixed(3))]
    prompts = [*(replace(prompt(name), category="chat") for name in "abcd"), replace(prompt("e"), category="story")]
    heard: list[tuple[str, str]] = []

    def is_loop(asked: Prompt) -> bool:
        assert heard[-1] == (asked.id, "plain")
        return asked.id in "be"

    for task in schedule_first_round(prompts, 2, contestants, is_loop):
        assert task.round == 1
        heard.append((task.prompt.id, task.contestant.name))
    assert heard == [
        *(("a", "plain"), ("a", "fixed:1"), ("a", "fixed:3")),
        ("b", "plain"),
        *(("c", "plain"), ("c", "fixed:1"), ("c", "fixed:3")),
        ("e", "plain"),
    ]


def test_a_prompt_answered_again_is_as_new(loaded: LoadedSet) -> None:
    """The suffix drafter would copy the whole answer if it remembered it."""
    contestant = Contestant(fixed(7), loaded.with_drafters(["suffix"]))
    first, second = (measure(Task(prompt("a"), contestant, number), GREEDY, 40, threading.Event()) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert first.answer_sha256 == second.answer_sha256
    # Trust in a match was learnt meanwhile, so counts may differ; but nothing came from memory.
    assert second.accepted is not None
    assert second.accepted < 20


def test_drafters_remember_until_told_to_forget(loaded: LoadedSet) -> None:
    """The other side of the test above: it could fail."""
    from engine.config import GenerationSettings
    from engine.session import Session
    from engine.types import Finished

    own = loaded.with_drafters(["suffix"])
    own.panel.forget()
    accepted = []
    for _ in range(2):
        session = Session(own)
        settings = GenerationSettings(GREEDY, fixed(7).speculation, 40)
        for event in session.chat(prompt("a").messages, settings, threading.Event()):
            if isinstance(event, Finished):
                accepted.append(event.metrics.accepted)
        session.close()
    assert accepted[1] >= 20 > accepted[0]


def test_a_draft_model_forgets_what_it_has_read(loaded: LoadedSet) -> None:
    (drafter,) = loaded.panel.models
    drafter.begin([1] * 30)
    future = drafter.start_catch_up(100, threading.Event())
    assert future is not None
    future.result()
    assert drafter.behind_tokens == 0
    loaded.panel.forget()
    drafter.begin([1] * 30)
    assert drafter.behind_tokens == 30
    loaded.panel.forget()


def test_contestants_use_their_own_drafters_and_learners(loaded: LoadedSet) -> None:
    one, other = loaded.with_drafters(["ngram"]), loaded.with_drafters(["ngram", "suffix"])
    assert one.panel.names == ("ngram",)
    assert other.panel.names == ("ngram", "suffix")
    assert one.learning is not other.learning
    assert one.learning.cost is loaded.learning.cost
    one.close()
    assert measure(Task(prompt("a"), Contestant(PLAIN, other), 1), GREEDY, 4, threading.Event()) is not None


def test_rows_say_what_was_measured(loaded: LoadedSet) -> None:
    names = loaded.panel.names
    own = measure(
        Task(prompt("a"), Contestant(fixed(3), loaded.with_drafters(names)), 2), GREEDY, 24, threading.Event()
    )
    plain = measure(Task(prompt("a"), Contestant(PLAIN, loaded.with_drafters([])), 2), GREEDY, 24, threading.Event())
    assert own is not None
    assert plain is not None
    assert own.answer_sha256 == plain.answer_sha256
    assert (own.tokens, own.round, own.config, own.baseline) == (24, 2, "fixed:3", "plain")
    assert own.verify_passes is not None
    assert own.plain_passes is not None
    assert own.verify_passes + own.plain_passes < 24
    assert sum(own.length_histogram.values()) == own.verify_passes + own.plain_passes
    assert sum(own.accepted_by_position) == own.accepted
    assert own.total_seconds >= own.decode_seconds + own.prefill_seconds
    assert sum(own.time_split_seconds.values()) <= own.total_seconds
    assert plain.verified == 0
    assert plain.plain_passes == 24


def test_every_round_has_a_seed_of_its_own_that_all_contestants_share(loaded: LoadedSet) -> None:
    warm = Sampling(temperature=1.5, seed=1)
    contestants = [Contestant(PLAIN, loaded.with_drafters([])), Contestant(fixed(3), loaded.with_drafters(["ngram"]))]
    hashes = [
        [own.answer_sha256 for own in run_round(tasks, lambda _task: False, warm, 12, threading.Event())]
        for tasks in (schedule_round([prompt("a")], contestants, number) for number in (1, 2))
    ]
    assert [len(set(own)) for own in hashes] == [1, 1]
    assert hashes[0] != hashes[1]


def test_what_is_done_is_passed_over_and_a_cancelled_answer_is_no_row(loaded: LoadedSet) -> None:
    contestants = [Contestant(PLAIN, loaded.with_drafters([])), Contestant(fixed(1), loaded.with_drafters(["ngram"]))]
    cancel = threading.Event()
    rows = []
    tasks = schedule_round([prompt("a"), prompt("b"), prompt("c")], contestants, 1)
    for own in run_round(tasks, lambda task: task.prompt.id == "a", GREEDY, 4, cancel):
        rows.append((own.prompt_id, own.config))
        if len(rows) == 3:
            cancel.set()
    assert rows == [("b", "fixed:1"), ("b", "plain"), ("c", "plain")]


def test_warm_up_precedes_round_one(loaded: LoadedSet) -> None:
    (own,) = warm_up([Contestant(PLAIN, loaded.with_drafters([]))], GREEDY, 4, threading.Event())
    assert (own.prompt_id, own.round) == ("warm-up", 0)


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_measured(loaded: LoadedSet) -> None:
    with pytest.raises(PromptError, match=r"prompt long has \d+ tokens and a context of 512 leaves room for 352"):
        check_prompts(loaded, [prompt("a"), prompt("long", "word " * 400)], 160)
