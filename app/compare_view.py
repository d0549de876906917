"""What a comparison found, as HTML made from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from app.bench.row import Row
from app.bench.summary import ConfigSummary, Estimate
from app.comparison import ComparisonSnapshot, Result
from app.jobs import JobState
from app.plots import Curve, Line, curve_chart, line_chart

MOST_ANSWERS = 6


def empty() -> str:
    """Before anything was compared."""
    return (
        '<p class="q-empty">Nothing has been compared yet. Choose drafter sets, policies and prompts; plain decoding '
        "runs beside them, one answer in turn, so that the figures mean something on this machine.</p>"
    )


def progress(comparison: ComparisonSnapshot | None) -> str:
    """How far it has come, and how long it may still take."""
    if comparison is None:
        return ""
    if comparison.state is JobState.FAILED:
        return f'<div class="q-alert" role="alert">{escape(comparison.error)}</div>'
    if comparison.state not in (JobState.WAITING, JobState.RUNNING):
        return ""
    percent = round(100 * comparison.share)
    left = comparison.seconds_left
    time_left = "" if left is None else f" · about {_duration(left)} left"
    return (
        f'<div class="q-progress" role="progressbar" aria-label="Comparing" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent}"><span style="width:{percent}%"></span></div>'
        f'<p class="q-phase">{escape(comparison.phase)} <b>{percent} %</b>{time_left}</p>'
    )


def result_view(result: Result, other: Result | None = None) -> str:
    """A result; and beside its speeds those of another one."""
    cards = [
        f'<section class="q-card q-advice" id="advice"><h2>{escape(result.name)}</h2>'
        f"<p>{advice(result)}</p>{_downloads(result.id)}</section>",
        _card("Figures", _table(result, other), "figures-card"),
        f'<div class="q-cards">{_card("Speed against plain", _speed_bars(result), "speed-card")}'
        f"{_card('Accepted, by position in the draft', _acceptance(result), 'acceptance-card')}"
        f"{_card('Draft tokens sent to the target', _lengths(result), 'length-card')}"
        f"{_card('Tokens over time', _pace(result), 'pace-card')}"
        f"{_card('Made with', _origin(result), 'origin-card')}</div>",
        _card("Answers side by side", _answers(result), "answers-card"),
    ]
    return f'<div class="q-results">{"".join(cards)}</div>'


def advice(result: Result) -> str:
    """One plain sentence."""
    best = result.best
    if not best and result.unsure_best:
        figure = result.summary.named(result.unsure_best).ratio
        assert figure is not None
        return (
            f"<b>{escape(result.unsure_best)}</b> was {figure.overall.value:.2f}× as fast as plain, but one prompt "
            "does not tell how sure that is: compare with <b>two or more of a category</b>."
        )
    if not best:
        return (
            "Nothing here is surely faster than plain decoding: <b>stay with plain</b>, or with "
            "<b>auto</b>, which stops drafting by itself where it does not pay."
        )
    figures = result.summary.named(best).ratio
    assert figures is not None
    overall = figures.overall
    uncertainty = max(overall.high - overall.value, overall.value - overall.low)
    gains = [
        f"{own.value:.1f}× on {escape(category)}" for category, own in figures.by_category.items() if own.value >= 1.05
    ]
    none = [escape(category) for category, own in figures.by_category.items() if own.value < 1.05]
    parts = ", ".join([*gains, *([f"no gain on {' and '.join(none)}"] if none else [])])
    return f"Use <b>{escape(best)}</b>: {overall.value:.2f}× ± {uncertainty:.2f} ({parts})."


def _table(result: Result, other: Result | None) -> str:
    then = {own.config: own for own in other.summary.configs} if other else {}
    columns = ["", "Tokens/s", "Against plain", "Accepted", "Per pass", "Agreement", "Memory", "Identical"]
    if other is not None:
        made_at = other.name.split(" · ")[0]
        columns += [f"Tokens/s, {made_at}", f"Against plain, {made_at}"]
    head = "".join(f'<th scope="col">{escape(column) or "Configuration"}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(own.config)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in _cells(own, result.rows, then if other else None))
        + "</tr>"
        for own in result.summary.configs
    )
    loops = len(result.summary.loops)
    left_out = (
        f'<p class="q-small">{loops} prompt{"s" if loops != 1 else ""} left out: the plain answer runs in a loop, '
        "which flatters drafting.</p>"
        if loops
        else ""
    )
    note = "" if result.document["complete"] else '<p class="q-small">Stopped early: figures of what was finished.</p>'
    return (
        '<div class="q-scroll" tabindex="0" role="region" aria-label="Figures"><table class="q-table"><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>{left_out}{note}"
        f"{_difference(result, other) if other is not None else ''}"
    )


def _cells(own: ConfigSummary, rows: Sequence[Row], then: Mapping[str, ConfigSummary] | None) -> list[str]:
    agreements = [row.agreement for row in rows if row.config == own.config and row.agreement is not None]
    identical = "–"
    if own.compared and not own.is_baseline:
        mark = "✓" if own.identical == own.compared else "✗"
        identical = f"{mark} {own.identical} of {own.compared}"
    cells = [
        f"{own.tokens_per_second:.1f}",
        "1" if own.is_baseline else _interval(own.ratio.overall if own.ratio else None),
        "–" if own.acceptance is None else f"{100 * own.acceptance:.0f} %",
        "–" if own.mean_accepted_length is None else f"{own.mean_accepted_length:.2f}",
        f"{100 * sum(agreements) / len(agreements):.0f} %" if agreements else "–",
        f"{own.peak_memory_bytes / 1e6:,.0f} MB",
        identical,
    ]
    if then is not None:
        before = then.get(own.config)
        cells += [
            "–" if before is None else f"{before.tokens_per_second:.1f}",
            "1"
            if own.is_baseline
            else _interval(before.ratio.overall if before is not None and before.ratio is not None else None),
        ]
    return cells


def _interval(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"<b>{estimate.value:.2f}×</b> ({_spread(estimate)})"


def _spread(estimate: Estimate) -> str:
    """The interval; a single answer has none."""
    is_known = estimate.low < estimate.high
    return f"{estimate.low:.2f} to {estimate.high:.2f}" if is_known else "one answer tells no more"


def _speed_bars(result: Result) -> str:
    shown = [(own.config, own.ratio) for own in result.summary.configs if own.ratio and not own.is_baseline]
    if not shown:
        return "<p>No answer could be compared with plain's.</p>"
    top = (
        max([1.0, *(estimate.high for _, own in shown for estimate in (*own.by_category.values(), own.overall))]) * 1.05
    )
    rows = []
    for name, own in shown:
        rows.append(f'<p class="q-bars-name">{escape(name)}</p>')
        rows += [
            _bar(category, estimate, top) for category, estimate in (*own.by_category.items(), ("all", own.overall))
        ]
    caption = '<p class="q-small">The line marks plain decoding; whiskers are 95 % intervals.</p>'
    return f'<div class="q-bars" style="--one:{100 / top:.2f}%">{"".join(rows)}</div>{caption}'


def _bar(label: str, estimate: Estimate, top: float) -> str:
    low, high, value = (100 * figure / top for figure in (estimate.low, estimate.high, estimate.value))
    return (
        f'<div class="q-bar" title="{estimate.value:.2f}: {_spread(estimate)}">'
        f'<span>{escape(label)}</span><i><b style="width:{value:.1f}%"></b>'
        f'<u style="left:{low:.1f}%;width:{max(0.0, high - low):.1f}%"></u></i><em>{estimate.value:.2f}×</em></div>'
    )


def _acceptance(result: Result) -> str:
    lines = [Line(own.config, own.acceptance_by_position) for own in result.summary.configs]
    return line_chart(lines, "Share of passes that accepted each position", first=1) or "<p>Nothing was drafted.</p>"


def _lengths(result: Result) -> str:
    lines = []
    for own in result.summary.configs:
        total = sum(own.lengths.values())
        longest = max(map(int, own.lengths), default=0)
        if longest and not own.is_baseline:
            lines.append(Line(own.config, [own.lengths.get(str(n), 0) / total for n in range(longest + 1)]))
    return line_chart(lines, "Share of passes by number of draft tokens sent") or "<p>Nothing was drafted.</p>"


def _pace(result: Result) -> str:
    """Tokens against the time they took, one answer after the other, of answers that every configuration gave."""
    names = [own.config for own in result.summary.configs]
    loops = {loop.prompt_id for loop in result.summary.loops}
    counted = [row for row in result.rows if row.prompt_id not in loops]
    answered = {name: {(row.prompt_id, row.round): row for row in counted if row.config == name} for name in names}
    shared = [key for key in answered[names[0]] if all(key in own for own in answered.values())] if names else []
    curves = []
    for name in names:
        seconds, tokens = 0.0, 0
        points = []
        for key in shared:
            seconds += answered[name][key].seconds
            tokens += answered[name][key].tokens
            points.append((seconds, float(tokens)))
        curves.append(Curve(name, points))
    in_all = {curve.name: curve.points[-1][0] for curve in curves if curve.points}
    label = "Tokens over time: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in in_all.items())
    chart = curve_chart(curves, label, along=" s")
    if not chart:
        return "<p>No prompt without a loop was answered by all.</p>"
    answers = f"The same {len(shared)} answer{'s' if len(shared) != 1 else ''}, one after the other"
    return f'{chart}<p class="q-small">{answers}: the steeper, the faster.</p>'


def _difference(result: Result, other: Result) -> str:
    """What two results do not have in common, so that nobody takes it for what was compared."""
    ours, theirs = _circumstances(result), _circumstances(other)
    differing = [
        f"<tr><th scope='row'>{name}</th><td>{escape(ours.get(name, '–'))}</td>"
        f"<td>{escape(theirs.get(name, '–'))}</td></tr>"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    if not differing:
        return '<p class="q-small">Both were made with the same machine, files, prompts and settings.</p>'
    head = (
        "<tr><th scope='col'>What differs</th><th scope='col'>This result</th>"
        f"<th scope='col'>{escape(other.name)}</th></tr>"
    )
    return (
        '<div class="q-scroll" tabindex="0" role="region" aria-label="What differs"><table class="q-table" '
        f'id="difference"><thead>{head}</thead><tbody>{"".join(differing)}</tbody></table></div>'
    )


def _circumstances(result: Result) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name, value in _origins(result):
        facts[name] = f"{facts[name]}; {value}" if name in facts else value
    return {**facts, "Prompts": ", ".join(result.document["prompts"])}


def _origin(result: Result) -> str:
    body = "".join(f'<tr><th scope="row">{name}</th><td>{escape(value)}</td></tr>' for name, value in _origins(result))
    return f'<table class="q-table"><tbody>{body}</tbody></table>'


def _origins(result: Result) -> list[tuple[str, str]]:
    machine, models = result.document["machine"], result.document["models"]
    files = [models["target"], *models["drafters"]]
    return [
        ("Machine", f"{machine['processor']}, {machine['threads']} threads, {machine['system']}"),
        ("llama.cpp", f"{machine['llama_cpp']} by llama-cpp-python {machine['llama_cpp_python']}"),
        ("Rounds", f"{result.document['rounds']}, up to {result.document['settings']['max_tokens']} tokens, greedy"),
        *(
            (
                "Target" if file is models["target"] else "Drafter",
                f"{file['name']}, sha256 {file['sha256'][:12]}" if "sha256" in file else file["name"],
            )
            for file in files
        ),
    ]


def _answers(result: Result) -> str:
    prompts = list(dict.fromkeys(row.prompt_id for row in result.rows))[:MOST_ANSWERS]
    parts = []
    for prompt_id in prompts:
        said = [row for row in result.rows if row.prompt_id == prompt_id and row.round == 1]
        columns = "".join(
            f"<div><h4>{escape(row.config)} {_sameness(row)}</h4><p>{escape(row.answer)}</p>"
            f'<p class="q-small">{row.tokens_per_second:.1f} tokens/s</p></div>'
            for row in said
        )
        question = result.document["prompts"].get(prompt_id, prompt_id)
        parts.append(
            f"<details><summary>{escape(question[:160])}</summary>"
            f'<div class="q-columns" tabindex="0" role="region" aria-label="Answers">{columns}</div></details>'
        )
    return "".join(parts)


def _sameness(row: Row) -> str:
    if row.is_plain or row.identical_to_plain is None:
        return ""
    return "✓ identical" if row.identical_to_plain else "✗ differs"


def _downloads(result_id: str) -> str:
    links = " ".join(
        f'<a href="/comparisons/{result_id}.{suffix}" download>{suffix.upper()}</a>'
        for suffix in ("csv", "json", "png")
    )
    return f'<p class="q-links">Export: {links}</p>'


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _card(title: str, body: str, name: str) -> str:
    return f'<section class="q-card" id="{name}"><h2>{title}</h2>{body}</section>'
