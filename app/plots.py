"""Plots as inline SVG: no script, and colours come from the page's own style."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.run import StepReading

MOST_BARS = 120
_SCALES = (4, 8, 16, 32)
_HEIGHT = 100


def speculation_lengths(steps: Sequence[StepReading]) -> str:
    """Draft tokens sent to the target in each step, and how many of them were accepted, over the answer."""
    bars = _binned(steps)
    top = next((scale for scale in _SCALES if all(sent <= scale for sent, _ in bars)), _SCALES[-1])
    width = max(len(bars), MOST_BARS // 2)
    marks = [
        _bar("sent", index, sent / top) + _bar("kept", index, accepted / top)
        for index, (sent, accepted) in enumerate(bars)
    ]
    lines = "".join(f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>' for y in (0, _HEIGHT // 2))
    return (
        f'<svg role="img" aria-label="{escape(_summary(steps))}" viewBox="0 0 {width} {_HEIGHT}" '
        f'preserveAspectRatio="none">{lines}{"".join(marks)}'
        f'<line class="axis" x1="0" x2="{width}" y1="{_HEIGHT}" y2="{_HEIGHT}"/></svg>'
        f'<div class="scale" aria-hidden="true"><span>{top}</span><span>{top // 2}</span><span>0</span></div>'
    )


def _bar(kind: str, index: int, share: float) -> str:
    height = round(_HEIGHT * share, 1)
    return (
        f'<rect class="{kind}" x="{index}.1" y="{_HEIGHT - height:g}" width=".8" height="{height:g}"/>'
        if height
        else ""
    )


def _binned(steps: Sequence[StepReading]) -> list[tuple[float, float]]:
    """Sent and accepted, averaged over as many neighbouring steps as keeps the bars few."""
    size = -(-len(steps) // MOST_BARS) or 1
    bins = (steps[start : start + size] for start in range(0, len(steps), size))
    return [(sum(s.sent for s in group) / len(group), sum(s.accepted for s in group) / len(group)) for group in bins]


def _summary(steps: Sequence[StepReading]) -> str:
    if not steps:
        return "Speculation length per step: no step yet"
    mean = sum(step.sent for step in steps) / len(steps)
    return f"Speculation length per step: {len(steps)} steps, {mean:.1f} draft tokens on average, last {steps[-1].sent}"
