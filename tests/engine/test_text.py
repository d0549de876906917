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
