"""A small OpenAI-compatible server over a toy target, for real HTTP in tests, with faults on request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.decoding import generate_batch


@dataclass
class ToyServer:
    """`fault(number, body)` names what goes wrong with a request: 429, 500, 400, drop, malformed, ... or None; or it
    gives what is sent in place of an answer, part by part, before the connection ends.

    `ids`: under which name token ids are returned; None: text only. `page`: what /v1/models says in place of `model`.
    """

    target: Target
    fault: Callable[[int, dict[str, Any]], str | Iterable[bytes] | None] = lambda number, body: None
    ids: str | None = "token_ids"
    model: str = "toy"
    page: str | None = None
    retry_after: str | None = "0.05"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def complete(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        prompt = body.get("prompt")
        if chat:
            text = tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=False,
                **body["chat_template_kwargs"],
            )  # fmt: skip
            prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        params = SamplingParams(body["temperature"], body.get("top_k", 0), body["top_p"])
        with self.lock:
            said = generate_batch(self.target, [prompt], body["max_tokens"], params, [body["seed"]])[0]
        text = tokenizer.decode(said.tokens, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if said.finished else "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {"id": "x", "model": self.model, "choices": [choice]}
        if self.ids is not None and body.get("return_token_ids"):
            choice[self.ids] = said.tokens
            (answer if chat else choice)["prompt_token_ids"] = prompt
        return answer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    toy: ToyServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections dropped on purpose are not worth a traceback."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        toy: ToyServer = self.server.toy  # type: ignore[attr-defined]
        self._send(200, {"data": [{"id": toy.model}]} if toy.page is None else toy.page)

    def do_POST(self) -> None:
        toy: ToyServer = self.server.toy  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with toy.lock:
            toy.bodies.append(body)
            toy.headers.append(dict(self.headers))
            number = len(toy.bodies) - 1
            toy.busy += 1
            toy.busiest = max(toy.busiest, toy.busy)
        try:
            fault = toy.fault(number, body)
            if fault == "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif fault == "malformed":
                self._send(200, "{not json")
            elif fault == "no choices":
                self._send(200, {"error": "busy"})
            elif fault is not None and not isinstance(fault, str):
                self.close_connection = True
                for part in fault:
                    self.wfile.write(part)
                    self.wfile.flush()
            elif fault is not None:
                retry = toy.retry_after if fault in ("429", "503") else None
                self._send(int(fault), {"error": f"asked for {fault}"}, {"Retry-After": retry} if retry else {})
            else:
                self._send(200, toy.complete(body, self.path.endswith("/chat/completions")))
        finally:
            with toy.lock:
                toy.busy -= 1

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(toy: ToyServer) -> Iterator[ToyServer]:
    """`toy` at a free local port, named by its `url`."""
    server = Server(("127.0.0.1", 0), Handler)
    server.toy = toy
    toy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield toy
    finally:
        server.shutdown()
        server.server_close()


_TAKEN: list[socket.socket] = []


def dead_url() -> str:
    """A local address where nothing listens; it stays taken, so that nobody else comes to listen there."""
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    _TAKEN.append(probe)
    return f"http://127.0.0.1:{probe.getsockname()[1]}"
