"""The summary as a picture: speed with intervals, acceptance by position, lengths sent."""

from __future__ import annotations

from pathlib import Path

from app.bench.summary import ConfigSummary, Summary
from engine.errors import EnvironmentProblem
from models.atomic import replacing

OVERALL = "overall"


def require_matplotlib() -> None:
    """Find out before hours of measuring whether their picture can be drawn.

    Raises:
        EnvironmentProblem: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            f"--plot needs matplotlib ({error}); install it with: python -m pip install -r requirements.txt"
        ) from error


def write_plot(path: Path, summary: Summary) -> None:
    """Draw the summary into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Plain decoding is the line at 1, and drafts nothing.
    drawn = tuple(config for config in summary.configs if not config.is_baseline)
    # Straight on the Agg canvas: no window system, and nothing kept in pyplot.
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_speed(figure.add_subplot(grid[0, :]), drawn)
    _draw_acceptance(figure.add_subplot(grid[1, 0]), drawn)
    _draw_lengths(figure.add_subplot(grid[1, 1]), drawn)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_speed(axes, configs: tuple[ConfigSummary, ...]) -> None:  # type: ignore[no-untyped-def]
    shown = [(config.config, config.ratio) for config in configs if config.ratio is not None]
    groups = [*dict.fromkeys(category for _, own in shown for category in own.by_category), OVERALL]
    width = 0.8 / max(1, len(shown))
    for index, (name, own) in enumerate(shown):
        estimates = {**own.by_category, OVERALL: own.overall}
        places = [place for place, group in enumerate(groups) if group in estimates]
        drawn = [estimates[groups[place]] for place in places]
        axes.bar(
            [place + (index - (len(shown) - 1) / 2) * width for place in places],
            [estimate.value for estimate in drawn],
            width,
            label=name,
            # Medians may lie on the edge of their interval, by rounding a hair outside.
            yerr=(
                [max(0.0, estimate.value - estimate.low) for estimate in drawn],
                [max(0.0, estimate.high - estimate.value) for estimate in drawn],
            ),
            capsize=2,
            error_kw={"linewidth": 0.8},
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("speed against plain")
    axes.set_title("Speed, median and 95 % interval")
    if shown:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_acceptance(axes, configs: tuple[ConfigSummary, ...]) -> None:  # type: ignore[no-untyped-def]
    for config in configs:
        shares = config.acceptance_by_position
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=config.config)
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of verify passes")
    axes.set_title("Accepted, by position")
    if axes.lines:
        axes.legend(fontsize="small")


def _draw_lengths(axes, configs: tuple[ConfigSummary, ...]) -> None:  # type: ignore[no-untyped-def]
    for config in configs:
        total = sum(config.lengths.values())
        if total:
            lengths = range(1 + max(map(int, config.lengths)))
            shares = [config.lengths.get(str(length), 0) / total for length in lengths]
            axes.plot(lengths, shares, drawstyle="steps-mid", label=config.config)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft tokens sent to the target (0: plain)")
    axes.set_ylabel("share of passes")
    axes.set_title("Length chosen")
    if axes.lines:
        axes.legend(fontsize="small")
