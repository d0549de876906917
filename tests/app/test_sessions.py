"""The pool on the real starter: what a closed session knew is known to the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.sessions import MOST_SESSIONS, SessionPool
from engine.config import SetConfig
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.transcript import Piece
from engine.types import Finished
from tests.app.conftest import settings


@pytest.fixture
def loaded_set(set_config: SetConfig) -> Iterator[LoadedSet]:
    loaded = LoadedSet.load(set_config)
    yield loaded
    loaded.close()


def answer(pool: SessionPool, conversation_id: str) -> Finished:
    *_, last = pool.session(conversation_id).chat([Message("user", "Hi!")], settings(6), threading.Event())
    assert isinstance(last, Finished)
    return last


def nothing(_conversation_id: str) -> tuple[Piece, ...]:
    return ()


def test_a_new_session_is_told_what_is_known_of_its_tokens(loaded_set: LoadedSet) -> None:
    known: dict[str, tuple[Piece, ...]] = {}
    pool = SessionPool(loaded_set, lambda conversation_id: known.get(conversation_id, ()))
    token_ids = answer(pool, "first").token_ids
    known["first"] = pool.session("first").remembered
    for number in range(MOST_SESSIONS):
        answer(pool, f"other {number}")
    assert "first" not in pool.conversation_ids
    assert pool.session("first").remembered[-1].tokens == token_ids
    pool.close()


def test_a_dropped_conversation_is_forgotten(loaded_set: LoadedSet) -> None:
    pool = SessionPool(loaded_set, nothing)
    answer(pool, "first")
    pool.drop("first")
    assert pool.conversation_ids == ()
    assert pool.session("first").remembered == ()
    pool.close()


def test_those_that_wait_take_no_more_than_one_cache(set_config: SetConfig) -> None:
    loaded = LoadedSet.load(replace(set_config, context_tokens=256))
    pool = SessionPool(loaded, nothing)
    long = "Here are some words that fill the context. " * 8
    for number in range(4):
        *_, _ = pool.session(f"{number}").chat([Message("user", long)], settings(4), threading.Event())
    # Each holds more than a third of the cache, so that two may wait beside the one at work.
    assert pool.conversation_ids == ("1", "2", "3")
    pool.close()
    loaded.close()
