"""Measure the server under load, and what it costs beside the engine alone.

    python -m benchmarks.serving load --minutes 10 --out soak.json
    python -m benchmarks.serving overhead --out overhead.json
    python -m benchmarks.serving chat --out chat.json
    python -m benchmarks.serving crowded --out crowded.json

`load`: streaming clients of `outrider serve` ask for greedy answers, and some of them disconnect on the way. Every
finished answer is compared with plain decoding of its prompt alone; a difference is a tie where the logits are one.
Memory, descriptors and threads are those of the server's process, whose KV pool is resident before it listens: what
its memory grows by is outside of the pool. Afterwards no request and no KV block may be left, and from the second
quarter of the time to the last memory may grow by `--most-growth` and no more.

`overhead`: the same requests in turns through an engine in this process; through HTTP with clients that sleep until
their answers are complete, which is what the server itself costs; and through HTTP with clients that read every event
as it comes, on the same cores. One process computes while the other waits. `loop_percent` is the processor time of the
server's event loop as a share of its runs, a figure that other work on the machine hardly changes.

`chat`: seconds to the first token of a third turn whose history the prefix cache has, and of the same under a salt of
its own, which it has not.

`crowded`: seconds of a request of one token, alone and beside clients that send prompts of megabytes, which cannot fit,
and leave when they get no answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

import outrider
from outrider.backends.openai import read_metrics
from outrider.data.chat import Chat
from outrider.data.sources import load_prompts
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import SamplingParams
from outrider.serving.start import build_server
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target
from outrider.utils.measure import machine, set_up, versions

_SAMPLE_SECONDS = 5.0
_PATIENCE = 300.0  # seconds for the server to start
_WHOLE_ANSWER = 2**20  # bytes, more than an answer has; its end wakes the client, too

app = typer.Typer(add_completion=False)


@dataclass
class Server:
    """A running `outrider serve`."""

    port: int
    process: int

    def metrics(self) -> dict[str, float]:
        """The page's samples by name, those of different labels added up; `aborted`: requests whose clients went."""
        page = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text
        gone = read_metrics("\n".join(line for line in page.splitlines() if 'finished_reason="abort"' in line))
        found = {name: sum(values) for name, values in read_metrics(page).items()}
        return {**found, "aborted": sum(gone["vllm:request_success_total"])}

    def loop_seconds(self) -> float:
        """Processor time of the main thread, which runs the event loop; the engine computes in others."""
        spent = Path(f"/proc/{self.process}/task/{self.process}/schedstat").read_text().split()[0]
        return int(spent) / 1e9

    def resources(self) -> dict[str, float]:
        """Resident memory (MiB), open descriptors and threads."""
        place = Path(f"/proc/{self.process}")
        pages = int((place / "statm").read_text().split()[1])
        return {
            "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "descriptors": len(list((place / "fd").iterdir())),
            "threads": len(list((place / "task").iterdir())),
        }


@contextmanager
def serving(target: str, threads: int, *more: str) -> Iterator[Server]:
    """`outrider serve` of a target with its drafter and more options, until the end."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    options = ["--target", target, "--port", str(port), "--threads", str(threads), *more]
    with subprocess.Popen([sys.executable, "-m", "outrider.cli.main", "serve", *options]) as process:
        try:
            until = time.monotonic() + _PATIENCE
            while True:
                assert process.poll() is None and time.monotonic() < until, "the server did not start"
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield Server(port, process.pid)
        finally:
            process.terminate()


async def events(port: int, asked: dict[str, Any], *, at_once: bool = False) -> AsyncIterator[bytes]:
    """The data of an answer's events; closing it disconnects. Nothing is parsed, to leave cores alone.

    `at_once`: they come when the answer is complete, and until then this process is not woken; else as they are sent.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if at_once:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WHOLE_ANSWER)
        body = json.dumps(asked).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        status = await reader.readline()
        assert status.startswith(b"HTTP/1.1 200"), status + await reader.read()
        async for line in reader:
            if line.startswith(b"data: {"):
                yield line[len(b"data: ") :]
    finally:
        writer.close()


