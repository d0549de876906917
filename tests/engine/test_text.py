"""Text out of tokens: characters are never broken, and nothing of a stop string is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text import TextStream

EMOJI = "👩‍🚀 é"  # an emoji of three code points, and an e with a combining accent


def stream(pieces: list[bytes], *stops: str) -> TextStream:
    return TextStream(lambda token: pieces[token], stops)


def shown(text: TextStream, count: int) -> list[str]:
    """What each token makes readable; stops where a session would."""
    parts = []
    for token in range(count):
        parts.append(text.push(token))
        if text.is_stopped:
            break
    parts.append(text.finish())
    return parts


def test_a_character_split_over_tokens_appears_when_it_is_whole() -> None:
    pieces = [bytes([byte]) for byte in "aé👍".encode()]
    assert shown(stream(pieces), len(pieces)) == ["a", "", "é", "", "", "", "👍", ""]


def test_an_incomplete_character_at_the_very_end_becomes_a_mark() -> None:
    text = stream([b"a", "👍".encode()[:2]])
    assert shown(text, 2) == ["a", "", "\ufffd"]
    assert text.text == "a\ufffd"
    assert text.token_count == 2


def test_bytes_that_are_no_text_become_marks_and_the_rest_goes_on() -> None:
    assert "".join(shown(stream([b"a\xff", b"b"]), 2)) == "a\ufffdb"


def test_a_stop_string_over_token_borders_is_never_shown() -> None:
    text = stream([b"Hi EN", b"", b"D", b" of it"], "END")
    assert shown(text, 4) == ["Hi ", "", "", ""]
    assert (text.text, text.is_stopped, text.token_count) == ("Hi ", True, 0)


def test_what_only_began_like_a_stop_string_is_shown_as_soon_as_that_is_known() -> None:
    text = stream([b"a\nUs", b"e", b"r:", b"\nUse", b"less"], "\nUser:", "\nUseful")
    assert shown(text, 2) == ["a", "", "\nUse"]
    text = stream([b"a\nUs", b"eX"], "\nUser:")
    assert shown(text, 2) == ["a", "\nUseX", ""]


def test_tokens_wholly_before_the_stop_string_count_as_the_answers() -> None:
    text = stream([b"one ", b"two", b" thr", b"ee"], " three")
    shown(text, 4)
    assert (text.text, text.token_count) == ("one two", 2)


def test_of_two_stop_strings_the_one_that_begins_first_counts_in_any_order() -> None:
    for stops in (("ab", "xa"), ("xa", "ab")):
        text = stream([b"..xab"], *stops)
        shown(text, 1)
        assert text.text == ".."


@given(
    st.text(alphabet=EMOJI + "ab", max_size=12),
    st.lists(st.text(alphabet=EMOJI + "ab", min_size=1, max_size=3), max_size=3),
    st.data(),
)
def test_any_split_of_any_text_shows_all_up_to_the_first_stop_string(
    whole: str, stops: list[str], data: st.DataObject
) -> None:
    encoded = whole.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    pieces = [encoded[start:end] for start, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    text = stream(pieces, *stops)
    parts: list[str] = []
    for token in range(len(pieces)):
        parts.append(text.push(token))
        so_far = "".join(parts)
        assert so_far == text.text
        assert not any(stop in so_far for stop in stops)
        if text.is_stopped:
            break
    parts.append(text.finish())
    assert "".join(parts) == text.text
    assert whole.startswith(text.text)
    assert not any(stop in text.text for stop in stops)
    if not any(stop in whole for stop in stops):
        assert text.text == whole
        assert text.token_count == len(pieces)
    else:
        assert text.is_stopped
        assert any(whole.startswith(stop, len(text.text)) for stop in stops)


# Thoughts


def thoughtful(
    said: str, *stops: str, opened: bool = False, stops_inside: bool = False
) -> tuple[TextStream, list[str]]:
    """A stream that was given a text one character at a time, and what each showed."""
    pieces = [character.encode() for character in said]
    text = TextStream(lambda token: pieces[token], stops, starts_thinking=opened, stops_in_thinking=stops_inside)
    return text, shown(text, len(pieces))


def test_a_thought_is_told_apart_and_its_tags_are_never_shown() -> None:
    text, parts = thoughtful("<think>\nHm, 2 < 3.</think>\n\nYes <b>.")
    assert (text.thinking, text.text) == ("Hm, 2 < 3.", "Yes <b>.")
    assert "".join(parts) == text.text
    assert text.said == "<think>\nHm, 2 < 3.</think>\n\nYes <b>."


def test_a_thought_that_the_prompt_has_opened_needs_no_tag() -> None:
    text, _ = thoughtful("Hm.</think>Yes.", opened=True)
    assert (text.thinking, text.text) == ("Hm.", "Yes.")


def test_a_thought_that_never_ends_is_no_answer() -> None:
    text, parts = thoughtful("<think>Hm, </thin")
    assert (text.thinking, text.text, "".join(parts)) == ("Hm, </thin", "", "")


def test_only_the_beginning_of_an_answer_can_open_a_thought() -> None:
    for said in ("Use <think>this</think>.", "<thinker>", "<thi", ""):
        text, parts = thoughtful(said)
        assert (text.thinking, text.text, "".join(parts)) == ("", said, said)


def test_without_thoughts_tags_are_text_like_any_other() -> None:
    text = stream([b"<think>", b"a", b"</think>"])
    assert shown(text, 3) == ["<think>", "a", "</think>", ""]
    assert text.thinking == ""


def test_a_stop_string_ends_the_answer_and_only_if_asked_the_thought() -> None:
    said = "<think>First.\nSecond.</think>Yes.\nNo."
    text, _ = thoughtful(said, "\n")
    assert (text.thinking, text.text, text.is_stopped) == ("First.\nSecond.", "Yes.", True)
    text, _ = thoughtful(said, "\n", stops_inside=True)
    assert (text.thinking, text.text, text.is_stopped) == ("First.", "", True)
    text, _ = thoughtful(said, "Second.</think>Yes")
    assert (text.text, text.is_stopped) == ("Yes.\nNo.", False)


@given(st.text("a<>/think\n", max_size=12), st.text("b<>/think\n", max_size=12), st.integers(1, 5))
def test_however_a_thought_is_cut_into_tokens_it_reads_the_same(thought: str, answer: str, size: int) -> None:
    said = f"<think>{thought}</think>{answer}".encode()
    pieces = [said[start : start + size] for start in range(0, len(said), size)]
    text = TextStream(lambda token: pieces[token], (), starts_thinking=False)
    parts = shown(text, len(pieces))
    whole, _ = thoughtful(said.decode())
    assert (text.thinking, text.text) == (whole.thinking, whole.text)
    assert "".join(parts) == text.text
    inner, _, outer = (thought + "</think>" + answer).partition("</think>")
    assert (text.thinking, text.text) == (inner.lstrip(), outer.lstrip())
