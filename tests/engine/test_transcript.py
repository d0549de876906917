"""An answer's ids are never made anew from its text."""

from __future__ import annotations

from engine.transcript import Transcript


class Tokenizer:
    """One token for each character, and a record of what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, text: str, begins: bool) -> list[int]:
        self.asked.append((text, begins))
        return list(map(ord, text))


ANSWER_IDS = (100_001, 100_002)
"""Ids that no tokenisation gives."""


def answered(answer: str = "Hello!") -> tuple[Transcript, Tokenizer]:
    tokenizer = Tokenizer()
    transcript = Transcript(tokenizer)
    transcript.encode("U:hi\nA:")
    transcript.record_answer(answer, ANSWER_IDS)
    return transcript, tokenizer


def test_a_follow_up_keeps_the_answers_ids_and_tokenises_only_what_is_new() -> None:
    transcript, tokenizer = answered()
    tokens = transcript.encode("U:hi\nA:Hello!\nU:more\nA:")
    assert tokens == [*map(ord, "U:hi\nA:"), *ANSWER_IDS, *map(ord, "\nU:more\nA:")]
    assert tokenizer.asked == [("U:hi\nA:", True), ("\nU:more\nA:", False)]


def test_a_template_that_strips_the_answer_keeps_its_ids_too() -> None:
    transcript, _ = answered(" Hello!\n")
    for _ in range(2):  # the kept piece must still match the next time
        tokens = transcript.encode("U:hi\nA:Hello!\nU:more\nA:")
        assert tokens == [*map(ord, "U:hi\nA:"), *ANSWER_IDS, *map(ord, "\nU:more\nA:")]


def test_regenerating_drops_the_answer() -> None:
    transcript, tokenizer = answered()
    assert transcript.encode("U:hi\nA:") == list(map(ord, "U:hi\nA:"))
    assert len(tokenizer.asked) == 1


def test_an_edited_answer_is_tokenised_anew() -> None:
    transcript, _ = answered()
    rendered = "U:hi\nA:Bye!\nU:more\nA:"
    assert transcript.encode(rendered) == list(map(ord, rendered))


def test_an_edited_question_is_tokenised_anew_and_begins_the_sequence() -> None:
    transcript, tokenizer = answered()
    rendered = "U:ho\nA:"
    assert transcript.encode(rendered) == list(map(ord, rendered))
    assert tokenizer.asked[-1] == (rendered, True)


def test_white_space_of_a_prompt_is_part_of_it() -> None:
    transcript = Transcript(Tokenizer())
    transcript.encode("say A\n")
    assert transcript.encode("say A B\n") == list(map(ord, "say A B\n"))


def test_an_empty_answer_leaves_no_trace() -> None:
    transcript, _ = answered("")
    rendered = "U:hi\nA:\nU:more\nA:"
    assert transcript.encode(rendered) == list(map(ord, rendered))


def test_another_transcript_continues_where_one_left_off() -> None:
    transcript, _ = answered()
    tokenizer = Tokenizer()
    later = Transcript(tokenizer, transcript.pieces)
    tokens = later.encode("U:hi\nA:Hello!\nU:more\nA:")
    assert tokens == [*map(ord, "U:hi\nA:"), *ANSWER_IDS, *map(ord, "\nU:more\nA:")]
    assert tokenizer.asked == [("\nU:more\nA:", False)]
