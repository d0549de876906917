"""Plots as inline SVG: no script, and colours come from the page's own style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from app.run import StepReading

MOST_BARS = 120
MOST_POINTS = 160
_SCALES = (4, 8, 16, 32)
_HEIGHT = 100


def speculation_lengths(steps: Sequence[StepReading]) -> str:
    """Draft tokens chosen and sent to the target in each step, and how many of them were accepted, over the answer."""
    bars = _binned(steps)
    top = next((scale for scale in _SCALES if all(max(bar) <= scale for bar in bars)), _SCALES[-1])
    width = max(len(bars), MOST_BARS // 2)
    marks = [
        _bar("sent", index, sent / top) + _bar("kept", index, accepted / top)
        for index, (_, sent, accepted) in enumerate(bars)
    ]
    ticks = "".join(
        f"M{index} {round(_HEIGHT * (1 - chosen / top), 1):g}h1" for index, (chosen, _, _) in enumerate(bars) if chosen
    )
    lines = "".join(f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>' for y in (0, _HEIGHT // 2))
    return (
        f'<svg role="img" aria-label="{escape(_summary(steps))}" viewBox="0 0 {width} {_HEIGHT}" '
        f'preserveAspectRatio="none">{lines}{"".join(marks)}<path class="chosen" d="{ticks}"/>'
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


def _binned(steps: Sequence[StepReading]) -> list[tuple[float, float, float]]:
    """Chosen, sent and accepted, averaged over as many neighbouring steps as keeps the bars few."""
    size = -(-len(steps) // MOST_BARS) or 1
    bins = (steps[start : start + size] for start in range(0, len(steps), size))
    return [
        (
            sum(step.chosen for step in group) / len(group),
            sum(step.sent for step in group) / len(group),
            sum(step.accepted for step in group) / len(group),
        )
        for group in bins
    ]


def _summary(steps: Sequence[StepReading]) -> str:
    if not steps:
        return "Speculation length per step: no step yet"
    mean = sum(step.sent for step in steps) / len(steps)
    return f"Speculation length per step: {len(steps)} steps, {mean:.1f} draft tokens on average, last {steps[-1].sent}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; `mark` is the index of a point to single out."""

    name: str
    values: Sequence[float]
    mark: int | None = None


def line_chart(lines: Sequence[Line], label: str, *, unit: str = "", first: int = 0) -> str:
    """Lines over equally spaced places, told apart by colour and by dashes.

    Args:
        lines: What is drawn; long ones are thinned out.
        label: What the chart shows, for those who cannot see it.
        unit: Of the values, behind the scale's figures.
        first: Number of the first place.
    """
    drawn = [_thinned(line) for line in lines if line.values]
    if not drawn:
        return ""
    values = [value for line in drawn for value in line.values]
    top = max(values) or 1.0
    width = max(1, max(len(line.values) for line in drawn) - 1)
    marks = "".join(_path(index, line, width, top) for index, line in enumerate(drawn))
    places = max(len(line.values) for line in lines)
    scale = (f"{_figure(top)}{unit}", _figure(top / 2))
    return _framed(marks, label, scale, (f"{first}", f"{first + places - 1}"), [line.name for line in drawn])


@dataclass(frozen=True, slots=True)
class Curve:
    """One line through points that are not equally spaced."""

    name: str
    points: Sequence[tuple[float, float]]


def curve_chart(curves: Sequence[Curve], label: str, *, unit: str = "", along: str = "") -> str:
    """Curves from the origin on, told apart as the lines of `line_chart` are.

    Args:
        curves: What is drawn.
        label: What the chart shows, for those who cannot see it.
        unit: Of the values, behind the scale's figures.
        along: Unit of the places, behind theirs.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return ""
    furthest = max(place for curve in drawn for place, _ in curve.points) or 1.0
    top = max(value for curve in drawn for _, value in curve.points) or 1.0
    marks = "".join(
        f'<polyline data-line="{index % 6}" points="'
        + " ".join(f"{100 * x / furthest:.4g},{100 - 96 * y / top:.4g}" for x, y in [(0.0, 0.0), *curve.points])
        + '"/>'
        for index, curve in enumerate(drawn)
    )
    places = (f"0{along}", f"{_figure(furthest)}{along}")
    return _framed(marks, label, (f"{_figure(top)}{unit}", _figure(top / 2)), places, [own.name for own in drawn])


def _framed(marks: str, label: str, scale: tuple[str, str], places: tuple[str, str], names: Sequence[str]) -> str:
    """A chart's marks with grid, scale, first and last place, and key."""
    grid = "".join(f'<line class="grid" x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (0, 50))
    keys = "".join(
        f'<span class="q-line-key" data-line="{index % 6}">{escape(name)}</span>'
        for index, name in enumerate(names)
        if name
    )
    return (
        f'<div class="q-chart"><div class="q-canvas tall"><svg role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{marks}'
        '<line class="axis" x1="0" x2="100" y1="100" y2="100"/></svg>'
        f'<div class="scale" aria-hidden="true"><span>{scale[0]}</span><span>{scale[1]}</span><span>0</span></div>'
        "</div>"
        f'<div class="q-places" aria-hidden="true"><span>{places[0]}</span><span>{places[1]}</span></div>'
        f'<p class="q-keys">{keys}</p></div>'
    )


def _path(index: int, line: Line, width: int, top: float) -> str:
    points = [
        (round(100 * place / width, 2), round(100 - 96 * value / top, 2)) for place, value in enumerate(line.values)
    ]
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    mark = ""
    if line.mark is not None and line.mark < len(points):
        x, y = points[line.mark]
        # A line of no length with round ends stays a dot however the chart is stretched.
        mark = f'<line class="mark" data-line="{index % 6}" x1="{x:g}" x2="{x:g}" y1="{y:g}" y2="{y:g}"/>'
    return f'<polyline data-line="{index % 6}" points="{path}"/>{mark}'


def _thinned(line: Line) -> Line:
    size = -(-len(line.values) // MOST_POINTS)
    if size <= 1:
        return line
    return Line(line.name, line.values[size - 1 :: size], None)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
