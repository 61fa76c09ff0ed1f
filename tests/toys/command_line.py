"""Runs a command line of the package inside the test's own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

import outrider.cli.main as main

Run = Callable[..., tuple[int, str, str]]  # exit status, stdout, stderr


def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *verb: str) -> Run:
    """What runs `outrider VERB ARGS` here and gives (exit status, stdout, stderr). Threads and allocator stay."""
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *verb, *map(str, args)])
        capfd.readouterr()
        with patch.dict(os.environ):  # --data-dir sets $OUTRIDER_DATA of its process
            try:
                main.main()
                status = 0
            except SystemExit as exit_:
                status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        return status, *capfd.readouterr()

    return call


def invoke(*words: object, columns: int = 200) -> Result:
    """`outrider WORDS` in this process; its exception is kept. `set_up` is the caller's to replace."""
    return CliRunner().invoke(main.app, list(map(str, words)), env={"COLUMNS": str(columns)})


def check_error(found: tuple[int, str, str], message: str) -> None:
    status, _, stderr = found
    assert status == 2
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], stderr
