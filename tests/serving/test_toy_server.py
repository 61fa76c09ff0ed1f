"""A toy target behind real HTTP: a full queue, engines that fail, keys, bodies, stopping, and tool calls."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

import outrider
import outrider.api.model
import outrider.api.scheduling
import outrider.serving.app as app
import outrider.serving.start
from outrider.api.model import Model
from outrider.backends.launch import free_port
from outrider.decoding.engine import Engine
from outrider.decoding.request import Output
from outrider.decoding.scheduler import EngineConfig
from outrider.evaluation.loadtest.metrics import Journal
from outrider.serving.app import Limits
from outrider.serving.metrics import ServerMetrics
from outrider.serving.tools import Format, ToolCall, ToolCallParser, format_of
from outrider.serving.worker import Worker
from outrider.target.model import Target
from outrider.target.paged import PagedKV
from tests.toys.command_line import Run
from tests.toys.serving import Served, serving, wait_for

SMALL = EngineConfig(max_requests=1)
ASKED = {"prompt": "ab", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def model(toy: Path) -> Model:
    return outrider.load(toy / "target", str(toy / "drafter"))


@contextmanager
def held(served: Served) -> Iterator[threading.Event]:
    """The engine's steps wait until the event is set."""
    go, step = threading.Event(), served.engine.step
    served.engine.step = lambda: step() if go.wait(60) else []  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        served.engine.step = step  # type: ignore[method-assign]


