"""`outrider push` against a hub on localhost, over real HTTP: what arrives there, and refusals in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.toys.command_line import Run, check_error, in_process
from tests.toys.hub_server import TOKEN, Hub, serve_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as package writes it, and a file that is no part of a drafter."""
    directory = tmp_path_factory.mktemp("drafter")
    for name in ("config.json", "model.safetensors", "README.md", "outrider.json", "notes.txt"):
        (directory / name).write_text(f"content of {name}\n")
    return directory


def push(hub: Hub, *arguments: object, token: str = TOKEN) -> tuple[int, str, str]:
    """In a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "outrider.cli.main", "push", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return found.returncode, found.stdout, found.stderr


def test_a_drafter_arrives_with_its_card_in_a_private_repository(hub: Hub, packaged: Path) -> None:
    status, said, errors = push(hub, packaged, "me/drafter")
    assert status == 0, errors
    assert said.startswith(f"{hub.url}/me/drafter: ") and "private" in said
    assert hub.private == {"me/drafter": True}
    wanted = {path.name: path.read_bytes() for path in packaged.iterdir() if path.name != "notes.txt"}
    assert hub.files["me/drafter"] == wanted


@pytest.mark.slow
def test_a_public_repository_is_written_to_only_when_that_is_said(hub: Hub, packaged: Path) -> None:
    hub.private["me/open"] = False
    check_error(push(hub, packaged, "me/open"), "is public already: --public adds to it")
    assert not hub.files
    assert push(hub, packaged, "me/open", "--public")[0] == 0 and len(hub.files["me/open"]) == 4


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(hub: Hub, packaged: Path) -> None:
    check_error(
        push(hub, packaged, "me/drafter", token="hf_reader"), "401 Invalid username or password.; hf auth login"
    )
    check_error(push(hub, packaged, "someone/drafter"), "403 You don't have the rights")
    check_error(push(hub, packaged, "no name/at all"), "no name/at all")
    check_error(push(Hub("http://127.0.0.1:1"), packaged, "me/drafter"), "no answer from the hub at http://127.0.0.1:1")
    assert not hub.private


def test_what_is_no_package_is_refused(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    run: Run = in_process(monkeypatch, capfd, "push")
    (tmp_path / "config.json").write_text("{}")
    check_error(run(tmp_path, "me/drafter"), "lacks model.safetensors, README.md, outrider.json: outrider package")
