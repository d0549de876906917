"""llama-server with as many requests at once as our pool: the same prompts, all asked for together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from app.bench.peer import Peer, PeerServer, PeerSetting
from app.bench.rounds import sampling_for
from engine.config import Sampling, SetConfig

CELLS_STEP = 256
"""llama.cpp rounds a cache up to whole steps."""

Requests = Sequence[Sequence[int]]
"""The prompts' tokens."""


@dataclass(frozen=True, slots=True)
class PeerPoolRow:
    """One round of all prompts under one of the server's settings."""

    setting: str
    concurrency: int
    round: int
    tokens: int
    elapsed_ms: float
    """From the first request until the last answer was there."""
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_ms * 1e3

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True)
class PeerPool:
    """How the server is run."""

    peer: Peer
    settings: tuple[PeerSetting, ...]
    config: SetConfig
    draft_model: Path | None

    def run(
        self,
        requests: Requests,
        warm_up: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        concurrency: int,
        rounds: int,
        cancel: threading.Event,
        heard: Callable[[PeerPoolRow], None],
    ) -> Iterator[PeerPoolRow]:
        """Measure each setting on a server of its own; fewer rows when cancelled.

        Raises:
            EnvironmentProblem: the server failed.
        """
        longest = max(map(len, (*requests, warm_up))) + max_tokens
        # What the server is given is shared out evenly among its requests.
        room = concurrency * CELLS_STEP * -(-longest // CELLS_STEP)
        config = replace(self.config, context_tokens=room)
        for setting in self.settings:
            arguments = self.peer.arguments(setting, config, self.draft_model, concurrency)
            with PeerServer(self.peer, arguments, concurrency) as server:
                if not server.wait_until_ready(cancel):
                    return
                server.complete_all([warm_up] * concurrency, sampling, max_tokens, cancel)
                for number in range(1, rounds + 1):
                    started = time.perf_counter()
                    replies = server.complete_all(requests, sampling_for(sampling, number), max_tokens, cancel)
                    elapsed_ms = (time.perf_counter() - started) * 1e3
                    if replies is None:
                        return
                    row = PeerPoolRow(
                        setting=setting.name,
                        concurrency=concurrency,
                        round=number,
                        tokens=sum(reply.answer_tokens for reply in replies),
                        elapsed_ms=elapsed_ms,
                        drafted=sum(reply.drafted for reply in replies),
                        accepted=sum(reply.accepted for reply in replies),
                    )
                    heard(row)
                    yield row


def render_peer_pool(own: Sequence[Mapping[str, Any]], rows: Sequence[PeerPoolRow]) -> str:
    """The server's medians as text for the terminal, and how the pool's compare with the best of them.

    Args:
        own: The pool's summary.
        rows: The server's.
    """
    speeds: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        speeds.setdefault(row.concurrency, {}).setdefault(row.setting, []).append(row.tokens_per_second)
    lines = []
    for concurrency, by_setting in speeds.items():
        medians = {setting: median(found) for setting, found in by_setting.items()}
        lines += [f"{concurrency:7d}  {speed:8.1f}  {setting}" for setting, speed in medians.items()]
        best = max(medians, key=lambda setting: medians[setting])
        lines += [
            f"{entry['configuration']}, {concurrency} at once, against {best}: "
            f"{entry['tokens_per_second'] / medians[best]:.2f}x"
            for entry in own
            if entry["concurrency"] == concurrency
        ]
    return "".join(f"{line}\n" for line in lines)
