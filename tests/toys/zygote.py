"""Commands of the CLI as processes that can be killed, without slow starts: one process imports, then forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.toys.target_directory import save_toy_target

# Imports once, then forks a child for every command it reads: a process that can be killed, without ten slow starts.
ZYGOTE = """
import json, os, signal, sys
import outrider.data.inspection, outrider.training.trainer  # else every child would import PyTorch
from outrider.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
def stop_before_writing(event, details):
    if event == "open" and str(details[1])[0] in "awx":
        os.kill(os.getpid(), signal.SIGSTOP)
print("ready", flush=True)
for line in sys.stdin:
    args, log, watched = json.loads(line)
    child = os.fork()
    if not child:
        if watched:
            sys.addaudithook(stop_before_writing)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv = ["outrider", *args]
        code = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Zygote:
    """Runs commands one after another in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(
        self, *args: object, kill_when: Callable[[], bool] | None = None, by: signal.Signals = signal.SIGKILL
    ) -> tuple[int, str]:
        """(exit status, output); -9 when it was killed.

        A command that is to be killed stops before it opens any file to write, until `kill_when` has been asked: so it
        cannot end unseen where this process has to wait for a processor.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([list(map(str, args)), str(self.log), kill_when is not None]) + "\n")
        self.process.stdin.flush()
        child = int(self._read())
        while kill_when is not None and (state := _state(child)):
            due = kill_when()
            with suppress(ProcessLookupError):  # it has ended meanwhile
                if due:
                    os.kill(child, by)
                if due or state == "T":  # stopped
                    os.kill(child, signal.SIGCONT)
            if due:
                break
            time.sleep(0.001 if state == "T" else 0.005)
        status = int(self._read())
        return status, self.log.read_text()


def _state(process: int) -> str:
    """The letter that /proc has for it; empty when it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def zygote_in(folder: Path) -> Iterator[Zygote]:
    zygote = Zygote(folder)
    yield zygote
    assert zygote.process.stdin is not None
    zygote.process.stdin.close()
    zygote.process.wait(timeout=120)


def write_toy(folder: Path) -> Path:
    """A directory with a random target and 24 conversations of one or two turns (36 turns)."""
    save_toy_target(folder / "target", layers=2)
    lines = [{"id": f"c{i}", "turns": ["word " + "abc"[i % 3] * (i % 7 + 1), "more"][: 1 + i % 2]} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run_killed(zygote: Zygote, args: tuple[object, ...], reached: Callable[[], bool], delay: float) -> bool:
    """Run a command and kill it `delay` seconds after it has `reached` something; whether it died of that."""
    since: list[float] = []

    def due() -> bool:
        if not since and reached():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() >= since[0] + delay

    status, output = zygote.run(*args, kill_when=due)
    assert status in (0, -signal.SIGKILL), output
    return status != 0
