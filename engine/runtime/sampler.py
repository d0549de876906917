"""The target's sampler chain: llama.cpp's own samplers, advanced once per emitted token.

Because a token costs the same draws of the random generator whether or not a draft covered it, the same seed gives the
same tokens with drafters on, off or changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.config import Sampling
from engine.errors import SettingError
from engine.residual import Row
from engine.runtime.api import native
from engine.runtime.context import Context, FloatRows
from engine.runtime.grammar import CANDIDATE, Grammar, apply, left_by
from engine.runtime.vocabulary import Vocabulary
from engine.types import LogProbabilities

SEED_LIMIT = 2**32 - 1
"""llama.cpp reads the largest 32-bit seed as "draw one"."""


class Distribution:
    """What a sampling draws from: a row of logits as probabilities. Used by one thread at a time."""

    def __init__(self, sampling: Sampling, vocabulary_size: int) -> None:
        """Args:
        sampling: Without penalties and grammar, which depend on what was said before, at a temperature above zero.
        vocabulary_size: Of the rows that are given out; what a model has beyond it is left out.
        """
        lib = native().lib
        self._lib = lib
        self._size = vocabulary_size
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in _truncating(lib, sampling):
            lib.llama_sampler_chain_add(self._chain, sampler)

    def row(self, logits: FloatRows) -> Row:
        """Probabilities by token."""
        logits = logits[: self._size]
        candidates = np.zeros(len(logits), CANDIDATE)
        candidates["id"] = np.arange(len(logits), dtype=np.int32)
        candidates["logit"] = logits
        left = left_by(self._chain, candidates)
        weights = np.exp(left["logit"].astype(np.float64) - float(left["logit"].max()))
        row = np.zeros(self._size)
        row[left["id"]] = weights / weights.sum()
        return row

    def close(self) -> None:
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None


def _truncating(lib: Any, sampling: Sampling) -> Iterator[Any]:
    """The native samplers that make a distribution of logits, in their order; penalties apart."""
    if sampling.top_k:
        yield lib.llama_sampler_init_top_k(sampling.top_k)
    if sampling.top_p < 1:
        yield lib.llama_sampler_init_top_p(sampling.top_p, 1)
    if sampling.min_p > 0:
        yield lib.llama_sampler_init_min_p(sampling.min_p, 1)
    yield lib.llama_sampler_init_temp(sampling.temperature)


class Sampler:
    """Chooses tokens from the rows of a context's last pass, in order."""

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: Vocabulary,
        history: Sequence[int],
        top_log_probabilities: int | None = None,
    ) -> None:
        """Build the chain.

        Args:
            sampling: The settings; without a seed one is drawn and kept in `seed`.
            vocabulary: The target's.
            history: Tokens before the answer, which the penalties count.
            top_log_probabilities: How many tokens' log-probabilities are kept beside each chosen one's; None for none.

        Raises:
            SettingError: the grammar cannot be read, or a biased token does not exist.
        """
        self.seed = sampling.seed if sampling.seed is not None else secrets.randbelow(SEED_LIMIT)
        self.sampling = sampling
        self.vocabulary_size = vocabulary.size
        unknown = [token for token, _ in sampling.logit_bias if token >= vocabulary.size]
        if unknown:
            raise SettingError(f"token {unknown[0]} cannot be biased: the vocabulary has {vocabulary.size} tokens")
        can_be_drawn = sampling.can_be_drawn and top_log_probabilities is None
        self.distribution = Distribution(sampling, vocabulary.size) if can_be_drawn else None
        """What is drawn from, where that depends on a row of logits alone."""
        self._top = top_log_probabilities
        self._log_probabilities: list[LogProbabilities] = []
        self._is_argmax = sampling.is_argmax
        self._end_token = next(iter(vocabulary.end_tokens), vocabulary.eos)
        self._grammar = Grammar(sampling.grammar, vocabulary) if sampling.grammar else None
        lib = native().lib
        self._lib = lib
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if sampling.logit_bias:
            biases = (lib.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias)
            self._add(lib.llama_sampler_init_logit_bias(vocabulary.size, len(biases), biases))
        if sampling.has_penalties:
            self._add(
                lib.llama_sampler_init_penalties(
                    vocabulary.size,
                    sampling.penalty_last_tokens,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature == 0:
            self._add(lib.llama_sampler_init_greedy())
        else:
            for sampler in _truncating(lib, sampling):
                self._add(sampler)
            self._add(lib.llama_sampler_init_dist(self.seed))
        if sampling.has_penalties:
            for token in history[-sampling.penalty_last_tokens :] if sampling.penalty_last_tokens else ():
                lib.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        self._lib.llama_sampler_chain_add(self._chain, sampler)

    def allowed_length(self, draft: Sequence[int]) -> int:
        """How much of a draft, from its beginning, the grammar allows: the target would reject the rest."""
        return len(draft) if self._grammar is None else self._grammar.allowed_length(draft)

    def match(self, context: Context, draft: Sequence[int], first_output: int) -> tuple[int, int]:
        """Token matching: accept the draft while each token equals the target's own choice.

        Args:
            context: Its last pass produced a row for the pending token and for each draft token.
            draft: The draft's tokens.
            first_output: The pending token's place in that pass.

        Returns:
            The number of accepted tokens and the target's own token after them.
        """
        accepted = 0
        choice = self.choose(context, first_output)
        while accepted < len(draft) and choice == draft[accepted]:
            accepted += 1
            choice = self.choose(context, first_output + accepted)
        return accepted, choice

    def choose(self, context: Context, output: int) -> int:
        """The target's own choice from one row of the last pass. The sampler goes on with it: it must be emitted."""
        if self._is_argmax:
            choice = int(context.logits()[output].argmax())
        elif self._grammar is None:
            choice = int(self._lib.llama_sampler_sample(self._chain, context.handle, output))
        else:
            choice = self._obey(self._grammar, context.logits()[output])
        if self._top is not None:
            self._log_probabilities.append(self._measure(context.logits()[output], choice))
        return choice

    def take_log_probabilities(self) -> list[LogProbabilities]:
        """Those of the tokens chosen since the last call, in order; empty unless they were asked for."""
        taken, self._log_probabilities = self._log_probabilities, []
        return taken

    def close(self) -> None:
        if self.distribution is not None:
            self.distribution.close()
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()

    def _obey(self, grammar: Grammar, row: FloatRows) -> int:
        # Most choices obey without being told, and asking about every token of the vocabulary takes 10 to 40 ms.
        token = self._run_chain(row, None)
        if not grammar.allows(token):
            token = self._run_chain(row, grammar)
            if not grammar.allows(token):
                return self._end_token  # the vocabulary has nothing that the grammar allows
        self._lib.llama_sampler_accept(self._chain, token)
        grammar.accept(token)
        return token

    def _run_chain(self, row: FloatRows, grammar: Grammar | None) -> int:
        candidates = np.zeros(len(row), CANDIDATE)
        candidates["id"] = np.arange(len(row), dtype=np.int32)
        candidates["logit"] = row
        if grammar is not None:
            grammar.restrict(candidates)
        return int(candidates["id"][apply(self._chain, candidates)])

    def _measure(self, row: FloatRows, token: int) -> LogProbabilities:
        assert self._top is not None
        logits = row.astype(np.float64)
        greatest = logits.max()
        logits -= greatest + np.log(np.exp(logits - greatest).sum())
        best: list[int] = []
        if self._top:
            close = np.flatnonzero(logits >= np.partition(logits, -self._top)[-self._top])
            # Equal ones stand in the order of their ids, so that the list is always the same.
            best = close[np.argsort(-logits[close], kind="stable")][: self._top].tolist()
        return LogProbabilities(float(logits[token]), tuple((one, float(logits[one])) for one in best))
