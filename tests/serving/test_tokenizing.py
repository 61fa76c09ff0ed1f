"""Prompts become tokens without holding up anybody, and log-probabilities tell the bytes of their own tokens."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import outrider
import outrider.serving.tokenizer as tokenizing
from outrider.api.model import Model
from outrider.decoding.scheduler import EngineConfig
from outrider.serving.tokenizer import ServerTokenizer
from outrider.target.hub import EMBEDDED_ID, load_tokenizer, resolve_model
from tests.toys.serving import Served, connect, sent, serving, wait_for
from tests.toys.tokenizer import FALLBACK, SPECIAL, TOKENIZER, ids, piece

ASKED = {"max_tokens": 4, "temperature": 0}
LONG = 220  # characters of a prompt that still fits


class Noted:
    """A tokenizer whose texts are noted. Those that begin with "w" wait until the event is set."""

    def __init__(self, own: PreTrainedTokenizerBase) -> None:
        self.own, self.go = own, threading.Event()
        self.texts: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        assert not text.startswith("w") or self.go.wait(60)
        return self.own(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


@pytest.fixture(scope="module")
def model(toy: Path) -> Model:
    return outrider.load(toy / "target", str(toy / "drafter"))


@contextmanager
def noting(served: Served) -> Iterator[Noted]:
    texts = served.server.texts
    noted = Noted(texts.tokenizer)
    texts.tokenizer = noted  # type: ignore[assignment]
    try:
        yield noted
    finally:
        noted.go.set()
        texts.tokenizer = noted.own


@cache
def tokenizer_named(name: str) -> PreTrainedTokenizerBase:
    known = {"bytes": TOKENIZER, "fallback": FALLBACK}
    return known[name] if name in known else load_tokenizer(resolve_model(EMBEDDED_ID))


def texts_of(tokenizer: Any, most: int) -> ServerTokenizer:
    return ServerTokenizer(tokenizer, most, rests=False)


# ----------------------------------------------------------------------------
# Prompts.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b" * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\U0001f468\u200d\U0001f469" * 50_000}]}),
        ("/tokenize", {"prompt": "a" * 900_000}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    model: Model, path: str, body: dict[str, Any]
) -> None:
    with serving(model) as served, noting(served) as noted:
        most = served.server.most_tokens
        found = served.post(path, **body)
        assert found.status_code == 400 and f"more than {most} tokens" in found.json()["error"]["message"]
        assert sum(map(len, noted.texts)) <= 2 * most + tokenizing._PIECE
        found = served.post("/detokenize", tokens=[5] * (most + 1))
        assert found.status_code == 400 and f"more than the {most} that fit" in found.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["words", "spaces", "equals", "emoji", "unknown"])
@pytest.mark.parametrize("name", ["bytes", "fallback", "smollm"])
def test_a_prompt_that_fits_is_not_refused(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is cut, and with exactly as many tokens as fit; its tokens are those of the text as a whole."""
    monkeypatch.setattr(tokenizing, "_WHOLE", 0)  # it is counted in any case
    tokenizer = tokenizer_named(name)
    words = ["a ", "the river ", "1" * 30, "\n\n", "    ", "internationalisation "]
    rng = random.Random(0)
    text = {
        "words": "".join(rng.choices(words, k=3000)),
        "spaces": " " * 40_000,
        "equals": "=" * 40_000,
        "emoji": "\U0001f468\u200d\U0001f469" * 4000,
        "unknown": "\u4e00" * 20_000,
    }[kind]
    whole = list(tokenizer(text)["input_ids"])
    assert len(text) > 2 * tokenizing._PIECE
    assert asyncio.run(texts_of(tokenizer, len(whole)).tokens(text, special=True)) == whole


def test_a_short_prompt_does_not_wait_for_long_ones(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_SHORT", 200)
    monkeypatch.setattr(tokenizing, "_REST", 0.0)
    with serving(model) as served, noting(served) as noted, connect(served) as first, connect(served) as second:
        for client, prompt in ((first, "w" * LONG), (second, "w" * (LONG + 1))):
            client.sendall(sent({**ASKED, "prompt": prompt}))
        wait_for(lambda: bool(noted.texts))
        assert served.post("/v1/completions", prompt="ab", **ASKED).status_code == 200
        chat = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "ab"}], **ASKED)
        assert chat.status_code == 200
        assert not noted.go.is_set() and "w" * (LONG + 1) not in noted.texts, "one long prompt after the other"
        noted.go.set()
        for client in (first, second):
            assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_prompts_being_tokenised_count_until_their_clients_leave(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is free at once, and what has not begun is not tokenised."""
    monkeypatch.setattr(tokenizing, "_SHORT", 200)
    monkeypatch.setattr(tokenizing, "_REST", 0.0)
    with serving(model, EngineConfig(max_requests=1), max_waiting=1) as served, noting(served) as noted:
        worker = served.server.worker
        with connect(served) as first, connect(served) as second:
            for number, (client, prompt) in enumerate(((first, "w" * LONG), (second, "w" * (LONG + 1))), 1):
                client.sendall(sent({**ASKED, "prompt": prompt}))
                wait_for(lambda count=number: worker.reserved == count)  # type: ignore[misc]
            full = served.post("/v1/completions", prompt="ab", **ASKED)
            assert full.status_code == 429 and int(full.headers["Retry-After"]) >= 1
            assert served.post("/tokenize", prompt="ab").status_code == 429
        wait_for(lambda: worker.reserved == 0)
        assert served.post("/v1/completions", prompt="ab", **ASKED).status_code == 200
        noted.go.set()
        assert served.post("/v1/completions", prompt="c" * LONG, **ASKED).status_code == 200, "long, and after both"
        assert "w" * (LONG + 1) not in noted.texts


def test_long_prompts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two that do not fit are counted in turns, so that neither waits for the other."""
    monkeypatch.setattr(tokenizing, "_PIECE", 8)
    monkeypatch.setattr(tokenizing, "_SHORT", 16)
    noted = Noted(TOKENIZER)
    texts = texts_of(noted, 50)

    async def both() -> list[Any]:
        asked = (texts.tokens(letter * 1000, special=True) for letter in "ab")
        return await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(one, ValueError) for one in asyncio.run(both()))
    assert noted.texts == ["a" * 8, "b" * 8] * 13, "thirteen pieces of eight are more than twice fifty"


