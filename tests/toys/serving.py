"""A server of the package on a free local port, in a thread of the test's process, for real HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import pytest
import uvicorn

import outrider.api.scheduling as scheduling
from outrider.api.model import Model
from outrider.decoding.engine import Engine
from outrider.decoding.scheduler import EngineConfig
from outrider.serving.app import Limits, Server
from outrider.serving.connection import http_server
from outrider.serving.start import build_server


@dataclass
class Served:
    """A running server."""

    url: str
    server: Server
    running: uvicorn.Server

    def stop(self) -> None:
        """Ask it to end."""
        self.running.should_exit = True

    @property
    def engine(self) -> Engine:
        return self.server.worker.engine

    @property
    def connections(self) -> int:
        """Of clients, open now."""
        return len(self.running.server_state.connections)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples; of those with the label, as label="value"."""
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"vllm:{name}{{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def wait_until_free(self) -> None:
        """No request is left, and no KV block is in use."""
        wait_for(lambda: self.engine.idle and self.engine.scheduler.allocator.used == 0)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(served: Served) -> socket.socket:
    """A connection of a client that writes its requests itself."""
    host, port = served.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)))
    found.settimeout(60)
    return found


def body_of(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def sent(value: dict[str, Any]) -> bytes:
    """A whole request for completions."""
    body = body_of(value)
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it holds; the limit is for what hangs, not for what is slow."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:g} seconds"
        time.sleep(0.01)


@contextmanager
def serving(
    model: Model,
    config: EngineConfig | None = None,
    limits: Limits | None = None,
    key: str | None = None,
    max_waiting: int = 64,
) -> Iterator[Served]:
    """`model` served under the name m; nothing is measured (tests/conftest.py), also for a module's fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "machine_profile", _refused)
        server = build_server(
            model,
            config or EngineConfig(prefix_cache=True),
            None,
            max_waiting=max_waiting,
            max_new_tokens=None,
            name="m",
            thinking=False,
        )
    server.limits = limits or server.limits
    listening = socket.create_server(("127.0.0.1", 0))
    running = http_server(server, key, host="127.0.0.1", port=0)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)

    served = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", server, running)
    try:
        yield served
    finally:
        served.stop()
        thread.join(30)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


def _refused(*_: object, **more: object) -> NoReturn:
    raise ValueError("tests measure nothing")
