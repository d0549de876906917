"""The store: what is kept, found and given back, also after the process was killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.conversations import INTERRUPTED, AnswerToken, Conversations, Listing, Turn
from app.export import as_json, as_markdown, file_stem
from engine.errors import EnvironmentProblem
from engine.transcript import Piece
from engine.types import FinishReason, Provenance

TOKENS = (
    AnswerToken(11, "Blue", Provenance.ACCEPTED, ("ngram", "suffix"), 0.75, 0.5),
    AnswerToken(12, "!", Provenance.BONUS),
)
ANSWERED = Turn("Name a colour.", "Blue!", FinishReason.STOP, "", "Small", TOKENS)


def answered(store: Conversations, question: str = "Name a colour.", answer: str = "Blue!") -> str:
    conversation_id = store.create().id
    assert store.add_turn(conversation_id, question, "Be brief.") == 0
    store.set_turn(conversation_id, 0, Turn(question, answer, FinishReason.STOP, "", "Small", TOKENS))
    return conversation_id


def names(store: Conversations, words: str = "") -> list[str]:
    return [entry.name for entry in store.find(words).entries]


def test_everything_comes_back_from_the_file(tmp_path: Path) -> None:
    store = Conversations(tmp_path / "c.sqlite3")
    conversation_id = answered(store)
    pieces = (Piece("<user>Name a colour.", (1, 2)), Piece("Blue!", (11, 12), is_answer=True))
    store.keep_pieces(conversation_id, "small.gguf", pieces)
    store.close()
    later = Conversations(tmp_path / "c.sqlite3")
    conversation = later.get(conversation_id)
    assert conversation is not None
    assert conversation.turns == (ANSWERED,)
    assert conversation.system_prompt == "Be brief."
    assert later.pieces(conversation_id, "small.gguf") == pieces
    assert later.pieces(conversation_id, "other.gguf") == ()
    later.close()


def test_the_list_is_newest_first_and_leaves_out_what_nobody_began() -> None:
    store = Conversations()
    answered(store, "first")
    second = answered(store, "second")
    store.create()
    assert names(store) == ["second", "first"]
    store.add_turn(second, "and more", "")
    store.rename(second, "  Colours ")
    assert names(store) == ["Colours", "first"]
    store.rename(second, "")
    assert names(store) == ["second", "first"]


def test_search_finds_all_words_in_titles_questions_and_answers() -> None:
    store = Conversations()
    answered(store, "Tell me about 100% wool", "It is warm.")
    answered(store, "What is felt?", "Pressed WOOL.")
    assert len(names(store, "wool")) == 2
    assert names(store, "wool warm") == ["Tell me about 100% wool"]
    assert names(store, "100%") == ["Tell me about 100% wool"]
    assert names(store, "_") == []


def test_of_many_conversations_the_newest_are_listed_and_the_others_counted() -> None:
    store = Conversations()
    for number in range(5):
        answered(store, f"Question {number}", "Odd." if number % 2 else "Even.")
    listing = store.find(limit=3)
    assert [entry.name for entry in listing.entries] == ["Question 4", "Question 3", "Question 2"]
    assert listing.older == 2
    found = store.find("even", limit=2)
    assert [entry.name for entry in found.entries] == ["Question 4", "Question 2"]
    assert found.older == 1
    assert store.find(limit=5).older == 0
    assert store.find("no such words") == Listing()


def test_deleting_takes_everything_with_it() -> None:
    store = Conversations()
    conversation_id = answered(store)
    store.keep_pieces(conversation_id, "t", (Piece("x", (1,)),))
    store.delete(conversation_id)
    assert store.get(conversation_id) is None
    assert names(store) == []
    assert store.pieces(conversation_id, "t") == ()
    store.append(conversation_id, 0, "late", TOKENS)
    store.keep_pieces(conversation_id, "t", (Piece("late", (1,)),))
    assert store.add_turn(conversation_id, "late", "") is None


def test_a_question_takes_the_place_of_another_and_what_came_after() -> None:
    store = Conversations()
    conversation_id = answered(store)
    store.add_turn(conversation_id, "two", "")
    store.append(conversation_id, 1, "half an ans", TOKENS)
    assert store.add_turn(conversation_id, "two, please", "", replaced=1) == 1
    conversation = store.get(conversation_id)
    assert conversation is not None
    assert conversation.turns == (ANSWERED, Turn("two, please"))
    assert store.add_turn("unknown", "two", "", replaced=0) is None


def test_what_is_replaced_stays_unless_its_successor_is_kept(tmp_path: Path) -> None:
    """The old turn goes and the new one comes in one transaction: whatever stops it in between undoes both."""
    path = tmp_path / "c.sqlite3"
    store = Conversations(path)
    conversation_id = answered(store)
    with sqlite3.connect(path) as other:
        other.execute("CREATE TRIGGER stop BEFORE INSERT ON turns BEGIN SELECT RAISE(ABORT, 'stopped'); END")
    other.close()
    with pytest.raises(sqlite3.IntegrityError, match="stopped"):
        store.add_turn(conversation_id, "Another one.", "", replaced=0)
    conversation = store.get(conversation_id)
    store.close()
    later = Conversations(path)
    assert conversation is not None
    assert conversation == later.get(conversation_id)
    assert conversation.turns == (ANSWERED,)
    later.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from app.conversations import AnswerToken, Conversations
from engine.transcript import Piece
from engine.types import Provenance
store = Conversations(Path(sys.argv[1]))
conversation_id = store.create().id
store.add_turn(conversation_id, "Count.", "")
store.keep_pieces(conversation_id, "t", (Piece("Count.", (5,)),))
for number in range(3):
    store.append(conversation_id, 0, f"{number} ", (AnswerToken(20 + number, f"{number} ", Provenance.PLAIN),))
print(conversation_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such kill")
def test_a_killed_process_loses_no_finished_batch(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    store = Conversations(path)
    conversation_id = killed.stdout.strip()
    conversation = store.get(conversation_id)
    assert conversation is not None
    (turn,) = conversation.turns
    assert turn.answer == "0 1 2 "
    assert [token.id for token in turn.tokens] == [20, 21, 22]
    assert turn.note == INTERRUPTED
    assert store.pieces(conversation_id, "t") == (Piece("Count.", (5,)), Piece("0 1 2 ", (20, 21, 22), is_answer=True))
    store.close()


def test_a_running_answer_of_another_process_is_left_alone(tmp_path: Path) -> None:
    first = Conversations(tmp_path / "c.sqlite3")
    conversation_id = answered(first)
    first.add_turn(conversation_id, "two", "")
    first.append(conversation_id, 1, "half", TOKENS)
    second = Conversations(tmp_path / "c.sqlite3")
    conversation = second.get(conversation_id)
    assert conversation is not None
    assert conversation.turns[1] == Turn("two")
    second.close()
    first.close()


def test_a_thought_that_was_cut_off_by_a_kill_is_kept_as_one(tmp_path: Path) -> None:
    store = Conversations(tmp_path / "c.sqlite3")
    conversation_id = store.create().id
    store.add_turn(conversation_id, "Name a fish.", "")
    for text, said in (("", "They want a fish."), ("", "\n"), ("", ""), ("A salm", "A salm")):
        store.append(conversation_id, 0, text, (AnswerToken(5, said, Provenance.PLAIN),))
    store.close()
    later = Conversations(tmp_path / "c.sqlite3")
    conversation = later.get(conversation_id)
    assert conversation is not None
    assert (conversation.turns[0].thinking, conversation.turns[0].answer) == ("They want a fish.\n", "A salm")
    later.close()


def test_a_file_that_is_no_database_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "c.sqlite3").write_bytes(b"not a database, and long enough to be looked at" * 40)
    with pytest.raises(EnvironmentProblem, match=r"c\.sqlite3"):
        Conversations(tmp_path / "c.sqlite3")


def test_export_as_markdown_and_json() -> None:
    store = Conversations()
    conversation_id = answered(store)
    store.rename(conversation_id, "Colours / shades?")
    conversation = store.get(conversation_id)
    assert conversation is not None
    text = as_markdown(conversation)
    assert text.startswith("# Colours / shades?\n\n> Be brief.\n\n## You\n\nName a colour.\n\n## Small\n\nBlue!")
    document = json.loads(as_json(conversation))
    assert document["turns"][0]["tokens"][0] == {
        "id": 11,
        "text": "Blue",
        "origin": "accepted",
        "proposers": ["ngram", "suffix"],
        "agreement": 0.75,
        "probability": 0.5,
    }
    assert file_stem(conversation) == "colours-shades"
    assert os.sep not in file_stem(conversation)


def test_a_thought_is_exported_apart_from_the_answer() -> None:
    store = Conversations()
    conversation_id = answered(store)
    store.set_turn(conversation_id, 0, replace(ANSWERED, thinking="The sky has one."))
    conversation = store.get(conversation_id)
    assert conversation is not None
    folded = "<details><summary>Thought</summary>\n\nThe sky has one.\n\n</details>"
    assert f"## Small\n\n{folded}\n\nBlue!\n" in as_markdown(conversation)
    turn = json.loads(as_json(conversation))["turns"][0]
    assert (turn["thinking"], turn["answer"]) == ("The sky has one.", "Blue!")
