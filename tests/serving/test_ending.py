"""A server that is told to stop: what is in progress finishes within the grace or ends with an error that says so."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

import outrider
import outrider.serving.start
import outrider.serving.tokenizer as tokenizing
from outrider.api.model import Model
from outrider.backends.launch import free_port
from outrider.decoding.request import Output
from outrider.serving.app import Limits
from tests.toys.command_line import Run
from tests.toys.serving import POST, Served, connect, sent, serving, wait_for

ENDLESS = {"prompt": "ab", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "speculative": "off"}
STOPS = "the server stops."


@pytest.fixture(scope="module")
def model(toy: Path) -> Model:
    return outrider.load(toy / "target", str(toy / "drafter"))


def slow(served: Served) -> None:
    """Steps of a twentieth of a second: an endless request takes ten."""
    step = served.engine.step

    def slowed() -> list[Output]:
        time.sleep(0.05)
        return step()

    served.engine.step = slowed  # type: ignore[method-assign]


def said_to(client: socket.socket) -> bytes:
    """All that the server says until it ends the connection."""
    said = b""
    while received := client.recv(65536):
        said += received
    return said


def answer_to(client: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """(status line, body) of a whole answer."""
    head, _, body = said_to(client).partition(b"\r\n\r\n")
    return head.splitlines()[0], json.loads(body)


def test_every_client_is_told_when_the_grace_is_over(
    model: Model, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whole answer, stream, a prompt that is tokenised, one that waits for that, and a body that is not all there."""
    monkeypatch.setattr(tokenizing, "_SHORT", 200)
    go = threading.Event()
    with ExitStack() as stack:
        served = stack.enter_context(serving(model, limits=Limits(shutdown_seconds=0.3)))
        stack.callback(go.set)
        slow(served)
        encode = served.server.texts._encode

        def held(text: str, special: bool) -> list[int]:
            assert not text.startswith("w") or go.wait(60)
            return encode(text, special)

        monkeypatch.setattr(served.server.texts, "_encode", held)
        clients = [stack.enter_context(connect(served)) for _ in range(5)]
        whole, streamed, tokenised, waiting, slowly = clients
        whole.sendall(sent(ENDLESS))
        streamed.sendall(sent({**ENDLESS, "stream": True}))
        begun = streamed.recv(65536)
        tokenised.sendall(sent({**ENDLESS, "prompt": "w" * 220, "max_tokens": 4}))
        waiting.sendall(sent({**ENDLESS, "prompt": "w" * 220, "max_tokens": 4}))
        slowly.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        wait_for(lambda: served.server.worker.reserved == 2 and len(served.server.worker._live) == 2)
        served.stop()
        for client in (whole, tokenised, waiting, slowly):
            status, body = answer_to(client)
            assert b" 503 " in status and body["error"]["message"] == STOPS
        events = (begun + said_to(streamed)).decode().split("data: ")
        error, done = (event.split("\n")[0] for event in events[-2:])
        assert json.loads(error)["error"] == {"message": STOPS, "type": "server_error", "param": None, "code": 503}
        assert done == "[DONE]" and "0\r\n\r\n" in events[-1], "the stream is whole"
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out and "Exception" not in shown.err, shown.err


def test_a_server_that_drains_says_so_and_finishes_what_it_has(model: Model) -> None:
    """From the first signal on /health and new requests get a 503, on connections old and new."""
    asked, go = {**ENDLESS, "max_tokens": 8}, threading.Event()
    with serving(model) as served, httpx.Client(base_url=served.url, timeout=60) as kept, connect(served) as client:
        expected = kept.post("/v1/completions", json=asked).json()["choices"]
        assert kept.get("/health").status_code == 200
        step = served.engine.step
        served.engine.step = lambda: step() if go.wait(60) else []  # type: ignore[method-assign]
        client.sendall(sent(asked))
        wait_for(lambda: served.server.worker.busy)
        served.stop()
        time.sleep(0.3)  # it has noticed
        for found in (
            kept.get("/health"),
            served.get("/health"),
            served.post("/v1/completions", **asked),
            served.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}]),
            served.post("/tokenize", prompt="a"),
        ):
            assert found.status_code == 503 and found.json()["error"]["message"] == STOPS
            assert found.headers["connection"] == "close"
        go.set()
        status, body = answer_to(client)
        assert b" 200 " in status and body["choices"] == expected
    with pytest.raises(httpx.ConnectError):
        served.get("/health")


def test_a_second_ctrl_c_ends_the_grace(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(model) as served, connect(served) as client:
        slow(served)
        client.sendall(sent(ENDLESS))
        wait_for(lambda: served.server.worker.busy)
        for _ in "ab":
            served.running.handle_exit(signal.SIGINT, None)
        status, body = answer_to(client)
        assert b" 503 " in status and body["error"]["message"] == STOPS
    shown = capfd.readouterr()
    assert not shown.out + shown.err


def test_the_grace_is_an_option(toy: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(return_value=Mock(started=True))
    monkeypatch.setattr(outrider.serving.start, "http_server", made)
    models = ("--target", toy / "target", "--drafter", "none", "--port", free_port())
    for given, seconds in (((), 30), (("--shutdown-timeout", 5), 5), (("--shutdown-timeout", 0), 0)):
        status, _, errors = run("serve", *models, *given)
        assert status == 0 and made.call_args.args[0].limits.shutdown_seconds == seconds, errors
