"""The public names of the package, and the example of its docstring on the real model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_another_is_refused_by_name() -> None:
    assert all(callable(getattr(outrider, name)) for name in outrider.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'generat'; it has .*generate"):
        outrider.generat  # noqa: B018


def test_the_docstrings_example_decodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert outrider.__doc__ is not None
    example = [line for line in outrider.__doc__.splitlines() if line.startswith("    ")]
    exec(textwrap.dedent("\n".join(example)), {})
    assert len(capsys.readouterr().out.split()) > 5
