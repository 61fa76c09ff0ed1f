"""`outrider bench --backend vllm --launch` with the real vLLM: a DFlash exported for it, measured beside no drafter.

What a fake engine cannot show: that our flags are vLLM's, that its parts carry token ids as they come, that it counts
drafts under the names we read, and that all of its processes end with ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean

import pytest

from outrider.backends.config import ExportConfig
from outrider.backends.export import run_export
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.evaluation.loadtest.metrics import Journal
from outrider.target.model import Target
from tests.engines.engine import ENVIRONMENT
from tests.toys.processes import wait_until_gone
from tests.toys.small_training import answer, train_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
KNOWN, USERS, NEW = 4, 2, 24
KNOWN_LENGTH = 2.0  # accepted length on the known answers at which training ends
PATIENCE = 1200.0  # seconds


@pytest.fixture(scope="module")
def exported(smollm: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vllm/: a drafter as `outrider export` writes it; known.jsonl: the prompts whose answers it knows."""
    root = tmp_path_factory.mktemp("bench")
    assert smollm.tokenizer is not None
    conversations = load_prompts("eval_math", KNOWN)
    prompts = [render(smollm.tokenizer, conversation.turns, []) for conversation in conversations]
    directory = train_until(KNOWN_LENGTH, "dflash", smollm, answer(smollm, prompts), root / "training").directory
    run_export(ExportConfig(drafter=directory, to="vllm", out=root / "vllm"))
    rows = [{"id": conversation.id, "turns": conversation.turns} for conversation in conversations]
    (root / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@contextmanager
def benching(exported: Path, out: Path, new: int) -> Iterator[subprocess.Popen[str]]:
    """The verb as a user runs it; a test that fails terminates it."""
    options = {
        "backend": "vllm",
        "engine-python": os.environ["VLLM_PYTHON"],
        "engine-args": "--enforce-eager",
        "drafter": exported / "vllm",
        "tasks": exported / "known.jsonl",
        "out": out,
        "concurrency": USERS,
        "requests-per-point": KNOWN,
        "max-new-tokens": new,
        "repeats": 1,
        "startup-timeout": PATIENCE,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "outrider.cli.main", "bench", "--launch", *words]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as a server has it
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def descendants(process: int) -> set[int]:
    """Ids of its children, their children, and so on."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found, waiting = set[int](), [process]
    while waiting:
        waiting += (new := children[waiting.pop()])
        found |= set(new)
    return found


def watch(process: subprocess.Popen[str], until: Callable[[], bool]) -> set[int]:
    """All that it has started before that holds."""
    found, deadline = set[int](), time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        found |= descendants(process.pid)
        time.sleep(0.2)
    return found


def test_a_launched_engine_is_measured_with_and_without_its_drafter(exported: Path, tmp_path: Path) -> None:
    with benching(exported, tmp_path, NEW) as process:
        started = watch(process, lambda: process.poll() is not None)
        printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert len(started) >= 2 * 2, "two engines, each a server and its workers"
    assert wait_until_gone(sorted(started))

    gamma = load_checkpoint(exported / "vllm").config.gamma
    logs = [(tmp_path / "logs" / f"vllm-{variant}.log").read_text() for variant in ("none", f"fixed-{gamma}")]
    assert all("enable_prefix_caching=False" in log for log in logs), "counted prompts are asked for several times"
    plain, drafted = Journal(tmp_path, json.loads((tmp_path / "settings.json").read_text())).points
    assert (plain.variant, drafted.variant) == ("none", f"fixed-{gamma}") and drafted.variant in printed
    for point in (plain, drafted):
        assert point.same == point.metrics.requests == KNOWN, "greedy responses are plain decoding's"
        for request in point.requests:
            assert request.tokens == sum(request.sizes) == NEW and request.sizes[0] == 1
            assert request.ttft > 0 and len(request.gaps) == len(request.sizes) - 1 > 1, "parts come as they are made"
    assert plain.metrics.tau is None and max(size for request in plain.requests for size in request.sizes) == 1

    tau = drafted.metrics.tau
    assert tau is not None and tau > 1.5, "the drafter knows these answers"
    assert drafted.metrics.acceptance == pytest.approx((tau - 1) / gamma, rel=1e-3)
    told = [request.accepted_length or 0.0 for request in drafted.requests]
    assert max(told) > KNOWN_LENGTH, "some answers are known better than the one held out"
    parts = [mean(request.sizes[1:]) for request in drafted.requests]
    for length, request, part in zip(told, drafted.requests, parts, strict=True):
        # The last round may accept more drafts than the response has room for, and vLLM counts them all.
        most = (NEW - 1 + gamma) / (len(request.sizes) - 1)
        assert 0.75 * part <= length <= most + 1e-3, "what is told of each request is what came"
    assert min(parts) <= tau <= gamma + 1


def test_the_engine_ends_with_a_client_that_is_terminated(exported: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "vllm-none.log"
    with benching(exported, tmp_path, 10 * NEW) as process:

        def answering() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return log.is_file() and "POST /v1/completions" in log.read_text()

        watch(process, answering)
        started = descendants(process.pid)
        assert len(started) >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0 and wait_until_gone(sorted(started))
    assert not (tmp_path / "reference.json").exists(), "it was in the middle"
