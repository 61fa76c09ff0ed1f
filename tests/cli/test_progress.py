"""What a long job tells where standard error is no terminal, and on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console

from outrider.cli import common


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    yield now


def test_without_a_terminal_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with common.responding(Console()) as progress:
        progress.update(30, 80, 5000)  # 30 replies of an earlier run: no part of the rate
        for _ in range(25):
            clock[0] += 1
            progress.update(30 + int(clock[0] - 100) // 5, 80, 5000 + 200 * int(clock[0] - 100))
    out, err = capsys.readouterr()
    assert out == "", "standard output is for results"
    assert err.splitlines() == [
        "responses: 32 of 80 replies, 200 tokens/s, about 4 minutes left",
        "responses: 34 of 80 replies, 200 tokens/s, about 4 minutes left",
    ]


def test_no_more_time_is_left_than_the_job_may_take(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A first batch says little: of 80 replies under way one is complete."""
    with common.responding(Console(), minutes=1.5) as progress:
        for done in (0, 1, 1):
            progress.update(done, 240)
            clock[0] += 15
    assert capsys.readouterr().err.splitlines() == [
        "responses: 1 of 240 replies, 15.0 s each, about 75 seconds left",
        "responses: 1 of 240 replies, 30.0 s each, about 60 seconds left",
    ]


def test_when_time_is_up_what_is_under_way_is_finished(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A batch is answered to its end, which may take minutes more: `about 0 seconds left` would be false."""
    with common.responding(Console(), minutes=0.5) as progress:
        for done in (0, 8, 9, 10):
            progress.update(done, 240)
            clock[0] += 12
    assert capsys.readouterr().err.splitlines() == [
        "responses: 8 of 240 replies, 1.5 s each, about 18 seconds left",
        "responses: 9 of 240 replies, 2.7 s each, about 6 seconds left",
        "responses: 10 of 240 replies, 3.6 s each, time is up: what is under way is finished",
    ]


def test_another_part_of_a_job_has_a_rate_of_its_own(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with common.counting(Console(), "eval") as count:
        for task, seconds in (("chat", 4.0), ("math", 0.5)):
            for done in range(31):
                count(task, done, 31)
                clock[0] += seconds
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "chat: 3 of 31, 4.0 s each, about 2 minutes left"
    assert err[-1] == "math: 12 of 31, 2.0/s, about 10 seconds left"


def test_on_a_terminal_a_bar_with_rate_and_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with common.responding(Console()) as progress:
        progress.update(0, 80)
        clock[0] += 60
        progress.update(20, 80, 18600)
    err = capsys.readouterr().err
    assert "20/80" in err and "310 tokens/s, about 3 minutes left" in err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "1 seconds"), (89, "89 seconds"), (90, "2 minutes"), (5300, "88 minutes"), (9000, "2.5 hours")],
)
def test_time_left_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert common.time_left(seconds) == f"about {text} left"
