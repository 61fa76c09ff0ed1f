"""Starts an engine's server: for a load test, and stops it again, whatever happens; or in place of this process.

    command -> process group -> /health answers (or: it ends, or time is up: the end of its log is shown) -> benchmark
            <- SIGTERM to the group, SIGKILL after a while                                                <- any exit

The engine gets a session of its own: its workers die with it, and Ctrl-C reaches it only through us. SIGTERM and the
SIGHUP of a terminal that closes end this process as Ctrl-C does while an engine runs. A keeper reads from a pipe whose
other end is ours alone: should this process be killed, the pipe ends, and the keeper ends the group.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from outrider import SPIN, SPINS

_HEALTH_EVERY = 0.25  # seconds
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_LAST_LINES = 15
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)")  # begins a line, or follows a log's [place]
_KEEPER = f'cat; kill -s TERM -- "-$0"; sleep {_GRACE:g}; kill -s KILL -- "-$0"'


def free_port() -> int:
    """A local TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def launched(
    command: Sequence[str], health_url: str, log: Path, timeout: float, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run `command` until the block ends; its output goes to `log`.

    Args:
        health_url: answers with a success once the engine serves.
        timeout: seconds until then.
        environment: added to this process's own.

    Raises:
        ValueError: the command is not there, ends early, or is not healthy in time; the end of its log is shown, and
            the first error in it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with _endings_interrupt(), log.open("wb") as output:
        try:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            env = _environment(environment or {})
            process = subprocess.Popen(list(command), env=env, start_new_session=True, **streams)
        except OSError as error:
            raise _not_run(command, error) from error
        try:
            with _kept(process.pid):
                _wait_for_health(process, command, health_url, log=log, timeout=timeout)
                yield
        finally:
            _stop(process)


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run `command` in place of this process: the terminal and its signals are the engine's from now on.

    Args:
        environment: added to this process's own.
    """
    try:
        os.execvpe(command[0], list(command), _environment(environment))
    except OSError as error:
        raise _not_run(command, error) from error


_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def check_installed(command: Sequence[str]) -> None:
    """Refuse a command that is not there, or `PYTHON -m MODULE ...` whose python does not have the module's package."""
    if command[1:2] != ["-m"]:
        if shutil.which(command[0]) is None:
            raise ValueError(f"{command[0]} is no program: neither a path of one nor a name of one in $PATH.")
        return
    package = command[2].partition(".")[0]
    try:
        search = subprocess.run([command[0], "-c", _FIND, package], env=_environment({}), check=False)
    except OSError as error:
        raise _not_run(command, error) from error
    if search.returncode != 0:
        raise ValueError(f"{command[0]} has no package {package}: name the python of an environment that has it.")


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's variables but two: an engine has packages of its own, often in other versions, and decides for
    itself how long its threads spin."""
    ours = {"PYTHONPATH"} | ({SPIN} if os.environ.get(SPIN) == SPINS else set())
    return {name: value for name, value in os.environ.items() if name not in ours} | dict(added)


def _not_run(command: Sequence[str], error: OSError) -> ValueError:
    return ValueError(f"the engine's command cannot be run ({error}): {shlex.join(command)}")


@contextmanager
def _kept(group: int) -> Iterator[None]:
    """End the process group with this process, even if that is killed."""
    null, words = subprocess.DEVNULL, ["/bin/sh", "-c", _KEEPER, str(group)]
    keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
    try:
        yield
    finally:  # before its pipe ends
        _signal(keeper.pid, signal.SIGKILL)
        keeper.communicate()


def _wait_for_health(
    process: subprocess.Popen[bytes], command: Sequence[str], url: str, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    with httpx.Client(timeout=2.0) as client:  # one: making a client reads certificates, a tenth of a core at this rate
        while True:
            if (code := process.poll()) is not None:
                raise ValueError(_failure(f"the engine ended with status {code} before it served", command, log))
            with suppress(httpx.HTTPError):
                if client.get(url).is_success:
                    return
            if time.monotonic() > deadline:
                raise ValueError(_failure(f"the engine did not answer {url} within {timeout:g} s", command, log))
            time.sleep(_HEALTH_EVERY)


def _failure(what: str, command: Sequence[str], log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = "\n".join(f"    {line}" for line in lines[-_LAST_LINES:]) or "    (nothing)"
    # Engines of several processes end in an error about the one that failed: the cause is the first they printed.
    causes = [match[1] for line in lines if (match := _ERROR.search(line))]
    first = f"  its first error: {causes[0]}\n" if causes else ""
    return f"{what}: {shlex.join(command)}\n{shown}\n{first}  its whole log is {log}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: a leader that has ended may have left workers."""
    _signal(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


@contextmanager
def _endings_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in former.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
