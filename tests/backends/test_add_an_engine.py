"""docs/add-an-engine.md: its example engine is exported for, started, loaded and measured."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

import outrider.backends.registry as registry
import outrider.evaluation.loadtest.config as config
from outrider.backends.base import ExternalEngine
from outrider.checkpoints.checkpoint import save_drafter
from outrider.config import _parts_of
from outrider.evaluation.loadtest.metrics import Journal
from tests.toys.command_line import check_error, in_process
from tests.toys.dialects import VD, made
from tests.toys.fake_engine import executable
from tests.toys.target_directory import save_toy_target

GUIDE = Path(__file__).parents[2] / "docs" / "add-an-engine.md"


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExternalEngine:
    """The guide's file, imported, and the guide's line in the registry."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "forge.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("forge", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = module.Forge()
    assert isinstance(engine, ExternalEngine)
    monkeypatch.setattr(registry, "ENGINES", (*registry.ENGINES, engine))
    monkeypatch.setattr(config, "BACKENDS", (*config.BACKENDS, engine.name))
    monkeypatch.setattr("outrider.config._parts_of", _parts_of.__wrapped__)  # read anew: BACKENDS has changed
    return engine


def test_the_guides_engine(
    forge: ExternalEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "target"
    vocab = save_toy_target(target, layers=5)
    save_drafter(made("dflash", vocab_size=vocab, draft_vocab_size=vocab), tmp_path / "drafter")
    save_drafter(made("dflash", vocab_size=vocab, draft_vocab_size=VD), tmp_path / "reduced")
    save_drafter(made("eagle3", vocab_size=vocab, draft_vocab_size=vocab), tmp_path / "eagle3")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"turns": [f"number {i}"]}) + "\n" for i in range(4)))
    outrider = in_process(monkeypatch, capfd)

    def export(name: str) -> tuple[int, str, str]:
        return outrider(
            "export", tmp_path / name, "--to", "forge", "--target", target, "--out", tmp_path / f"forge-{name}"
        )

    check_error(export("reduced"), f"--to forge: draft_vocab_size {VD} has no place there")
    check_error(export("eagle3"), "--to forge: it takes no eagle3 drafters: train one of dflash (drafter.algorithm).")
    status, shown, errors = export("drafter")
    assert status == 0, errors
    exported, gamma = tmp_path / "forge-drafter", 3
    assert f"forge serve {target} --draft block --draft-tokens {gamma} --draft-model {exported}" in shown
    assert "left out: Forge drafts greedily." in shown
    assert "written by Outrider for forge" in (exported / "README.md").read_text()

    out = tmp_path / "out"
    bench = ["bench", "--backend", "forge", "--target", target, "--drafter", exported, "--out", out]
    bench += ["--tasks", tmp_path / "tasks.jsonl", "--requests-per-point", 3, "--max-new-tokens", 6, "--repeats", 1]
    status, _, errors = outrider(
        *bench, "--launch", "--engine-command", executable(tmp_path / "forge", "forge"), "--concurrency", 2
    )
    assert status == 0, errors
    log = (out / "logs" / f"forge-fixed-{gamma}.log").read_text()
    assert "serve" in log and f"--draft-tokens {gamma}" in log and f"--draft-model {exported}" in log
    plain, drafted = Journal(out, json.loads((out / "settings.json").read_text())).points
    assert (plain.variant, drafted.variant) == ("none", f"fixed-{gamma}") and plain.same == drafted.same == 3
    assert [request.accepted_length for request in drafted.requests] == [3.0] * 3
    assert plain.metrics.tau is None and drafted.metrics.tau is not None and 1 < drafted.metrics.tau <= gamma + 1
    check_error(
        outrider(*bench[:2], "smithy", *bench[3:]),
        "--backend 'smithy': choose one of local, transformers, openai, vllm",
    )
