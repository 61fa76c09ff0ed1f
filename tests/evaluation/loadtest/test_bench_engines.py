"""`outrider bench` on other engines than ours, later turns, thinking, and several processes that share one load."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from outrider.backends.export import export_drafter, target_facts
from outrider.backends.registry import engine_of
from outrider.checkpoints.checkpoint import load_checkpoint, save_drafter
from outrider.data.conversations import Conversation
from outrider.evaluation.loadtest.bench import side_by_side
from outrider.evaluation.loadtest.engines import SequentialBackend
from outrider.evaluation.loadtest.load import Ask, Prompt, mixed_prompts
from outrider.evaluation.loadtest.metrics import Frontier, Journal, RequestFigures
from outrider.evaluation.loadtest.sweep import Share, Workload, responses
from outrider.training.parallel import ALONE, Ranks
from tests.toys.command_line import invoke
from tests.toys.dialects import FACTS, VD, changed, made
from tests.toys.fake_engine import FakeEngine, executable, serving
from tests.toys.processes import ROOT, processes, torchrun, wait_until_gone
from tests.toys.share_worker import work
from tests.toys.tokenizer import byte_tokenizer


def run(directory: Path, out: Path, *more: object) -> Result:
    """`outrider bench` on the toy target."""
    command = ["--target", directory / "target", "--out", out]
    command += [] if "--drafter" in more else ["--drafter", directory / "drafter"]
    command += ["--tasks", directory / "tasks.jsonl", "--requests-per-point", 3, "--max-new-tokens", 6, "--repeats", 1]
    return invoke("bench", *command, *more, columns=80)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)


def test_transformers(toy: Path, tmp_path: Path) -> None:
    done = run(toy, tmp_path, "--backend", "transformers", "--assistant", toy / "target", "--prompt-lookup", 2)
    assert done.exit_code == 0, (done.output, done.exception)
    frontier = Frontier.load(tmp_path / "frontier.json")
    assert [p.variant for p in frontier.points] == ["none", "prompt-lookup", "assisted"] and frontier.points[
        0
    ].level == 1
    assert all(p.mismatches == 0 for p in frontier.points) and (tmp_path / "frontier.png").is_file()
    lengths = {p.variant: p.median("tau") for p in frontier.points}
    assert lengths["none"] == 1 and (lengths["assisted"] or 0) > 1, "a target assisting itself is always right"
    histograms = {p.variant: p.acceptance_histogram or () for p in frontier.points}
    assert len(histograms["none"]) == 1 < len(histograms["assisted"]) and "rounds by accepted drafts" in done.output
    assert frontier.settings["assistant"] == str(toy / "target") and "gap" in done.output and "rows" not in done.output
    shown = [line for line in done.output.splitlines() if line.lstrip().startswith(("load", "1 "))]
    assert len(shown) >= 4 and max(map(len, shown)) <= 80
    refused = run(toy, tmp_path / "other", "--backend", "transformers", "--variants", "fixed-3")
    assert isinstance(refused.exception, ValueError) and "there are none, prompt-lookup" in str(refused.exception)


def test_a_launched_engine(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE_WORKER", str(tmp_path / "ids"))
    engine = ["--backend", "vllm", "--launch", "--engine-command", executable(tmp_path / "engine")]
    done = run(toy, tmp_path / "out", *engine, "--concurrency", "1,2", "--engine-args", "--enforce-eager --seed 1")
    assert done.exit_code == 0, (done.output, done.exception)
    gamma = 7
    frontier = Frontier.load(tmp_path / "out" / "frontier.json")
    assert [(p.variant, p.level) for p in frontier.points] == [
        ("none", 1), (f"fixed-{gamma}", 1), ("none", 2), (f"fixed-{gamma}", 2),
    ]  # fmt: skip
    assert all(p.same == 3 for p in frontier.points) and frontier.overall
    assert {p.median("tau") is None for p in frontier.points if p.variant == "none"} == {True}
    assert all((p.median("tau") or 0) > 1 for p in frontier.points if p.variant != "none")
    assert all((p.acceptance_histogram is None) == (p.variant == "none") for p in frontier.points)
    logs = {path.stem: path.read_text() for path in (tmp_path / "out" / "logs").iterdir()}
    assert set(logs) == {"vllm-none", f"vllm-fixed-{gamma}"} and "--enforce-eager --seed 1" in logs["vllm-none"]
    assert "--speculative-config" in logs[f"vllm-fixed-{gamma}"] and "--speculative-config" not in logs["vllm-none"]
    ids = processes(tmp_path / "ids")
    assert len(ids) == 2 * 2 and wait_until_gone(ids), "each variant's engine was started once and is gone"
    again = run(toy, tmp_path / "out", *engine, "--concurrency", "1,2", "--engine-args", "--enforce-eager --seed 1")
    assert again.exit_code == 0 and processes(tmp_path / "ids") == ids, "nothing to measure, nothing to start"
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    dead = run(toy, tmp_path / "dead", *engine)
    assert isinstance(dead.exception, ValueError) and "no such model" in str(dead.exception)


def test_a_launched_engines_drafter_need_not_say_how_deep_its_target_is(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = target_facts(str(toy / "target"), torch.float32)
    vocab = len(facts.embedding_VH)
    drafter = made("eagle3", vocab_size=vocab, draft_vocab_size=vocab)
    export_drafter(drafter, engine_of("vllm"), tmp_path / "eagle", facts)
    changed(tmp_path / "eagle", {"outrider": None})
    with pytest.raises(ValueError, match="does not state num_target_layers"):
        load_checkpoint(tmp_path / "eagle")
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    engine = ["--backend", "vllm", "--launch", "--engine-command", executable(tmp_path / "engine")]
    dead = run(toy, tmp_path / "out", *engine, "--drafter", tmp_path / "eagle")
    assert isinstance(dead.exception, ValueError) and "no such model" in str(dead.exception), "it came to the engine"


def test_running_servers(toy: Path, tmp_path: Path) -> None:
    with serving(FakeEngine(style="openai")) as plain, serving(FakeEngine(drafts=3, style="openai")) as fast:
        urls = ["--base-url", fast.url + "/v1", "--baseline-url", plain.url]
        done = run(toy, tmp_path / "a", "--backend", "openai", "--concurrency", 2, *urls, "--chat", "--thinking")
        alone = run(toy, tmp_path / "b", "--backend", "openai", "--concurrency", 2, "--base-url", fast.url)
    with serving(FakeEngine(style="openai")) as unasked:
        calm = run(toy, tmp_path / "d", "--backend", "openai", "--concurrency", 1, "--base-url", unasked.url, "--chat")
    assert done.exit_code == 0 and alone.exit_code == 0, (done.output, done.exception, alone.exception)
    assert calm.exit_code == 0, calm.exception
    points = Journal(tmp_path / "a", json.loads((tmp_path / "a" / "settings.json").read_text())).points
    assert [(p.variant, p.same, p.metrics.tau) for p in points] == [("none", 3, None), ("speculative", 3, None)]
    assert all("messages" in body and "chat_template_kwargs" in body for body in plain.bodies)
    assert not any("chat_template_kwargs" in body for body in unasked.bodies), "a field that some servers refuse"
    assert [p.variant for p in Frontier.load(tmp_path / "b" / "frontier.json").points] == ["speculative"]
    rows = side_by_side([tmp_path / "a"])
    assert [row[:3] for row in rows] == [("openai (chat)", "none", "2"), ("openai (chat)", "speculative", "2")]
    assert [row[3] for row in rows] == ["", ""] and side_by_side([tmp_path / "b"])[0][0] == "openai"
    assert rows[0][-2:] == ("", "1.00") and float(rows[1][-1]) > 0
    with pytest.raises(ValueError, match=r"b was not measured as .*a was: thinking differ"):
        side_by_side([tmp_path / "a", tmp_path / "b"])
    missing = run(toy, tmp_path / "c", "--backend", "sglang")
    assert isinstance(missing.exception, ValueError) and "name a running server" in str(missing.exception)
    started = run(toy, tmp_path / "c", "--backend", "openai", "--launch")
    assert isinstance(started.exception, ValueError) and "start it yourself" in str(started.exception)
    both = run(toy, tmp_path / "c", "--backend", "vllm", "--launch", "--base-url", "http://x")
    assert isinstance(both.exception, ValueError) and "leave out --base-url" in str(both.exception)


def launch(directory: Path, out: Path, drafter: Path, kind: str, *more: object) -> Result:
    """A fake engine of that kind under two short requests."""
    engine = ["--backend", kind, "--launch", "--engine-command", executable(directory / "engine"), "--concurrency", 1]
    return run(directory, out, *engine, "--drafter", drafter, "--max-new-tokens", 3, *more)


def test_drafters_of_other_makers_are_launched_and_their_types_told(toy: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    export_drafter(made("eagle3"), engine_of("vllm"), drafter, FACTS)
    changed(drafter, {"outrider": None})  # nothing of ours says how deep the target is
    done = launch(toy, tmp_path / "out", drafter, "vllm", "--engine-dtype", "bfloat16")
    assert done.exit_code == 0, (done.output, done.exception)
    log = (tmp_path / "out" / "logs" / "vllm-fixed-4.log").read_text()
    assert '"method": "eagle3"' in log and str(drafter) in log and "--dtype bfloat16" in log
    assert {row[3] for row in side_by_side([tmp_path / "out"])} == {"bfloat16"}


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "eagle3", {}, "eagle3 drafters are not loaded in the dialect Outrider, only in speculators or EAGLE-3"),
    ("vllm", "medusa", {}, r"in the dialect Outrider, only in Medusa: export it first .outrider export DIR --to vllm"),
    ("vllm", "mtp", {}, "vllm: it takes no mtp drafters"),
    ("vllm", "dspark", {"markov_head_type": "rnn"}, 'markov_head_type "rnn" is not served there'),
    ("sglang", "dflash", {"draft_vocab_size": VD}, "sglang: draft_vocab_size 40 has no place there"),
    ("sglang", "dspark", {"draft_vocab_size": VD}, "draft_vocab_size 40 has no place there: export it first"),
    ("sglang", "medusa", {}, "sglang: it takes no medusa drafters"),
    ("llama.cpp", "dspark", {}, r"reads GGUF files, not .*--engine-drafter D\.gguf"),
    ("llama.cpp", "hydra", {}, "llama.cpp has no drafters of kind hydra"),
]


@pytest.mark.parametrize(("kind", "method", "change", "message"), REFUSED)
def test_what_an_engine_does_not_load_is_said_before_anything_is_started(
    toy: Path,
    tmp_path: Path,
    kind: str,
    method: str,
    change: dict[str, Any],
    message: str,
) -> None:
    save_drafter(made(method, **change), tmp_path / "drafter")
    files = ["--engine-target", "t.gguf"] if kind == "llama.cpp" else []
    files += ["--engine-drafter", "d.gguf"] if method == "hydra" else []
    refused = launch(toy, tmp_path / "out", tmp_path / "drafter", kind, *files)
    assert isinstance(refused.exception, ValueError)
    assert re.search(message, str(refused.exception)), refused.exception
    assert not (tmp_path / "out").exists(), "neither a journal nor the log of an engine"


def test_what_stands_for_a_drafter_is_held_to_the_same_limits(toy: Path, tmp_path: Path) -> None:
    save_drafter(made("eagle3"), tmp_path / "eagle3")
    save_drafter(made("dspark", markov_head_type="gated"), tmp_path / "gated")
    done = launch(toy, tmp_path / "out", tmp_path / "eagle3", "vllm", "--engine-drafter", "exported/elsewhere")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "exported/elsewhere" in (tmp_path / "out" / "logs" / "vllm-fixed-4.log").read_text()
    refused = launch(toy, tmp_path / "other", tmp_path / "gated", "vllm", "--engine-drafter", "exported/elsewhere")
    assert isinstance(refused.exception, ValueError) and '"gated" is not served there' in str(refused.exception)


def test_tools_go_to_chat_servers_with_their_messages(tmp_path: Path) -> None:
    conversation = Conversation("a", ("look",), ({"type": "function", "function": {"name": "look"}},))
    assert Prompt("a", (1,), conversation).chat == {
        "messages": [{"role": "user", "content": "look"}], "tools": list(conversation.tools),
    }  # fmt: skip
    assert "tools" not in Prompt("a", (1,), replace(conversation, tools=())).chat


def conversations(directory: Path) -> Path:
    path = directory / "chats.jsonl"
    path.write_text(
        '{"id": "a", "turns": ["1", "2", "3"]}\n{"id": "b", "turns": ["4"]}\n{"id": "c", "turns": ["5", "6"]}\n'
    )
    return path


def test_later_turns_follow_the_baseline_answers(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    first = mixed_prompts(tokenizer, [str(conversations(tmp_path))], 9, seed=0)
    load, asked = Workload(first, 3, 4), []

    def respond(turn: int, prompts: Any) -> list[list[int]]:
        asked.append((turn, len(prompts)))
        backend = SequentialBackend(lambda request: iter([tokenizer(f"r{turn}")["input_ids"]]))
        return responses(backend, [Ask(prompt) for prompt in prompts], 4)

    before = load.longest
    load.grow(tokenizer, False, respond)
    assert asked == [(1, 2), (2, 1)] and before >= load.longest == max(map(len, load.prompts))
    turns = {prompt.name: [str(m["content"]) for m in prompt.chat["messages"]] for prompt in load.asked}
    assert turns["chats/a"] == ["1"] and turns["chats/a#2"] == ["1", "r1", "2"] and len(turns) == 6
    assert turns["chats/a#3"] == ["1", "r1", "2", "r2", "3"] and turns["chats/c#2"] == ["5", "r1", "6"]
    names = [prompt.name for prompt in load.asked]
    assert names.index("chats/a#2") == names.index("chats/a") + 1, "a conversation's turns stay together"
    assert load.chat_of(load.prompts[1]) == load.asked[1].chat and load.capacity(3) == (3, load.longest + 4)


def test_the_thinking_mode_reaches_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% endif %}"
    for thinking, last in ((False, "1"), (True, "T")):
        prompts = mixed_prompts(tokenizer, [str(conversations(tmp_path))], 3, 0, thinking)
        found = {prompt.name: tokenizer.decode(list(prompt.tokens)) for prompt in prompts}
        assert found["chats/a"].endswith(last)


def test_shares() -> None:
    second = Share.of(Ranks(1, 2), prompts=3, counted=5)
    assert second.prompts == [1, 0] and second.users("closed", 4) == 2 and second.users("poisson", 3) == 1.5
    assert Share.of(ALONE, 3, None).prompts is None
    with pytest.raises(ValueError, match="concurrency 3 cannot be shared by 2 processes"):
        second.users("closed", 3)
    for counted in (None, 1):
        with pytest.raises(ValueError, match="2 processes share counted requests"):
            Share.of(Ranks(0, 2), 3, counted)


@pytest.mark.slow
def test_two_processes_measure_what_one_does(toy: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    work(toy, one, ALONE)
    done = torchrun(ROOT / "tests/toys/share_worker.py", toy, two)
    assert done.returncode == 0, done.stderr[-4000:]

    def exact(path: Path) -> list[dict[str, Any]]:
        tasks = json.loads(path.read_text())["tasks"]
        timed = ("second", "speedup", "generation_tps")
        return [{key: value for key, value in task.items() if not any(word in key for word in timed)} for task in tasks]

    def said(request: RequestFigures) -> tuple[object, ...]:
        return request.index, request.tokens, request.sizes, request.accepted_length

    assert exact(one / "results0.json") == exact(two / "results0.json") == exact(two / "results1.json")
    assert exact(one / "results0.json")[0]["turns"] > 5
    for name, variants in (("transformers", ["none", "prompt-lookup"]), ("local", ["none", "fixed-2"])):
        assert (one / name / "prompts0.json").read_text() == (two / name / "prompts1.json").read_text()
        mine, theirs = Journal(one / name, {}), Journal(two / name, {})
        assert mine.reference() == theirs.reference() and mine.said() == theirs.said()
        assert [p.variant for p in mine.points] == [p.variant for p in theirs.points] == variants
        for single, shared in zip(mine.points, theirs.points, strict=True):
            assert shared.acceptance_histogram == single.acceptance_histogram is not None
            for figure in ("tau", "budget", "acceptance", "tokens"):
                assert getattr(shared.metrics, figure) == pytest.approx(getattr(single.metrics, figure)), figure
            assert shared.mismatches == 0
            assert (shared.same, shared.metrics.requests) == (single.same, single.metrics.requests) == (5, 5)
            assert list(map(said, single.requests)) == list(map(said, shared.requests))
