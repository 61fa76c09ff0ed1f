"""Tokens to text: characters split over tokens, stop strings wherever they fall, nothing lost and nothing early."""

from __future__ import annotations

import random

import pytest

from outrider.decoding.request import TextStream
from tests.toys.tokenizer import PIECES, SPECIAL, TOKENIZER, ids, piece


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


def test_a_stop_string_before_an_unfinished_character_is_found_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    for token in [*ids("go "), piece("STO"), piece("P\u00e2")]:
        assert not stream.push(token), "the last character may still change"
    assert stream.release(final=True) == "go " and stream.stopped


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        TextStream(TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        TextStream(None, ["a"])
    stream = TextStream(None)
    assert not stream.push(5) and stream.release(final=True) == "", "without a tokenizer there is no text"
