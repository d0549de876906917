"""What a page shows, as text and HTML made from plain data. Nothing here waits, decides or remembers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import TypedDict

from app.conversations import Turn, title_of
from app.jobs import Job, JobState, Load, Progressed
from app.plots import speculation_lengths
from app.run import Run, RunSnapshot
from app.worker import LoadedFacts
from engine.session import ANSWER_SHARE
from engine.types import DrafterReport, Metrics, SpeculationState, StepTimes
from models.pairing import Verdict


class ChatMessage(TypedDict):
    """A message as Gradio's chatbot takes it."""

    role: str
    content: str


GREETING = """
<div class="q-greeting">
<p class="q-greeting-title">Ask something.</p>
<p>The model runs on this machine; nothing you write leaves it. Drafters guess ahead, vote, and the model checks
their guess in one pass: the words are its own, only sooner.</p>
</div>
"""

WELCOME = """
<div class="q-greeting">
<p class="q-greeting-title">Welcome.</p>
<p>Quorum needs a model on this machine. Everything runs here; the network is used only for what you choose to
fetch.</p>
</div>
"""

ENDED = '<p class="q-loaded"><b>Quorum has ended.</b> <span>Start it again and reload this page.</span></p>'
_UNSEEN = "\u200b"
_CODE_OR_TAG = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)|<(?=[a-zA-Z/!?])(?!https?:)", re.DOTALL)
KEYS_HINT = '<span class="q-shortcuts">Enter sends · Shift + Enter: new line · Esc: stop · Alt + N: new chat</span>'
"""Not shown where the page is as narrow as a phone, which has no such keys."""


def transcript(turns: Sequence[Turn], running: RunSnapshot | None, ahead: Sequence[Job]) -> list[ChatMessage]:
    """The messages of a conversation; its last turn is taken from the running answer while there is one."""
    messages: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": written(turn.question)})
        if running is not None and index == len(turns) - 1:
            messages.append(
                {"role": "assistant", "content": said(running.thinking, running.text) or _waiting_for(running, ahead)}
            )
            continue
        if turn.answer or turn.thinking:
            messages.append({"role": "assistant", "content": said(turn.thinking, turn.answer)})
        note = turn.note or ("" if turn.answer else "stopped before it began")
        if note:
            messages.append({"role": "assistant", "content": f'<span class="q-note">{escape(note)}</span>'})
    return messages


def earlier(turns: int) -> str:
    """What shows turns that come before those shown."""
    return f"Show earlier turns ({turns})"


def said(thinking: str, answer: str) -> str:
    """An answer as the chat shows it, its thought folded."""
    answer = written(answer)
    return f"<think>{written(thinking)}</think>\n{answer}" if thinking.strip() else answer


def written(text: str) -> str:
    """Markdown in which tags stand as they were written: a mark that is never seen keeps the chat from obeying them.

    Code is left as it is, for the chat does not obey it, and it is there to be copied.
    """
    return _CODE_OR_TAG.sub(lambda found: found[1] or f"<{_UNSEEN}", text)


def unwritten(text: str) -> str:
    """The text that `written` was given."""
    return text.replace(f"<{_UNSEEN}", "<")


def _waiting_for(running: RunSnapshot, ahead: Sequence[Job]) -> str:
    return f'<span class="q-wait">{escape(progress_of(running, ahead))}</span>'


def progress_of(running: RunSnapshot, ahead: Sequence[Job]) -> str:
    """One line on an answer that is not over."""
    if running.state is JobState.WAITING:
        if any(isinstance(job, Load) for job in ahead):
            return "Waiting for the model to load"
        other = next((job for job in ahead if not isinstance(job, Run)), None)
        if other is not None:
            return f"Waiting: Quorum is {other.doing}"
        return f"In the queue: {len(ahead)} answer{'s' if len(ahead) != 1 else ''} ahead" if ahead else "Next in line"
    if running.thinking and not running.text:
        return "Thinking"
    if running.text or running.steps:
        return "Answering"
    prefill = running.prefill
    return f"Reading the prompt: {prefill.done_tokens} of {prefill.total_tokens} tokens" if prefill else "Reading"


def hint(is_loaded: bool, is_loading: bool) -> str:
    """What to know before writing."""
    if is_loaded:
        return KEYS_HINT
    if is_loading:
        return "You can write already; it is answered as soon as the model is loaded."
    return "No model is loaded, so nothing can be answered; choose one under Models."


