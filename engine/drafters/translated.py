"""A draft model with another vocabulary than the target's: what is committed reaches it as text, and so do its drafts.

Every draft reads the whole conversation's text anew into the drafter's own tokens, of which those stay in its cache
that are the same as before. A draft is cut where the target's own tokens begin and end, so the last one is left out: it
may be half a word. The target judges what comes of it as it judges any draft.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from engine.drafters.base import Drafter, DraftRequest, Score, finished
from engine.drafters.model import ModelDrafter
from engine.prefix import shared_prefix
from engine.runtime.vocabulary import Vocabulary
from engine.types import Draft


class TranslatedDrafter(Drafter):
    """Stands between the target's tokens and a draft model's."""

    is_free = False

    def __init__(self, inner: ModelDrafter, target: Vocabulary) -> None:
        """Args:
        inner: Closed with this drafter.
        target: The target's vocabulary.
        """
        self.name = inner.name
        self._inner = inner
        self._target = target
        self._committed: list[int] = []
        self._known = 0
        """Committed tokens that the inner drafter was given when it last read."""
        self._last: tuple[int, ...] = ()
        self._score = Score()

    def begin(self, tokens: Sequence[int]) -> None:
        self._known = min(self._known, shared_prefix(tokens, self._committed))
        self._committed = list(tokens)
        self._last = ()

    def accept(self, tokens: Sequence[int]) -> None:
        for guess, token in zip(self._last, tokens, strict=False):
            self._score += Score(int(guess == token), 1)
            if guess != token:
                break
        self._committed.extend(tokens)
        self._last = ()

    def truncate(self, length: int) -> None:
        del self._committed[length:]
        self._known = min(self._known, length)
        self._last = ()

    def forget(self) -> None:
        self.begin(())
        self._inner.forget()

    def take_score(self) -> Score:
        score, self._score = self._score, Score()
        return score

    @property
    def behind_tokens(self) -> int:
        return len(self._committed) - self._known

    @property
    def vocabulary_size(self) -> int:
        return self._target.size

    @property
    def threads(self) -> int:
        return self._inner.threads

    @property
    def last_passes(self) -> int:
        return self._inner.last_passes

    @property
    def last_extra_tokens(self) -> int:
        return self._inner.last_extra_tokens

    def start(self, request: DraftRequest) -> Future[Draft]:
        return self._start(request, self._inner.start)

    def start_beside(self, request: DraftRequest) -> Future[Draft]:
        return self._start(request, self._inner.start_beside)

    def _start(self, request: DraftRequest, start: Callable[[DraftRequest], Future[Draft]]) -> Future[Draft]:
        text = _text(self._target, (*self._committed, *request.path))
        if text is None or not self._give(text):
            return finished(Draft(self.name))
        mapped: Future[Draft] = Future()
        anchor = _text(self._target, (*self._committed, *request.path)[-1:]) or ""
        # One more than is wanted, as the last one is left out.
        drafting = start(replace(request, path=(), max_tokens=request.max_tokens + 1, drawing=None))

        def translate(done: Future[Draft]) -> None:
            try:
                draft = self._translated(done.result(), anchor, request.max_tokens)
            except BaseException as error:
                mapped.set_exception(error)
            else:
                self._last = () if request.path else draft.tokens
                mapped.set_result(draft)

        drafting.add_done_callback(translate)
        return mapped

    def start_catch_up(self, max_tokens: int, cancel: threading.Event) -> Future[int] | None:
        text = _text(self._target, self._committed)
        before = self._known
        if not self.behind_tokens or text is None or not self._give(text):
            return None
        reading = self._inner.start_catch_up(max_tokens, cancel)
        if reading is None:
            return None
        mapped: Future[int] = Future()

        def told(done: Future[int]) -> None:
            try:
                done.result()
            except BaseException as error:
                mapped.set_exception(error)
                return
            # As far as can be told: the two count different tokens.
            self._known = max(before, len(self._committed) - self._inner.behind_tokens)
            mapped.set_result(self._known - before)

        reading.add_done_callback(told)
        return mapped

    def check(self, tokens: Sequence[int]) -> None:
        assert self._committed == list(tokens), f"{self.name} has heard of other tokens than were committed"

    def end_thread(self) -> None:
        self._inner.end_thread()

    def close(self) -> None:
        self._inner.close()

    def _give(self, text: str) -> bool:
        """Let the inner drafter have the text; false where it has no token for it."""
        tokens = self._inner.model.vocabulary.tokenize(text, adds_special=True)
        self._inner.begin(tokens)
        self._known = len(self._committed)
        return bool(tokens)

    def _translated(self, draft: Draft, anchor: str, most: int) -> Draft:
        """The draft in the target's tokens; each is as probable as the drafter's tokens that begin in it."""
        own = self._inner.model.vocabulary
        pieces = [own.piece(token) for token in draft.tokens]
        end = next((at for at, token in enumerate(draft.tokens) if token in own.end_tokens), len(pieces))
        text = b"".join(pieces[:end]).decode("utf-8", "ignore")
        if not text:
            return Draft(self.name)
        # After the last committed token, as vocabularies differ in what they do at the beginning of a text.
        before = self._target.tokenize(anchor, adds_special=False)
        tokens = self._target.tokenize(anchor + text, adds_special=False)
        is_apart = tokens[: len(before)] == before
        tokens = tokens[len(before) :] if is_apart else self._target.tokenize(text, adds_special=False)
        if end == len(pieces):
            tokens.pop()
        tokens = tokens[:most]
        starts = [0, *itertools.accumulate(map(len, pieces[:end]))]
        probabilities = []
        position = 0
        for token in tokens:
            following = position + len(self._target.piece(token))
            probability = 1.0
            for start, own_probability in zip(starts, draft.probabilities, strict=False):
                if position <= start < following:
                    probability *= own_probability
            probabilities.append(probability)
            position = following
        return Draft(self.name, tuple(tokens), tuple(probabilities), last_entropy=draft.last_entropy)


def _text(vocabulary: Vocabulary, tokens: Sequence[int]) -> str | None:
    """What tokens stand for, control tokens spelled out; None where a character is not complete."""
    try:
        return b"".join(map(vocabulary.written, tokens)).decode("utf-8")
    except UnicodeDecodeError:
        return None