def asked_for(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A greedy request of a stream."""
    return {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


# ----------------------------------------------------------------------------
# Load.
# ----------------------------------------------------------------------------


class Clients:
    """Clients that ask one after another, and what they saw.

    Args:
        plain: prompts and what plain decoding answers to each alone.
        first, gaps: seconds to the first event of an answer, and between two.
        different: prompts and answers that are not plain decoding's.
    """

    def __init__(self, port: int, plain: dict[tuple[int, ...], list[int]]) -> None:
        self.port, self.plain = port, plain
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.counts: Counter[str] = Counter()
        self.different: list[tuple[tuple[int, ...], list[int]]] = []

    async def run(self, seed: int, until: float) -> None:
        """Ask again and again; three answers in ten are left somewhere, some of them before their first token."""
        draw = random.Random(seed)
        while time.monotonic() < until:
            prompt = draw.choice(list(self.plain))
            patience = draw.uniform(0.0, 10.0) if draw.random() < 0.3 else None  # seconds
            tokens: list[int] = []
            try:
                await asyncio.wait_for(self._ask(prompt, tokens), patience)
            except asyncio.TimeoutError:
                self.counts["disconnected"] += 1
            else:
                self.counts["finished"] += 1
                if tokens != self.plain[prompt]:
                    self.different.append((prompt, tokens))
            self.counts["tokens"] += len(tokens)

    async def _ask(self, prompt: tuple[int, ...], tokens: list[int]) -> None:
        last = time.perf_counter()
        async with aclosing(events(self.port, asked_for(prompt, len(self.plain[prompt])))) as stream:
            async for event in stream:
                now = time.perf_counter()
                (self.gaps if tokens else self.first).append(now - last)
                last = now
                tokens += json.loads(event)["choices"][0]["token_ids"]


async def sampled(server: Server, seconds: float) -> list[dict[str, float]]:
    """The server's resources and its share of KV blocks in use, printed again and again for so many seconds."""
    started, found = time.monotonic(), list[dict[str, float]]()
    while (now := time.monotonic() - started) < seconds:
        metrics = await asyncio.to_thread(server.metrics)
        blocks = round(metrics["vllm:kv_cache_usage_perc"], 4)
        found.append({"seconds": round(now, 1), **server.resources(), "kv_blocks_used": blocks})
        typer.echo(json.dumps(found[-1]))
        await asyncio.sleep(_SAMPLE_SECONDS)
    return found


def growth(samples: Sequence[dict[str, float]]) -> float:
    """MiB of memory between the medians of the second and the last quarter of the samples."""
    memory, quarter = [sample["memory_mib"] for sample in samples], -(-len(samples) // 4)
    return statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])


@app.command()
def load(
    minutes: Annotated[float, typer.Option(help="of load")] = 10.0,
    users: Annotated[int, typer.Option(help="clients at once")] = 32,
    tokens: Annotated[int, typer.Option(help="of an answer")] = 48,
    prompts: Annotated[int, typer.Option(help="different ones")] = 24,
    target: Annotated[str, typer.Option(help="directory or id")] = EMBEDDED_ID,
    threads: Annotated[int, typer.Option(help="of the server, and of plain decoding")] = 2,
    seed: Annotated[int, typer.Option(help="of the clients' choices")] = 0,
    most_growth: Annotated[float, typer.Option(help="MiB, from the second quarter of the time to the last")] = 50.0,
    out: Annotated[Path | None, typer.Option(help="JSON file of the figures")] = None,
) -> None:
    """Streaming clients that disconnect at random: exactness, latencies, and what is left of them in the server."""
    set_up(threads)
    loaded = outrider.load(target, "none").target
    assert isinstance(loaded, Target)
    alone = Engine(loaded)
    plain = {tuple(prompt): direct(alone, [prompt], tokens)[0] for prompt in tokenized(loaded, prompts)}
    with serving(target, threads) as server:
        asyncio.run(Clients(server.port, plain).run(seed, time.monotonic()))  # one, so that nothing is new
        before, counted = server.resources(), server.metrics()
        clients = Clients(server.port, plain)

        async def together() -> list[dict[str, float]]:
            until = time.monotonic() + 60 * minutes
            running = asyncio.gather(*(clients.run(seed + 1 + user, until) for user in range(users)))
            samples = await sampled(server, 60 * minutes)
            await running
            return samples

        samples = asyncio.run(together())
        time.sleep(_SAMPLE_SECONDS)  # connections are closed
        after, metrics = server.resources(), server.metrics()
    verdicts = Counter(compare_greedy(loaded, key, plain[key], speculative=other) for key, other in clients.different)
    found = {
        "users": users,
        "seconds": 60 * minutes,
        **clients.counts,
        "same": clients.counts["finished"] - len(clients.different),
        "ties": verdicts["tie"],
        "mismatches": verdicts["mismatch"],
        "aborted": metrics["aborted"] - counted["aborted"],
        "ttft_seconds": percentiles(clients.first),
        "inter_token_seconds": percentiles(clients.gaps),
        "left": {name: metrics[f"vllm:{name}"] for name in _LEFT},
        "preemptions": metrics["vllm:num_preemptions_total"],
        "before": before,
        "after": after,
        "growth_mib": round(growth(samples), 1),
        "samples": samples,
    }
    shown = {name: value for name, value in found.items() if name != "samples"}
    typer.echo(json.dumps(shown, indent=1))
    keep(out, found)
    leaks = [name for name, value in found["left"].items() if value]
    leaks += ["descriptors"] if after["descriptors"] > before["descriptors"] else []
    leaks += ["memory"] if found["growth_mib"] > most_growth else []
    if leaks or verdicts["mismatch"]:
        raise typer.Exit(f"left in the server: {leaks or 'nothing'}; {verdicts['mismatch']} wrong answers")


_LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


# ----------------------------------------------------------------------------
# Overhead.
# ----------------------------------------------------------------------------


def direct(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What an engine answers greedily, so many tokens to each prompt, all at once."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        engine.submit(Request(str(index), prompt, SamplingParams(0.0), StopRules(tokens, stop_ids=())))
    while not engine.idle:
        for output in engine.step():
            found[output.id] += output.tokens
    return list(found.values())


async def through_http(port: int, prompts: Sequence[Sequence[int]], tokens: int, *, at_once: bool) -> None:
    """The same through the server; the events are only counted. `at_once` as of `events`."""

    async def ask(prompt: Sequence[int]) -> None:
        async with aclosing(events(port, asked_for(prompt, tokens), at_once=at_once)) as stream:
            assert [event async for event in stream]

    await asyncio.gather(*map(ask, prompts))


@app.command()
def overhead(
    users: Annotated[str, typer.Option(help="requests at once, several levels")] = "1,8,32",
    tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    repeats: Annotated[int, typer.Option(help="of each side")] = 4,
    target: Annotated[str, typer.Option(help="directory or id")] = EMBEDDED_ID,
    threads: Annotated[int, typer.Option(help="of either side")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON file of the figures")] = None,
) -> None:
    """Seconds of the same greedy requests through the engine and through HTTP, in turns: A B C A B C ..."""
    set_up(threads)
    with serving(target, threads, "--no-prefix-cache") as server:  # the same prompts come again and again
        built = build_server(
            outrider.load(target),
            EngineConfig(),
            None,
            max_waiting=0,
            max_new_tokens=None,
            name=None,
            thinking=False,
        )
        engine = built.worker.engine
        engine.warm_up()
        levels = [int(level) for level in users.split(",")]
        prompts = tokenized(built.target, max(levels))
        found = []
        for level in levels:
            seconds: dict[str, list[float]] = {"engine": [], "server": [], "server_and_readers": []}
            loop = list[float]()  # per cent of the server's runs
            for repeat in range(repeats + 1):
                for side, times in seconds.items():
                    spent, started = server.loop_seconds(), time.perf_counter()
                    if side == "engine":
                        direct(engine, prompts[:level], tokens)
                    else:
                        at_once = side == "server"
                        asyncio.run(through_http(server.port, prompts[:level], tokens, at_once=at_once))
                    taken = time.perf_counter() - started
                    if repeat:  # the first of each side is not counted
                        times.append(round(taken, 4))
                    if repeat and side == "server":
                        loop.append(100 * (server.loop_seconds() - spent) / taken)
            over = {name: percent_over(seconds["engine"], seconds[name]) for name in ("server", "server_and_readers")}
            medians = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
            found.append({"users": level, "seconds": seconds, "medians": medians, "overhead_percent": over})
            found[-1]["loop_percent"] = round(statistics.median(loop), 2)
            typer.echo(json.dumps(found[-1]))
    keep(out, {"tokens": tokens, "threads": threads, "levels": found})


def percent_over(alone: Sequence[float], through: Sequence[float]) -> dict[str, Any]:
    """By how much the second of each pair takes longer: the median of the pairs, and all of them in order."""
    percents = sorted(100 * (other / own - 1) for own, other in zip(alone, through, strict=True))
    return {"median": round(statistics.median(percents), 2), "pairs": [round(one, 2) for one in percents]}


# ----------------------------------------------------------------------------
# Chat.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a turn was answered, how much of its prompt was cached, and the seconds to its first token."""

    tokens: list[int]
    cached: int
    first: float


async def answer(port: int, prompt: Sequence[int], tokens: int, salt: str) -> Answer:
    """Ask for so many tokens."""
    found, cached, first, started = list[int](), 0, 0.0, time.perf_counter()
    asked = {**asked_for(prompt, tokens), "cache_salt": salt, "stream_options": {"include_usage": True}}
    async for event in events(port, asked):
        first = first or time.perf_counter() - started
        data = json.loads(event)
        found += [token for choice in data["choices"] for token in choice["token_ids"]]
        if usage := data.get("usage"):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(found, cached, first)


@app.command()
def chat(
    tokens: Annotated[int, typer.Option(help="of an answer")] = 128,
    repeats: Annotated[int, typer.Option(help="chats")] = 8,
    target: Annotated[str, typer.Option(help="directory or id")] = EMBEDDED_ID,
    threads: Annotated[int, typer.Option(help="of the server")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON file of the figures")] = None,
) -> None:
    """Seconds to the first token of a third turn, with its history in the prefix cache and without, in turns."""
    questions = tokenized(outrider.load(target, None).target, 3 * repeats)
    found: dict[str, list[float]] = {"cached": [], "whole": []}
    lengths = []
    with serving(target, threads) as server:
        for number in range(repeats):
            history = list[int]()
            for question in questions[3 * number : 3 * number + 2]:
                history += question
                history += asyncio.run(answer(server.port, history, tokens, f"chat {number}")).tokens
            history += questions[3 * number + 2]
            salts = {"cached": f"chat {number}", "whole": f"alone {number}"}
            said = []
            for side in sorted(salts, reverse=number % 2 == 1):
                last = asyncio.run(answer(server.port, history, tokens, salts[side]))
                found[side].append(round(last.first, 4))
                said.append(last.tokens)
                assert (last.cached > 0) == (side == "cached"), f"{last.cached} of {len(history)} tokens were cached"
            lengths.append({"prompt": len(history), "same": said[0] == said[1]})
    medians = {side: round(statistics.median(seconds), 4) for side, seconds in found.items()}
    typer.echo(json.dumps(medians))
    keep(out, {"tokens": tokens, "threads": threads, "seconds": found, "medians": medians, "chats": lengths})


@app.command()
def crowded(
    clients: Annotated[int, typer.Option(help="that send prompts which cannot fit")] = 3,
    patience: Annotated[float, typer.Option(help="seconds after which they leave")] = 3.6,
    repeats: Annotated[int, typer.Option(help="of each side, four requests each")] = 6,
    target: Annotated[str, typer.Option(help="directory or id")] = EMBEDDED_ID,
    threads: Annotated[int, typer.Option(help="of the server")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON file of the figures")] = None,
) -> None:
    """Seconds of a lone request of one token, alone and beside clients with prompts of megabytes, in turns."""
    body = json.dumps({"prompt": "a b" * 1_300_000, "max_tokens": 1}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    on, refused = threading.Event(), Counter[bytes]()

    def crowd(port: int) -> None:
        while on.is_set():
            with closing(socket.create_connection(("127.0.0.1", port))) as client, suppress(OSError):
                client.settimeout(patience)
                client.sendall(request)
                refused[client.recv(12)] += 1

    found: dict[str, list[float]] = {"alone": [], "beside": []}
    asked = {"prompt": "A river", "max_tokens": 1, "temperature": 0}
    with serving(target, threads, "--drafter", "none") as server, httpx.Client() as client:
        for repeat in range(repeats + 1):
            for side, seconds in found.items():
                (on.set if side == "beside" else on.clear)()
                crowds = [threading.Thread(target=crowd, args=(server.port,)) for _ in range(clients)]
                for one in crowds:
                    one.start()
                time.sleep(1.0)
                for _ in range(4):
                    started = time.perf_counter()
                    client.post(f"http://127.0.0.1:{server.port}/v1/completions", json=asked).raise_for_status()
                    if repeat:  # the first of each side is not counted
                        seconds.append(round(time.perf_counter() - started, 4))
                on.clear()
                for one in crowds:
                    one.join()
    medians = {side: round(statistics.median(seconds), 4) for side, seconds in found.items()}
    typer.echo(json.dumps(medians))
    statuses = {status.decode(): count for status, count in refused.items()}
    keep(out, {"clients": clients, "threads": threads, "seconds": found, "medians": medians, "refused": statuses})


# ----------------------------------------------------------------------------
# All.
# ----------------------------------------------------------------------------


def tokenized(target: Target, count: int) -> list[list[int]]:
    """Prompts of eval_math, as the target's chat template writes them."""
    chat = Chat.of(target)
    return [chat.prompts(conversation, [], False)[0] for conversation in load_prompts("eval_math", count)]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    return {f"p{p}": round(float(np.percentile(seconds, p)), 4) for p in (50, 95, 99)}


def keep(out: Path | None, found: dict[str, Any]) -> None:
    """Write figures with the machine and the versions they were taken on."""
    if out is not None:
        out.write_text(json.dumps({**found, "machine": machine(), "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    app()
