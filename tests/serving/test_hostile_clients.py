"""Clients that send what no client should, over sockets: each gets an answer or is cut off, and the server goes on."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import outrider
from outrider.api.model import Model
from outrider.decoding.request import Output
from outrider.decoding.scheduler import EngineConfig
from outrider.serving.app import Limits
from tests.toys.serving import POST, Served, body_of, connect, sent, serving, wait_for

BODY_BYTES, BODY_SECONDS, UNREAD_SECONDS = 20_000, 0.8, 0.5
ASKED = {"prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(toy: Path) -> Model:
    return outrider.load(toy / "target", str(toy / "drafter"))


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    limits = Limits(body_bytes=BODY_BYTES, body_seconds=BODY_SECONDS, unread_seconds=UNREAD_SECONDS)
    with serving(model, EngineConfig(num_blocks=64), limits) as running:
        yield running


@pytest.fixture(autouse=True)
def goes_on(served: Served) -> Iterator[None]:
    """The server answers as before, and nothing of a hostile client is left: no request, block or connection."""
    before = served.post("/v1/completions", **ASKED).json()["choices"]
    yield
    served.wait_until_free()
    assert served.post("/v1/completions", **ASKED).json()["choices"] == before
    wait_for(lambda: served.connections == 0)


def until_cut_off(client: socket.socket, piece: bytes = b"", pause: float = 0.05) -> bytes:
    """What the server says while `piece` is sent again and again, until it ends the connection."""
    started, said = time.monotonic(), b""
    client.settimeout(pause)
    while time.monotonic() - started < 60:
        try:
            client.sendall(piece)
            received = client.recv(65536)
            said += received
            if not received:
                return said
        except TimeoutError:
            pass
        except OSError:
            return said
    raise AssertionError("the connection is still open")


ABORT = 'finished_reason="abort"'
BOMB = gzip.compress(body_of({"prompt": "a" * 10**7}))
JSON = "application/json"
BODIES: list[tuple[dict[str, str], bytes, int, str]] = [
    ({"Content-Type": JSON, "Content-Encoding": "gzip"}, BOMB, 415, "Content-Encoding"),
    ({"Content-Type": "text/plain"}, body_of(ASKED), 415, "application/json"),
    ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\n\r\n", 415, "application/json"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "seed": 1, "seed": 2}', 400, "'seed' is given twice"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "metadata": {"a": 1, "a": 2}}', 400, "'a' is given twice"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3001, 400, "nested"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "max_tokens": 1e400}', 400, "max_tokens"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}", 400, "not JSON"),
    ({"Content-Type": JSON}, b'{"prompt": "a", "temperature": -Infinity}', 400, "temperature"),
    ({"Content-Type": JSON}, b'{"prompt": "\x00\xff"}', 400, "not JSON"),
    ({"Content-Type": JSON}, body_of({"prompt": "a", "stop": ["x"] * 1000}), 400, "stop"),
    ({"Content-Type": JSON}, body_of({"prompt": ["a"] * 3000}), 429, "queue is full"),
    ({"Content-Type": JSON}, body_of({"prompt": "a" * 2 * BODY_BYTES}), 413, f"{BODY_BYTES} bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("headers", "body", "status", "reason"), BODIES, ids=range(len(BODIES)))
def test_bodies(served: Served, headers: dict[str, str], body: bytes, status: int, reason: str) -> None:
    found = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert found.status_code == status and reason in found.json()["error"]["message"], found.text


NUMBERS = ("max_tokens", "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty", "seed", "logprobs", "max_draft_tokens", "top_k")  # fmt: skip


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-3", "-1e400", "[]", '"x"'])
def test_numbers_that_are_none(served: Served, value: str) -> None:
    """Each field of a number names itself, and so does one of a request of which all are wrong."""
    for fields in (*((name,) for name in NUMBERS), NUMBERS):
        body = ", ".join(['{"prompt": "ab"', *(f'"{name}": {value}' for name in fields)]) + "}"
        found = httpx.post(f"{served.url}/v1/completions", content=body, headers={"Content-Type": JSON}, timeout=60)
        error = found.json()["error"]
        assert found.status_code == 400 and error["param"] in fields and error["param"] in error["message"], found.text


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(9000)),
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=["long header", "many headers", "two lengths", "negative length", "TLS"],
)
def test_heads_that_are_no_http(served: Served, head: bytes) -> None:
    with connect(served) as client:
        client.sendall(head)
        said = until_cut_off(client)
    assert said.startswith(b"HTTP/1.1 400") and b"Invalid HTTP request" in said


@pytest.mark.parametrize(
    ("beginning", "piece", "status"),
    [
        (b"", b"", b""),  # connects and says nothing
        (b"POST /v1/completions HTTP/1.1\r\n", b"X-a: 1\r\n", b""),  # headers, one by one
        (POST + b"Content-Length: 1000\r\n\r\n{", b" ", b"408"),  # a body, byte by byte
        (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{", b" ", b"404"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", b"408"),  # chunks without end
    ],
    ids=["silent", "headers", "body", "elsewhere", "chunks"],
)
def test_slow_clients_are_cut_off(served: Served, beginning: bytes, piece: bytes, status: bytes) -> None:
    with connect(served) as client:
        client.sendall(beginning)
        said = until_cut_off(client, piece)
    assert said[9:12] == status


def test_a_fast_body_without_end_is_cut_off(model: Model) -> None:
    """By its size, its time being long: it is answered at the limit, and thrown away for a while, so that the answer
    can be read.
    """
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    with serving(model, limits=Limits(body_bytes=BODY_BYTES, body_seconds=600)) as patient, connect(patient) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        said = until_cut_off(client, chunk, pause=0.002)
    assert b"413" in said[:12]


def test_a_client_that_does_not_read_is_cut_off(served: Served) -> None:
    """Likeliest tokens make an answer that is larger than what the sockets hold."""
    asked = {**ASKED, "max_tokens": 30, "n": 16, "logprobs": 20, "ignore_eos": True}
    with connect(served) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: served.connections == 1)
        (connection,) = served.running.server_state.connections
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(sent(asked))
        wait_for(lambda: served.connections == 0)


@pytest.mark.parametrize("pipelined", [0, 1, 3])
def test_a_client_that_goes_with_requests_unanswered(
    served: Served, pipelined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request would take the engine ten seconds; the others are not begun."""
    step = served.engine.step

    def slow() -> list[Output]:
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(served.engine, "step", slow)
    aborted = served.metric("request_success_total", ABORT)
    with connect(served) as client:
        client.sendall(sent({**ASKED, "max_tokens": 100, "speculative": "off"}) + pipelined * sent(ASKED))
        wait_for(lambda: not served.engine.idle)
    wait_for(lambda: served.engine.idle)
    assert served.metric("request_success_total", ABORT) == aborted + 1, "it did not go on to its end"
