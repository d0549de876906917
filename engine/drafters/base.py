"""The life every drafter lives, and what it is asked."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.config import Sampling
from engine.residual import Chance
from engine.types import Draft

KeepDrafting = Callable[[Sequence[float], float], bool]
"""Asked after each drafted token: its probability and those before it, and the entropy (nats) of its distribution."""


def always(_probabilities: Sequence[float], _entropy: float) -> bool:
    """Draft on until the limit."""
    return True


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawing from a drafter's distribution, under the target's own sampling."""

    sampling: Sampling
    vocabulary_size: int
    """The target's."""
    chance: Chance


@dataclass(frozen=True, slots=True)
class Threads:
    """With how many processor threads a draft model computes."""

    one_token: int
    """In passes over one token, which often gain little from a second thread."""
    more_tokens: int


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one drafter is asked to guess."""

    path: tuple[int, ...]
    """Tokens assumed to follow the committed ones; the draft continues after them."""
    max_tokens: int
    keep_drafting: KeepDrafting
    cancel: threading.Event
    """Set to end the draft after the token in hand."""
    threads: Threads | None = None
    """For drafters that compute; None for as many as the drafter was given."""
    drawing: Drawing | None = None
    """How tokens are drawn, by drafters that know distributions; None to take the most probable ones."""


@dataclass(frozen=True, slots=True)
class Score:
    """How often a drafter's own next-token guess was what the target committed."""

    hits: int = 0
    scored: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.hits + other.hits, self.scored + other.scored)


class Drafter(ABC):
    """Guesses the tokens after the committed ones.

    All methods are called by the thread that runs the session, one at a time; between `start` and the completion of
    its future no other method is called.
    """

    name: str
    is_free: bool
    """Whether drafting costs no model pass, so that it may always be asked."""

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Replace the committed tokens; what was learnt about a common prefix is kept."""

    @abstractmethod
    def start(self, request: DraftRequest) -> Future[Draft]:
        """Draft, in this thread where nothing runs beside it; the future's draft is empty when the drafter abstains."""

    def start_beside(self, request: DraftRequest) -> Future[Draft]:
        """Begin to draft while others do; as `start`, where drafting takes no time."""
        return self.start(request)

    def end_thread(self) -> None:  # noqa: B027 - most drafters have no thread
        """Wait for what was begun beside other work, and go on in the caller's thread."""

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> None:
        """Hear which tokens were committed, whoever proposed them."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the committed tokens from `length` on."""

    def forget(self) -> None:  # noqa: B027 - a drafter may have no memory
        """Drop all text that was read; what was learnt about how far to trust it stays."""

    def take_score(self) -> Score:
        """How its guesses fared since the last call."""
        return Score()

    @property
    def behind_tokens(self) -> int:
        """Committed tokens it must still read before it can draft."""
        return 0

    def start_catch_up(self, max_tokens: int, cancel: threading.Event) -> Future[int] | None:
        """Read up to `max_tokens` of the committed tokens, where `start` drafts; None when there is nothing to read."""
        return None

    def start_look_ahead(self, request: DraftRequest) -> Future[Draft] | None:
        """Draft beyond tokens that are still being verified; None where running ahead has no use."""
        return None

    @property
    def vocabulary_size(self) -> int:
        """Token numbers that it can read are below this; without a model, all are."""
        return 2**31

    @property
    def threads(self) -> int:
        """Processor threads it was given."""
        return 1

    @property
    def last_passes(self) -> int:
        """Model passes the last draft took; fewer than its tokens where earlier guesses were taken over."""
        return 0

    @property
    def last_extra_tokens(self) -> int:
        """Tokens the last draft read besides one in each pass: what it had fallen behind by."""
        return 0

    def check(self, tokens: Sequence[int]) -> None:  # noqa: B027 - most drafters keep no copy that could be wrong
        """Check what it keeps against the committed tokens.

        Raises:
            AssertionError: they do not agree.
        """

    def close(self) -> None:  # noqa: B027 - most drafters own nothing native
        """Free everything; the drafter is not used again."""


def finished(draft: Draft) -> Future[Draft]:
    """A future that already has its draft."""
    future: Future[Draft] = Future()
    future.set_result(draft)
    return future
