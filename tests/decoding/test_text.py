"""Tokens to text: characters split over tokens, stop strings wherever they fall, nothing lost and nothing early."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outrider.decoding.text import TextStream
from tests.toys.tokenizer import FALLBACK, PIECES, SPECIAL, TOKENIZER, ids, piece


def test_the_tokenizer_splits_characters_and_knows_longer_pieces() -> None:
    assert len(ids("é")) == 2 and len(ids("€")) == 3 and len(ids("🚀")) == 4
    assert TOKENIZER.decode([piece("STO"), piece("Pq")]) == "STOPq"
    assert len(TOKENIZER) == 256 + len(PIECES) + len(SPECIAL)


def test_a_character_is_released_only_when_its_last_byte_is_there() -> None:
    stream = TextStream(TOKENIZER)
    released = []
    for token in ids("a€🚀é!"):
        stream.push(token)
        released.append(stream.release())
    assert released == ["a", "", "", "€", "", "", "", "🚀", "", "é", "!"]
    assert stream.release(final=True) == ""


def test_bytes_that_never_become_a_character_are_released_at_the_end_or_when_the_next_one_comes() -> None:
    stream = TextStream(TOKENIZER)
    half = ids("€")[:2]
    for token in half:
        stream.push(token)
    assert stream.release() == ""
    assert stream.release(final=True) == TOKENIZER.decode(half) == "�"
    stream = TextStream(TOKENIZER)
    for token in [*half, *ids("ok")]:
        stream.push(token)
    assert stream.release() == "�ok"


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_add_up_to_the_decoded_text(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abc  \n.,'é€🚀日本語ñ") for _ in range(60))
    tokens = ids(text)
    for _ in range(4):  # special tokens and stray bytes in between
        tokens.insert(draw.randrange(len(tokens)), draw.choice([piece("<|im_end|>"), draw.randrange(256)]))
    tokens += ids("日")[: draw.randrange(3)]
    stream = TextStream(TOKENIZER, ["never in the text"])
    released = []
    for token in tokens:
        assert not stream.push(token)
        if draw.random() < 0.4:  # rounds of several tokens
            released.append(stream.release())
    released.append(stream.release(final=True))
    assert "".join(released) == TOKENIZER.decode(tokens, skip_special_tokens=True) == stream.text


@pytest.mark.parametrize(
    "tokens",
    [ids("go STOP now"), [*ids("go "), piece("STOP")], [*ids("go "), piece("STO"), piece("Pq"), *ids(" more")]],
    ids=["byte by byte", "one token", "inside the second token"],
)
def test_a_stop_string_ends_the_text_before_it(tokens: list[int]) -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    released, pushed = "", 0
    for token in tokens:
        pushed += 1
        stopped = stream.push(token)
        released += stream.release(final=stopped)
        if stopped:
            break
    assert stream.stopped and released == stream.text == "go "
    assert "STOP" in TOKENIZER.decode(tokens[:pushed]) and "STOP" not in TOKENIZER.decode(tokens[: pushed - 1])


def test_the_beginning_of_a_stop_string_is_held_back_and_released_if_it_is_not_one() -> None:
    stream = TextStream(TOKENIZER, ["STOP", "TOE"])
    released = []
    for token in ids("a STO?"):
        stream.push(token)
        released.append(stream.release())
    assert released == ["a", " ", "", "", "", "STO?"]
    for token in ids("ST"):
        stream.push(token)
    assert stream.release() == ""
    assert stream.release(final=True) == "ST", "the response ended: nothing can complete it"


def test_held_back_text_keeps_the_longest_possible_beginning() -> None:
    stream = TextStream(TOKENIZER, ["ababc"])
    released = ""
    for token in ids("xabab"):
        stream.push(token)
        released += stream.release()
    assert released == "x"
    for token in ids("abc"):
        stopped = stream.push(token)
        released += stream.release()
    assert stopped and released == "xab"


@pytest.mark.parametrize("stops", [["OP", "STOP"], ["STOP", "OP"]])
def test_the_first_of_several_stop_strings_wins_even_when_another_completes_with_it(stops: list[str]) -> None:
    stream = TextStream(TOKENIZER, stops)
    assert not stream.push(piece("STO"))
    assert stream.release() == ""
    assert stream.push(piece("Pq"))
    assert stream.release(final=True) == "" and stream.text == ""


def test_a_stop_string_with_a_split_character() -> None:
    stream = TextStream(TOKENIZER, ["é!"])
    results = [stream.push(token) for token in ids("né!x")[:-1]]
    assert results == [False, False, False, True] and stream.release(final=True) == "n"


def test_a_stop_string_before_an_unfinished_character_is_found_at_once() -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    results = [stream.push(token) for token in [*ids("go "), piece("STO"), piece("P\u00e2")]]
    assert results == [False] * 4 + [True] and stream.release(final=True) == "go "


def test_bytes_that_are_no_text_are_released_as_they_come() -> None:
    stream, bad = TextStream(TOKENIZER, ["STOP"]), ids("é")[1]  # a byte that begins no character
    released = ""
    for count in range(1, 40):
        assert not stream.push(bad)
        released += stream.release()
        assert released == "�" * max(0, count - 3)
    assert not stream.push(piece("STO"))
    assert stream.push(piece("P\u00e2"))
    assert released + stream.release(final=True) == "�" * 39


@pytest.mark.parametrize("kind", ["bad bytes", "text"])
def test_the_work_for_a_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = [0], TOKENIZER.decode

    def counting(tokens: list[int], **options: object) -> str:
        decoded[-1] += len(tokens)
        return str(decode(tokens, **options))

    monkeypatch.setattr(TOKENIZER, "decode", counting)
    stream = TextStream(TOKENIZER, ["STOP"])
    for token in [ids("é")[1]] * 600 if kind == "bad bytes" else ids("abcdefghij" * 60):
        stream.push(token)
        stream.release()
        decoded.append(0)
    assert max(decoded) <= 24, "two windows at most"


@pytest.mark.parametrize(
    "stops, text, last",
    [
        (["<|im_end|>"], "go !", 4),
        (["!<|im_end|>"], "go ", 4),
        (["<|im_end|>STOP"], "go !", 5),
        (["!<|im_end|>STOP"], "go ", 5),
        (["<|im_end|>ST\u00e9", "!<|im_end|>?"], "go !STOP\u00e9", None),
        (["im_end"], "go !STOP\u00e9", None),  # a part of a special token is no text
        (["!STOP"], "go ", 5),  # text as it is in the output
        (["<|im_start|>", "STOP"], "go !", 5),
    ],
)
def test_a_stop_string_with_a_special_token(stops: list[str], text: str, last: int | None) -> None:
    """`last`: the token that completes it."""
    stream, released, found = TextStream(TOKENIZER, stops), "", None
    for at, token in enumerate([*ids("go !"), piece("<|im_end|>"), piece("STOP"), *ids("é")]):
        stopped = stream.push(token)
        released += stream.release(final=stopped)
        if stopped:
            found = at
            break
    assert released + stream.release(final=True) == stream.text == text
    assert found == last


TOKENS = st.one_of(
    st.sampled_from(ids("é€🚀 STOP\ufffd")),
    st.integers(0, 255),
    st.sampled_from([piece(name) for name in (*PIECES, *SPECIAL)]),
)


@given(st.lists(TOKENS, max_size=60), st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_stream_to_the_decoded_text_up_to_a_stop_string(tokens: list[int], data: st.DataObject) -> None:
    """The stop string is anywhere in the text, and is found with the token that completes it."""
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    start, length = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 5))
    stop = whole[start : start + length]
    stream, released, stopped = TextStream(TOKENIZER, [stop] if stop else []), "", False
    for number, token in enumerate(tokens, 1):
        stopped = stream.push(token)
        if data.draw(st.booleans()):  # rounds of several tokens
            released += stream.release()
        if "\ufffd" not in stop:
            assert stopped == (stop != "" and stop in TOKENIZER.decode(tokens[:number], skip_special_tokens=True))
        if stopped:
            break
    released += stream.release(final=True)
    assert released == stream.text == (whole[: whole.find(stop)] if stop else whole)


@given(st.text("a 1é€🚀日", max_size=20))
@settings(deadline=None)
def test_characters_in_byte_tokens_after_one_another(text: str) -> None:
    """Byte fallback decodes a run of bytes as a whole, and strips the first space of what it decodes."""
    stream, released = TextStream(FALLBACK), ""
    for token in FALLBACK(text)["input_ids"]:
        stream.push(token)
        released += stream.release()
    assert released + stream.release(final=True) == text


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        TextStream(TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        TextStream(None, ["a"])
    stream = TextStream(None)
    assert not stream.push(5) and stream.release(final=True) == "", "without a tokenizer there is no text"
