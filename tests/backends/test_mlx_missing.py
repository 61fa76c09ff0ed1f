"""Where MLX is not installed, everything else works and `--backend mlx` says what to do."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from outrider.backends.mlx import require_mlx
from outrider.cli.main import app


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("mlx") else find(name))
    with pytest.raises(ValueError, match=r"needs mlx and mlx-lm: pip install 'outrider\[mlx\]'"):
        require_mlx()
    run = CliRunner().invoke(app, ["generate", "hello", "--drafter", "none", "--backend", "mlx"])
    assert isinstance(run.exception, ValueError) and "outrider[mlx]" in str(run.exception)


def test_half_of_it_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else find("json"))
    with pytest.raises(ValueError, match="needs mlx-lm:"):
        require_mlx()
