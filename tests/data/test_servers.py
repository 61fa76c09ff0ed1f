"""Responses over real HTTP: faults of every kind, servers that die, tokens that are exact or said to be guessed."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider.backends.openai as openai
import outrider.data.regenerate as regeneration
from outrider.backends.openai import Endpoint, Part, parse_answer, retry_after, shown_url
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
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.command_line import Run
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
    data = section(base_urls=urls, **{"concurrency": 3, "retries": 4, "timeout": 30.0, **options})
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
        made, source = ask(target, tmp_path / "r.jsonl", [dead_url(), healthy.url])
        assert made.replies == local and source.trouble is None
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
    ended = threading.Event()

    def slow(number: int, body: dict[str, Any]) -> str | None:
        if number == 0:
            ended.wait()
        return None

    with serving(ToyServer(target, slow)) as toy:
        made, _ = ask(target, tmp_path / "r.jsonl", [toy.url], timeout=3.0)
        ended.set()
    first = toy.bodies[0]["prompt"]
    assert made.replies == local and [body["prompt"] for body in toy.bodies].count(first) > 1


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
    content = {"choices": [{"finish_reason": "stop", "text": "ab", **choice}]}
    return parse_answer(json.dumps(content), server_of("openai"))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (answer(token_ids=[1, 2, 9999]), "token 9999 is not in the target's vocabulary"),
        (answer(token_ids=[1], prompt_token_ids=[7]), "changed the prompt"),
    ],
)
def test_answers_that_no_retry_improves(target: Target, given: Part, error: str) -> None:
    request = Request("a", 0, [5, 6], SamplingParams(seed=1), False, [], ())
    with pytest.raises(Unusable, match=error):
        reply_of(given, request, Chat.of(target), chat_api=False)
    message = {"content": None, "tool_calls": [{"id": 1}]}
    with pytest.raises(Unusable, match="tool_calls"):
        reply_of(answer(message=message), request, Chat.of(target), chat_api=True)


def test_the_stop_token_of_a_text_answer_is_put_back(target: Target) -> None:
    chat, request = Chat.of(target), Request("a", 0, [5, 6], SamplingParams(seed=1), False, [], ())
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


def http(body: object, head: str = "", status: str = "200 OK") -> Iterable[bytes]:
    """An answer as a server sends it; text is sent as it is."""
    content = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    yield f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": "stop", "text": "ab", **fields}]}


def busy(status: str, header: str) -> Callable[[], Iterable[bytes]]:
    return lambda: http("busy", f"Retry-After: {header}\r\n", status)


def silent() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    time.sleep(5)


def slower_and_slower() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    for _ in range(1000):
        time.sleep(0.1)
        yield b"x"


DEEP = "[" * 100_000
BAD_ANSWERS: dict[str, Callable[[], Iterable[bytes]]] = {
    "null": lambda: http("null"),
    "number": lambda: http("3"),
    "list": lambda: http([]),
    "no choices": lambda: http({}),
    "choices null": lambda: http({"choices": [None]}),
    "choices a mapping": lambda: http({"choices": {"text": "ab"}}),
    "message null": lambda: http({"choices": [{"message": None, "finish_reason": "stop"}]}),
    "message a list": lambda: http({"choices": [{"message": ["ab"], "finish_reason": "stop"}]}),
    "deep": lambda: http(DEEP),
    "deep inside": lambda: http('{"choices": [{"text": ' + DEEP),
    "digits": lambda: http('{"choices": ' + "9" * 10_000 + "}"),
    "text a number": lambda: http(choice(text=5)),
    "half a character": lambda: http(choice(text="\ud800")),
    "not UTF-8": lambda: http(b'{"choices": "\xff\xfe'),
    "unknown charset": lambda: http("nothing", "Content-Type: text/plain; charset=nonsense\r\n"),
    "finish_reason a list": lambda: http(choice(finish_reason=["stop"])),
    "finish_reason long": lambda: http(choice(finish_reason="\x1b[31m" * 10_000)),
    "ids fractions": lambda: http(choice(token_ids=[1.5])),
    "ids negative": lambda: http(choice(token_ids=[-1])),
    "ids huge": lambda: http(choice(token_ids=[2**70])),
    "ids nested": lambda: http(choice(token_ids=[[1]])),
    "ids true": lambda: http(choice(token_ids=[True])),
    "an error": lambda: http({"error": {"message": "full"}}),
    "400 with escape codes": lambda: http("\x1b]0;title\x07" * 1000, status="400 Bad Request"),
    "429 inf": busy("429 Too Many Requests", "inf"),
    "429 nan": busy("429 Too Many Requests", "nan"),
    "429 negative": busy("429 Too Many Requests", "-1e9"),
    "429 huge": busy("429 Too Many Requests", "1e300"),
    "503 a date": busy("503 Service Unavailable", "Wed, 21 Oct 9999 07:28:00 GMT"),
    "503 no date": busy("503 Service Unavailable", "Wed, 99 Oct 99999999999 07:28:00 GMT"),
    "redirect": lambda: http("", "Location: http://u:secret@127.0.0.1:1/\r\n", "302 Found"),
    "redirect to itself": lambda: http("", "Location: /v1/completions\r\n", "307 Temporary Redirect"),
    "status 999": lambda: http("", status="999 What"),
    "no content": lambda: http("", status="204 No Content"),
    "continue": lambda: [b"HTTP/1.1 100 Continue\r\n\r\n"],
    "not HTTP": lambda: [b"220 mail.example.com ESMTP\r\n"],
    "nothing": lambda: [b""],
    "cut": lambda: [b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": ['],
    "chunks": lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"],
    "chunks cut": lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"],
    "gzip": lambda: http(b"no gzip", "Content-Encoding: gzip\r\n"),
    "gzip cut": lambda: http(gzip.compress(b"{}")[:-9], "Content-Encoding: gzip\r\n"),
    "silent": silent,
    "slow": slower_and_slower,
}


def within(seconds: float, work: Callable[[], Regeneration]) -> Regeneration:
    """What `work` gives; a failure where it takes longer."""
    found: list[Regeneration] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs, or ended with an exception"
    return found[0]


def ask_three(target: Target, path: Path, url: str, **options: Any) -> tuple[Regeneration, ServerSource]:
    """The first three conversations, four turns in all."""
    data = section(
        base_urls=[url], **{"concurrency": 2, "retries": 1, "timeout": 4.0, "served_model": "toy", **options}
    )
    source = ServerSource(Chat.of(target), data, api_key="key-9876", backoff=0.01)
    return within(120, lambda: regenerate(source, PROMPTS[:3], path, seed=SEED)), source


def printable(lines: Iterable[str]) -> bool:
    return all(line.isprintable() and len(line) < 2000 for line in lines)


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch, target: Target, local: list[Reply], tmp_path: Path, bad: str
) -> None:
    monkeypatch.setattr(openai, "_CONNECT_SECONDS", 4.0)
    path, prompt = tmp_path / "r.jsonl", next(r.prompt for r in local if r.id == "p0")
    with serving(ToyServer(target, lambda _, body: BAD_ANSWERS[bad]() if body["prompt"] == prompt else None)) as toy:
        made, source = ask_three(target, path, toy.url)
    assert source.trouble is None
    assert [r for r in made.replies if r.id != "p0"] == [r for r in local if r.id in ("p1", "p2")]
    assert (made.summary.done, made.summary.failed, made.summary.waiting) == (3, 1, 0)
    failed = [json.loads(line) for line in companion_file(path, "failed").read_text().splitlines()]
    assert [(f["id"], f["turn"]) for f in failed] == [("p0", 0)]
    assert failed[0]["reason"] and printable([failed[0]["reason"]]) and "secret" not in failed[0]["reason"]


def test_an_exception_that_nobody_foresaw_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch, target: Target, local: list[Reply], tmp_path: Path
) -> None:
    real = reply_of

    def broken(answer: Part, request: Request, chat: Chat, chat_api: bool) -> Reply:
        if request.id == "p1":
            raise RuntimeError("unforeseen")
        return real(answer, request, chat, chat_api)

    monkeypatch.setattr(regeneration, "reply_of", broken)
    with serving(ToyServer(target)) as toy:
        made, _ = ask_three(target, tmp_path / "r.jsonl", toy.url)
    assert [r.id for r in made.replies] == ["p0", "p2"] and made.summary.failed == 2
    assert made.failures[0].reason == "RuntimeError: unforeseen"


@pytest.mark.parametrize("page", [DEEP, "[]", "3", "null", '{"data": {}}', '{"data": [{"id": 5}]}', "\x1b[31m", ""])
def test_a_list_of_models_that_is_none(target: Target, page: str) -> None:
    with serving(ToyServer(target, page=page)) as toy, pytest.raises(ValueError, match="no model is listed") as caught:
        ServerSource(Chat.of(target), section(base_urls=[toy.url]))
    assert printable([str(caught.value)])


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "localhost:8000",
            "ftp://host",
            "http://",
            "http://:80",
            "http://[::1",
            "http://host\n",
            "http://host?x=1",
        ),
        *("http://host#x", "http://host:port", "http://host:99999", "http://host:0", "http://host:-1"),
        *("http://user:pw9@host:x", "user:pw9@host", "http://us:p/w9@host", "http://user:p@w9@host:y"),
    ],
)
def test_urls_that_are_none(target: Target, url: str) -> None:
    with pytest.raises(ValueError, match="must start with http") as caught:
        Endpoint(url)
    assert printable([str(caught.value)]) and "w9" not in str(caught.value)


@pytest.mark.parametrize("key", ["key\n", " key", "kéy", "k y", "\x1b"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ValueError, match="the server's key holds"):
        Endpoint("http://host", api_key=key)


def test_urls_are_shown_without_passwords() -> None:
    shown = {"http://host:80/v1": "http://host:80/v1", "https://me:pw@host/v1": "https://***@host/v1"}
    shown |= {"me:pw@host": "***@host", "http://me:p@w/x@host": "http://***@host", "http://token@h": "http://***@h"}
    assert {url: shown_url(url) for url in shown} == shown
    assert "secret" not in repr(Endpoint("http://me:secret@host", api_key="secret"))


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "500 Internal Server Error"])
def test_what_a_server_repeats_of_key_and_password_is_masked(
    monkeypatch: pytest.MonkeyPatch, target: Target, toy: Path, tmp_path: Path, run: Run, status: str
) -> None:
    key, sent = "sk-12345678", base64.b64encode(b"me:p@ss9").decode()
    said = f"you said {key} and http://me:p%40ss9@host and p@ss9, Basic {sent}. "
    monkeypatch.setenv("OPENAI_API_KEY", key)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n')
    with serving(ToyServer(target, lambda *_: http(said * 20, status=status))) as server:
        url = server.url.replace("//", "//me:p%40ss9@")
        arguments = ["--target", toy / "target", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", "4"]
        arguments += ["--max-prompt-tokens", "100"]
        found = run("prepare", *arguments, "--base-url", url, "--out", tmp_path / "out" / "r.jsonl", "--retries", "0")
    assert found[0] in (1, 2) and "you said ***" in " ".join(found[1:]).replace("\n", " ")
    written = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written and all(part not in text for text in (*found[1:], *written) for part in (key, "ss9", sent))


def test_an_interrupt_is_never_raised_inside_the_event_loop(target: Target) -> None:
    """The loop runs in another thread than the one in which Python raises KeyboardInterrupt, and ends with it."""
    threads: set[int] = set()

    def stop() -> bool:
        threads.add(threading.get_ident())
        return False

    requests = [Request(f"p{i}", 0, [5, 6], SamplingParams(seed=i), False, [], ()) for i in range(50)]
    with serving(ToyServer(target)) as server:
        source = ServerSource(Chat.of(target), section(base_urls=[server.url], concurrency=2))
        answers = source.answer(requests, stop)
        assert isinstance(next(answers)[0], Reply)
        with pytest.raises(KeyboardInterrupt):
            answers.throw(KeyboardInterrupt)  # type: ignore[attr-defined]  # a generator
        threads_then = threads.copy()
        threads.clear()
        time.sleep(0.1)
    assert threads_then and threading.get_ident() not in threads_then
    # Not that no request comes any more: one that was sent before may arrive late.
    assert not threads and len(server.bodies) < 50 and source.trouble is None, "it has ended"
