"""Responses over real HTTP: faults of every kind, servers that die, tokens that are exact or said to be guessed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.openai import Part, read_answer, retry_after
from outrider.backends.registry import server_of
from outrider.data.chat import Chat
from outrider.data.conversations import Conversation
from outrider.data.regenerate import (
    DataSection,
    LocalSource,
    Regeneration,
    Request,
    ServerSource,
    Unusable,
    regenerate,
    reply_of,
)
from outrider.data.responses import Reply, companion_file, read_responses
from outrider.target.model import Target
from tests.toys.openai_server import ToyServer, dead_url, serving
from tests.toys.targets import TOY
from tests.toys.tokenizer import byte_tokenizer

PROMPTS = [Conversation(f"p{i}", tuple("abcdefghi"[i : i + 1 + i % 2])) for i in range(8)]  # 1 or 2 turns, 12 in all
SEED = 3


def section(**fields: Any) -> DataSection:
    sampled = {"max_new_tokens": 6, "temperature": 1.2, "top_k": 30, "top_p": 0.9}
    return DataSection.model_validate({"responses": "r.jsonl", **sampled, **fields})


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": len(tokenizer), "num_hidden_layers": 1}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return Target(model, tokenizer, "toy")


@pytest.fixture(scope="module")
def local(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Reply]:
    """What the local engine says, and a faithful server too, since every response has its own seed."""
    path = tmp_path_factory.mktemp("local") / "r.jsonl"
    return regenerate(LocalSource(target, section(batch_size=1)), PROMPTS, path, seed=SEED).replies


def ask(
    target: Target,
    path: Path,
    urls: list[str],
    stop: Callable[[], bool] = lambda: False,
    api_key: str | None = None,
    **options: Any,
) -> tuple[Regeneration, ServerSource]:
    data = section(base_urls=urls, **{"concurrency": 3, "retries": 4, "timeout": 5.0, **options})
    source = ServerSource(Chat.of(target), data, api_key=api_key, backoff=0.01)
    return regenerate(source, PROMPTS, path, seed=SEED, stop=stop), source


@pytest.mark.parametrize("ids", ["token_ids", "output_ids"])
def test_two_servers_give_the_tokens_of_the_local_engine(
    target: Target, local: list[Reply], tmp_path: Path, ids: str
) -> None:
    with serving(ToyServer(target, ids=ids)) as a, serving(ToyServer(target, ids=ids)) as b:
        made, source = ask(target, tmp_path / "r.jsonl", [a.url, b.url + "/v1/"], api_key="secret")
    assert made.replies == local and source.trouble is None
    assert made.summary.done == made.summary.total == 12 and made.summary.inexact == 0
    assert len(a.bodies) + len(b.bodies) == 12 and a.bodies and b.bodies, "both work, none twice"
    assert max(a.busiest, b.busiest) <= 3
    assert all(h["Authorization"] == "Bearer secret" for h in a.headers)
    body = a.bodies[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["model"]) == (1.2, 0.9, 30, "toy")
    settings, read = read_responses(tmp_path / "r.jsonl")
    assert settings["generator"] == "completions:toy" and read == local, "written in the order of the prompts"


def test_the_same_bytes_whatever_goes_wrong_on_the_way(target: Target, local: list[Reply], tmp_path: Path) -> None:
    faults = ["429", "500", "drop", "malformed", None, "no choices", "503", None, "drop", "502", "408"]
    with serving(ToyServer(target)) as calm:
        ask(target, tmp_path / "calm.jsonl", [calm.url])
    with serving(ToyServer(target, lambda number, _: faults[number] if number < len(faults) else None)) as rough:
        made, _ = ask(target, tmp_path / "rough.jsonl", [rough.url, dead_url()])
    assert made.replies == local
    assert (tmp_path / "rough.jsonl").read_bytes() == (tmp_path / "calm.jsonl").read_bytes()
    assert len(rough.bodies) == 12 + 9, "one more request for each fault"


def test_a_server_that_dies_is_replaced_by_another(target: Target, local: list[Reply], tmp_path: Path) -> None:
    with serving(ToyServer(target)) as healthy:
        dead = dead_url()
        started = time.monotonic()
        made, source = ask(target, tmp_path / "r.jsonl", [dead, healthy.url])
        assert made.replies == local and source.trouble is None and time.monotonic() - started < 10
        with serving(ToyServer(target, lambda *_: "401")) as locked:
            made, source = ask(target, tmp_path / "s.jsonl", [locked.url, healthy.url])
    assert made.replies == local and source.trouble is None and len(locked.bodies) <= 2 * 3


def test_without_any_server_what_is_done_stays_and_the_rest_waits(
    target: Target, local: list[Reply], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    with serving(ToyServer(target, lambda number, _: None if number < 5 else "403")) as toy:
        made, source = ask(target, path, [toy.url], concurrency=1)
    assert source.trouble is not None and "refuses the request (403" in source.trouble
    counts = made.summary
    assert (counts.total, counts.done, counts.failed, counts.waiting) == (12, 5, 0, 7)
    assert read_responses(path)[1] == made.replies and not companion_file(path, "failed").exists()
    made, source = ask(target, path, [dead_url()], served_model="toy", retries=2)
    assert source.trouble is not None and "cannot be reached" in source.trouble and made.summary.done == 5
    with serving(ToyServer(target)) as toy:
        made, _ = ask(target, path, [toy.url])
    assert made.replies == local and len(toy.bodies) == 7, "only what was missing"


def test_failures_are_kept_aside_counted_and_asked_again(target: Target, local: list[Reply], tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = {tuple(r.prompt): r.id for r in local if r.turn == 0}
    broken = {"p1": "400", "p2": "500", "p4": "malformed"}
    asked: Counter[str] = Counter()

    def fault(number: int, body: dict[str, Any]) -> str | None:
        name = first.get(tuple(body["prompt"]), "")
        asked[name] += 1
        return broken.get(name)

    with serving(ToyServer(target, fault)) as toy:
        made, _ = ask(target, path, [toy.url])
    counts = made.summary
    assert (counts.total, counts.done, counts.failed, counts.skipped, counts.waiting) == (12, 8, 4, 0, 0)
    failed = [json.loads(line) for line in companion_file(path, "failed").read_text().splitlines()]
    assert [(f["id"], f["turn"]) for f in failed] == [("p1", 0), ("p2", 0), ("p4", 0)]
    assert failed[0]["reason"].startswith("400: ") and "asked for 400" in failed[0]["reason"]
    assert failed[1]["reason"].startswith("500: ") and "JSONDecodeError" in failed[2]["reason"]
    assert (asked["p1"], asked["p2"], asked["p4"]) == (1, 5, 5), "400 is not asked again, the others four times"
    with serving(ToyServer(target)) as toy:
        made, _ = ask(target, path, [toy.url])
    assert made.replies == local and len(toy.bodies) == 4 and not companion_file(path, "failed").exists()


def test_retry_after_is_honoured(target: Target, tmp_path: Path) -> None:
    times: list[float] = []

    def fault(number: int, body: dict[str, Any]) -> str | None:
        times.append(time.monotonic())
        return "429" if number == 0 else None

    with serving(ToyServer(target, fault, retry_after="0.5")) as toy:
        ask(target, tmp_path / "r.jsonl", [toy.url], concurrency=1)
    assert times[1] - times[0] >= 0.5
    assert retry_after("2.5") == 2.5 and retry_after("soon") is None and retry_after(None) is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = retry_after("Wed, 21 Oct 2099 07:28:00 GMT")
    assert later is not None and later > 1e9


def test_a_slow_answer_times_out_and_is_asked_for_again(target: Target, local: list[Reply], tmp_path: Path) -> None:
    def slow(number: int, body: dict[str, Any]) -> str | None:
        if number == 0:
            time.sleep(6.0)
        return None

    with serving(ToyServer(target, slow)) as toy:
        made, _ = ask(target, tmp_path / "r.jsonl", [toy.url], timeout=3.0)
    assert made.replies == local and len(toy.bodies) == 13


def test_a_stop_finishes_what_is_under_way(target: Target, local: list[Reply], tmp_path: Path) -> None:
    with serving(ToyServer(target)) as toy:
        made, source = ask(target, tmp_path / "r.jsonl", [toy.url], stop=lambda: len(toy.bodies) >= 4)
        assert source.trouble is None and 4 <= made.summary.done <= 6
        assert made.summary.done == len(toy.bodies) and made.summary.waiting == 12 - made.summary.done
        made, _ = ask(target, tmp_path / "r.jsonl", [toy.url])
    assert made.replies == local and len(toy.bodies) == 12


def test_text_without_ids_is_split_again_and_marked(target: Target, local: list[Reply], tmp_path: Path) -> None:
    with serving(ToyServer(target, ids=None)) as toy:
        made, _ = ask(target, tmp_path / "r.jsonl", [toy.url])
    assert made.summary.inexact == 12 and not any(r.exact for r in made.replies)
    tokenizer = byte_tokenizer()
    for ours, theirs in zip(local, made.replies, strict=True):
        if ours.turn == 0:
            said = tokenizer.decode(ours.response, skip_special_tokens=True)
            assert tokenizer.decode(theirs.response, skip_special_tokens=True) == said


def test_the_chat_api_gives_messages_tools_and_thinking_to_the_server(
    target: Target, local: list[Reply], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    with serving(ToyServer(target)) as toy:
        made, _ = ask(target, path, [toy.url], chat_api=True)
        assert [r for r in made.replies if r.turn == 0] == [r for r in local if r.turn == 0]
        again, _ = ask(target, path, [toy.url], chat_api=True)
        assert again.replies == made.replies and len(toy.bodies) == 12
    assert all("prompt" not in body for body in toy.bodies)
    assert toy.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    longest = max((body["messages"] for body in toy.bodies), key=len)
    assert [m["role"] for m in longest] == ["user", "assistant", "user"]


def test_models_are_found_and_must_agree(target: Target) -> None:
    with serving(ToyServer(target, model="one")) as a, serving(ToyServer(target, model="two")) as b:
        with pytest.raises(ValueError, match="different models"):
            ServerSource(Chat.of(target), section(base_urls=[a.url, b.url]))
        assert ServerSource(Chat.of(target), section(base_urls=[dead_url(), b.url])).model == "two"
    dead = dead_url()
    with pytest.raises(ValueError, match=f"no model is listed at {dead}/v1 .ConnectError"):
        ServerSource(Chat.of(target), section(base_urls=[dead]))
    with pytest.raises(ValueError, match="must start with http"):
        ServerSource(Chat.of(target), section(base_urls=["localhost:8000"]))


def answer(**choice: Any) -> Part:
    return read_answer({"choices": [{"finish_reason": "stop", "text": "ab", **choice}]}, server_of("openai"))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (answer(token_ids=[1, 2, 9999]), "token 9999 is not in the target's vocabulary"),
        (answer(token_ids=[1], prompt_token_ids=[7]), "changed the prompt"),
    ],
)
def test_answers_that_no_retry_improves(target: Target, given: Part, error: str) -> None:
    request = Request("a", 0, [5, 6], 1, False, [], ())
    with pytest.raises(Unusable, match=error):
        reply_of(given, request, Chat.of(target), chat_api=False)
    message = {"content": None, "tool_calls": [{"id": 1}]}
    with pytest.raises(Unusable, match="tool_calls out of the text"):
        reply_of(answer(message=message), request, Chat.of(target), chat_api=True)


def test_the_stop_token_of_a_text_answer_is_put_back(target: Target) -> None:
    chat, request = Chat.of(target), Request("a", 0, [5, 6], 1, False, [], ())
    chat = replace(chat, eos_ids=frozenset([chat.tokenizer.eos_token_id, 9]))
    ab = list(chat.tokenizer("ab")["input_ids"])
    assert reply_of(answer(), request, chat, False).response == [*ab, chat.tokenizer.eos_token_id]
    assert reply_of(answer(stop_reason=9), request, chat, False).response == [*ab, 9]
    cut = reply_of(answer(finish_reason="length"), request, chat, False)
    assert cut.response == ab and not cut.finished and not cut.exact
    exact = reply_of(answer(token_ids=[3, 9]), request, chat, False)
    assert exact == Reply("a", 0, [5, 6], [3, 9], True, True)
    for bad in (
        {"token_ids": ["x"]},
        {"finish_reason": "abort"},
        {"token_ids": [], "finish_reason": "length", "text": ""},
    ):
        with pytest.raises(ValueError):
            reply_of(answer(**bad), request, chat, False)
