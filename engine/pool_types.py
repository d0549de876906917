"""How much a pool holds, and what it has counted: plain data for whoever makes a pool or looks at one."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import LookAhead

TIMED = ("prefill_ms", "draft_ms", "verify_ms", "sample_ms", "other_ms")
"""Fields of the statistics that say where the time went."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How much a pool holds."""

    most_active: int = 8
    """Requests that are answered at the same time."""
    most_waiting: int = 64
    """Requests that wait for that; more are refused. Those that are taken up at once are not counted."""
    context_tokens: int | None = None
    """Tokens in the cache that all requests share; None: as many as the set's own context holds."""
    most_kept: int = 8
    """Ended requests whose tokens are kept for others that begin the same."""
    overlap: LookAhead = LookAhead.AUTO
    """Whether draft models draft for some requests while the target verifies others; `auto`: where it measures faster,
    and as a rule where they have a processor of their own."""
    target_cores: tuple[int, ...] = ()
    """Processor cores that the pool's owner, which computes with one thread, is kept to; empty for all."""
    drafter_cores: tuple[int, ...] = ()
    """The same for draft models."""

    def __post_init__(self) -> None:
        for name in ("most_active", "most_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts since the pool was made, and how it stands."""

    exactness: str
    """Whether requests say what they would alone, in a clause."""
    active: int = 0
    put_aside: int = 0
    """Of the active, those that wait in memory for room in the cache."""
    waiting: int = 0
    done: int = 0
    cancelled: int = 0
    failed: int = 0
    rounds: int = 0
    passes: int = 0
    """Passes of the target that carried answers."""
    carried_answers: int = 0
    """Answers in all these passes together."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompts' tokens, those that were in the cache already."""
    tokens: int = 0
    """Emitted."""
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    overlapped: int = 0
    """Passes during which drafts were made for other answers."""
    gathered: int = 0
    """How often the cells of the cache were brought together."""
    free_cells: int = 0
    left_out: tuple[tuple[str, str], ...] = ()
    """Draft models of the set that do not draft here, and why."""
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def mean_batch(self) -> float | None:
        """Answers in a pass; None before the first."""
        return self.carried_answers / self.passes if self.passes else None
