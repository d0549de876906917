"""What the page shows, made from plain data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app import plots, views
from app.conversations import Conversation, Turn
from app.jobs import Check, JobState, Load, Progressed
from app.run import Run, RunSnapshot, StepReading
from app.worker import LoadedFacts
from engine.config import GenerationSettings, SetConfig
from engine.types import DrafterReport, Metrics, PrefillProgress, SpeculationState, StepTimes, Timings
from models.pairing import Verdict

FACTS = LoadedFacts(SetConfig(Path("models/Small-<b>.gguf")), 4096, ("ngram", "suffix"))
HOSTILE = "<img src=x onerror=alert(1)>"


def running(text: str = "", **more: object) -> RunSnapshot:
    return RunSnapshot(JobState.RUNNING, text, **more)  # type: ignore[arg-type]


def reading(html: str, name: str) -> str:
    match = re.search(rf'id="{name}">([^<]*)<', html)
    assert match is not None
    return match[1]


def test_readings_are_the_metrics_own() -> None:
    metrics = Metrics(verify_steps=4, verified=10, accepted=6, agreement_sum=4.5, agreement_count=5)
    html = views.live_panel(running("x", metrics=metrics, timings=Timings(decode_ms=10, tokens_per_second=41.26)))
    assert reading(html, "tokens-per-second") == "41.3"
    assert reading(html, "acceptance-rate") == "60 %"
    assert reading(html, "accepted-length") == "2.50"
    assert reading(html, "vote-agreement") == "90 %"


def test_readings_that_are_not_there_say_why() -> None:
    html = views.live_panel(None)
    for name in ("tokens-per-second", "acceptance-rate", "accepted-length", "vote-agreement"):
        assert reading(html, name) == "–"
    assert "no draft was checked" in html
    assert "nothing was voted on" in html


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (SpeculationState(True, "on: 1.4× plain", 1.4), "Drafting is <b>on</b>: 1.4× plain"),
        (SpeculationState(False, "off: the policy is plain decoding"), "Drafting is <b>off</b>: the policy is plain"),
    ],
)
def test_the_state_of_drafting_comes_with_its_reason(state: SpeculationState, text: str) -> None:
    assert text in views.live_panel(running(speculation=state))


def test_the_speed_against_plain_comes_with_its_uncertainty() -> None:
    html = views.live_panel(running(speculation=SpeculationState(True, "on: 1.4× plain", 1.437, 0.081)))
    assert reading(html, "speed-up") == "1.44×"
    assert "± 0.08 over the last steps" in html
    assert reading(views.live_panel(None), "speed-up") == "–"


def test_look_ahead_hits_are_out_of_all_look_aheads() -> None:
    html = views.live_panel(running(metrics=Metrics(look_ahead_hits=3, look_ahead_misses=1)))
    assert reading(html, "look-ahead") == "75 %"
    assert "3 of 4 drafted ahead" in html
    assert reading(views.live_panel(None), "look-ahead") == "–"


def test_the_time_of_a_step_is_split_into_its_parts() -> None:
    html = views.live_panel(running(times=StepTimes(1, 20, 3, 60, 4, 12), steps=(StepReading(1, 1),) * 2))
    shares = re.findall(r'<span data-part="\d" style="width:([\d.]+)%">', html)
    assert [float(share) for share in shares] == [1, 20, 3, 60, 4, 12]
    assert "A step takes 50.0 ms" in html
    assert "plan 0.5 ms, draft 10.0 ms, vote 1.5 ms, verify 30.0 ms, sample 2.0 ms, other 6.0 ms" in html
    assert "time-split" not in views.live_panel(None)


def test_each_drafter_has_its_row_and_a_rested_one_its_reason() -> None:
    drafters = (
        DrafterReport("small", 2.0, 10, 20, 15, 0.5, 3.25, True),
        DrafterReport("broken", 0.5, 0, 0, 0, 0.0, 1.0, False, "it failed to load"),
        DrafterReport(HOSTILE, 1.0, 0, 0, 0, 0.0, 0.0, False),
    )
    html = views.live_panel(running(metrics=Metrics(drafters=drafters)))
    assert "75 %" in html
    assert "3.2 ms" in html
    assert "rested: it failed to load" in html
    assert HOSTILE not in html
    assert html.count("<tr data-state") == 3


def test_transcript_takes_the_last_answer_from_the_run() -> None:
    turns = (Turn("one", "1"), Turn("two"))
    messages = views.transcript(turns, running("2 so far"), ())
    assert [message["content"] for message in messages] == ["one", "1", "two", "2 so far"]


def test_transcript_shows_what_an_answer_waits_for() -> None:
    load, run = Load(lambda _report, _cancel: FACTS.config), Run("c", 0, GenerationSettings(), lambda: 0.0)
    waiting = RunSnapshot(JobState.WAITING)
    assert views.progress_of(waiting, (load,)) == "Waiting for the model to load"
    assert views.progress_of(waiting, (run,)) == "In the queue: 1 answer ahead"
    assert views.progress_of(waiting, (run, run)) == "In the queue: 2 answers ahead"
    assert views.progress_of(waiting, (run, Check())) == "Waiting: Quorum is measuring how exact the model is"
    assert views.progress_of(running(prefill=PrefillProgress(5, 9)), ()) == "Reading the prompt: 5 of 9 tokens"
    assert "q-wait" in views.transcript((Turn("one"),), waiting, (run,))[-1]["content"]


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("What does <div> mean? and </b>, <!-- x -->, <?php", 4),
        ("1 < 2, a <- b, <3 and <https://example.org>", 0),
        ("`<b>` and\n```html\n<p>one</p>\n```\nthen <i>", 1),
        ("an open fence\n```\n<p>", 0),
    ],
)
def test_tags_stand_as_they_were_written_and_code_is_left_alone(text: str, tags: int) -> None:
    shown = views.written(text)
    assert len(shown) == len(text) + tags
    assert views.unwritten(shown) == text
    (question, answer) = views.transcript((Turn(text, text),), None, ())
    assert question["content"] == answer["content"] == shown


def test_transcript_says_why_an_answer_is_missing_or_short() -> None:
    turns = (Turn("one", note=f"too long {HOSTILE}"), Turn("two", "half", note="stopped"), Turn("three"))
    contents = [message["content"] for message in views.transcript(turns, None, ())]
    assert "too long" in contents[1]
    assert HOSTILE not in contents[1]
    assert contents[3] == "half"
    assert "stopped" in contents[4]
    assert "stopped before it began" in contents[6]


def test_status_while_loading_and_after_failing() -> None:
    loading = views.status(FACTS, Progressed(JobState.RUNNING, "Loading x", 0.425, ""))
    assert 'aria-valuenow="42"' in loading
    failed = views.status(FACTS, Progressed(JobState.FAILED, "", 0, f"{HOSTILE} is not GGUF."))
    assert 'role="alert"' in failed
    assert "stays loaded" in failed
    assert HOSTILE not in failed
    assert "<b>.gguf" not in failed
    nothing = views.status(None, Progressed(JobState.CANCELLED, "", 0, ""))
    assert "Loading was stopped" in nothing


def test_models_that_are_not_offered_are_explained() -> None:
    good = Verdict("good", Path("good.gguf"), True)
    assert views.pairing_notes([good]) == ""
    notes = views.pairing_notes([good, Verdict("other", Path("o.gguf"), False, "token 7 is 'a' and 'b'")])
    assert "token 7 is" in notes
    assert "<b>good" not in notes


def test_a_plot_of_a_long_answer_stays_small() -> None:
    steps = [StepReading(sent, sent // 2) for sent in range(8)] * 500
    svg = plots.speculation_lengths(steps)
    assert svg.count("<rect") <= 2 * plots.MOST_BARS
    assert "4000 steps, 3.5 draft tokens on average, last 7" in svg


def test_bars_are_in_proportion() -> None:
    svg = plots.speculation_lengths([StepReading(4, 1), StepReading(0, 0), StepReading(2, 2)])
    bars = re.findall(r'<rect class="(\w+)" x="(\d)\.1" y="[\d.]+" width=".8" height="([\d.]+)"', svg)
    assert bars == [("sent", "0", "100"), ("kept", "0", "25"), ("sent", "2", "50"), ("kept", "2", "50")]


def test_the_chosen_length_is_marked_above_what_was_sent() -> None:
    svg = plots.speculation_lengths([StepReading(1, 1, chosen=4), StepReading(2, 0, chosen=2)])
    assert '<path class="chosen" d="M0 0h1M1 50h1"/>' in svg


def test_a_conversation_leaves_out_turns_without_an_answer() -> None:
    conversation = Conversation("c", (Turn("one", "1"), Turn("lost", note="failed"), Turn("three")), "Be kind.")
    said = [(message.role, message.content) for message in conversation.messages(2)]
    assert said == [("system", "Be kind."), ("user", "one"), ("assistant", "1"), ("user", "three")]
