"""Model files, memory and errands, as HTML made from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.errands import Errand
from app.inside_view import progress
from app.jobs import JobState
from models.budget import Forecast
from models.catalogue import Machine, Preset
from models.library import InstalledModel


def installed(models: Sequence[InstalledModel], target: str) -> str:
    """What is installed, faults included; the loaded target is marked."""
    if not models:
        return '<p class="q-empty">No model is installed. Fetch one here, or add a folder that holds some.</p>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Model", "Size", "Format", "Parameters", "From"))
    body = "".join(_model(model, is_loaded=str(model.path) == target) for model in models)
    return (
        '<div class="q-scroll" tabindex="0" role="region" aria-label="Installed models"><table class="q-table" '
        f'id="installed-models"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _model(model: InstalledModel, *, is_loaded: bool) -> str:
    mark = ' <span class="q-tag">loaded</span>' if is_loaded else ""
    name = f'<th scope="row">{escape(model.name)}{mark}'
    if model.facts is None or model.fault:
        return f'<tr>{name}<br><span class="q-fault">✗ {escape(model.fault)}</span></th><td colspan="4"></td></tr>'
    facts = model.facts
    cells = (
        f"{facts.size_bytes / 1e6:,.0f} MB",
        escape(facts.quantisation),
        f"{facts.parameter_count / 1e6:,.0f} M",
        escape(model.origin.value),
    )
    return f"<tr>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def memory(foreseen: Forecast, placement: str = "") -> str:
    """What a set would take of the memory that is free, as a bar with one part for each model.

    Args:
        foreseen: What it would take.
        placement: Why its layers lie where they do; empty where there is nothing to say.
    """
    whole = max(foreseen.free_bytes, foreseen.lasting_bytes, 1)
    parts = "".join(
        f'<span data-part="{index % 6}" style="width:{100 * need.lasting / whole:.1f}%" '
        f'title="{escape(need.path.stem)}: {need.lasting / 2**30:.2f} GB"></span>'
        for index, need in enumerate(foreseen.needs)
    )
    keys = "".join(
        f'<li data-part="{index % 6}">{escape(need.path.stem)} {need.lasting / 2**30:.2f} GB</li>'
        for index, need in enumerate(foreseen.needs)
    )
    summary = foreseen.summary[:1].upper() + foreseen.summary[1:]
    mark = "✓" if foreseen.fits else "✗"
    placed = f" {escape(placement)}." if placement else ""
    return (
        f'<div class="q-memory"><h3>Memory</h3><div class="q-memory-bar" role="img" aria-label="{escape(summary)}">'
        f'{parts}</div><ul class="q-memory-keys">{keys}</ul>'
        f'<p class="q-small">{mark} {escape(summary)}.{placed}</p></div>'
    )


def recommendation(machine: Machine, presets: Sequence[Preset]) -> str:
    """What suits this machine."""
    items = "".join(
        f"<li><b>{escape(preset.name)}</b>: {escape(preset.target.name)}"
        f"{' with ' + escape(', '.join(own.name for own in preset.drafters)) if preset.drafters else ''}, "
        f"about {preset.total_gib:.1f} GB in use. {escape(preset.why[:1].upper() + preset.why[1:])}.</li>"
        for preset in presets
    )
    return f'<p class="q-small">For {machine.memory_gib:.0f} GB of memory:</p><ul class="q-small">{items}</ul>'


def errand(job: Errand | None) -> str:
    """How far it has come, or what came of it."""
    if job is None:
        return ""
    seen = job.peek()
    if seen.state in (JobState.WAITING, JobState.RUNNING):
        return progress(seen)
    if seen.state is JobState.FAILED:
        return f'<div class="q-alert" role="alert">{escape(seen.error)}</div>'
    if seen.state is JobState.CANCELLED:
        stopped = seen.error or "stopped before it began"
        return f'<p class="q-small">{escape(stopped[:1].upper() + stopped[1:])}.</p>'
    return f'<p class="q-small">✓ {escape(job.outcome)}</p>'
