"""The real SmolLM2 behind real HTTP, asked by the openai package and by httpx: texts, counts, choices, stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

import outrider
from outrider.api.model import Model
from outrider.decoding.scheduler import EngineConfig
from outrider.target.hub import EMBEDDED_ID
from tests.toys.serving import Served, serving, wait_for

PROMPTS = [
    "Name three rivers.",
    "What is 7 + 5?",
    "Say hello.",
    "Write some Python.",
    "Name a sea.",
    "Count to 5.",
]


@pytest.fixture(scope="module")
def model() -> Model:
    return outrider.load(EMBEDDED_ID)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}


def test_a_chat_reads_its_history_once_and_says_what_it_would_without_a_cache(model: Model) -> None:
    """Texts and drafts of three turns, the second and third of which have most of their prompts in the cache."""
    questions = ["Name three rivers of Europe, and say where they end.", "Which is the longest?", "And in Asia?"]
    told: dict[bool, list[Any]] = {}
    for cached in (True, False):
        with serving(model, EngineConfig(prefix_cache=cached)) as served:
            messages, told[cached] = list[dict[str, str]](), []
            read = 0
            for question in questions:
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "temperature": 0, "max_tokens": 24, "seed": 1}
                answer = served.post("/v1/chat/completions", **body).json()
                messages.append(answer["choices"][0]["message"])
                usage, speculative = answer["usage"], answer["metrics"]["speculative_decoding"]
                told[cached].append((messages[-1]["content"], speculative["acceptance_histogram"]))
                found = usage["prompt_tokens_details"]["cached_tokens"]
                # All but the last round of the turn before, and what does not fill a block.
                assert found <= read and (found > read - 8 - 16 if cached else found == 0)
                read = usage["total_tokens"]
            counted = [served.metric(f"prefix_cache_{name}_total") for name in ("queries", "hits")]
            assert (counted[0] > counted[1] > 0) == cached
    assert told[True] == told[False] and sum(sum(drafts[1:]) for _, drafts in told[True]) > 0


def test_text_is_that_of_generate(served: Served, client: OpenAI, model: Model) -> None:
    """Streamed and whole, by chat and by text; usage and the record of drafts agree with what was counted."""
    names = [f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [served.metric(name) for name in names]
    expected = model.generate(PROMPTS[0], max_new_tokens=20)
    whole = client.chat.completions.create(**chat(PROMPTS[0], max_completion_tokens=20))
    assert whole.choices[0].message.content == expected.text and whole.choices[0].finish_reason == expected.finish
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.tokens)
    told = whole.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    counted = [served.metric(name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert counted == [told["num_spec_steps"], told["num_draft_tokens"], told["num_accepted_draft_tokens"]]
    assert told["num_accepted_draft_tokens"] > 0 and len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    by_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert served.metric(by_position) == served.metric(names[2])
    assert served.metric(by_position, 'position="0"') == sum(told["acceptance_histogram"][1:])

    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(client.chat.completions.create(**chat(PROMPTS[0], max_tokens=20, stream=True, stream_options=options)))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected.text
    assert parts[0].choices[0].delta.role == "assistant" and parts[-2].choices[0].finish_reason == expected.finish
    so_far = [part.usage.completion_tokens for part in parts if part.usage]
    assert so_far == sorted(so_far) and len(so_far) == len(parts) and parts[-1].usage is not None
    assert parts[-1].usage.model_copy(update={"prompt_tokens_details": None}) == whole.usage.model_copy(
        update={"prompt_tokens_details": None}
    )
    assert parts[-1].model_extra["metrics"]["speculative_decoding"] == told  # type: ignore[index]

    text = "The largest lake of the world"
    expected = model.generate(text, raw=True, max_new_tokens=16)
    completion: Any = client.completions.create(model="m", prompt=text, temperature=0)
    assert completion.choices[0].text == expected.text
    assert model.target.tokenizer is not None
    ids = model.target.tokenizer(text)["input_ids"]
    chunks: Any = client.completions.create(
        model="m", prompt=ids, temperature=0, stream=True, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == expected.text
    assert [token for choice in choices for token in choice.token_ids] == expected.tokens
    assert choices[0].prompt_token_ids == ids


def test_many_clients_at_once_each_get_their_own_text(served: Served, model: Model) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as many:

            async def streamed(prompt: str) -> str:
                parts = await many.chat.completions.create(**chat(prompt, max_tokens=8, stream=True))
                return "".join([part.choices[0].delta.content or "" async for part in parts])

            async def whole(prompt: str) -> str:
                answer = await many.chat.completions.create(**chat(prompt, max_tokens=8))
                return str(answer.choices[0].message.content)

            return await asyncio.gather(*map(streamed, PROMPTS), *map(whole, PROMPTS[:2]))

    found = asyncio.run(ask())
    assert found == [model.generate(prompt, max_new_tokens=8).text for prompt in [*PROMPTS, *PROMPTS[:2]]]


def test_choices_and_seeds(client: OpenAI, model: Model) -> None:
    """Choice i has seed + i; several prompts have their choices one after the other, and each prompt counts once."""
    asked = {"model": "m", "max_tokens": 6, "seed": 5, "top_p": 0.9, "extra_body": {"top_k": 50, "min_p": 0.01}}
    one = client.completions.create(prompt="A river", **asked).choices[0].text
    again = client.completions.create(prompt="A river", **asked).choices[0].text
    assert one == again
    expected = model.generate(
        "A river", raw=True, max_new_tokens=6, seed=5, temperature=1, top_p=0.9, top_k=50, min_p=0.01
    )
    assert one == expected.text
    both = client.completions.create(prompt=["A river", "A lake"], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) > 2
    assert both.usage is not None and both.usage.prompt_tokens == 4 and both.usage.completion_tokens == 24
    assert both.model_extra is not None and "metrics" not in both.model_extra


def test_where_a_response_ends(served: Served, client: OpenAI) -> None:
    free = client.chat.completions.create(**chat("Say hello.", max_tokens=40))
    text, tokens = str(free.choices[0].message.content), free.usage
    assert free.choices[0].finish_reason == "stop" and tokens is not None
    word = text.split()[2]
    cut = client.chat.completions.create(**chat("Say hello.", max_tokens=40, stop=[word, "\u2603"]))
    assert cut.choices[0].message.content == text[: text.index(word)] and cut.choices[0].finish_reason == "stop"
    longer = client.chat.completions.create(
        **chat("Say hello.", max_tokens=tokens.completion_tokens + 4, extra_body={"ignore_eos": True})
    )
    assert longer.choices[0].finish_reason == "length" and longer.usage is not None
    assert longer.usage.completion_tokens == tokens.completion_tokens + 4


def test_logprobs_and_fewer_drafts(served: Served, client: OpenAI) -> None:
    """The likeliest token is the greedy one, streamed as whole; fewer drafts, or none, change no text."""
    asked = chat(PROMPTS[0], max_tokens=8, logprobs=True, top_logprobs=2)
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    told = choice.logprobs.content
    assert "".join(one.token for one in told) == choice.message.content and len(told) == 8
    assert all(one.top_logprobs[0].token == one.token and one.top_logprobs[0].logprob == one.logprob for one in told)
    assert all(one.logprob >= one.top_logprobs[1].logprob and len(one.top_logprobs) == 2 for one in told)
    for more in ({"speculative": "off"}, {"max_draft_tokens": 1}):
        answer: Any = client.chat.completions.create(**asked, extra_body=more, stream=False)
        drafts = answer.metrics["speculative_decoding"]
        assert drafts["num_draft_tokens"] == drafts["num_spec_steps"] and answer.choices[0].message == choice.message
        assert (drafts["num_draft_tokens"] == 0) == ("speculative" in more)
    parts = client.chat.completions.create(**asked, stream=True)
    streamed = [one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in told]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in told], abs=1e-4)
    text = client.completions.create(model="m", prompt="A river", temperature=0, max_tokens=6, logprobs=3).choices[0]
    assert text.logprobs is not None and text.logprobs.tokens is not None and text.logprobs.top_logprobs is not None
    assert "".join(text.logprobs.tokens) == text.text and text.logprobs.text_offset is not None
    offsets = zip(text.logprobs.text_offset, text.logprobs.tokens, strict=True)
    assert all(text.text[at:].startswith(token) for at, token in offsets)
    assert all(len(top) == 3 for top in text.logprobs.top_logprobs)


def test_pages(served: Served, client: OpenAI, model: Model) -> None:
    assert [one.id for one in client.models.list().data] == ["m"]
    assert served.get("/version").json() == {"version": outrider.__version__}
    assert served.get("/health").status_code == 200
    assert served.get("/openapi.json").json()["paths"].keys() >= {"/v1/completions", "/tokenize"}
    tokenizer = model.target.tokenizer
    assert tokenizer is not None
    found = served.post("/tokenize", prompt="Two words", return_token_strs=True).json()
    assert found["tokens"] == tokenizer("Two words")["input_ids"] and len(found["token_strs"]) == found["count"]
    assert served.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "Two words"}
    asked = served.post("/tokenize", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]).json()
    text = served.post("/detokenize", tokens=asked["tokens"]).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_frees_its_request(served: Served, streamed: bool) -> None:
    """Which would have gone on for minutes."""
    ended = served.metric("request_success_total")
    body = chat("Count to a million.", max_tokens=4000, stream=streamed, ignore_eos=True)
    with closing(HTTPConnection(served.url.removeprefix("http://"), timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        if streamed:
            assert connection.getresponse().readline().startswith(b"data: ")
        wait_for(lambda: not served.engine.idle)
    served.wait_until_free()
    wait_for(lambda: served.metric("request_success_total") == ended + 1)
    assert served.post("/v1/completions", prompt="Still", max_tokens=1).status_code == 200


def test_a_tool_call_that_is_required(client: OpenAI, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target whose template is given tools here: arguments that follow the schema, the same without drafts."""
    template = "{% if tools %}<|im_start|>system\n{{ tools | tojson }} Call one in <tool_call>.<|im_end|>\n{% endif %}"
    monkeypatch.setattr(model.target.tokenizer, "chat_template", template + str(model.target.tokenizer.chat_template))  # type: ignore[union-attr]
    city, days = {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 1, "maximum": 9}
    schema = {"type": "object", "properties": {"city": city, "days": days}, "required": ["city", "days"]}
    strict = {**schema, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "forecast", "strict": True, "parameters": strict}}]
    asked = chat("How is the weather in Oslo in the next 3 days?", tools=tools, tool_choice="required", max_tokens=200)
    answer: Any = client.chat.completions.create(**asked, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "forecast" and answer.choices[0].finish_reason == "tool_calls"
    assert arguments.keys() == {"city", "days"} and len(arguments["city"]) <= 20 and 1 <= arguments["days"] <= 9
    assert answer.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    off = {"speculative": "off"}
    plain: Any = client.chat.completions.create(**asked, parallel_tool_calls=False, extra_body=off)
    assert plain.choices[0].message.tool_calls[0].function == call.function


USER = [{"role": "user", "content": "hi"}]
WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "temperatur": 1}, 400, "no such field"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400, "more than the 8192 that fit"),
    ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n: "),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}, 400, "stop: List should have at most 16 items"),
    ("/v1/completions", {"prompt": "a", "stop": ""}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e9}, 400, "repetition_penalty"),
    ("/v1/completions", {"prompt": "a", "seed": -1}, 400, "seed"),
    ("/v1/completions", {"prompt": "a", "seed": 2**70}, 400, "seed"),
    ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"3": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, 400, "vocabulary"),
    ("/v1/completions", {"prompt": [5, -1]}, 400, "prompt.1: Input should be greater"),
    ("/v1/completions", {"prompt": {}}, 400, "prompt: Input should be"),
    ("/v1/completions", {"prompt": None}, 400, "prompt: Field required."),
    ("/v1/completions", {"prompt": ["a", ""]}, 400, "prompt is empty"),
    ("/v1/completions", {"prompt": [5] * 9000}, 400, "that fit"),
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "'other' is not served"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "speculative": "on"}, 400, "speculative"),
    ("/v1/completions", {"prompt": "a", "max_draft_tokens": -1}, 400, "max_draft_tokens"),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "needs logprobs"),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": " "}]}, 400, "prompt is empty"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [*USER, {"content": "a"}]}, 400, "messages.1.role: Field required."),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 100_000}}]}]}, 400, "arguments of a tool call are not JSON"),
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400,
     "does not support tool calling"),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    ("/detokenize", {"tokens": [10**9]}, 400, "vocabulary"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_is_asked_wrongly_is_refused_with_a_reason(
    served: Served, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    found = served.post(path, **body)
    assert found.status_code == status and reason in found.json()["error"]["message"], found.text


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"nonsense", b'{"prompt": "\xff\xfe"}', b"[" * 100_000, b'{"prompt": "a", "temperature": NaN}', b"3",
     b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}'],
)  # fmt: skip
def test_bodies_that_are_no_requests(served: Served, content: bytes) -> None:
    found = httpx.post(
        f"{served.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert found.status_code == 400 and found.json()["error"]["message"], found.text
    assert served.get("/health").status_code == 200
