"""What every enumeration runs with."""

from __future__ import annotations

import pytest

import outrider.decoding.backoff as backoff_module


@pytest.fixture(autouse=True)
def asked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that refused is asked again within the few rounds of an enumeration."""
    monkeypatch.setattr(backoff_module, "_LONGEST", 1)
