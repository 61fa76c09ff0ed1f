"""Conversations of every shape, data sets, tools and templates, later turns on the exact tokens, the split."""

from __future__ import annotations

import builtins
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import outrider.data.sources as sources
from outrider.data.chat import Chat, printable_lines, render, render_text
from outrider.data.conversations import Conversation, Turn, content_id, number_copies, parse_row, row_of
from outrider.data.regenerate import DataSection, PromptSource
from outrider.data.responses import Reply, Sample, join_turns, truncation_warning
from outrider.data.sources import load_prompts
from outrider.training.dataset import recipe_prompts, split_samples
from tests.toys.tokenizer import CHAT_TEMPLATE, byte_tokenizer

SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "x"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["a", "b"]}, ("a", "b")),
        ({"prompt": "a"}, ("a",)),
        ({"prompt": [user("a"), said("x"), user("b")]}, ("a", "b")),
        ({"messages": [user("a"), said("x")]}, ("a",)),
        ({"messages": [SYSTEM, user("a"), said("x"), user("b")]}, ((SYSTEM, user("a")), "b")),
        ({"question": "a", "answer": "x"}, ("a",)),  # gsm8k
        ({"instruction": "a", "input": "", "output": "x"}, ("a",)),  # CodeAlpaca
        ({"instruction": "a", "input": "b", "output": "x"}, ("a\n\nInput:\nb",)),
        ({"input": [user("a"), said("x"), user("b")], "output": "y", "category": "math"}, ("a", "b")),  # Nemotron 1
        ({"prompt": "a", "prompt_id": "i", "messages": [user("a"), said("x"), user("b")]}, ("a", "b")),  # UltraChat
        ({"data": ["a", "x", "b", "y"]}, ("a", "b")),
        ({"messages": [user("a")], "input": {"unlike": 1}, "data": 3}, ("a",)),
        ({"messages": [user("a"), CALL, RESULT, said("x"), user("b")]}, ("a", (RESULT,), "b")),
        ({"messages": [said("hello"), user("a"), said("x"), said("y")]}, ("a",)),
        ({"messages": [user("a"), user("b")]}, ((user("a"), user("b")),)),
        ({"messages": [{**user("a"), "name": None}, said("x")]}, ("a",)),
        ({"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}, ("ab",)),  # type: ignore[arg-type]
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]}, ("a",)),
        (
            {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "a"}]},
            ((SYSTEM, user("a")),),
        ),
    ],
)
def test_what_is_said_before_each_response(row: dict[str, Any], turns: tuple[Turn, ...]) -> None:
    for given in (row, json.dumps(row)):
        assert parse_row(given) == Conversation(content_id(turns, ()), turns)
    assert parse_row(row_of(parse_row(row))) == parse_row(row)
    assert parse_row({**row, "id": 4}).id == "4"


def test_tools_are_objects_or_their_json() -> None:
    row = {"messages": [user("a")], "tools": [TOOL]}
    assert parse_row(row).tools == (TOOL,) == parse_row({**row, "tools": json.dumps([TOOL])}).tools
    assert parse_row(row_of(parse_row(row))) == parse_row(row)
    assert parse_row({**row, "tools": None}).tools == () == parse_row({**row, "tools": ""}).tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": 1}, "no conversation among the fields label, text"),
        ({"messages": [said("x")]}, "messages: no user message to respond to"),
        ({"messages": [SYSTEM]}, "no user message"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "role 'wizard' is none of system"),
        ({"messages": [{"content": "a"}]}, 'a message without "role"'),
        ({"messages": [user(" ")]}, "an empty turn"),
        ({"messages": [user([{"type": "image"}])]}, "content of type image; only text"),  # type: ignore[arg-type]
        ({"prompt": " "}, "an empty turn"),
        ({"question": " ", "answer": "x"}, "an empty turn"),
        ({"data": []}, "data: .*at least 1"),
        ({"messages": "a"}, "messages: .*valid list"),
    ],
)
def test_rows_that_hold_no_conversation(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_row(row)


def data_set(folder: Path, rows: Sequence[Mapping[str, object]], name: str = "train") -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_directory_with_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="needs the extra outrider[hub]")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"messages": [user(f"q{i}"), said("x")], "source": "s"} for i in range(5)]
    rows[2] = {"messages": [said("x")], "source": "s"}
    folder = data_set(tmp_path / "chats", rows)
    data_set(tmp_path / "chats", rows[:1], "test")
    with pytest.warns(UserWarning, match="1 of 5 rows .*row 3: messages: no user message"):
        found = load_prompts(folder)
    assert found == [Conversation(content_id((f"q{i}",), ()), (f"q{i}",)) for i in (0, 1, 3, 4)]
    assert load_prompts(f"hf:{folder}:test") == found[:1], "of the same content"
    assert load_prompts(folder, limit=2) == found[:2]
    sections = DataSection(prompts=[PromptSource(path=f"hf:{folder}", limit=2)])
    assert recipe_prompts(sections) == found[:2]
    other = data_set(tmp_path / "texts", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"has the columns text, .*messages, .*question"):
        load_prompts(other)
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="blank' has no rows"):
        load_prompts(tmp_path / "blank")
    with pytest.raises(ValueError, match=r"no data set .*with a split 'dev'.*JSONL file"):
        load_prompts(f"hf:{folder}:dev")


