"""A server of the package on a free local port, in a thread of the test's process, for real HTTP."""

from __future__ import annotations

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
from outrider.cli.serve import build_server
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.serving.app import Limits, Server, create_app


@dataclass
class Served:
    """A running server; `stop` asks it to end."""

    url: str
    server: Server
    stop: Callable[[], None]

    @property
    def engine(self) -> Engine:
        return self.server.worker.engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def wait_until_free(self, seconds: float = 20.0) -> None:
        """No request is left, and no KV block is in use."""
        until = time.monotonic() + seconds
        while not (self.engine.idle and self.engine.scheduler.allocator.used == 0):
            assert time.monotonic() < until, "requests are left"
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
            config or EngineConfig(),
            None,
            max_waiting=max_waiting,
            max_new_tokens=None,
            name="m",
            thinking=False,
        )
    server.limits = limits or server.limits
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(
        uvicorn.Config(create_app(server, key), log_level="error", timeout_graceful_shutdown=20, lifespan="on")
    )
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)

    def stop() -> None:
        running.should_exit = True

    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", server, stop)
    finally:
        stop()
        thread.join(30)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


def _refused(*_: object) -> NoReturn:
    raise ValueError("tests measure nothing")
