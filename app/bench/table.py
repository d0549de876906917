"""The summary as text for the terminal, and the rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from app.bench.replayed import Hindsight
from app.bench.row import LOOP_SHARE, Row
from app.bench.summary import Estimate, Figures, PeerComparison, Summary

GAP = "  "
MISSING = "-"


def render(document: Mapping[str, Any], summary: Summary, *, shows_ceiling: bool) -> str:
    """Everything a reader needs to judge the figures, figures included."""
    parts = [_heading(document), _ratios(summary), _details(summary)]
    if summary.peer is not None:
        parts.append(_peer(summary.peer))
    if shows_ceiling:
        ceiling = document["ceiling"]
        parts.append(
            f"Ceiling: {ceiling['ratio']:.2f}x, by a perfect drafter that costs nothing and passes of "
            f"{ceiling['pass_tokens']} tokens, at the pass times measured here."
        )
    if summary.loops:
        parts.append(_loops(summary))
    return "\n\n".join(parts) + "\n"


def _heading(document: Mapping[str, Any]) -> str:
    machine, models, settings = document["machine"], document["models"], document["settings"]
    prompts, target = document["prompts"], models["target"]
    lines = [
        f"Target     {_model(target)}, KV {models['kv']['target']}",
        f"Drafters   {', '.join(map(_model, models['drafters'])) or 'none'}, KV {models['kv']['drafters']}",
        f"Machine    {machine['processor']}, {machine['threads']} threads, {', '.join(machine['devices'])}",
        f"llama.cpp  {machine['llama_cpp']} by llama-cpp-python {machine['llama_cpp_python']}",
        f"Prompts    {prompts['count']} in {prompts['categories']} categories ({prompts['half']} half, "
        f"{prompts['copies']} copy much of their prompt), up to {settings['max_tokens']} tokens, "
        f"temperature {settings['temperature']:g}, {document['rounds']} rounds",
    ]
    if target["expansion"]:
        lines.append(
            f"Note       the target is a function-preserving expansion ({target['expansion']}): "
            "it costs what a larger model costs and says what the small one says"
        )
    peer = models.get("peer")
    if peer is not None:
        lines.append(
            f"Peer       llama-server {peer['version']}, KV {peer['kv_type']}, "
            f"draft model {peer['draft_model'] or 'none'} (KV {peer['draft_kv_type']})"
        )
        lines += [f"           left out: {name}, {why}" for name, why in peer["left_out"].items()]
    if document.get("replayed"):
        lines.append(
            "Note       replayed from a recording: the engine's own steps on recorded drafts, at the costs measured "
            "when it was made; chains only, nothing runs ahead"
        )
    if not document["complete"]:
        lines.append("Note       interrupted: the figures hold for the rows that were finished")
    return "\n".join(lines)


def _model(model: Mapping[str, Any]) -> str:
    if "sha256" not in model:
        return str(model["name"])
    return f"{model['name']} ({model['quantisation']}, sha256 {model['sha256'][:12]})"


def _ratios(summary: Summary) -> str:
    shown = [(config.config, config.ratio) for config in summary.configs if config.ratio is not None]
    categories = list(dict.fromkeys(category for _, own in shown for category in own.by_category))
    rows = [["Speed against plain", *categories, "overall (95 %)"]]
    rows += [[name, *_cells(own, categories), _interval(own.overall)] for name, own in shown]
    return _aligned(rows) if shown else "No prompt could be compared with plain decoding."


def _cells(own: Figures, categories: Sequence[str]) -> list[str]:
    return [
        f"{own.by_category[category].value:.2f}" if category in own.by_category else MISSING for category in categories
    ]


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f}-{estimate.high:.2f})"


def _details(summary: Summary) -> str:
    rows = [["", "tokens/s", "accepted", "per pass", "identical", "total time", "first token", "worst", "memory MB"]]
    for config in summary.configs:
        rows.append(
            [
                config.config,
                f"{config.tokens_per_second:.1f}",
                MISSING if config.acceptance is None else f"{config.acceptance:.0%}",
                MISSING if config.mean_accepted_length is None else f"{config.mean_accepted_length:.2f}",
                f"{config.identical}/{config.compared}" if config.compared else MISSING,
                MISSING if config.total_ratio is None else f"{config.total_ratio.overall.value:.2f}x speed",
                MISSING if config.first_token_ratio is None else f"{config.first_token_ratio.overall.value:.2f}x time",
                MISSING
                if config.ratio is None
                else f"{config.ratio.worst_category} {config.ratio.by_category[config.ratio.worst_category].value:.2f}",
                f"{config.peak_memory_bytes / 1e6:.0f}",
            ]
        )
    return _aligned(rows)


def _peer(peer: PeerComparison) -> str:
    categories = list(peer.best_by_category)
    rows = [[f"Speed against {peer.best_setting}", *categories, "overall (95 %)"]]
    rows += [[name, *_cells(own, categories), _interval(own.overall)] for name, own in peer.against_best.items()]
    rows.append(["Speed against its best of each category", *categories, ""])
    for name, by_category in peer.against_best_of_category.items():
        values = [f"{by_category[category]:.2f}" if category in by_category else MISSING for category in categories]
        rows.append([name, *values, ""])
    best = "\n".join(f"  {category}: {setting}" for category, setting in peer.best_by_category.items())
    return f"{_aligned(rows)}\nBest of each category:\n{best}"


def _loops(summary: Summary) -> str:
    rows = [["Left out", "distinct 4-grams", "speed against plain, for what it is worth"]]
    for loop in summary.loops:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in loop.ratios.items())
        rows.append([loop.prompt_id, f"{loop.distinct_4gram:.2f}", ratios])
    return f"Plain answers with fewer than {LOOP_SHARE:.0%} distinct 4-grams run in loops:\n{_aligned(rows)}"


def render_hindsight(best: Mapping[str, Sequence[Hindsight]]) -> str:
    """The best fixed settings of each category."""
    rows = [["Best fixed settings in hindsight", "speed against plain"]]
    for category, settings in best.items():
        for setting in settings:
            rows.append(
                [f"{category}: fixed:{setting.length},drafters={'+'.join(setting.drafters)}", f"{setting.ratio:.2f}"]
            )
    return _aligned(rows) + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def rows_csv(rows: Sequence[Row]) -> str:
    """One line a row; lists are joined by spaces, tables written `key:value`."""
    names = [part.name for part in fields(Row)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{entry}" for key, entry in value.items())
    return str(value)
