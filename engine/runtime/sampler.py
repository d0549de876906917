"""The target's sampler chain: llama.cpp's own samplers, advanced once per emitted token.

Because a token costs one draw of the random generator whether or not a draft covered it, the same seed gives the same
tokens with drafters on, off or changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.config import Sampling
from engine.runtime.api import native
from engine.runtime.context import Context

SEED_LIMIT = 2**32 - 1
"""llama.cpp reads the largest 32-bit seed as "draw one"."""


class Sampler:
    """Chooses tokens from the rows of a context's last pass, in order."""

    def __init__(self, sampling: Sampling, vocabulary_size: int, history: Sequence[int]) -> None:
        """Build the chain.

        Args:
            sampling: The settings; without a seed one is drawn and kept in `seed`.
            vocabulary_size: Of the target.
            history: Tokens before the answer, which the penalties count.
        """
        self.seed = sampling.seed if sampling.seed is not None else secrets.randbelow(SEED_LIMIT)
        self._is_argmax = sampling.temperature == 0 and not sampling.has_penalties
        lib = native().lib
        self._lib = lib
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if sampling.has_penalties:
            self._add(
                lib.llama_sampler_init_penalties(
                    vocabulary_size,
                    sampling.penalty_last_tokens,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature == 0:
            self._add(lib.llama_sampler_init_greedy())
        else:
            if sampling.top_k:
                self._add(lib.llama_sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1:
                self._add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
            if sampling.min_p > 0:
                self._add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
            self._add(lib.llama_sampler_init_temp(sampling.temperature))
            self._add(lib.llama_sampler_init_dist(self.seed))
        if sampling.has_penalties:
            for token in history[-sampling.penalty_last_tokens :] if sampling.penalty_last_tokens else ():
                lib.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        self._lib.llama_sampler_chain_add(self._chain, sampler)

    def match(self, context: Context, draft: Sequence[int], first_output: int) -> tuple[int, int]:
        """Token matching: accept the draft while each token equals the target's own choice.

        Args:
            context: Its last pass produced a row for the pending token and for each draft token.
            draft: The draft's tokens.
            first_output: The pending token's place in that pass.

        Returns:
            The number of accepted tokens and the target's own token after them.
        """
        if self._is_argmax:
            rows = context.logits()[first_output : first_output + len(draft) + 1]
            choices = np.argmax(rows, axis=1).tolist()
            accepted = 0
            while accepted < len(draft) and choices[accepted] == draft[accepted]:
                accepted += 1
            return accepted, choices[accepted]
        for accepted, token in enumerate(draft):
            choice = self._lib.llama_sampler_sample(self._chain, context.handle, first_output + accepted)
            if choice != token:
                return accepted, choice
        return len(draft), self._lib.llama_sampler_sample(self._chain, context.handle, first_output + len(draft))

    def close(self) -> None:
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
