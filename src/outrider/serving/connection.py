"""Clients' connections: uvicorn's HTTP/1.1, with limits for clients that are slow or send without end.

    a request begins ... all of it has come     at most twice `Limits.body_seconds`, then the connection is cut off
    an answer waits to be read                  at most `Limits.unread_seconds`
    after a complete request                    the client is still listened to, so that its disconnect is noticed
    SIGTERM ... what is in progress has ended   at most `Limits.shutdown_seconds`, then it ends with an error

uvicorn limits only the pause between two requests. `Guard` (serving/app.py) answers a late or large body first, with
408 or 413; what a client sends on after that is thrown away, up to four times `Limits.body_bytes`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.serving.app import Limits, Server, create_app

_LAST_SECONDS = 2.0  # that clients have to read their last words when the grace is over
_TICK = 0.05  # seconds
_MOST_PIPELINED = 2**16  # bytes that may come after a request before it is answered


def http_server(server: Server, api_key: str | None = None, *, host: str, port: int) -> uvicorn.Server:
    """The server at an address; `run` it, or run it with sockets of one's own."""
    fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": "warning"}
    fixed |= {"http": _connection(server.limits)}
    running = _Draining(uvicorn.Config(create_app(server, api_key), host=host, port=port, **fixed), server)
    server.closing = lambda: running.should_exit
    return running


class _Draining(uvicorn.Server):
    """uvicorn's server, which goes on listening while requests in progress finish.

    Meanwhile /health and new requests get a 503, so that a load balancer sends them elsewhere. Requests for which the
    grace is too short are ended by us first: uvicorn cancels them, which clients cannot tell from a fault.
    """

    def __init__(self, config: uvicorn.Config, served: Server) -> None:
        super().__init__(config)
        self._served = served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        worker, until = self._served.worker, time.monotonic() + self._served.limits.shutdown_seconds
        while worker.busy and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(_TICK)
        await worker.stop()
        # What is left are clients that have not read their answers yet, or that still send a request.
        self.config.timeout_graceful_shutdown = math.ceil(max(_LAST_SECONDS, until - time.monotonic()))
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: uvicorn cancels this, with a traceback
            await self.lifespan.shutdown()


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
