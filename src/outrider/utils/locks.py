"""Lock files: one process at a time. The lock of a process that died is free."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"  # of a training, in its OUT


@contextmanager
def sole_process(path: Path, taken: str | None = None) -> Iterator[None]:
    """Hold the lock file `path`, which stays when it is released; while another process holds it, wait.

    Args:
        taken: do not wait; it is the message of the error.

    Raises:
        ValueError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(taken) from error
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file."""
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
