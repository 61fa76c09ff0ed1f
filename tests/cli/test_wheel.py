"""The built wheel holds what the commands need beside code: recipes, tables, prompts and the trained drafter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_file_beside_code_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By package-data in pyproject.toml, as setuptools reads it."""
    from setuptools import Distribution
    from setuptools.command.build_py import build_py

    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    distribution.include_package_data = False  # what git tracks would count as declared
    build = build_py(distribution)
    build.ensure_finalized()
    declared = {Path(directory, name) for _, directory, _, names in build.data_files for name in names}
    kept = {path for path in Path("src/outrider").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(kept) > 30 and not kept - declared


def test_a_release_has_one_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


@pytest.mark.slow
def test_an_installed_wheel_generates_and_lists_recipes(tmp_path: Path) -> None:
    """Built from the source distribution; used in an empty directory, with nothing of the checkout on the path."""
    source, site, here = (tmp_path / name for name in ("source", "site", "here"))
    here.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)  # a build leaves files in its source
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (packed,) = tmp_path.glob("outrider-*.tar.gz")
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, packed], check=True)
    (wheel,) = tmp_path.glob("outrider-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=here, env=environment, text=True, capture_output=True, check=True)

    outrider = partial(python, "-m", "outrider.cli.main")
    assert "smollm2-135m/dspark" in outrider("recipe").stdout
    drafted = outrider("generate", "Name three rivers.", "--max-new-tokens", "8")
    assert drafted.stdout.strip() and "drafter smollm2-135m-dspark" in drafted.stderr
    # A packaged drafter is named, not placed: it lies beside the code that found it.
    assert python("-c", "import outrider; print(outrider.__file__)").stdout.startswith(str(site)), "the checkout's"
    # The table and the recipes of its rows are read; --dry-run would measure a training of each.
    planned = "from outrider.evaluation.experiment import *; print(plan(load_table(Path('smollm2-135m'))))"
    assert f"'train', '{site}" in python("-c", planned).stdout
    kept = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "outrider").rglob("*") if path.suffix != ".pyc"}
    lost = [path for path in kept if (ROOT / "src" / path).is_file() and not (site / path).is_file()]
    assert not lost, "package-data in pyproject.toml leaves these out"
