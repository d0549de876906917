"""A model's vocabulary: text to tokens, tokens to bytes, and which tokens end an answer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from engine.errors import IncompatibleDrafter
from engine.runtime.api import native

MAX_SIZE_DIFFERENCE = 128
"""Padded vocabularies of one family differ by up to this many unused tokens (llama.cpp's own limit)."""
FIRST_COMPARED_TOKEN = 5
"""Special tokens below this id may be spelled differently without harm (llama.cpp's own rule)."""
_KIND_NAMES = {1: "SentencePiece", 2: "byte-level BPE", 3: "WordPiece", 4: "Unigram", 5: "RWKV", 6: "PLaMo-2"}


class Vocabulary:
    """Read-only view of a loaded model's vocabulary. Safe to use from any thread while the model lives."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        lib = native().lib
        self.size: int = lib.llama_vocab_n_tokens(handle)
        self.kind: int = lib.llama_vocab_type(handle)
        self.bos: int = lib.llama_vocab_bos(handle)
        self.eos: int = lib.llama_vocab_eos(handle)
        self.adds_bos: bool = lib.llama_vocab_get_add_bos(handle)
        self.adds_eos: bool = lib.llama_vocab_get_add_eos(handle)

    @property
    def kind_name(self) -> str:
        """The tokenizer type as llama.cpp's documentation calls it."""
        return _KIND_NAMES.get(self.kind, f"type {self.kind}")

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every token after which the model's turn is over."""
        is_end = native().lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self.handle, token))

    def tokenize(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokens of `text`; special tokens written out in it are recognised.

        Args:
            text: Any text; an empty one gives no tokens (or BOS alone).
            adds_special: Whether BOS/EOS are added where the model's own rules ask for them.
        """
        # Half characters, as from a command line that is not UTF-8, have no tokens.
        data = text.encode("utf-8", "replace")
        lib = native().lib
        room = len(data) + 8
        while True:
            buffer = (lib.llama_token * room)()
            count = lib.llama_tokenize(self.handle, data, len(data), buffer, room, adds_special, True)
            if count >= 0:
                return list(buffer[:count])
            room = -count

    def piece(self, token: int) -> bytes:
        """The bytes a token shows as; control tokens show as nothing. A character may span several tokens."""
        return self._bytes(token, spells_control=False)

    def written(self, token: int) -> bytes:
        """The bytes a token shows as, control tokens spelled out: what `tokenize` would make the token of."""
        return self._bytes(token, spells_control=True)

    def _bytes(self, token: int, *, spells_control: bool) -> bytes:
        lib = native().lib
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = lib.llama_token_to_piece(self.handle, token, buffer, room, 0, spells_control)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens read as; bytes that are no whole character become replacement marks."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def spelling(self, token: int) -> str:
        """The vocabulary's entry for a token, as stored."""
        text = native().lib.llama_vocab_get_text(self.handle, token)
        return str(text.decode("utf-8", "replace")) if text else ""


def check_compatible(target: Vocabulary, drafter: Vocabulary, drafter_name: str) -> None:
    """Check that a drafter's token ids mean the same as the target's (the rules llama.cpp applies to drafters).

    Raises:
        IncompatibleDrafter: naming the first rule that fails and, where one is to blame, the token.
    """

    def refuse(rule: str) -> IncompatibleDrafter:
        return IncompatibleDrafter(
            f"{drafter_name} cannot draft for this target: {rule}. Choose a drafter of the target's own family, "
            "or let text go between them: --translate."
        )

    if target.kind != drafter.kind:
        raise refuse(f"tokenizer types differ (target {target.kind_name}, drafter {drafter.kind_name})")
    for name in ("bos", "eos"):
        adds_target, adds_drafter = getattr(target, f"adds_{name}"), getattr(drafter, f"adds_{name}")
        if adds_target != adds_drafter:
            raise refuse(f"one adds a {name.upper()} token and the other does not")
        theirs, ours = getattr(target, name), getattr(drafter, name)
        if adds_target and theirs != ours:
            raise refuse(
                f"{name.upper()} tokens differ (target {theirs} {target.spelling(theirs)!r}, "
                f"drafter {ours} {drafter.spelling(ours)!r})"
            )
    if abs(target.size - drafter.size) > MAX_SIZE_DIFFERENCE:
        raise refuse(
            f"vocabulary sizes differ by more than {MAX_SIZE_DIFFERENCE} (target {target.size}, drafter {drafter.size})"
        )
    for token in range(FIRST_COMPARED_TOKEN, min(target.size, drafter.size)):
        theirs, ours = target.spelling(token), drafter.spelling(token)
        if theirs != ours:
            raise refuse(f"token {token} is {theirs!r} in the target and {ours!r} in the drafter")