def in_background(call: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
    """Starts a call; gives what waits for its answer."""
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def answer() -> httpx.Response:
        thread.join(60)
        return found[0]

    return answer


def test_a_full_queue_says_when_to_come_again(model: Model) -> None:
    with serving(model, SMALL, max_waiting=1) as served:
        with held(served) as go:
            waiting = [in_background(lambda: served.post("/v1/completions", **ASKED)) for _ in range(2)]
            wait_for(lambda: len(served.server.worker._live) == 2)
            full = served.post("/v1/completions", **ASKED)
            assert full.status_code == 429 and int(full.headers["Retry-After"]) >= 1
            assert full.json()["error"]["type"] == "rate_limit_error"
            assert served.metric("num_requests_waiting") >= 1 or served.metric("num_requests_running") >= 1
            go.set()
            first, second = (answer() for answer in waiting)
        assert first.json()["choices"] == second.json()["choices"]
        many = served.post("/v1/completions", **ASKED, n=3)
        assert many.status_code == 429, "choices count one by one"
        assert served.post("/v1/completions", **ASKED, n=2).status_code == 200


def test_nothing_is_left_of_requests_that_are_refused_together(model: Model) -> None:
    with serving(model) as served, held(served):
        refused = served.post("/v1/completions", **{**ASKED, "prompt": ["ab", ""]})
        assert refused.status_code == 400 and "prompt is empty" in refused.json()["error"]["message"]
        assert served.engine.idle and not served.server.worker._live


def test_preempted_requests_are_counted(model: Model) -> None:
    """Two that do not fit together: one gives way, and has the text of a request alone all the same."""
    asked = {**ASKED, "max_tokens": 60, "ignore_eos": True}
    with serving(model, EngineConfig(max_requests=2, num_blocks=5)) as served:
        alone = served.post("/v1/completions", **asked).json()["choices"]
        assert served.metric("num_preemptions_total") == 0
        answers = [in_background(lambda: served.post("/v1/completions", **asked)) for _ in range(2)]
        assert [answer().json()["choices"] for answer in answers] == [alone, alone]
        assert served.metric("num_preemptions_total") > 0


def test_the_engine_warms_up_before_requests_are_taken(model: Model) -> None:
    """With drafts, in the thread that runs it, the KV pool claimed before; nothing of it is counted or learned from."""
    steps: list[tuple[str, int]] = []
    claimed: list[PagedKV] = []
    step = Engine.step

    def noted(engine: Engine) -> list[Output]:
        assert claimed == [engine.kv]
        found = step(engine)
        assert engine.last is not None
        steps.append((threading.current_thread().name, engine.last.proposed))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", noted)
        patch.setattr(PagedKV, "claim", lambda kv: claimed.append(kv))
        with serving(model) as served:
            assert {thread for thread, _ in steps} == {"engine"} and sum(proposed for _, proposed in steps) > 0
            assert served.engine.idle and served.engine.last is None and served.engine.scheduler.allocator.used == 0
            assert served.engine.drafting.acceptance.plan_view([], []).typical_K is None
            assert served.metric("generation_tokens_total") == served.metric("spec_decode_num_drafts_total") == 0


def test_the_thread_that_loads_has_ended_when_serving_begins(
    toy: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it its OpenMP threads: more of them than cores make every barrier of the engine's steps a sleep."""
    threads: list[threading.Thread] = []
    alive: list[bool] = []
    load = outrider.api.model.load

    def noted(*values: Any, **options: Any) -> Model:
        threads.append(threading.current_thread())
        return load(*values, **options)

    def measured(*_: object, **more: object) -> NoReturn:
        threads.append(threading.current_thread())
        raise ValueError("nothing is measured in tests")

    running = Mock(started=True, run=lambda sockets: alive.append(threads[0].is_alive()))
    monkeypatch.setattr(outrider.serving.start, "load", noted)
    monkeypatch.setattr(outrider.serving.start, "http_server", Mock(return_value=running))
    monkeypatch.setattr(outrider.api.scheduling, "machine_profile", measured)
    status, _, errors = run("serve", "--target", toy / "target", "--drafter", toy / "drafter", "--port", free_port())
    assert status == 0, errors
    assert threads[0].daemon and alive == [False]
    assert threads == [threads[0]] * 2, "step costs are measured by forwards, which use OpenMP too"
    monkeypatch.setattr(outrider.serving.start, "load", Mock(side_effect=ValueError("no such target")))
    plain = ("serve", "--target", toy / "target", "--drafter", "none", "--port")
    status, _, errors = run(*plain, free_port())
    assert status != 0 and "no such target" in errors
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said, errors = run(*plain, port := taken.getsockname()[1])
    assert status == 2 and f"--port {port}: Address already in use" in errors, "before the target is loaded"
    assert "serving" not in said + errors


def test_a_worker_whose_engine_fails_at_once_does_not_start(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(model.target, Target)
    engine = Engine(model.target)
    monkeypatch.setattr(engine, "step", Mock(side_effect=RuntimeError("out of memory")))
    worker = Worker(engine, ServerMetrics("m", engine), most_waiting=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(worker.start())
    assert not worker.healthy


def test_bench_reads_the_counters(
    model: Model, toy: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outrider bench` measures this server as it does vLLM: accepted lengths are those of the server's counters."""
    (tmp_path / "tasks.jsonl").write_text('{"turns": ["number 1"]}\n{"turns": ["number 2"]}\n')
    load = ["--tasks", tmp_path / "tasks.jsonl", "--concurrency", 2, "--requests-per-point", 2, "--max-new-tokens", 8]
    with serving(model) as served:
        url = ["--backend", "vllm", "--base-url", served.url, "--repeats", 1, "--out", tmp_path / "out"]
        models = ["--target", toy / "target", "--drafter", toy / "drafter"]
        status, _, errors = run("bench", *models, *load, *url)
        assert status == 0, errors
        names = [f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
        rounds, drafted, accepted = map(served.metric, names)
    (point,) = Journal(tmp_path / "out", json.loads((tmp_path / "out" / "settings.json").read_text())).points
    assert point.same == 2 and rounds > 0
    assert point.metrics.tau == pytest.approx(1 + accepted / rounds)
    assert point.metrics.acceptance == pytest.approx(accepted / drafted)


def test_a_request_that_fails_ends_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as served:
        step, marked = served.engine.step, set[str]()

        def failing() -> list[Output]:
            found = step()
            return [Output(o.id, [], "", "error", error=OSError("lost")) if o.id in marked else o for o in found]

        served.engine.step = failing  # type: ignore[method-assign]
        submit = served.engine.submit

        def mark(request: Any) -> None:
            if list(request.prompt) == [7]:
                marked.add(request.id)
            submit(request)

        served.engine.submit = mark  # type: ignore[method-assign]
        lost = served.post("/v1/completions", prompt=[7], max_tokens=1)
        assert lost.status_code == 500 and "lost" in lost.json()["error"]["message"]
        assert served.post("/v1/completions", **ASKED).status_code == 200
        assert served.get("/health").status_code == 200
        assert 'finished_reason="error",model_name="m"} 1.0' in served.get("/metrics").text


def test_an_engine_that_fails_makes_the_server_unhealthy(model: Model) -> None:
    with serving(model) as served:
        step = served.engine.step
        steps = 0

        def failing() -> list[Output]:
            nonlocal steps
            steps += 1
            if steps > 1:
                raise RuntimeError("out of memory")
            return step()

        served.engine.step = failing  # type: ignore[method-assign]
        body = {**ASKED, "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events[-1] == "[DONE]" and "out of memory" in json.loads(events[-2])["error"]["message"]
        for found in (served.get("/health"), served.post("/v1/completions", **ASKED)):
            assert found.status_code == 503 and "out of memory" in found.json()["error"]["message"]


def test_metrics_of_two_servers_can_be_summed(model: Model) -> None:
    """Sums of the pages are what the answers of both told; no gauge but one is a share of a single server."""
    pages, told = [], []
    with serving(model) as first, serving(model) as second:
        for served, count in ((first, 1), (second, 2)):
            told += [served.post("/v1/completions", **ASKED).json() for _ in range(count)]
        pages = [served.get("/metrics").text for served in (first, second)]
    families = [{family.name: family for family in text_string_to_metric_families(page)} for page in pages]
    assert families[0].keys() == families[1].keys()
    gauges = {name for name, family in families[0].items() if family.type == "gauge"}
    assert gauges == {
        f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    summed: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for page in families:
        for sample in (sample for name in page.keys() - gauges for sample in page[name].samples):
            place = sample.name.removeprefix("vllm:"), frozenset(sample.labels.items())
            summed[place] = summed.get(place, 0.0) + sample.value

    def total(name: str, **labels: str) -> float:
        return sum(value for (own, found), value in summed.items() if own == name and labels.items() <= set(found))

    speculative = [answer["metrics"]["speculative_decoding"] for answer in told]
    for name, field in (
        ("spec_decode_num_drafts_total", "num_spec_steps"),
        ("spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        assert total(name) == sum(one[field] for one in speculative), name
    histograms = [one["acceptance_histogram"] for one in speculative]
    for position in range(len(histograms[0]) - 1):
        deeper = sum(sum(histogram[position + 1 :]) for histogram in histograms)
        assert total("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == deeper
    assert total("spec_decode_num_drafts_total") > 0
    assert total("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in told)
    assert total("generation_tokens_total") == sum(answer["usage"]["completion_tokens"] for answer in told)
    assert total("request_success_total") == total("time_to_first_token_seconds_count") == len(told)
    assert total("time_to_first_token_seconds_bucket", le="+Inf") == len(told)


def test_prompts_that_begin_alike_are_read_once_for_each_salt(model: Model) -> None:
    """Usage of whole answers and streams tells it, and the counters sum it; without the cache there are none."""
    asked = {**ASKED, "prompt": "abcdefgh" * 5}
    with serving(model) as served:

        def found(**more: Any) -> int:
            usage = served.post("/v1/completions", **asked, **more).json()["usage"]
            assert usage["prompt_tokens"] == 40
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert [found(), found(), found(cache_salt="a"), found(cache_salt="a"), found(n=2)] == [0, 32, 0, 32, 32]
        hits = served.metric("prefix_cache_hits_total")
        assert hits == 4 * 32 and served.metric("prefix_cache_queries_total") == 6 * 40
        body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        last = served.post("/v1/completions", **body).text.split("data: ")[-2]
        assert json.loads(last)["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    with serving(model, EngineConfig()) as served:
        assert [served.post("/v1/completions", **asked).json()["usage"]["prompt_tokens_details"] for _ in "ab"] == [
            {"cached_tokens": 0}
        ] * 2
        assert "prefix_cache" not in served.get("/metrics").text


def test_times_are_those_of_the_clients_own_clocks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests come during the first step of another, two may run at once, and one is slow to tokenise.

    Nothing took longer than its client saw, nor less than it was held up here. The counters are their sums.
    """
    asked = {**ASKED, "ignore_eos": True, "speculative": "off", "return_token_ids": True, "stream": True}
    asked |= {"stream_options": {"include_usage": True}}
    seen: list[tuple[float, float, float, dict[str, float]]] = []  # began, first token, end, times that are told

    def ask(prompt: str) -> None:
        began, times = time.perf_counter(), list[float]()
        url, body = f"{served.url}/v1/completions", {**asked, "prompt": prompt}
        with httpx.stream("POST", url, json=body, timeout=60) as found:
            for line in found.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                    event = json.loads(line.removeprefix("data: "))
        seen.append((began, times[0], times[-1], event["metrics"]))

    with serving(model, EngineConfig(max_requests=2)) as served:
        step, encode, go = served.engine.step, served.server.texts._encode, threading.Event()

        def slow_step() -> list[Output]:
            assert go.wait(60)
            time.sleep(0.05)
            return step()

        def slow_encode(text: str, special: bool) -> list[int]:
            time.sleep(0.2 * (text == "slow"))
            return encode(text, special)

        served.engine.step = slow_step  # type: ignore[method-assign]
        monkeypatch.setattr(served.server.texts, "_encode", slow_encode)
        threads = []
        for count, prompt in enumerate(["ab", "slow", *["ab"] * 4], 1):
            threads.append(threading.Thread(target=ask, args=(prompt,)))
            threads[-1].start()
            wait_for(lambda expected=count: len(served.server.worker._live) == expected)  # type: ignore[misc]
        held = time.perf_counter()
        time.sleep(0.2)
        go.set()
        for thread in threads:
            thread.join(60)
        sums = [served.metric(f"{name}_seconds_sum") for name in ("request_queue_time", "time_to_first_token")]
    seen.sort(key=lambda one: one[0])
    queued = [told["queue_time_ms"] / 1000 for *_, told in seen]
    first = [told["time_to_first_token_ms"] / 1000 for *_, told in seen]
    decoded = [told["generation_time_ms"] / 1000 for *_, told in seen]
    for place, (began, came, ended, _) in enumerate(seen):
        assert queued[place] >= 0 and first[place] >= 0.05 and decoded[place] >= 7 * 0.05
        assert queued[place] + first[place] <= came - began
        assert queued[place] + first[place] + decoded[place] <= ended - began
    assert first[0] >= 0.2 and min(queued[1:]) >= 0.2, "during the first step"
    assert queued[1] >= 0.4 + held - seen[2][0], "tokenising it, and until the second step"
    assert min(queued[2:]) >= 0.2 + 7 * 0.05, "until the first of two has finished"
    assert sums == pytest.approx([sum(queued), sum(queued) + sum(first)])


def test_keys_are_asked_for_where_one_is_set(model: Model) -> None:
    with serving(model, key="secret") as served:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            found = httpx.post(f"{served.url}/v1/completions", json=ASKED, headers=header, timeout=60)
            assert found.status_code == 401 and found.json()["error"]["type"] == "authentication_error"
        assert served.get("/v1/models").status_code == 401
        client = OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model="m", prompt="ab", max_tokens=3).usage
        for page in ("health", "metrics", "version"):
            assert served.get(f"/{page}").status_code == 200


def test_a_key_is_compared_in_constant_time_and_shown_nowhere(
    model: Model, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in answers, whatever is asked, nor in traces, metrics or what the server prints."""
    key, compare = "kept-to-ourselves", Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(app, "compare_digest", compare)
    with serving(model, key=key) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        asked = {**ASKED, "trace": True, "logprobs": 2}
        answers = [
            client.post("/v1/completions", json=asked),
            client.post("/v1/completions", json={**asked, "model": "other"}),
            client.post("/v1/completions", json={**asked, "n": "x"}),
            client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}),
            client.get("/v1/models"),
            client.get("/nothing"),
        ]
        assert [one.status_code for one in answers] == [200, 404, 400, 400, 200, 404]
        assert compare.call_count == len(answers) and compare.call_args.args[1] == f"Bearer {key}".encode()
        monkeypatch.setattr(served.engine, "step", Mock(side_effect=RuntimeError("out of memory")))
        answers += [client.post("/v1/completions", json=asked), client.get("/health"), client.get("/metrics")]
        answers.append(client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}x"}))
        assert [one.status_code for one in answers[-4:]] == [503, 503, 200, 401]
    shown = capfd.readouterr()
    assert all(key not in one.text + str(one.headers) for one in answers) and key not in shown.out + shown.err


def test_bodies_too_large_or_too_slow(model: Model) -> None:
    with serving(model, limits=Limits(body_bytes=1000, body_seconds=0.3)) as served:
        large = served.post("/v1/completions", prompt="a" * 1000)
        assert large.status_code == 413 and "1000 bytes" in large.json()["error"]["message"]
        address = served.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            slow.settimeout(60)
            assert b"408" in slow.recv(1000).splitlines()[0]
        assert served.post("/v1/completions", **ASKED).status_code == 200


def test_a_server_that_stops_finishes_what_it_has(model: Model) -> None:
    with serving(model) as served, held(served) as go:
        answer = in_background(lambda: served.post("/v1/completions", **ASKED))
        wait_for(lambda: bool(served.server.worker._live))
        served.stop()
        go.set()
        assert answer().json()["usage"]["completion_tokens"] > 0
    with pytest.raises(httpx.ConnectError):
        served.post("/v1/completions", **ASKED)


# ----------------------------------------------------------------------------
# Tool calls: the three forms, text in pieces of any length, and what is no call.
# ----------------------------------------------------------------------------


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = ToolCall("weather", '{"city": "1", "days": 2}')
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "1", "days": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n1\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
ODD = '"\\\\\\"</tool_call></tool_call>"'  # a text with a quote, and marks that do not end the call
BROKEN = HERMES.replace('"1"', '"a " b"')  # a quote too many
CUT_OFF = XML.replace("</function>\n", "")
MARKS = '["a</tool_call>", "<tool_call>"]'
LLAMA = '{"name": "weather", "parameters": {"city": "1", "days": 2}}'


@pytest.mark.parametrize("length", [1, 3, 1000])
@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        ("hermes", f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", [CALL, CALL]),
        ("hermes", f"{HERMES}\n and\n{HERMES} ", "\n and\n", [CALL, CALL]),
        ("hermes", HERMES.replace('"1"', ODD), "", [ToolCall("weather", CALL.arguments.replace('"1"', ODD))]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [CALL]),
        ("hermes", "a < b, <tool", "a < b, <tool", []),
        ("hermes", "<tool_call>nonsense</tool_call> on", "<tool_call>nonsense</tool_call> on", []),
        ("hermes", HERMES.replace("weather", "other"), HERMES.replace("weather", "other"), []),
        ("xml", f"So: {XML}", "So: ", [CALL]),
        (
            "xml",
            XML.replace("2", '["</parameter>"]'),
            "",
            [ToolCall("weather", CALL.arguments.replace("2", '["</parameter>"]'))],
        ),
        ("hermes", f"{BROKEN} or\n{HERMES}", f"{BROKEN} or\n", [CALL]),
        ("hermes", f"{BROKEN}\n{HERMES}\n{BROKEN}\n{HERMES}", f"{BROKEN}\n\n{BROKEN}\n", [CALL, CALL]),
        ("xml", "<tool_call><function=weather></tool_call>", "<tool_call><function=weather></tool_call>", []),
        ("xml", f"{CUT_OFF}\n{XML}", f"{CUT_OFF}\n", [CALL]),
        (
            "xml",
            f"{XML.replace('2', MARKS)}\n{XML}",
            "",
            [ToolCall("weather", CALL.arguments.replace("2", MARKS)), CALL],
        ),
        ("llama", LLAMA, "", [CALL]),
        ("llama", f"Text {LLAMA}", f"Text {LLAMA}", []),
        ("llama", '{"name": 3}', '{"name": 3}', []),
    ],
)
def test_tool_calls_are_read(format: Format, text: str, content: str, calls: list[ToolCall], length: int) -> None:
    parser = ToolCallParser(format, TOOLS)
    pieces = [text[i : i + length] for i in range(0, len(text), length)]
    found = [parser.push(piece, final=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert "".join(text for text, _ in found) == content
    assert [call for _, some in found for call in some] == calls


def test_the_form_of_tool_calls_is_the_templates() -> None:
    assert format_of("{{ tools }} <tool_call> {{ x }}") == "hermes"
    assert format_of("{{ tools }} <tool_call><function=name>") == "xml"
    assert format_of('Environment: ipython {"name": n, "parameters": p}') == "llama"
    assert format_of("{{ tools }}") is None


def test_tool_calls_through_http(model: Model) -> None:
    """A target whose template asks for them, and which says what a script says."""
    tokenizer = model.target.tokenizer
    assert tokenizer is not None
    plain = tokenizer.chat_template
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }} <tool_call>{% endfor %}" + str(plain)
    try:
        with serving(model) as served:
            step = served.engine.step

            def scripted() -> list[Output]:
                for output in (found := step()):
                    served.engine.cancel(output.id)
                pieces = ["Wait. <tool", HERMES[5:40], HERMES[40:]]
                return [
                    Output(output.id, [5], piece, finish="stop" if i == 2 else None)
                    for output in found
                    for i, piece in enumerate(pieces)
                ]

            served.engine.step = scripted  # type: ignore[method-assign]
            client: Any = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            earlier = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "2"}'}}
            messages = [
                {"role": "user", "content": "And here?"},
                {"role": "assistant", "content": None, "tool_calls": [earlier]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"},
            ]
            asked = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 20}
            choice = client.chat.completions.create(**asked).choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Wait. "
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "1", "days": 2})
            parts = list(client.chat.completions.create(**asked, stream=True))
            assert "".join(part.choices[0].delta.content or "" for part in parts) == "Wait. "
            (part,) = [part for part in parts if part.choices[0].delta.tool_calls]
            assert part.choices[0].delta.tool_calls[0].function.arguments == call.function.arguments
            assert parts[-1].choices[0].finish_reason == "tool_calls"
            none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
            assert none.finish_reason == "stop" and HERMES in none.message.content
            broken = [{**messages[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
            refused = served.post("/v1/chat/completions", messages=broken)
            assert refused.status_code == 400 and "not JSON" in refused.json()["error"]["message"]
    finally:
        tokenizer.chat_template = plain