def test_the_thread_of_long_prompts_rests() -> None:
    """Three times as long as it worked. The result need not wait for that."""
    lane, said = tokenizing._Lane("long", rest=3.0), list[tuple[str, float]]()

    def say(word: str) -> None:
        said.append((word, time.perf_counter()))

    def work() -> None:
        say("began")
        time.sleep(0.1)
        say("ended")

    async def twice() -> None:
        first, second = (asyncio.create_task(lane.run(work)) for _ in "ab")
        await first
        say("told")
        await second

    asyncio.run(twice())
    assert [word for word, _ in said] == ["began", "ended", "told", "began", "ended"]
    (_, began), (_, ended), _, (_, again), _ = said
    assert again - ended >= 2.9 * (ended - began)


# ----------------------------------------------------------------------------
# Bytes.
# ----------------------------------------------------------------------------

TEXTS = [" a a1a", "\u20ac 1 a\n", "\U0001f468\u200d\U0001f469", "na\u00efve  text", "STOP P\u20acq", "\ufffd"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK], ids=["bytes", "fallback"])
def test_bytes_of_tokens_are_those_of_their_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    texts = texts_of(tokenizer, 100)
    tokens = list(tokenizer(text)["input_ids"])
    found = [texts.bytes_of(token, first=place == 0) for place, token in enumerate(tokens)]
    assert bytes(byte for one in found for byte in one or ()).decode() == tokenizer.decode(tokens)


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    """A longer one, one of each kind that is a byte alone, special ones, and ids beyond the tokenizer's."""
    texts = texts_of(TOKENIZER, 100)
    assert [texts.bytes_of(token, False) for token in [*ids("\u20ac"), piece("P\u00e2")]] == [
        (0xE2,), (0x82,), (0xAC,), (0x50, 0xE2),
    ]  # fmt: skip
    special = [TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL]
    assert {texts.bytes_of(token, False) for token in [*special, len(TOKENIZER) + 3]} == {None}
    texts = texts_of(FALLBACK, 100)
    byte, word = FALLBACK.convert_tokens_to_ids(["<0xE2>", "\u2581a"])
    assert texts.bytes_of(byte, True) == texts.bytes_of(byte, False) == (0xE2,)
    assert texts.bytes_of(word, True) == (0x61,) and texts.bytes_of(word, False) == (0x20, 0x61)


def test_bytes_of_log_probabilities_joined_are_the_answer(model: Model) -> None:
    """Of a target that writes bytes at random, so hardly a character of more than one is whole; also in a stream."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 60, "seed": 3}
    asked |= {"logprobs": True, "top_logprobs": 3, "ignore_eos": True, "return_token_ids": True, "speculative": "off"}
    with serving(model) as served:
        choice = served.post("/v1/chat/completions", **asked).json()["choices"][0]
        greedy = served.post("/v1/chat/completions", **asked, temperature=0).json()["choices"][0]
        events = served.post("/v1/chat/completions", **asked, stream=True).text.split("data: ")[1:-1]
    told = choice["logprobs"]["content"]
    own = [bytes(one["bytes"] or ()) for one in told]
    assert b"".join(own).decode(errors="replace") == choice["message"]["content"]
    assert sum(len(one) == 1 and one[0] >= 0x80 for one in own) > 10, "parts of characters"
    assert [one["bytes"] is None for one in told] == [id >= len(TOKENIZER) - len(SPECIAL) for id in choice["token_ids"]]
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in greedy["logprobs"]["content"])
    shown = {(one["token"], tuple(one["bytes"] or ())) for at in told for one in at["top_logprobs"]}
    assert sum(token == "\ufffd" for token, _ in shown) > 1, "different tokens, which their texts do not tell apart"
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    assert [one["bytes"] for part in parts if part for one in part["content"]] == [one["bytes"] for one in told]
