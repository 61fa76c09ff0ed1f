"""Atomic writes of files and directories: what is written is whole, and nothing else is ever touched."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outrider.utils.files import atomic_directory, recover_interrupted_write, write_atomically


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    def half(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, "old\n")
    for options in ({}, {"durable": True}, {"sole_writer": True}, {"keep_first": True}):
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, half, **options)
        assert path.read_text() == "old\n" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_of_several_writers_the_last_decides_or_the_first(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first", durable=True, keep_first=True)
    write_atomically(path, b"second", keep_first=True)
    assert path.read_bytes() == b"first"
    (tmp_path / f".file.outrider-{'0a' * 16}.tmp").write_bytes(b"what a killed process left")
    write_atomically(path, b"third", sole_writer=True)
    assert path.read_bytes() == b"third" and [p.name for p in tmp_path.iterdir()] == ["file"]


class Killed(BaseException):
    """Stands for the end of the process: nothing after it is done."""


CALLS = [(Path, "mkdir"), (Path, "rename"), (Path, "replace"), (Path, "unlink"), (shutil, "rmtree"), (os, "link")]


@contextmanager
def killed_at(call: int) -> Iterator[None]:
    """The process dies at its `call`-th change of the file system; None of those after it is made either."""
    done = 0

    def counted(real: Any) -> Any:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > call:
                raise Killed
            return real(*args, **options)

        return change

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for owner, name in CALLS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def tree(top: Path) -> dict[str, str]:
    """Every path below `top`, with what it holds."""
    return {
        str(path.relative_to(top)): os.readlink(path)
        if path.is_symlink()
        else (path.is_file() and path.read_text()) or ""
        for path in top.rglob("*")
    }


NAMES = ["mine", "m[in]e", "*", "mine.my", "m"]
NEAR = ["my-private-notes", "0123abcd", "0123abcd.old", "0123abcd.tmp", "tmp", "old", "outrider-notes", "outrider-"]
NEAR += [f"outrider-{'0a' * 16}.bak", f"outrider-{'0a' * 15}0", f"outrider-{'0A' * 16}", f"outrider-{'0a' * 16}-notes"]
siblings = st.one_of(
    st.builds(".{}.{}".format, st.sampled_from(NAMES), st.sampled_from(NEAR)),
    st.builds("{}.{}".format, st.sampled_from(NAMES), st.sampled_from(NEAR)),
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20),
).filter(lambda name: name not in (".", "..", *NAMES))
writes = st.lists(
    st.tuples(st.sampled_from(NAMES[:3]), st.sampled_from(["file", "directory"]), st.integers(0, 12)), max_size=5
)


@settings(max_examples=40, deadline=None)
@given(beside=st.dictionaries(siblings, st.sampled_from(["file", "directory", "link"]), max_size=6), writes=writes)
def test_siblings_of_any_name_survive_writes_that_end_and_writes_that_are_killed(
    beside: dict[str, str], writes: list[tuple[str, str, int]]
) -> None:
    with TemporaryDirectory() as place:
        top = Path(place)
        (top / "files").mkdir()
        (top / "directories").mkdir()
        for folder in (top / "files", top / "directories"):
            for name, kind in beside.items():
                if kind == "file":
                    (folder / name).write_text("mine")
                elif kind == "link":
                    (folder / name).symlink_to("nowhere")
                else:
                    (folder / name).mkdir()
                    (folder / name / "notes").write_text("mine")
        before = tree(top)
        written: dict[str, set[str]] = {}  # what may be at a path: the last whole write, and those killed since
        ends = [(name, kind, 99) for name in NAMES[:3] for kind in ("file", "directory")]
        steps = [*writes, *ends, *(("mine", "directory", kill) for kill in range(8)), *ends]
        for number, (name, kind, kill) in enumerate(steps):
            text, ended = str(number), False
            path = top / "files" / name if kind == "file" else top / "directories" / name
            with killed_at(kill):
                if kind == "file":
                    write_atomically(path, text, sole_writer=True)
                else:
                    with atomic_directory(path) as staging:
                        (staging / "weights").write_text(text)
                ended = True
            if kind == "directory":
                recover_interrupted_write(path)
            mark = f"files/{name}" if kind == "file" else f"directories/{name}/weights"
            written[mark] = {text} if ended else {*written.get(mark, {""}), text}
            now = tree(top)
            assert now.get(mark, "") in written[mark], "the former or the new one, whole"
            assert before.items() <= now.items()
        made = set(written) | {f"directories/{name}" for name in NAMES[:3]}
        assert set(tree(top)) == set(before) | made, "nothing temporary is left"


def test_links_and_files_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").write_text("mine")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").write_text("mine")
    with atomic_directory(tmp_path / "link") as staging:
        (staging / "weights").write_text("new")
    with pytest.raises(NotADirectoryError, match="is a file"), atomic_directory(tmp_path / "file"):
        raise AssertionError
    assert tree(tmp_path) == {
        "elsewhere": "", "elsewhere/notes": "mine", "link": "", "link/weights": "new", "file": "mine"
    }  # fmt: skip


def test_a_writer_that_is_alive_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`outrider train --dry-run`, say, while that run is trained: it looks at the state at any moment."""
    place, rename, seen = tmp_path / "state", Path.rename, []

    def looked_at(self: Path, to: Path) -> Path:
        recover_interrupted_write(place)
        moved = rename(self, to)
        recover_interrupted_write(place)
        seen.append(to)
        return moved

    for text in ("first", "second", "third"):
        with atomic_directory(place) as staging:
            recover_interrupted_write(place)
            (staging / "weights").write_text(text)
            monkeypatch.setattr(Path, "rename", looked_at)
        monkeypatch.setattr(Path, "rename", rename)
        assert tree(tmp_path) == {"state": "", "state/weights": text}
    assert len(seen) >= 5
