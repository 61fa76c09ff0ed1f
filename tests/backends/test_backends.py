"""Engines other than ours under the same load: over HTTP, started and stopped, and functions that decode one prompt."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaForCausalLM

from outrider.backends.base import Launch, MetricNames, Speculation
from outrider.backends.launch import free_port, launched
from outrider.backends.openai import Endpoint, Part, ServerBackend, acceptance_between, parse_event, read_metrics
from outrider.backends.registry import engine_of, server_of, servers
from outrider.backends.transformers import HfDecoder, load_causal_lm
from outrider.decoding.request import Request, StopRules
from outrider.evaluation.loadtest.config import Sla
from outrider.evaluation.loadtest.engines import (
    SequentialBackend,
    mlx_engine,
    running_servers,
    transformers_engine,
)
from outrider.evaluation.loadtest.load import Ask, ClosedLoop, LoadConfig, WallClock, Window, run_load
from outrider.evaluation.loadtest.metrics import Journal, summarise
from outrider.evaluation.loadtest.sweep import Sweep, run_sweep
from tests.toys import fake_engine
from tests.toys.dialects import made
from tests.toys.fake_engine import FakeEngine, response, serving
from tests.toys.processes import gone, processes, wait_until_gone
from tests.toys.targets import TOY_CONFIGS
from tests.toys.tokenizer import byte_tokenizer

ENGINE = {engine.name: engine for engine in servers()}
LAUNCHED = [engine for engine in servers() if engine.also_drafts]
LEAST = Sla(600.0, 0.0)
PROMPTS = [[70 + i, 80, 90] for i in range(6)]
ASKS = [Ask(prompt) for prompt in PROMPTS]


def endpoint(engine: FakeEngine, kind: str = "vllm", **changes: object) -> Endpoint:
    return Endpoint(engine.url, engine=ENGINE[kind], **changes)  # type: ignore[arg-type]


def load(where: Endpoint, users: int = 2, requests: int = 4) -> Window:
    backend = ServerBackend(where, byte_tokenizer())
    config = LoadConfig(requests=requests, max_new_tokens=7, warmup=users, warmup_tokens=3)
    try:
        return run_load(backend, ASKS, ClosedLoop(users), config, WallClock())
    finally:
        backend.close()


def as_text(tokens: Sequence[int]) -> list[int]:
    """What a server that gives text only is read as."""
    return list(byte_tokenizer()(bytes(tokens).decode(), add_special_tokens=False)["input_ids"])


def test_events() -> None:
    any_server = server_of("openai")

    def read(event: object) -> Part:
        return parse_event(json.dumps(event), any_server)

    part = read({"choices": [{"text": " four", "token_ids": [2, 9], "finish_reason": None}]})
    assert (part.text, part.tokens, part.finish_reason) == (" four", [2, 9], None)
    chat = read({"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]})
    assert (chat.reasoning, chat.text, chat.tokens, chat.accepted_length) == ("hm", "", None, None)
    told = {"choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": 4, "mean_acceptance_length": 2.5}}}
    assert (read(told).accepted_length, read(told).text) == (2.5, None)
    timings = {"predicted_n": 12, "draft_n": 20, "draft_n_accepted": 8}
    llama = read({"choices": [{"text": "", "finish_reason": "stop"}], "timings": timings})
    assert (llama.accepted_length, llama.finish_reason) == (3.0, "stop")
    for data, message in (
        ('{"error": {"message": "full"}}', "the server says.*full"),
        ("{not json", "not an answer"),
        ('{"choices": 3}', "not an answer"),
        ('{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', "without a tool call parser"),
        ('{"choices": [], "metrics": {"speculative_decoding": {"x": 1}}}', "not an answer"),
        ('{"choices": [], "metrics": [1]}', "not an answer"),
        ('{"choices": [], "timings": {"draft_n": 1, "predicted_n": 1, "draft_n_accepted": 1}}', "not an answer"),
        ('{"choices": [{"token_ids": ["x"]}]}', "token ids that are not a list of numbers"),
        ('{"choices": [{"text": 5}]}', "not an answer"),
        ('{"choices": [{"delta": {"reasoning": ["hm"]}}]}', "not an answer"),
        ('{"choices": [{"text": "", "finish_reason": ["stop"]}]}', "finish_reason is no text"),
        ('{"choices": [], "timings": {"draft_n": 1, "predicted_n": NaN, "draft_n_accepted": 1}}', "length of nan"),
        ("[" * 200 + "]" * 200, "more than 100 deep"),
        ('{"choices": ' + "9" * 10_000 + "}", "digits"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_event(data, any_server)


def test_metrics_pages() -> None:
    page = '# TYPE a counter\na{x="1"} 3.0\na{x="} 2"} 4\nb 5e0\nbroken\nc nope\nd{y="z"} 1.5 1700000\n'
    assert read_metrics(page) == {"a": [3.0, 4.0], "b": [5.0], "d": [1.5]}
    names = MetricNames("rounds", "drafted", "accepted")
    found = acceptance_between(
        names, {"rounds": [4], "accepted": [2]}, {"rounds": [8, 6], "drafted": [30], "accepted": [8]}
    )
    assert (found.accepted_length, found.acceptance, found.rounds) == (1.6, 0.2, 10)
    assert acceptance_between(names, {}, {}).accepted_length is None
    assert acceptance_between(names, {"rounds": [3]}, {"rounds": [3], "accepted": [0]}).accepted_length is None
    names = MetricNames.counters("vllm")
    before = {
        names.rounds: [4.0],
        names.accepted: [5.0],
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": [4.0, 1.0],
    }
    after = {name: [8.0 * value for value in values] for name, values in before.items()}
    assert acceptance_between(names, before, after).histogram == (0, 21, 7)  # 28 rounds, 28 and 7 accepted
    two = {name: values * 2 for name, values in after.items()}
    assert acceptance_between(names, {}, two).histogram is None, "which values are of which engine is not known"
    gauge = MetricNames(length="length")
    assert acceptance_between(gauge, {}, {"length": [2.0, 4.0, 0.0]}).accepted_length == 3.0
    assert acceptance_between(gauge, {}, {"length": [0.0]}).accepted_length is None


@pytest.mark.parametrize(("style", "kind"), [("vllm", "vllm"), ("llama.cpp", "llama.cpp"), ("openai", "openai")])
def test_a_server_under_load(style: str, kind: str) -> None:
    with serving(FakeEngine(drafts=2, style=style, slow=0.002)) as engine:
        window = load(endpoint(engine, kind))
        found = summarise(window, LEAST)
    assert [served.index for served in sorted(window.requests, key=lambda s: s.index or 0)] == [0, 1, 2, 3]
    for served in window.requests:
        assert served.index is not None
        said = response(PROMPTS[served.index], 7)
        assert served.tokens == (said if style == "vllm" else as_text(said))
        assert served.sizes == [3, 3, 1] and 0 < served.times[0] - served.arrived < 10
        assert served.accepted_length == (None if kind == "openai" else pytest.approx(7 / 3))
    assert found.ttft_p50 is not None and found.ttft_p50 >= 0.002 and found.gap_p50 is not None and found.steps == 0
    if kind == "openai":
        assert found.tau is None and found.acceptance is None and window.histogram is None
    else:
        assert (
            found.tau is not None and 1 < found.tau <= 3 and found.acceptance is not None and 0 < found.acceptance < 1
        )
        assert window.histogram is not None and window.histogram[1] == 0, "every round accepts both drafts or none"
        assert found.tau == pytest.approx(1 + 2 * window.histogram[2] / sum(window.histogram))
    assert all(("return_token_ids" in body) == (kind == "vllm") for body in engine.bodies)
    neutral = {"vllm": ("repetition_penalty", 1.0), "llama.cpp": ("repeat_penalty", 1.0)}.get(kind)
    assert neutral is None or all(neutral in body.items() for body in engine.bodies)
    assert all(("presence_penalty" in body) == (kind != "openai") for body in engine.bodies)


def test_text_servers_are_compared_by_their_whole_text() -> None:
    """Parts that end inside a character count as tokens, but the response is the tokens of the whole text."""

    def parts(self: FakeEngine, body: dict[str, object]) -> Iterator[list[int]]:
        yield from ([ord("a")], [ord("b"), ord("c")])

    with serving(FakeEngine(style="openai")) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "parts", parts)
        merged = load(endpoint(engine, "openai"))
    assert [served.tokens for served in merged.requests] == 4 * [as_text(b"abc")]


def test_a_line_separator_in_a_text_does_not_end_its_event() -> None:
    """U+2028 and U+0085 are line ends to Python and text to server-sent events."""
    said = "a\u2028b\x85c"

    def parts(self: FakeEngine, body: dict[str, object]) -> Iterator[list[int]]:
        yield list(said.encode())

    with serving(FakeEngine(style="openai")) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "parts", parts)
        window = load(endpoint(engine, "openai"))
    assert [served.tokens for served in window.requests] == 4 * [as_text(said.encode())]


TOOLS = [{"type": "function", "function": {"name": "look"}}]


def said_by_user(tokens: Sequence[int]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(tokens[0])}], "tools": TOOLS}


def test_chat_servers_get_messages_and_the_thinking_mode() -> None:
    with serving(FakeEngine()) as engine:
        window = load(endpoint(engine, chat_of=said_by_user, thinking=True))
        load(endpoint(engine, chat_of=said_by_user, thinking=None), requests=1)
    assert len(window.requests) == 4 and all("prompt" not in body for body in engine.bodies)
    assert engine.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in engine.bodies[-1], "not every server knows the field"
    assert all(body["tools"] == TOOLS for body in engine.bodies)
    assert {body["messages"][0]["content"] for body in engine.bodies} <= {str(prompt[0]) for prompt in PROMPTS}


def test_servers_that_fail() -> None:
    with serving(FakeEngine(refuse=400)) as engine, pytest.raises(ValueError, match=r"did not answer.*400.*asked for"):
        load(endpoint(engine))
    with pytest.raises(ValueError, match=r"no model is listed.*--served-model"):
        load(Endpoint("http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="did not answer"):
        load(Endpoint("http://127.0.0.1:9", model="m"))
    with pytest.raises(ValueError, match="must start with http"):
        Endpoint("localhost:8000")


def test_cancelling_ends_a_request() -> None:
    with serving(FakeEngine(silent=True)) as engine:
        backend = ServerBackend(endpoint(engine), byte_tokenizer())
        backend.submit(Request("a", [5, 6], rules=StopRules(4)))
        while not (outputs := backend.step()):
            pass
        assert outputs[0].tokens == response([5, 6], 1) and not backend.idle
        assert backend.cancel("a") and not backend.cancel("a") and backend.idle and backend.step() == []
        backend.close()
        backend.close()


def test_a_sweep_over_two_servers(tmp_path: Path) -> None:
    plan = Sweep("closed", (1, 2), ("none", "speculative"), 2, 3, None, 7, LEAST, grouped=True)
    with (
        serving(FakeEngine()) as plain,
        serving(FakeEngine(drafts=2)) as fast,
        serving(FakeEngine(3, other=True)) as odd,
    ):
        endpoints = {"none": endpoint(plain), "speculative": endpoint(fast)}
        source = running_servers(endpoints, byte_tokenizer())
        journal = Journal(tmp_path / "a", {})
        run_sweep(plan, source.serve, PROMPTS, source.compare, journal, WallClock)
        source.close()
        wrong = running_servers({**endpoints, "speculative": endpoint(odd)}, byte_tokenizer())
        broken = Journal(tmp_path / "b", {})
        run_sweep(plan, wrong.serve, PROMPTS, wrong.compare, broken, WallClock)
        wrong.close()
    keys = [point.key for point in journal.points]
    assert keys[:4] == [("none", 1, 0), ("none", 2, 0), ("speculative", 1, 0), ("speculative", 2, 0)]
    assert keys[4][0] == "speculative", "to and fro: one engine start less"
    for point in journal.points:
        assert point.same == 3 and point.mismatches == 0 and [r.index for r in point.requests] == [0, 1, 2]
        assert {r.accepted_length for r in point.requests} == {None if point.variant == "none" else 7 / 3}
        assert all(r.tokens == 7 and sum(r.sizes) == 7 and len(r.gaps) == len(r.sizes) - 1 for r in point.requests)
        assert (point.metrics.tau is None) == (point.variant == "none")
    assert {p.mismatches for p in broken.points if p.variant == "speculative"} == {3}
    assert Journal(tmp_path / "a", {}).points == journal.points


def command(port: int) -> list[str]:
    return [sys.executable, fake_engine.__file__, "serve", "model", "--port", str(port)]


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_a_launched_engine_ends_with_all_its_processes(tmp_path: Path, ending: type[BaseException] | None) -> None:
    port, worker = free_port(), tmp_path / "ids"

    def run() -> None:
        where = f"http://127.0.0.1:{port}/health"
        with launched(command(port), where, tmp_path / "log", 60, {"FAKE_ENGINE_WORKER": str(worker)}):
            assert not any(gone(process) for process in processes(worker))
            if ending is not None:
                raise ending

    if ending is None:
        run()
    else:
        with pytest.raises(ending):
            run()
    assert len(processes(worker)) == 2 and wait_until_gone(processes(worker))
    assert f"--port {port}" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("behaviour", "timeout", "message"),
    [("dies", 60, r"ended with status 3 before it served.*\n.*\n    no such model"), ("hangs", 6.0, "did not answer")],
)
def test_engines_that_do_not_start(tmp_path: Path, behaviour: str, timeout: float, message: str) -> None:
    port, worker = free_port(), tmp_path / "ids"
    environment = {"FAKE_ENGINE_WORKER": str(worker), "FAKE_ENGINE": behaviour}
    with (
        pytest.raises(ValueError, match=message),
        launched(command(port), f"http://127.0.0.1:{port}/health", tmp_path / "log", timeout, environment),
    ):
        raise AssertionError("it does not serve")
    assert not worker.exists() or wait_until_gone(processes(worker)), "a slow machine may not have started it yet"
    with pytest.raises(ValueError, match="cannot be run"), launched(["./no-such"], "http://x", tmp_path / "log", 1):
        pass


def test_the_first_error_of_a_long_log_is_shown(tmp_path: Path) -> None:
    said = [
        "WARNING [limits.py:255] This can cause errors like `OSError: too many files`",
        "(worker pid=7) ERROR [executor.py:953] ValueError: memory on node 0 is less than desired",
        *["  File somewhere"] * 30,
        "RuntimeError: See root cause above.",
    ]
    command = [sys.executable, "-c", f"print({chr(10).join(said)!r}); raise SystemExit(1)"]
    with (
        pytest.raises(
            ValueError, match=r"(?s)See root cause above\..*first error: ValueError: memory on node 0"
        ) as caught,
        launched(command, "http://127.0.0.1:9/health", tmp_path / "log", 60),
    ):
        raise AssertionError("it does not serve")
    assert "OSError" not in str(caught.value).split("first error")[1]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_end_the_engine_too(tmp_path: Path, ending: signal.Signals) -> None:
    port, worker = free_port(), tmp_path / "ids"
    script = (
        "import signal, time; from pathlib import Path\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # where the tests run under nohup
        "from outrider.backends.launch import launched\n"
        f"with launched({command(port)!r}, 'http://127.0.0.1:{port}/health', Path({str(tmp_path / 'log')!r}), 60):\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "FAKE_ENGINE_WORKER": str(worker)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(ending)
    assert process.wait(300) != 0 and wait_until_gone(processes(worker))


def launch(method: str = "dspark", drafts: int = 7, drafter: str | None = "D", **changes: object) -> Launch:
    """A launch with some drafter; of 0 drafts: none. Other `changes` are of `Launch`, or of `Speculation`."""
    told = {name: changes.pop(name) for name in ("reduced_vocabulary", "mixed_layers") if name in changes}
    speculation = Speculation(method, drafts, drafter, **told) if drafts else None  # type: ignore[arg-type]
    base = {"target": "T", "port": 8, "dtype": "float32", "users": 4, "context": 100, "python": "py"}
    base |= {"prompt_cache": False}
    return Launch(**{**base, "speculation": speculation, **changes})  # type: ignore[arg-type]


def test_commands() -> None:
    vllm = ENGINE["vllm"].command(launch(extra=("--enforce-eager",)))
    assert (
        vllm[:5] == ["py", "-m", "vllm.entrypoints.openai.api_server", "--model", "T"] and vllm[-1] == "--enforce-eager"
    )
    config = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert config == {"method": "dspark", "num_speculative_tokens": 7, "model": "D"}
    assert ENGINE["vllm"].command(launch(executable="vllm"))[:3] == ["vllm", "serve", "T"]
    assert vllm[vllm.index("--max-model-len") + 1] == "116", "room for the longest and two drafts"
    assert "--no-enable-prefix-caching" in vllm
    for reduced in (False, True):
        medusa = " ".join(ENGINE["vllm"].command(launch("medusa", reduced_vocabulary=reduced)))
        assert ("enable_weights_track" in medusa) == reduced
    assert ENGINE["vllm"].environment(launch("dspark"))["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    for other in (launch("dspark", 0), launch("eagle3")):
        assert set(ENGINE["vllm"].environment(other)) == {"VLLM_NO_USAGE_STATS"}
    ngram = ENGINE["vllm"].command(launch("ngram", drafter=None))
    assert json.loads(ngram[ngram.index("--speculative-config") + 1])["method"] == "ngram"
    sglang = " ".join(ENGINE["sglang"].command(launch("eagle3", 5)))
    assert "--speculative-draft-model-path D --speculative-algorithm EAGLE3 --speculative-num-steps 5" in sglang
    assert "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in sglang
    assert "--enable-metrics" in sglang and "--disable-radix-cache" in sglang
    for algorithm, flag in (("dflash", "--speculative-dflash-block-size 8"), ("dspark", "-dspark-block-size 7")):
        block = " ".join(ENGINE["sglang"].command(launch(algorithm)))
        assert block.endswith(flag), "DSpark's block counts drafts, DFlash's the anchor too"
    llama = " ".join(ENGINE["llama.cpp"].command(launch("dflash", target="t.gguf", drafter="d.gguf")))
    assert (
        llama.startswith("llama-server -m t.gguf")
        and "--metrics" in llama
        and "-np 4 -c 464 --no-cache-prompt" in llama
    )
    assert llama.endswith("-md d.gguf --spec-type draft-dflash --spec-draft-n-max 7")
    for name in ("vllm", "sglang", "llama.cpp"):
        plain = " ".join(ENGINE[name].command(launch(drafts=0, target="t.gguf")))
        assert "spec" not in plain and " D" not in plain and "8" in plain
        with pytest.raises(ValueError, match=f"{name} has no drafters of kind hydra; it knows"):
            ENGINE[name].command(launch("hydra", target="t.gguf", drafter="d.gguf"))
    with pytest.raises(ValueError, match=r"reads GGUF files, not T.*--engine-target T\.gguf --engine-drafter D\.gguf"):
        ENGINE["llama.cpp"].command(launch())
    with pytest.raises(ValueError, match="start it yourself"):
        ENGINE["openai"].command(launch())


@pytest.mark.parametrize(
    ("name", "method"), [(engine.name, method) for engine in LAUNCHED for method in engine.exports()]
)
def test_a_launched_engine_drafts_as_an_exports_command_says(name: str, method: str) -> None:
    parts = made(method).weights.folded()
    given = launch(method, parts.config.gamma, target="t.gguf", drafter="drafter.gguf")
    words = shlex.split(engine_of(name).serve(parts, "drafter.gguf", "t.gguf")[-1])
    first = next(word for word in words if word in ("--speculative-config", "--speculative-draft-model-path", "-md"))
    flags = words[words.index(first) :]
    assert " ".join(flags) in " ".join(ENGINE[name].command(given)) and len(flags) > 1
    variables = dict(word.split("=", 1) for word in words if word.startswith("VLLM_"))
    assert variables.items() <= ENGINE[name].environment(given).items()


def test_what_can_be_launched_and_not_exported() -> None:
    more = {engine.name: set(engine.also_drafts) - set(engine.exports()) for engine in LAUNCHED}
    assert more == {"vllm": {"lm", "ngram"}, "sglang": {"lm", "ngram"}, "llama.cpp": {"lm", "ngram", "eagle3"}}


def by_threes(request: Request) -> Iterator[list[int]]:
    tokens = response(request.prompt, request.rules.max_new_tokens)
    while tokens:
        yield tokens[:3]
        tokens = tokens[3:]


def test_one_request_after_the_other() -> None:
    backend = SequentialBackend(by_threes)
    window = run_load(backend, ASKS, ClosedLoop(2), LoadConfig(requests=3, max_new_tokens=7), WallClock())
    found = summarise(window, LEAST)
    assert [served.tokens for served in window.requests] == [response(prompt, 7) for prompt in PROMPTS[:3]]
    assert all(served.accepted_length == pytest.approx(7 / 3) for served in window.requests)
    assert found.tau is not None and 2 < found.tau <= 3 and found.acceptance is None and found.steps == 0
    assert backend.idle and not backend.cancel("0") and backend.step() == []


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    torch.manual_seed(0)
    pair = []
    for _ in range(2):
        model = LlamaForCausalLM(TOY_CONFIGS["llama"])
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        pair.append(model.eval())
    return pair[0], pair[1]


def test_transformers_own_generate(models: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    model, assistant = models
    source = transformers_engine(model, [1], 3, assistant)
    said, lengths = {}, {}
    for variant in ("none", "prompt-lookup", "assisted"):
        backend = source.serve(variant, 1)
        window = run_load(backend, ASKS, ClosedLoop(1), LoadConfig(requests=3, max_new_tokens=12), WallClock())
        said[variant] = [served.tokens for served in window.requests]
        lengths[variant] = summarise(window, LEAST).tau
    with torch.inference_mode():
        plain = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=12, do_sample=False, eos_token_id=1)
    assert said["none"][0] == plain[0, len(PROMPTS[0]) :].tolist()
    assert said["prompt-lookup"] == said["assisted"] == said["none"]
    assert lengths["none"] == 1 and (lengths["prompt-lookup"] or 0) >= 1 <= (lengths["assisted"] or 0)
    first = said["none"][0]
    assert source.compare(ASKS[0], first, first) == "same"
    assert source.compare(ASKS[0], first, [(first[0] + 1) % 40, *first[1:]]) == "mismatch"


def test_transformers_decodes_without_the_penalties_of_a_models_files(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path
) -> None:
    model = models[0]
    plain = list(HfDecoder(model, [1])(PROMPTS[0], 12))
    model.save_pretrained(tmp_path)
    GenerationConfig(repetition_penalty=9.0).save_pretrained(tmp_path)
    found = load_causal_lm(str(tmp_path), "cpu", torch.float32)
    penalised = LlamaForCausalLM.from_pretrained(tmp_path)
    for decoded, same in ((found, True), (penalised, False)):
        said = list(HfDecoder(decoded, [1])(PROMPTS[0], 12))
        assert (said == plain) == same


@pytest.mark.parametrize("damage", ["missing", "not finite"])
def test_transformers_refuses_weights_that_would_be_another_model(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, damage: str
) -> None:
    models[0].save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        load_causal_lm(str(tmp_path), "cpu", torch.float32)


def test_cancelling_transformers(models: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    backend = transformers_engine(models[0], [1], 3, None).serve("none", 1)
    steps: list[object] = []
    hook = models[0].register_forward_pre_hook(lambda *_: steps.append(None))
    backend.submit(Request("a", PROMPTS[0], rules=StopRules(20_000)))
    backend.step()
    assert backend.cancel("a") and backend.idle and 0 < len(steps) < 20_000, "nobody waited for the whole response"
    hook.remove()
    backend.submit(Request("b", [10**9], rules=StopRules(2)))
    with pytest.raises(ValueError, match="generate failed"):
        while not backend.idle:
            backend.step()


def test_mlx_is_asked_for_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"needs MLX.*outrider\[mlx\]"):
        monkeypatch.setitem(sys.modules, "outrider.backends.mlx.drafter", None)
        mlx_engine("T", Path("D"))
    asked: list[tuple[str, Path | None]] = []
    module = ModuleType("outrider.backends.mlx.drafter")
    module.decoder = lambda target, drafter: asked.append((target, drafter)) or by_threes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.backends.mlx", ModuleType("outrider.backends.mlx"))
    monkeypatch.setitem(sys.modules, "outrider.backends.mlx.drafter", module)
    source = mlx_engine("T", Path("D"))
    assert asked == [("T", None), ("T", Path("D"))] and isinstance(source.serve("speculative", 1), SequentialBackend)
    assert source.compare([1], [2], [3]) == "mismatch"
