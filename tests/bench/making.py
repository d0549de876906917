"""Rows with the few values that a test is about."""

from __future__ import annotations

from dataclasses import replace

from app.bench.row import Row, hash_text


def row(
    prompt_id: str,
    config: str,
    speed: float,
    *,
    category: str = "chat",
    round_number: int = 1,
    distinct: float = 1.0,
    answer: str = "the answer",
    baseline: str = "plain",
) -> Row:
    """An answer of 100 tokens at `speed` tokens per second after half a second of prompt."""
    return Row(
        prompt_id=prompt_id,
        category=category,
        config=config,
        baseline=baseline,
        round=round_number,
        tokens=100,
        seconds=100 / speed,
        tokens_per_second=speed,
        distinct_4gram=distinct,
        finish_reason="length",
        answer_sha256=hash_text(answer),
        text_sha256=hash_text(answer),
        prompt_tokens=20,
        prefill_seconds=0.5,
        time_to_first_token_seconds=0.5,
        decode_seconds=100 / speed,
        total_seconds=0.5 + 100 / speed,
        peak_memory_bytes=1000,
    )


def peer_row(prompt_id: str, config: str, speed: float, *, category: str = "chat", round_number: int = 1) -> Row:
    """An answer of a peer, which is known by its text alone."""
    own = row(prompt_id, config, speed, category=category, round_number=round_number)
    return replace(own, answer_sha256="")
