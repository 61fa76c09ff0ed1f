"""The toy that the doctor's tests spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toys.alphabets import train_pair


@pytest.fixture(scope="session")
def alphabet_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `train_pair`; not to be changed."""
    return train_pair(tmp_path_factory.mktemp("doctor"))
