"""Clients' connections: uvicorn's HTTP/1.1, with limits for clients that are slow or send without end.

    a request begins ... all of it has come     at most twice `Limits.body_seconds`, then the connection is cut off
    an answer waits to be read                  at most `Limits.unread_seconds`
    after a complete request                    the client is still listened to, so that its disconnect is noticed

uvicorn limits only the pause between two requests. `Guard` (serving/app.py) answers a late or large body first, with
408 or 413; what a client sends on after that is thrown away, up to four times `Limits.body_bytes`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.serving.app import Limits, Server, create_app

_STOP_SECONDS = 30  # that requests have to finish when the server is stopped
_MOST_PIPELINED = 2**16  # bytes that may come after a request before it is answered


def http_server(server: Server, api_key: str | None = None, *, host: str, port: int) -> uvicorn.Server:
    """The server at an address; `run` it, or run it with sockets of one's own."""
    fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": "warning"}
    fixed |= {"http": _connection(server.limits), "timeout_graceful_shutdown": _STOP_SECONDS}
    running = uvicorn.Server(uvicorn.Config(create_app(server, api_key), host=host, port=port, **fixed))
    server.closing = lambda: running.should_exit
    return running


def _connection(limits: Limits) -> type[H11Protocol]:
    """The class of a server's connections."""

    class Connection(H11Protocol):
        _arrival: asyncio.TimerHandle | None = None  # runs while a request is awaited
        _reading: asyncio.TimerHandle | None = None  # runs while the client does not read
        _thrown_away = 0  # bytes that came after an answer

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                self._await_request()
                if self.cycle is not None and self.cycle.response_complete:
                    self._thrown_away += len(data)
            else:
                _cancel(self._arrival)
                self._arrival, self._thrown_away = None, 0
                self.flow.resume_reading()  # uvicorn pauses it for a pipelined request
            pipelined = len(self.conn.trailing_data[0]) if self.conn.their_state is h11.DONE else 0
            if self._thrown_away > 4 * limits.body_bytes or pipelined > _MOST_PIPELINED:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading = self.loop.call_later(limits.unread_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._reading)

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._arrival)
            _cancel(self._reading)
            super().connection_lost(exc)

        def _await_request(self) -> None:
            if self._arrival is None:
                self._arrival = self.loop.call_later(2 * limits.body_seconds, self.transport.abort)

    return Connection


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
