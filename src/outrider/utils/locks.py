"""Lock files: one process at a time. The lock of a process that died is free."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"  # of a training, in its OUT


@contextmanager
def sole_process(path: Path, taken: str | None = None) -> Iterator[None]:
    """Hold the lock file `path`, which stays when it is released; while another process holds it, wait.

    The file is made empty and never written to; one that is there keeps what it holds.

    Args:
        taken: do not wait; it is the message of the error.

    Raises:
        ValueError: another process holds it, or the file is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(taken) from error
        yield
    finally:
        os.close(file)


@contextmanager
def marked_in_use(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory of our own, under whatever name it is moved to, so that `is_held` says so.

    On file systems that cannot lock directories it has no effect.
    """
    file = _open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file or directory."""
    if path.is_symlink() or not path.exists():
        return False
    try:
        file = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _open(path: Path, flags: int) -> int:
    """A descriptor of the lock file; links are not followed, as what they point to is not ours."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path} is a symbolic link, and a lock file is none: remove it.") from error
