"""Model files, memory and errands, as HTML made from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from app.errands import Errand
from app.inside_view import progress
from app.jobs import JobState
from engine.config import ModelPlacement
from models.budget import Forecast, MemoryNeed, PlacedSet
from models.catalogue import WHY_Q4_0_ON_CPU, Machine, MachineKind, Offer, Preset
from models.gguf_file import GgufFacts
from models.library import InstalledModel


def installed(models: Sequence[InstalledModel], target: str, hashes: Mapping[Path, str]) -> str:
    """What is installed, faults included; the loaded target is marked.

    Args:
        models: All of them.
        target: Path of the loaded target.
        hashes: The SHA-256 of those that were hashed.
    """
    if not models:
        return (
            '<p class="q-empty">No model is installed. Fetch one below, or paste the path of a file or folder of yours '
            "under the target.</p>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Model", "Size", "Format", "Parameters", "From"))
    body = "".join(_model(model, hashes.get(model.path, ""), is_loaded=str(model.path) == target) for model in models)
    return (
        '<div class="q-scroll" tabindex="0" role="region" aria-label="Installed models"><table class="q-table" '
        f'id="installed-models"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _model(model: InstalledModel, sha256: str, *, is_loaded: bool) -> str:
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
    details = "".join(
        f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in _details(model.path, facts, sha256) if text
    )
    name += f'<details class="q-details"><summary>Details</summary><dl>{details}</dl></details>'
    return f"<tr>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _details(path: Path, facts: GgufFacts, sha256: str) -> tuple[tuple[str, str], ...]:
    parts = f" and {facts.split_count - 1} more" if facts.split_count > 1 else ""
    return (
        ("File", f"{path}{parts}"),
        ("Architecture", f"{facts.architecture}, {facts.layer_count} layers"),
        ("Context", f"{facts.context_tokens:,} tokens"),
        ("Vocabulary", f"{facts.vocabulary_size:,} tokens"),
        ("Chat template", "yes" if facts.has_chat_template else "none: it completes text instead of answering"),
        ("Licence", facts.licence),
        ("SHA-256", sha256 or "not computed yet"),
    )


def no_forecast(problem: str) -> str:
    """Why nothing is foreseen of a set."""
    return f'<p class="q-small">No forecast: {escape(problem)}</p>'


def memory(foreseen: Forecast, placed: PlacedSet) -> str:
    """What a set would take of the memory that is free, as a bar with one part for each model, and where it would run.

    Args:
        foreseen: What it would take.
        placed: The set, with its models in their places.
    """
    whole = max(foreseen.free_bytes, foreseen.lasting_bytes, 1)
    parts = "".join(
        f'<span data-part="{index % 6}" style="width:{100 * need.lasting / whole:.1f}%" '
        f'title="{escape(need.path.stem)}: {need.lasting / 2**30:.2f} GB"></span>'
        for index, need in enumerate(foreseen.needs)
    )
    keys = "".join(
        f'<li data-part="{index % 6}">{escape(need.path.stem)} {need.lasting / 2**30:.2f} GB; '
        f"{_place(need, placed)}</li>"
        for index, need in enumerate(foreseen.needs)
    )
    summary = foreseen.summary[:1].upper() + foreseen.summary[1:]
    mark = "✓" if foreseen.fits else "✗"
    reason = f" {escape(placed.reason)}." if placed.reason else ""
    return (
        f'<div class="q-memory"><h3>Memory</h3><div class="q-memory-bar" role="img" aria-label="{escape(summary)}">'
        f'{parts}</div><ul class="q-memory-keys">{keys}</ul>'
        f'<p class="q-small">{mark} {escape(summary)}.{reason}</p></div>'
    )


def _place(need: MemoryNeed, placed: PlacedSet) -> str:
    config = placed.config
    placement: ModelPlacement = config.placement if need.is_target else config.placement_of(str(need.path))
    threads = "1 thread" if placement.threads == 1 else f"{placement.threads} threads"
    if not need.gpu:
        return f"on the CPU with {threads}"
    layers = "all layers" if placement.gpu_layers < 0 else f"{placement.gpu_layers} layers"
    return f"{layers} on the GPU, taking {need.gpu / 2**30:.2f} GB there; {threads}"


def no_drafter(offers: Sequence[Offer]) -> str:
    """How to get a drafter for a target that no installed model can draft for.

    Args:
        offers: What the catalogue has of the target's family, smallest first.
    """
    fetch = f"fetch {escape(offers[-1].reference)}, which is of its family, or " if offers else ""
    return (
        f'<p class="q-small" id="no-drafter">No installed model drafts for this target: {fetch}make a drafter from the '
        "target itself, under the list of models.</p>"
    )


def recommendation(machine: Machine, presets: Sequence[Preset]) -> str:
    """What suits this machine."""
    items = "".join(
        f"<li><b>{escape(preset.name)}</b>: {escape(preset.target.name)}"
        f"{' with ' + escape(', '.join(own.name for own in preset.drafters)) if preset.drafters else ''}, "
        f"about {preset.total_gib:.1f} GB in use. {escape(preset.why[:1].upper() + preset.why[1:])}.</li>"
        for preset in presets
    )
    if not presets:
        return (
            f'<p class="q-small">With {machine.memory_gib:.0f} GB of memory the starter is what runs well here, or any '
            "small model of yours.</p>"
        )
    why = f'<p class="q-small">{WHY_Q4_0_ON_CPU}.</p>' if machine.kind is MachineKind.CPU else ""
    return f'<p class="q-small">For {machine.memory_gib:.0f} GB of memory:</p><ul class="q-small">{items}</ul>{why}'


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
