"""Lock files: what is at their place is never changed, and links there are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.utils.locks import is_held, sole_process


def test_a_lock_is_held_once_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "out" / ".lock"
    assert not is_held(path)
    with sole_process(path):
        assert is_held(path)
        with pytest.raises(ValueError, match="busy"), sole_process(path, taken="busy"):
            raise AssertionError
    assert not is_held(path) and path.read_bytes() == b""


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_not_followed(tmp_path: Path, there: bool) -> None:
    path, notes = tmp_path / ".lock", tmp_path / "notes"
    path.symlink_to(notes)
    if there:
        notes.write_text("mine")
    with pytest.raises(ValueError, match="is a symbolic link"), sole_process(path):
        raise AssertionError
    assert not is_held(path)
    assert notes.read_text() == "mine" if there else not notes.exists()


def test_a_file_of_that_name_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("mine")
    with sole_process(path):
        assert is_held(path)
    assert path.read_text() == "mine"
