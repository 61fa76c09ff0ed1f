"""A server that speaks like vLLM without a model: fast to start, streams, counts drafts, and can misbehave.

    python tests/toys/fake_engine.py [serve] MODEL --port P [--speculative-config JSON] [...]     (in a test: `serving`)

Token i of a response is a function of the prompt and i alone, so speculation changes nothing but the number of parts:
with K drafts, K + 1 tokens come together. Its behaviour is chosen by the environment variable FAKE_ENGINE.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIRST, LETTERS = 97, 26  # tokens are bytes: lower-case letters


def response(prompt: Sequence[int], length: int) -> list[int]:
    """What the engine says."""
    return [FIRST + (sum(prompt) + 3 * i) % LETTERS for i in range(length)]


@dataclass
class FakeEngine:
    """`drafts` 0: no speculation.

    `style`: vllm (ids, metrics), forge (ids, usage; docs/add-an-engine.md), llama.cpp (text, timings) or openai
    (text only).
    """

    drafts: int = 0
    style: str = "vllm"
    refuse: int | None = None  # an HTTP status
    silent: bool = False  # never finishes
    slow: float = 0.0  # seconds before every part
    other: bool = False  # speculation says something else: a broken engine
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_K: list[int] = field(default_factory=list)  # at each position

    def parts(self, body: dict[str, Any]) -> Iterator[list[int]]:
        prompt = body.get("prompt") or list(json.dumps(body["messages"]).encode())
        tokens = response(prompt, body["max_tokens"])
        if self.other:
            tokens[-1] = ord("!")
        while tokens:
            part, tokens = tokens[: self.drafts + 1], tokens[self.drafts + 1 :]
            if self.drafts:
                self.rounds += 1
                self.drafted += self.drafts
                self.accepted += len(part) - 1
                self.accepted_K = self.accepted_K or [0] * self.drafts
                for position in range(len(part) - 1):
                    self.accepted_K[position] += 1
            yield part

    def metrics(self) -> str:
        name = {"vllm": "vllm", "forge": "forge"}.get(self.style, "llamacpp")
        counts = {"drafts": self.rounds, "draft_tokens": self.drafted, "accepted_tokens": self.accepted}
        lines = [f'{name}:spec_decode_num_{key}_total{{engine="0"}} {float(value)}' for key, value in counts.items()]
        at = f'{name}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="'
        lines += [f'{at}{position}"}} {float(value)}' for position, value in enumerate(self.accepted_K)]
        return "# HELP x y\n" + "\n".join(lines) + "\nbroken line here x\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def engine(self) -> FakeEngine:
        return self.server.engine  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        pages = {"/health": "ok", "/metrics": self.engine.metrics(), "/v1/models": '{"data": [{"id": "fake"}]}'}
        self._send(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.bodies.append(body)
        if engine.refuse is not None:
            self._send(engine.refuse, '{"error": "asked for"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        parts = list(engine.parts(body))
        try:
            for number, part in enumerate(parts):
                time.sleep(engine.slow)
                last = number == len(parts) - 1
                self._event({"choices": [self._choice(part, "length" if last else None)]})
                if engine.silent:
                    time.sleep(600)
            self._event({"choices": [], **self._closing(parts)})
            self._chunk("data: [DONE]\n\n")
            self._chunk("")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has cancelled

    def _choice(self, part: list[int], finish: str | None) -> dict[str, Any]:
        text = bytes(part).decode()
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "chat" in self.path else {"text": text}
        return {**choice, "token_ids": part} if self.engine.style in ("vllm", "forge") else choice

    def _closing(self, parts: list[list[int]]) -> dict[str, Any]:
        tokens, rounds = sum(map(len, parts)), len(parts)
        if not self.engine.drafts or self.engine.style == "openai":
            return {}
        if self.engine.style == "llama.cpp":
            drafted = {"draft_n": self.engine.drafts * rounds, "draft_n_accepted": tokens - rounds}
            return {"timings": {"predicted_n": tokens, **drafted}}
        if self.engine.style == "forge":
            return {"usage": {"tokens_per_round": tokens / rounds}}
        told = {"num_spec_steps": rounds, "mean_acceptance_length": tokens / rounds}
        return {"metrics": {"speculative_decoding": told}}

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event, ensure_ascii=False)}\n\n")  # as vLLM writes it

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    engine: FakeEngine

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that cancel drop their connections."""


def _server(engine: FakeEngine, port: int) -> Server:
    server = Server(("127.0.0.1", port), Handler)
    server.engine = engine
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    return server


@contextmanager
def serving(engine: FakeEngine) -> Iterator[FakeEngine]:
    """`engine` at a free local port."""
    server = _server(engine, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()


def executable(path: Path, style: str = "vllm") -> Path:
    """The fake engine as a command of its own."""
    lines = f"#!{sys.executable}", "import sys", f"sys.path.insert(0, {str(ROOT)!r})"
    lines += "from tests.toys.fake_engine import main", f"main(sys.argv[1:], {style!r})"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def main(arguments: list[str], style: str = "vllm") -> None:
    """As a process: a worker of its own beside the server, whose id goes to FAKE_ENGINE_WORKER."""
    behaviour = os.environ.get("FAKE_ENGINE", "")
    print("fake engine:", " ".join(arguments), flush=True)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if "FAKE_ENGINE_WORKER" in os.environ:
        with open(os.environ["FAKE_ENGINE_WORKER"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {worker.pid}\n")
    if behaviour == "dies":
        print("no such model", flush=True)
        sys.exit(3)
    if behaviour == "hangs":
        time.sleep(600)
    options = dict(pairwise(arguments))
    config = json.loads(options.get("--speculative-config", "{}"))
    drafts = int(options.get("--draft-tokens", config.get("num_speculative_tokens", 0)))
    engine = FakeEngine(drafts, style)
    _server(engine, int(options["--port"])).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
