"""Shared fixtures: toy targets of every family, random samples, the command line in this process, the real SmolLM2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

# No test depends on what the user has set, which the processes that it starts would inherit. It sets what it needs.
# huggingface_hub reads its own when it is imported, so this comes first.
_USERS = (
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "OUTRIDER_DATA", "OUTRIDER_API_KEY"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"),
)
for _name in _USERS:
    os.environ.pop(_name, None)

import outrider.api.scheduling as scheduling  # noqa: E402
from outrider.target.hub import EMBEDDED_ID  # noqa: E402
from outrider.target.model import Target, load_target  # noqa: E402
from tests.toys.command_line import Run, in_process  # noqa: E402
from tests.toys.target_directory import save_toy_drafter, save_toy_target  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that are long in coming first: processes that share the files out (xdist) then end together."""
    slow = {
        item.path for item in items if item.get_closest_marker("slow") or item.path.parent.name in ("smollm", "proof")
    }
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a generator of its own is the same in every run, and alone as among others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A verb run inside a test sets this process's threads; the tests after it should not be slower for that."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test decodes follows no clock: draft lengths are chosen as where step costs cannot be measured."""

    def refused(*_: object, **more: object) -> NoReturn:
        raise ValueError("tests measure nothing")

    monkeypatch.setattr(scheduling, "machine_profile", refused)


@pytest.fixture(scope="session")
def smollm() -> Target:
    """The real SmolLM2-135M-Instruct, float32 on the CPU."""
    return load_target(EMBEDDED_ID)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random target (target/), its drafter (drafter/) and one for another target (other/)."""
    directory = tmp_path_factory.mktemp("toy")
    vocab = save_toy_target(directory / "target", layers=5)
    for name, size in (("drafter", vocab), ("other", vocab + 1)):
        save_toy_drafter(directory / name, size)
    return directory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider ARGS` in this process: (exit status, stdout, stderr). Threads and allocator stay as they are."""
    return in_process(monkeypatch, capfd)