def test_a_configuration_of_a_data_set_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra outrider[hub]")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, split: str, streaming: bool) -> Any:
        asked.append((*args, split))
        return datasets.Dataset.from_list([{"question": "a", "answer": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    assert [load_prompts(f"hf:{name}")[0].turns for name in ("o/n", "o/n:test", "o/n/main:test")] == [("a",)] * 3
    assert asked == [("o/n", None, "train"), ("o/n", None, "test"), ("o/n", "main", "test")]
    monkeypatch.setattr(sources, "hub_answers", lambda: False)
    with pytest.raises(ValueError, match=r"no data set 'o/n' .*does not answer.*JSONL"):
        load_prompts("hf:o/n")


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra outrider[hub]")
    saved = datasets.Dataset.from_list([{"prompt": "a", "id": "n1"}, {"prompt": "b", "id": "n2"}])
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": saved}).save_to_disk(str(tmp_path / "several"))
    wanted = [Conversation("n1", ("a",)), Conversation("n2", ("b",))]
    assert load_prompts(tmp_path / "one") == wanted == load_prompts(f"hf:{tmp_path / 'several'}:dev")


def test_without_the_package_or_the_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"'some/chats' needs the package datasets: pip install 'outrider\[hub\]'.*JSONL"
    ):
        load_prompts("hf:some/chats")


TOOL_TEMPLATE = "{% if tools %}<|spare_1|>{{ tools[0].function.name }}\n{% endif %}" + CHAT_TEMPLATE


def test_system_prompts_and_tools_reach_the_template_or_the_error_says_why() -> None:
    tokenizer = byte_tokenizer()
    turns = ((SYSTEM, user("a")), (RESULT,))
    text = render_text(tokenizer, turns, ["call"])
    assert [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not support tool calling"):
        render(tokenizer, turns, ["call"], [TOOL])
    tokenizer.chat_template = TOOL_TEMPLATE
    assert render_text(tokenizer, turns, ["call"], [TOOL]).startswith("<|spare_1|>add\n<|im_start|>system")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="refuses a conversation with the roles system, user: System role not"):
        render(tokenizer, turns[:1], [])
    base = byte_tokenizer(chat=False)
    assert base.decode(render(base, turns[:1], [])) == "be brief\n\na"
    with pytest.raises(ValueError, match="no chat template"):
        render(base, turns[:1], [], [TOOL])


def test_thinking_reaches_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if not enable_thinking %}-{% endif %}"
    assert render_text(tokenizer, ["a"], []).endswith("assistant\n-")
    assert render_text(tokenizer, ["a"], [], thinking=True).endswith("assistant\n")


def chat_of(template: str = CHAT_TEMPLATE) -> Chat:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    return Chat("toy", tokenizer, frozenset([end]), len(tokenizer), 999)


def later(chat: Chat, response: Sequence[int]) -> tuple[Reply, list[list[int]]]:
    conversation = Conversation("c", ("one", "two"))
    first = Reply("c", 0, chat.prompts(conversation, [], False)[0], list(response), True)
    return first, chat.prompts(conversation, [first], False)


def noted(template: str | None, thinking: bool) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Chat("toy", tokenizer, frozenset(), vocab_size=300, max_context=64).notes(thinking)


def test_no_template_and_what_becomes_of_thinking_are_said() -> None:
    assert noted(None, False) == ["toy has no chat template: prompts are continued as plain text"]
    switch = CHAT_TEMPLATE + "{% if CONDITION %}<think></think>{% endif %}"
    on_by_default = switch.replace("CONDITION", "enable_thinking is defined and not enable_thinking")
    off_by_default = switch.replace("CONDITION", "not enable_thinking")
    assert noted(on_by_default, False) == [
        "toy thinks by default, which is switched off here; --thinking (data.thinking) switches it on"
    ]
    assert noted(on_by_default, True) == noted(off_by_default, False) == noted(CHAT_TEMPLATE, False) == []
    assert noted(off_by_default, True) == []
    assert noted(CHAT_TEMPLATE.replace("enable_thinking", "other"), True) == [
        "the chat template of toy has no switch for thinking: asking for it changes nothing"
    ]
    assert noted("{{ raise_exception('no') }}", False) == [], "the prompts' own error says more"


def test_a_prompt_is_shown_with_what_cannot_be_seen() -> None:
    assert printable_lines("<s>user\na\\nb\tü\x1b[0m\n\n") == ["<s>user\\n", "a\\nb\\tü\\x1b[0m\\n", "\\n"]
    long = printable_lines("".join(f"line {i}\n" for i in range(30)) + "x" * 500)
    assert long[:4] + long[-3:-1] == [f"line {i}\\n" for i in (0, 1, 2, 3, 28, 29)]
    assert len(long) == 8 and long[4] == "... 24 more lines ..." and len(long[-1]) == 103


def test_many_truncated_responses_are_a_warning() -> None:
    finished = [i >= 3 for i in range(10)]
    said = truncation_warning(finished, 256)
    assert said is not None and "3 of 10 responses (30%)" in said and "max_new_tokens 256: raise data.max_new_" in said
    assert truncation_warning(finished[2:], 256) is None and truncation_warning([], 256) is None


def test_a_later_turn_continues_the_very_tokens_that_were_generated() -> None:
    chat = chat_of()
    (end,) = chat.eos_ids
    merged = chat.tokenizer.convert_tokens_to_ids("STO")  # read back as text it would be three tokens
    for response, finished in (([merged, end], True), ([merged], False)):
        first, (prompt, plain) = later(chat, response)
        assert prompt[: len(first.prompt) + len(response)] == first.prompt + response
        assert chat.tokenizer.decode(prompt) == chat.tokenizer.decode(plain) and len(plain) == len(prompt) + 2
        samples = join_turns([first, Reply("c", 1, prompt, [5], finished)])
        assert len(samples) == 1 and samples[0].supervised_tokens == [*response, 5]
    letters = list(chat.tokenizer("STO")["input_ids"])
    first, prompts = later(chat, [*letters, end])
    assert len(prompts) == 1 and prompts[0][: len(first.prompt) + 4] == [*first.prompt, *letters, end]


def test_a_template_that_rewrites_the_response_makes_a_sample_of_its_own() -> None:
    trimming = chat_of(CHAT_TEMPLATE.replace("m.content", "m.content | trim"))
    (end,) = trimming.eos_ids
    spaced = list(trimming.tokenizer(" a")["input_ids"])
    first, prompts = later(trimming, [*spaced, end])
    assert len(prompts) == 1 and prompts[0][: len(first.prompt) + 3] != [*first.prompt, *spaced, end]
    assert len(join_turns([first, Reply("c", 1, prompts[0], [5], True)])) == 2
    other_stop = chat_of()
    first, prompts = later(other_stop, [5, other_stop.tokenizer.eos_token_id])
    assert len(prompts) == 1, "the template writes <|im_end|> where the target wrote <|end|>"


def test_ids_come_from_content_and_copies_are_numbered() -> None:
    tool = {"type": "function"}
    ids = [content_id(turns, tools) for turns in (("a",), ("a", "b"), ((user("a"),),)) for tools in ((), (tool,))]
    assert len(set(ids)) == 6 and all(len(name) == 16 for name in ids)
    a, b = Conversation("a", ("x",)), Conversation("b", ("y",))
    given = [a, b, a, Conversation("a", ("other",)), a, Conversation("a-2", ("x",))]
    assert [c.id for c in number_copies(given)] == ["a", "b", "a-2", "a", "a-3", "a-2-2"]


def one(name: str) -> Sample:
    return Sample(name, [1, 2], ((1, 2),))


def test_the_split_is_by_conversation_and_stable_when_data_grow() -> None:
    samples = [one(f"c{i}") for i in range(50)] + [one(f"c{i}") for i in range(0, 50, 3)]
    train, held_out = split_samples(samples, 8, Path("r"))
    trained, held = {s.id for s in train}, {s.id for s in held_out}
    assert len(held) == 8 and not trained & held and len(train) + len(held_out) == len(samples)
    shuffled = random.Random(1).sample(samples, len(samples))
    assert {s.id for s in split_samples(shuffled, 8, Path("r"))[1]} == held
    also_held = split_samples([*samples, *(one(f"new{i}") for i in range(50))], 8, Path("r"))[1]
    assert not trained & {s.id for s in also_held}, "nothing that was trained on becomes held out"
    with pytest.raises(ValueError, match=r"responses to 8 conversations and data\.held_out takes 8"):
        split_samples(held_out, 8, Path("r"))
