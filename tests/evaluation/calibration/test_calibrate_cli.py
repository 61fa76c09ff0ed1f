"""`outrider calibrate` with files: rounds kept and used again, the sweep, and the export for SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.checkpoints.checkpoint import add_metadata, read_metadata
from outrider.evaluation.calibration.calibrate import weights_digest
from outrider.evaluation.calibration.fit import Scaling
from outrider.target.hub import EMBEDDED_ID
from tests.toys.command_line import Run
from tests.toys.dialects import released_medusa
from tests.toys.shipped import tasks_file, trained


def test_rounds_sweep_and_export(run: Run, toy: Path, tmp_path: Path) -> None:
    drafter, tasks = trained(toy, tmp_path / "d"), tasks_file(tmp_path / "mine.jsonl", 8)
    command = ("calibrate", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks)
    files = ("--rounds", tmp_path / "r.npz", "--sweep", tmp_path / "s.png", "--export-sglang", tmp_path / "sglang")
    found = run(*command, "--max-new-tokens", 32, *files)
    assert found[0] == 0, found[2]
    stored, written = read_metadata(drafter)["calibration"], (tmp_path / "r.npz").read_bytes()
    assert len(stored["offsets"]) == 7 and stored["estimator"] is None
    points = json.loads((tmp_path / "s.json").read_text())
    assert len(points) == 20 and points[0]["verified_per_step"] >= points[-1]["verified_per_step"]
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads((tmp_path / "sglang" / "confidence_sts.json").read_text())["temperatures"]) == 7
    assert run(*command, "--max-new-tokens", 32, *files)[0] == 0
    assert read_metadata(drafter)["calibration"] == stored and (tmp_path / "r.npz").read_bytes() == written
    status, out, _ = run(*command, "--max-new-tokens", 32, "--fit", "sts", *files)
    assert status == 0 and "STS" in out and "T, b" in out, "both are shown"
    assert "SGLang has no offsets" not in out
    refused = run(*command, "--max-new-tokens", 31, *files)
    assert refused[0] == 2 and "was collected with settings" in refused[2]


def test_the_package_s_own_drafter_is_not_calibrated_in_place(run: Run, tmp_path: Path) -> None:
    command = ("calibrate", "--target", EMBEDDED_ID, "--drafter", "smollm2-135m-dspark", "--tasks", "eval_math")
    status, _, errors = run(*command)
    assert status == 2 and "came with the package: copy it" in errors


def test_worse_temperatures_are_not_stored(
    monkeypatch: pytest.MonkeyPatch, run: Run, toy: Path, tmp_path: Path
) -> None:
    drafter, tasks = trained(toy, tmp_path / "d"), tasks_file(tmp_path / "mine.jsonl", 8)
    before = {path.name: path.read_bytes() for path in drafter.iterdir()}
    worse = Scaling([1.0] * 7, [3.0] * 7)
    monkeypatch.setattr("outrider.evaluation.calibration.fit.fit_scaling", lambda rounds, offsets=True: worse)
    command = ("calibrate", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks)
    status, out, err = run(*command, "--max-new-tokens", 32, "--export-sglang", tmp_path / "sglang")
    assert status == 0, err
    assert "not stored: on held-out conversations ECE" in out and "d is unchanged" in out and "not exported: " in out
    assert {path.name: path.read_bytes() for path in drafter.iterdir()} == before
    assert not (tmp_path / "sglang").exists()
    add_metadata(drafter, calibration={"temperatures": [1.0] * 7, "offsets": [0.5] * 7})
    status, out, err = run(*command, "--max-new-tokens", 96, "--temperature", 1)
    assert status == 0 and "left without a fit (on held-out conversations ECE" in out, err
    stored = read_metadata(drafter)["calibration_sampled"]
    assert stored["temperatures"] == [1.0] * 7 and stored["offsets"] == [0.0] * 7
    assert stored["after"] == stored["before"]


def test_heads_of_another_maker_are_measured(run: Run, toy: Path, tmp_path: Path) -> None:
    vocab = json.loads((toy / "target" / "config.json").read_text())["vocab_size"]
    drafter, tasks = released_medusa(tmp_path / "medusa", vocab), tasks_file(tmp_path / "mine.jsonl", 8)
    command = ("calibrate", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks)
    found = run(*command, "--max-new-tokens", 32)
    assert found[0] == 0, found[2]
    assert len(read_metadata(drafter)["candidates"]["accuracy"]) == 3


def test_rounds_belong_to_all_files_of_a_drafter(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = set()
    for contents in (("x", "y"), ("x", "z"), ("w", "y")):
        for name, content in zip(index["weight_map"].values(), contents, strict=True):
            (tmp_path / name).write_text(content)
        found.add(weights_digest(tmp_path))
    assert len(found) == 3
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        weights_digest(tmp_path)
