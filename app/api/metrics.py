"""Counters for Prometheus, in its text format; a dozen lines need no library."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil

from engine.pool import PoolStatistics

GAUGES = {
    "active": "Requests that are being answered.",
    "waiting": "Requests that wait for that.",
    "put_aside": "Requests whose state waits in memory for room in the cache.",
    "free_cells": "Tokens that the cache of requests has room for.",
}
"""Fields of the pool's statistics that say how it stands; all other numbers count what has happened."""


def counted(statistics: PoolStatistics) -> Counter[str]:
    """What a pool has counted since it was made, by name."""
    values = {field.name: getattr(statistics, field.name) for field in dataclasses.fields(statistics)}
    return Counter(
        {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in GAUGES
        }
    )


def exposition(
    counts: Mapping[str, float],
    statistics: PoolStatistics | None,
    responses: Mapping[int, int],
    *,
    is_ready: bool,
    are_requests_exact: bool | None,
) -> str:
    """The text that Prometheus reads.

    Args:
        counts: By name, since the start.
        statistics: Of the present pool.
        responses: How many there were, by HTTP status.
        is_ready: Whether requests are taken.
        are_requests_exact: Whether they measured bit-equal to each alone; None leaves it out.
    """
    lines = _metric("quorum_ready", "gauge", "Whether requests are taken.", [("", int(is_ready))])
    if are_requests_exact is not None:
        text = "Whether several requests in a pass measured bit-equal to each alone."
        lines += _metric("quorum_requests_exact", "gauge", text, [("", int(are_requests_exact))])
    for name, text in GAUGES.items():
        value = 0 if statistics is None else getattr(statistics, name, 0)
        lines += _metric(f"quorum_{name}", "gauge", text, [("", value)])
    for name in sorted(counts):
        if name.endswith("_ms"):
            seconds = f"quorum_{name.removesuffix('_ms')}_seconds_total"
            lines += _metric(seconds, "counter", f"Time spent: {name.removesuffix('_ms')}.", [("", counts[name] / 1e3)])
        else:
            text = f"Count of {name.replace('_', ' ')} since the start."
            lines += _metric(f"quorum_{name}_total", "counter", text, [("", counts[name])])
    by_status = [(f'{{status="{status}"}}', count) for status, count in sorted(responses.items())]
    lines += _metric("quorum_http_responses_total", "counter", "Responses by HTTP status.", by_status)
    resident_bytes = psutil.Process().memory_info().rss
    text = "Memory of this process, weights in the page cache included."
    lines += _metric("process_resident_memory_bytes", "gauge", text, [("", resident_bytes)])
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: Sequence[tuple[str, float]]) -> list[str]:
    lines = (f"{name}{labels} {value:.15g}" for labels, value in values)
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines]
