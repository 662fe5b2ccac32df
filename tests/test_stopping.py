"""Answers as they grow: what may be shown, and where they end."""

from hypothesis import given
from hypothesis import strategies as st

from mmx_jax.engine import Token
from mmx_jax.stopping import Answer
from mmx_jax.tokenizer import byte_level

TOKENIZER = byte_level()


def push_all(answer: Answer, text: str) -> list[str]:
    pieces = []
    for i in TOKENIZER.encode(text):
        if answer.finish_reason is None:
            pieces.append(answer.push(Token(i, None, None)))
    if answer.finish_reason is None:
        pieces.append(answer.close())
    return pieces


def test_stop_text_and_what_follows_are_never_shown() -> None:
    answer = Answer(TOKENIZER, (), ("END", "E!"))
    assert push_all(answer, "one EN two END three") == [*"one ", "", "", "EN ", *"two ", "", "", ""]
    assert (answer.text, answer.finish_reason) == ("one EN two ", "stop")
    assert len(answer.tokens) == len("one EN two END")


def test_held_text_is_shown_when_the_length_ends_it() -> None:
    answer = Answer(TOKENIZER, (), ("END",))
    assert push_all(answer, "so E") == [*"so ", "", "E"]
    assert (answer.text, answer.finish_reason) == ("so E", "length")


def test_stop_id_is_a_token_but_not_text() -> None:
    answer = Answer(TOKENIZER, (256,), ())
    shown = [answer.push(Token(i, None, None)) for i in (104, 105, 256)]
    assert shown == ["h", "i", ""]
    assert (answer.text, answer.finish_reason) == ("hi", "stop")
    assert [t.id for t in answer.tokens] == [104, 105, 256]


def test_broken_character_at_the_end_is_replaced() -> None:
    answer = Answer(TOKENIZER, (256,), ())
    first, second = "é".encode()
    assert [answer.push(Token(i, None, None)) for i in (first, second, first, 256)] == ["", "é", "", "\ufffd"]
    assert answer.text == "é\ufffd"


def test_without_a_tokenizer_there_are_only_tokens() -> None:
    answer = Answer(None, (7,), ())
    assert [answer.push(Token(i, None, None)) for i in (5, 6, 7)] == ["", "", ""]
    assert (answer.text, answer.finish_reason) == ("", "stop")


@given(st.text("aab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_stops(text: str, stops: list[str]) -> None:
    """The answer ends where the stop text begins that is complete first; the longest, if several are."""
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    answer = Answer(TOKENIZER, (), stops)
    shown = "".join(push_all(answer, text))
    assert shown == answer.text
    if ends:
        assert answer.text == text[: min(ends)[1]]
        assert answer.finish_reason == "stop"
    else:
        assert answer.text == text
        assert answer.finish_reason == "length"