def status(facts: LoadedFacts | None, load: Progressed | None) -> str:
    """What is loaded, how far loading has come, or why there is nothing."""
    parts: list[str] = []
    is_loading = load is not None and load.state in (JobState.WAITING, JobState.RUNNING)
    if load is not None and is_loading:
        percent = round(100 * load.share)
        parts.append(
            f'<div class="q-progress" role="progressbar" aria-label="{escape(load.phase)}" aria-valuemin="0" '
            f'aria-valuemax="100" aria-valuenow="{percent}"><span style="width:{percent}%"></span></div>'
            f'<p class="q-phase">{escape(load.phase)} <b>{percent} %</b></p>'
        )
    if load is not None and load.state is JobState.FAILED:
        kept = f". {facts.name} stays loaded." if facts else ""
        parts.append(alert(load.error.rstrip(".") + kept))
    if facts is not None:
        drafters = ", ".join(facts.drafters) or "no drafters"
        exactness = f" · {escape(facts.exactness)}" if facts.exactness else ""
        parts.append(
            f'<p class="q-loaded"><b>{escape(facts.name)}</b> <span>with {escape(drafters)} · '
            f"context {facts.context_tokens:,} tokens{exactness}</span></p>"
        )
    elif not is_loading:
        stopped = "Loading was stopped. " if load is not None and load.state is JobState.CANCELLED else ""
        parts.append(
            f'<p class="q-loaded"><b>No model is loaded.</b> <span>{stopped}Choose one under Models; '
            "the starter (98 MB) is fetched when it is not on this machine.</span></p>"
        )
    return "".join(parts)


def is_nearly_full(answer: RunSnapshot, limit: int) -> bool:
    """Whether the next question has to push something out of the context."""
    return _used(answer) > limit - limit // ANSWER_SHARE


def context_meter(answer: RunSnapshot | None, limit: int, next_to_go: str = "") -> str:
    """How full the context is, and what happens when it is.

    Args:
        answer: The last one.
        limit: What the context holds.
        next_to_go: The oldest question that the model still sees, where the next one will push it out.
    """
    used = _used(answer) if answer else 0
    if answer is None or not used or not limit:
        return ""
    share = min(1.0, used / limit)
    state = "full" if is_nearly_full(answer, limit) else "roomy"
    goes = f" · next to go: “{escape(title_of(next_to_go))}”" if next_to_go else ""
    return (
        f'<div class="q-fill"><div class="q-meter" data-state="{state}" role="meter" aria-label="Context used" '
        f'aria-valuemin="0" aria-valuemax="{limit}" aria-valuenow="{used}" title="When it is full, the '
        f'oldest turns make room for the next answer"><span style="width:{100 * share:.0f}%"></span></div>'
        f'<p class="q-small">{used:,} of {limit:,} tokens{goes}</p></div>'
    )


def _used(answer: RunSnapshot) -> int:
    return answer.metrics.prompt_tokens + answer.metrics.emitted if answer.metrics else 0


def alert(message: str) -> str:
    """An error, as it reads; empty for none."""
    return f'<div class="q-alert" role="alert">{escape(message).replace(chr(10), "<br>")}</div>' if message else ""


def live_panel(run: RunSnapshot | None) -> str:
    """The readings of an answer, running or over."""
    run = run or RunSnapshot(JobState.WAITING)
    metrics = run.metrics or Metrics()
    parts = (
        _speculation_line(run.speculation),
        _readings(run, metrics),
        _length_plot(run),
        _time_split(run.times, len(run.steps)),
        _drafter_table(metrics.drafters),
        _footer(run, metrics),
    )
    return f'<div class="q-panel">{"".join(parts)}</div>'


def _speculation_line(state: SpeculationState | None) -> str:
    mark = "idle" if state is None else "on" if state.is_on else "off"
    text = "Drafting: nothing measured yet"
    if state is not None:
        text = f"Drafting is <b>{mark}</b>: {escape(state.reason.removeprefix(f'{mark}: '))}"
    return f'<p class="q-state" id="speculation-state" data-state="{mark}"><span>{text}</span></p>'


def _readings(run: RunSnapshot, metrics: Metrics) -> str:
    speed = run.timings.tokens_per_second if run.timings and run.timings.decode_ms else None
    now = run.tokens_per_second_now
    tiles = (
        (
            "tokens-per-second",
            "Tokens per second",
            _number(speed),
            "no answer yet" if speed is None else f"{now:.0f} right now" if now else "mean of the answer",
        ),
        ("speed-up", "Against plain", *_speedup(run.speculation)),
        (
            "acceptance-rate",
            "Acceptance rate",
            _percent(metrics.acceptance_rate),
            f"{metrics.accepted} of {metrics.verified} checked" if metrics.verified else "no draft was checked",
        ),
        (
            "accepted-length",
            "Mean accepted length",
            _number(metrics.mean_accepted_length, 2),
            "tokens per checking pass" if metrics.verify_steps else "no draft was checked",
        ),
        (
            "vote-agreement",
            "Vote agreement",
            _percent(metrics.mean_agreement),
            "of the drafters' weight" if metrics.agreement_count else "nothing was voted on",
        ),
        ("look-ahead", "Look-ahead hits", *_look_ahead(metrics)),
    )
    cells = "".join(
        f'<div><dt>{label}</dt><dd id="{name}">{value}</dd><dd class="q-small">{small}</dd></div>'
        for name, label, value, small in tiles
    )
    return f'<dl class="q-readings">{cells}</dl>'


