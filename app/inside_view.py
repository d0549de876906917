"""What the loaded set has measured and learnt, as HTML made from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.jobs import JobState, Progressed, Verify
from app.plots import Line, line_chart
from app.run import RunSnapshot
from app.trace import TracedBranch, TracedStep
from engine.exactness import ExactnessReport, Way
from engine.insight import Insight
from engine.runtime.devices import Device

SHOWN_STEPS = 12
WRITING = '<section class="q-card"><h2>The last steps</h2><p>They appear when the answer is over.</p></section>'


def empty() -> str:
    """Before a set is loaded."""
    return '<p class="q-empty">Load a model and ask something: what was measured and decided appears here.</p>'


def cards(insight: Insight, run: RunSnapshot | None, devices: Sequence[Device]) -> str:
    """All that changes from step to step, and the machine it runs on."""
    parts = (costs(insight), rates(insight), weights(insight, run), machine(insight, devices))
    return f'<div class="q-cards">{"".join(parts)}</div>'


def costs(insight: Insight) -> str:
    """What a pass costs by size, and what the drafters cost."""
    one_ms = insight.pass_ms[0]
    chart = line_chart(
        [Line("", insight.pass_ms)],
        f"Time of a target pass over 1 to {len(insight.pass_ms)} tokens: "
        f"{one_ms:.1f} ms for one, {insight.pass_ms[-1]:.1f} ms for {len(insight.pass_ms)}",
        unit=" ms",
        first=1,
    )
    cheapest = min(range(len(insight.pass_ms)), key=lambda index: insight.pass_ms[index] / (index + 1))
    gain = (cheapest + 1) * one_ms / insight.pass_ms[cheapest]
    bargain = "larger passes are no cheaper by the token, so that drafts are hard to repay"
    if gain > 1.05:
        bargain = (
            f"one of {cheapest + 1} takes {insight.pass_ms[cheapest]:.1f} ms, so that a perfect, free draft would make "
            f"it {gain:.1f} times as fast"
        )
    drafters = "".join(
        f"<li><b>{escape(name)}</b> {ms:.1f} ms a drafted token, {100 * ms / one_ms:.0f} % of a pass</li>"
        for name, ms in insight.draft_ms.items()
    )
    return _card(
        "What a pass costs",
        f"{chart}<p>A pass of one token takes <b>{one_ms:.1f} ms</b>; {bargain}.</p><ul>{drafters}</ul>"
        f'<p class="q-small">By tokens in the pass, at {insight.used_tokens:,} tokens of context. '
        f"Beside the pass, a step takes {insight.overhead_ms:.2f} ms.</p>",
        "cost-card",
    )


def rates(insight: Insight) -> str:
    """What speed each length promises, the best one marked."""
    if not insight.can_roll_back:
        return _card("How far drafting pays", "<p>This model cannot take back rejected tokens, so it runs plain.</p>")
    if not insight.forecasts:
        return _card(
            "How far drafting pays",
            "<p>Ask something: with drafters that look text up, this is known once some drafts were judged.</p>",
            "rate-card",
        )
    lines = [
        Line(" + ".join(forecast.drafters) or "look-up drafters", forecast.tokens_per_second, forecast.best_length)
        for forecast in insight.forecasts
    ]
    plain = insight.forecasts[0].tokens_per_second[0]
    best = max(insight.forecasts, key=lambda forecast: forecast.tokens_per_second[forecast.best_length])
    gain = best.tokens_per_second[best.best_length] / plain
    name = " + ".join(best.drafters) or "look-up drafters"
    verdict = (
        f"Best on average: <b>{best.best_length} draft tokens</b> by {escape(name)}, {gain:.2f}× plain."
        if best.best_length
        else "On average no length pays: <b>plain decoding</b> is the fastest."
    )
    chart = line_chart(lines, f"Predicted tokens per second by draft length. {verdict}", unit=" t/s")
    acceptances = ", ".join(
        f"{escape(' + '.join(forecast.drafters) or 'look-up')} {100 * forecast.acceptance:.0f} %"
        for forecast in insight.forecasts
    )
    return _card(
        "How far drafting pays",
        f'{chart}<p>{verdict}</p><p class="q-small">Predicted tokens per second by draft tokens sent, from measured '
        f"cost and learnt acceptance ({acceptances} a token). Each step decides anew, from how sure its own draft is."
        "</p>",
        "rate-card",
    )


def weights(insight: Insight, run: RunSnapshot | None) -> str:
    """Voting weights, now and over the last answer."""
    names = [drafter.name for drafter in run.metrics.drafters] if run and run.metrics else []
    steps = [step.weights for step in run.steps if len(step.weights) == len(names)] if run else []
    lines = [Line(name, [step[index] for step in steps]) for index, name in enumerate(names)]
    chart = line_chart(lines, f"Voting weights over {len(steps)} steps of the last answer") if steps else ""
    now = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{weight:.2f}</td></tr>" for name, weight in insight.weights.items()
    )
    table = f'<table class="q-table"><tbody>{now}</tbody></table>' if now else "<p>No drafter is loaded.</p>"
    caption = "Over the steps of the last answer; the heaviest is 1" if steps else "The heaviest is 1"
    return _card("Voting weights", f'{chart}{table}<p class="q-small">{caption}.</p>', "weight-card")


def exactness(report: ExactnessReport | None, check: Progressed | None) -> str:
    """What the check found, or how far it has come."""
    body = (
        "<p>Not checked yet. The check scores a text in every way drafting does and one token "
        "at a time, and compares every bit; it takes some seconds, with a large model minutes.</p>"
    )
    if report is not None:
        rows = "".join(
            f"<tr><th scope='row'>{escape(way.value.capitalize())}</th><td>{escape(report.in_words(way))}</td></tr>"
            for way in Way
        )
        mark = "✓" if report.is_exact else "≈"
        body = (
            f'<p><b>{mark} {escape(report.summary[:1].upper() + report.summary[1:])}.</b></p><div class="q-scroll" '
            'tabindex="0" role="region" aria-label="Exactness by way of scoring"><table class="q-table"><thead><tr>'
            '<th scope="col">Scored in</th><th scope="col">Against one token at a time</th></tr></thead>'
            f'<tbody>{rows}</tbody></table></div><p class="q-small">Cache {escape(report.kv_type)}, '
            f"{report.threads} threads.</p>"
        )
    if check is not None and check.state in (JobState.WAITING, JobState.RUNNING):
        body = progress(check)
    elif check is not None and check.state is JobState.FAILED:
        body += f'<div class="q-alert" role="alert">{escape(check.error)}</div>'
    return _card("Exactness", body, "exactness-card")


def verification(job: Verify | None) -> str:
    """What came of comparing answers, or how far it has come."""
    seen = job.peek() if job is not None else None
    body = (
        "<p>Answers a few prompts with and without drafts, the most probable tokens and sampled ones, and compares "
        "them token by token.</p>"
    )
    if seen is not None and seen.state in (JobState.WAITING, JobState.RUNNING):
        body = progress(seen)
    elif seen is not None and seen.state is JobState.FAILED:
        body += f'<div class="q-alert" role="alert">{escape(seen.error)}</div>'
    elif job is not None:
        mark = {True: "✓ ", False: "✗ ", None: ""}[job.is_identical]
        stopped = "<p>It was stopped before its end.</p>" if seen and seen.state is JobState.CANCELLED else ""
        verdict, *more = job.outcome or ("Nothing was compared.",)
        body = f"<p><b>{mark}{escape(verdict)}</b></p>{stopped}{''.join(f'<p>{escape(line)}</p>' for line in more)}"
    return _card("Losslessness", body, "verification-card")


def _memory_of(device: Device) -> str:
    total = f"{device.total_bytes / 2**30:.1f} GB"
    # Of the processor's own memory llama.cpp calls all of it free.
    return total if device.free_bytes >= device.total_bytes else f"{device.free_bytes / 2**30:.1f} of {total} free"


def machine(insight: Insight | None, devices: Sequence[Device]) -> str:
    """Devices and threads."""
    rows = [
        (
            device.name,
            f"{device.description}, {_memory_of(device)}",
        )
        for device in devices
    ]
    if insight is not None:
        layers = "all that fit" if insight.gpu_layers < 0 else str(insight.gpu_layers)
        rows += [
            ("Target", insight.description),
            ("Threads", str(insight.threads)),
            ("Layers on a GPU", layers if len(devices) > 1 else "no GPU in use"),
            ("Cache", f"{insight.kv_type}, {insight.context_tokens:,} tokens"),
            ("Drafting", insight.exactness),
        ]
    body = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return _card("This machine", f'<table class="q-table"><tbody>{body}</tbody></table>', "machine-card")


def trace(steps: Sequence[TracedStep]) -> str:
    """The last steps, newest first."""
    if not steps:
        return _card("The last steps", "<p>They appear with the first answer.</p>", "trace-card")
    items = "".join(_step(step) for step in reversed(steps[-SHOWN_STEPS:]))
    return _card(
        "The last steps",
        f'<p class="q-links"><a href="/trace.json" download>Download the last {len(steps)} as JSON</a></p>{items}',
        "trace-card",
    )


def progress(job: Progressed) -> str:
    """A bar and what is being done."""
    percent = round(100 * job.share)
    return (
        f'<div class="q-progress" role="progressbar" aria-label="{escape(job.phase)}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent}"><span style="width:{percent}%"></span></div>'
        f'<p class="q-phase">{escape(job.phase)} <b>{percent} %</b></p>'
    )


def _step(step: TracedStep) -> str:
    drafts = "".join(
        f'<tr><th scope="row">{escape(draft.drafter)}{" ★" if draft.drafter == step.winner else ""}</th>'
        f"<td>{''.join(_cell(token.text) for token in draft.tokens)}</td></tr>"
        for draft in step.drafts
    )
    voted = "".join(
        _cell(
            token.text,
            "accepted" if place < step.accepted_of_voted else "rejected" if place < step.sent_of_voted else "trimmed",
            f"agreement {100 * step.agreement[place]:.0f} %" if place < len(step.agreement) else "",
        )
        for place, token in enumerate(step.voted)
    )
    if voted:
        drafts += f'<tr><th scope="row">voted</th><td>{voted}</td></tr>'
    drafts += "".join(map(_branch, step.branches))
    said = "".join(_cell(token.text, origin) for token, origin in zip(step.emitted, step.origins, strict=True))
    total_ms = sum(step.milliseconds.values())
    verdict = f"{step.accepted} of {step.sent} accepted" if step.sent else "no draft sent"
    return (
        f'<details class="q-step"><summary>{verdict} · {total_ms:.1f} ms · {escape(step.reason)}</summary>'
        f'<table class="q-table q-tree"><tbody>{drafts}<tr><th scope="row">target</th><td>{said}</td></tr></tbody>'
        f'</table><p class="q-small">{" · ".join(f"{part} {ms:.1f} ms" for part, ms in step.milliseconds.items())}</p>'
        "</details>"
    )


def _branch(branch: TracedBranch) -> str:
    """A side branch, under the voted token in whose place its own first one would stand."""
    choice = "second choice" if branch.is_second else "lost the vote"
    cells = "".join(
        _cell(token.text, "accepted" if place < branch.accepted else "rejected", f"side branch, {choice}")
        for place, token in enumerate(branch.tokens)
    )
    after = f"after {branch.fork} voted" if branch.fork else "from the start"
    return (
        f'<tr><th scope="row">{escape(branch.drafter)}<br><small>side branch {after}, {choice}</small></th>'
        f"<td>{cells}</td></tr>"
    )


def _cell(text: str, state: str = "", about: str = "") -> str:
    title = f' title="{escape(f"{state} {about}".strip())}"' if state or about else ""
    return f'<span class="q-t" data-o="{state}"{title}>{escape(text.replace(chr(10), "⏎"))}</span>'


def _card(title: str, body: str, name: str = "") -> str:
    return f'<section class="q-card" id="{name}"><h2>{title}</h2>{body}</section>'
