"""What an answer may say: a GBNF grammar, followed token by token by llama.cpp's own grammar sampler."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import SettingError
from engine.runtime.api import native
from engine.runtime.vocabulary import Vocabulary

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""One entry of a llama_token_data_array."""
ROOT = b"root"

Candidates = npt.NDArray[np.void]


def grammar_of_schema(schema: str) -> str:
    """The GBNF grammar of all JSON texts that a JSON schema admits.

    Raises:
        SettingError: it is no JSON, or no schema that can be turned into a grammar.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        if not isinstance(json.loads(schema), dict):
            raise SettingError("the JSON schema must be a JSON object")
        return str(json_schema_to_gbnf(schema))
    except json.JSONDecodeError as error:
        raise SettingError(f"the JSON schema is no JSON: {error}") from error
    except SettingError:
        raise
    except Exception as error:  # the converter walks whatever the schema holds: it may raise anything
        raise SettingError(
            f"the JSON schema cannot be turned into a grammar: {type(error).__name__}: {error}"
        ) from error


class Grammar:
    """A grammar and how far an answer has got in it."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        """Raises:
        SettingError: llama.cpp cannot read the text as GBNF.
        """
        self._lib = native().lib
        native().log.clear()
        self._handle: Any = self._lib.llama_sampler_init_grammar(vocabulary.handle, text.encode("utf-8"), ROOT)
        if not self._handle:
            raise SettingError(
                f"the grammar is no GBNF grammar with a rule called root (llama.cpp: {native().log.problem()})"
            )

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with this token."""
        return self._allows(self._handle, token)

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """How many leading tokens the answer may go on with; its own place in the grammar stays where it is."""
        if not tokens or not self.allows(tokens[0]):
            return 0
        copy = self._lib.llama_sampler_clone(self._handle)
        try:
            length = 1
            while length < len(tokens):
                self._lib.llama_sampler_accept(copy, tokens[length - 1])
                if not self._allows(copy, tokens[length]):
                    break
                length += 1
            return length
        finally:
            self._lib.llama_sampler_free(copy)

    def restrict(self, candidates: Candidates) -> None:
        """Set the logit of every candidate that is not allowed to minus infinity."""
        apply(self._handle, candidates)

    def accept(self, token: int) -> None:
        """Go on with a token, which must be allowed: llama.cpp ends the process over any other."""
        self._lib.llama_sampler_accept(self._handle, token)

    def close(self) -> None:
        if self._handle:
            self._lib.llama_sampler_free(self._handle)
            self._handle = None

    def _allows(self, handle: Any, token: int) -> bool:
        candidate = np.zeros(1, CANDIDATE)
        candidate["id"] = token
        apply(handle, candidate)
        return bool(candidate["logit"][0] == 0)


def apply(sampler: Any, candidates: Candidates) -> int:
    """Run a native sampler over candidates, which it may reorder; returns the place it selects, or -1."""
    return int(_applied(sampler, candidates).selected)


def left_by(sampler: Any, candidates: Candidates) -> Candidates:
    """What a native sampler leaves of candidates; a view."""
    return candidates[: int(_applied(sampler, candidates).size)]


def _applied(sampler: Any, candidates: Candidates) -> Any:
    lib = native().lib
    array = lib.llama_token_data_array()
    array.data = ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p)
    array.size = len(candidates)
    array.selected = -1
    array.sorted = False
    lib.llama_sampler_apply(sampler, ctypes.byref(array))
    return array