def _speedup(state: SpeculationState | None) -> tuple[str, str]:
    """The figure, and how sure it is."""
    if state is None or state.speedup is None:
        return "–", "not measured yet"
    sureness = "" if state.uncertainty is None else f"± {state.uncertainty:.2f} "
    return f"{state.speedup:.2f}×", f"{sureness}over the last steps"


def _look_ahead(metrics: Metrics) -> tuple[str, str]:
    """The share of look-aheads that guessed right, and out of how many."""
    tried = metrics.look_ahead_hits + metrics.look_ahead_misses
    if not tried:
        return "–", "nobody drafted ahead"
    return _percent(metrics.look_ahead_hits / tried), f"{metrics.look_ahead_hits} of {tried} drafted ahead"


def _length_plot(run: RunSnapshot) -> str:
    last = run.steps[-1] if run.steps else None
    caption = "appears with the first step"
    if last is not None:
        reason = f": {run.length_reason}" if run.length_reason else ""
        caption = f"last step {last.sent} sent, {last.accepted} accepted{reason}"
    return (
        '<figure class="q-plot" id="length-plot"><figcaption>Draft tokens per step '
        '<span class="q-key chosen">chosen</span> <span class="q-key sent">sent</span> '
        '<span class="q-key kept">accepted</span></figcaption>'
        f'<div class="q-canvas">{speculation_lengths(run.steps)}</div>'
        f'<p class="q-small">{escape(caption)}</p></figure>'
    )


def _time_split(times: StepTimes, steps: int) -> str:
    """Where the time of a step goes, as a bar with its key."""
    if not times.total_ms:
        return ""
    parts = times.parts.items()
    bar = "".join(
        f'<span data-part="{index}" style="width:{100 * ms / times.total_ms:.1f}%"></span>'
        for index, (_, ms) in enumerate(parts)
    )
    keys = "".join(
        f'<li data-part="{index}">{name} <b>{100 * ms / times.total_ms:.0f} %</b></li>'
        for index, (name, ms) in enumerate(parts)
    )
    in_words = ", ".join(f"{name} {ms / steps:.1f} ms" for name, ms in parts)
    return (
        f'<figure class="q-split" id="time-split"><figcaption>A step takes {times.total_ms / steps:.1f} ms</figcaption>'
        f'<div class="q-split-bar" role="img" aria-label="Time of a step: {in_words}" title="{in_words}">{bar}</div>'
        f'<ul class="q-split-keys">{keys}</ul></figure>'
    )


def _drafter_table(drafters: Sequence[DrafterReport]) -> str:
    if not drafters:
        return '<p class="q-small" id="drafters">Drafters report here while they draft.</p>'
    heaviest = max(drafter.weight for drafter in drafters) or 1.0
    rows = "".join(_drafter_row(drafter, drafter.weight / heaviest) for drafter in drafters)
    return (
        '<table class="q-drafters" id="drafters"><thead><tr><th scope="col">Drafter</th><th scope="col">Weight</th>'
        '<th scope="col" title="Its own guess was what the target said">Hits</th>'
        '<th scope="col" title="Share of the voted tokens it had proposed">Agrees</th>'
        f'<th scope="col" title="Time for each drafted token">Cost</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _drafter_row(drafter: DrafterReport, share: float) -> str:
    state = "active" if drafter.is_active else "rested"
    resting = "it does not pay for itself now" if drafter.cost_ms else "no match just now"
    reason = drafter.note or ("" if drafter.is_active else resting)
    cost = f"{drafter.cost_ms:.1f} ms" if drafter.cost_ms else "free"
    return (
        f'<tr data-state="{state}"><th scope="row" title="{escape(drafter.name)}"><span>{escape(drafter.name)}</span>'
        f"<small>{state}{escape(f': {reason}' if reason else '')}</small></th>"
        f'<td><i class="q-weight"><i style="width:{100 * share:.0f}%"></i></i>{drafter.weight:.2f}</td>'
        f"<td>{_percent(drafter.hits / drafter.scored if drafter.scored else None)}</td>"
        f"<td>{_percent(drafter.agreement if drafter.proposed else None)}</td><td>{cost}</td></tr>"
    )


def _footer(run: RunSnapshot, metrics: Metrics) -> str:
    if run.timings is None:
        return ""
    facts = (
        f"{metrics.emitted} tokens",
        f"prompt {metrics.prompt_tokens}, of which {metrics.reused_tokens} were in the cache",
        f"first token after {run.timings.time_to_first_token_ms / 1e3:.2f} s",
    )
    return f'<p class="q-small">{" · ".join(facts)}</p>'


def pairing_notes(verdicts: Sequence[Verdict]) -> str:
    """Why installed models are not among the drafters to choose from."""
    items = "".join(
        f"<li><b>{escape(verdict.name)}</b> {escape(verdict.reason or verdict.caution)}</li>"
        for verdict in verdicts
        if not verdict.is_worth_choosing
    )
    return (
        f'<details class="q-unfit"><summary>Why others are not offered</summary><ul>{items}</ul></details>'
        if items
        else ""
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
