"""Lock files and directories for one process at a time; the system frees the lock of a process that dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"  # name of a training's lock file in its OUT


@contextmanager
def sole_process(path: Path, taken: str | None = None) -> Iterator[None]:
    """Hold the lock file `path` inside the block; wait while another process holds it.

    The file is created empty if absent, never written to and never removed.

    Args:
        taken: message of the error that is raised instead of waiting; None: wait.

    Raises:
        ValueError: another process holds the lock and `taken` is given, or the file is a symbolic link.
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
    """Hold a lock on a directory inside the block, even if it is renamed; `is_held` then returns True.

    It has no effect on file systems that cannot lock directories.
    """
    file = _open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock on a file or directory."""
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
    """Open a lock file without following symbolic links, whose targets may belong to others."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"the lock file {path} is a symbolic link: remove it.") from error
