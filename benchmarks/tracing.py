"""What the inspector costs: throughput of the same streamed chats as they are, watched, and traced.

    plain      neither
    watched    while GET /inspector/events is read
    traced     while it is read, with "trace": true in every request

All three are taken in every round, each first as often as the others, against one server. Tokens per second are of the
whole: all users' tokens over the seconds from the first request to the last token, at temperature 0. A round's ratios
to its own plain run are what is reported; they vary by several per cent on a machine with other work. Clients sleep
until their answers have ended, so that what is measured is the server's work and not theirs on the same cores.

--inside needs no server: the seconds in which the engine makes traces, and those in which they become JSON, as shares
of the seconds of its steps when every request is traced. Other work slows both alike.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import outrider.decoding.engine as engine_module
from outrider.api.model import load
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.text import TextStream
from outrider.sampling import SamplingParams
from outrider.serving.inspector import trace_json
from outrider.serving.start import build_server
from outrider.target.hub import EMBEDDED_ID
from outrider.utils.measure import machine, versions

KINDS = ("plain", "watched", "traced")
_LONGEST_ANSWER = 1 << 24  # bytes
PROMPTS = ("Name three rivers.", "What is 7 + 5?", "Describe a sea.", "Count to 20.", "Tell a story.", "Explain rain.")


def run(url: str, kind: str, users: int, tokens: int) -> float:
    """Tokens per second of one run: every user asks once for exactly `tokens` tokens."""

    def ask(user: int) -> None:
        messages = [{"role": "user", "content": PROMPTS[user % len(PROMPTS)]}]
        body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with sent(url, "POST /v1/chat/completions", json.dumps(body | {"trace": kind == "traced"})) as connection:
            answer = whole(connection)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:1000]
        assert answer.count(b'"trace"') > 0 or kind != "traced"

    with ThreadPoolExecutor(users + 1) as pool:
        if kind != "plain":
            watching = sent(url, "GET /inspector/events", "")
            events = pool.submit(whole, watching)
        started = time.perf_counter()
        list(pool.map(ask, range(users)))
        seconds = time.perf_counter() - started
        if kind != "plain":
            watching.shutdown(socket.SHUT_RDWR)
            assert events.result().startswith(b"HTTP/1.1 200")
            watching.close()
    return users * tokens / seconds


def sent(url: str, route: str, body: str) -> socket.socket:
    """A connection with one request on it."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    connection = socket.create_connection((host, int(port)), timeout=600)
    connection.settimeout(None)
    headers = f"Host: {host}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{route} HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode())
    return connection


def whole(connection: socket.socket) -> bytes:
    """All bytes until the connection ends. The kernel collects them: this process sleeps meanwhile."""
    return connection.recv(_LONGEST_ANSWER, socket.MSG_WAITALL)


def inside(users: int, tokens: int, temperature: float) -> tuple[float, float, float]:
    """(seconds of a step, share of making traces, share of writing JSON) with every request traced."""
    model = load(EMBEDDED_ID)
    server = build_server(
        model, EngineConfig(), None, max_waiting=users, max_new_tokens=None, name=None, thinking=False
    )
    engine, tokenizer, spent = server.worker.engine, server.tokenizer, {"trace": 0.0, "step": 0.0, "json": 0.0}
    original = engine_module.report

    def timed(*about: Any, **named: Any) -> Any:
        started = time.perf_counter()
        fields = original(*about, **named)
        spent["trace"] += time.perf_counter() - started
        return fields

    engine_module.report = timed
    params, rules = SamplingParams(temperature=temperature, seed=0), StopRules(tokens, stop_ids=())
    for user in range(users):
        engine.submit(
            Request(str(user), tokenizer(PROMPTS[user % len(PROMPTS)])["input_ids"], params, rules, trace=True)
        )
    texts = {str(user): TextStream(tokenizer) for user in range(users)}
    steps = 0
    while not engine.idle:
        began = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        for output in outputs:
            assert output.trace is not None
            final = output.finish is not None
            json.dumps(trace_json(output.trace, texts[output.id], server.texts.piece, final=final))
        spent["step"] += ended - began
        spent["json"] += time.perf_counter() - ended
        steps += 1
    engine_module.report = original
    return spent["step"] / steps, spent["trace"] / spent["step"], spent["json"] / spent["step"]


def main() -> None:
    """Measure a running server, or the engine in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a running outrider serve")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help="the engine in this process, without a server")
    options = parser.parse_args()
    if options.inside:
        for temperature in (0.0, 1.0):
            step, trace, written = inside(options.users, options.tokens, temperature)
            print(f"temperature {temperature:g}: a step {1000 * step:.0f} ms, traces {trace:.2%}, JSON {written:.2%}")
        return
    run(options.url, "traced", options.users, tokens=16)  # what is computed once is computed now
    found: list[dict[str, float]] = []
    for number in range(options.rounds):
        turn = [KINDS[(number + i) % 3] for i in range(3)]
        found.append({kind: run(options.url, kind, options.users, tokens=options.tokens) for kind in turn})
    table = Table("", "tokens/s", "of plain", "quartiles")
    ratios: dict[str, Any] = {}
    for kind in KINDS:
        of_plain = [one[kind] / one["plain"] for one in found]
        low, median, high = np.quantile(of_plain, (0.25, 0.5, 0.75)).tolist()
        ratios[kind] = {"low": low, "median": median, "high": high}
        speed = float(np.median([one[kind] for one in found]))
        table.add_row(kind, f"{speed:.1f}", f"{median:.4f}", f"{low:.4f} to {high:.4f}")
    Console().print(table)
    if options.out:
        settings = {"users": options.users, "tokens": options.tokens, "rounds": options.rounds}
        written = {"settings": settings, "ratios": ratios, "runs": found, "machine": machine(), "versions": versions()}
        options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
