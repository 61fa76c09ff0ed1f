"""`outrider serve --engine`: the command that serves target and drafter on vLLM or SGLang, printed and carried out."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from outrider.backends.launch import free_port
from outrider.checkpoints.checkpoint import save_drafter
from tests.toys.command_line import Run, check_error
from tests.toys.dialects import made
from tests.toys.fake_engine import executable
from tests.toys.processes import processes, wait_until_gone
from tests.toys.serving import wait_for


def test_the_command_is_printed(run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = ("--target", toy / "target", "--drafter", toy / "drafter")
    status, shown, errors = run("serve", *models, "--engine", "vllm", "--port", 8123)
    assert status == 0 and not errors, errors
    variables = [word for word in shlex.split(shown) if word.startswith("VLLM_")]
    python, _, _, flag, target, *rest = shlex.split(shown)[len(variables) :]
    assert variables == ["VLLM_NO_USAGE_STATS=1", "VLLM_USE_V2_MODEL_RUNNER=1"]
    assert (python, flag, target) == ("python", "--model", str((toy / "target").resolve()))
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    config = json.loads(options.pop("--speculative-config"))
    assert config == {"method": "dspark", "model": str(toy / "drafter"), "num_speculative_tokens": 7}
    assert options == {"--host": "127.0.0.1", "--port": "8123", "--per-request-spec-decode-metrics": "summary"}, (
        "prompts stay cached, and context, users and the type of the weights are the engine's choice"
    )
    more = (
        "--name",
        "m",
        "--max-requests",
        5,
        "--host",
        "0.0.0.0",
        "--engine-args",
        "--seed 1",
        "--engine-python",
        "py",
    )
    status, shown, errors = run("serve", *models, "--engine", "sglang", *more, "--engine-dtype", "bfloat16")
    assert status == 0 and "warning: anyone who reaches 0.0.0.0 may use this server" in errors
    for words in (
        "py -m sglang.launch_server",
        "--host 0.0.0.0 --port 8000 --dtype bfloat16 --served-model-name m --max-running-requests 5",
        "--speculative-dspark-block-size 7",
        "--seed 1",
    ):
        assert words in shown
    assert "--disable-radix-cache" not in shown
    status, shown, _ = run("serve", *models[:2], "--drafter", "none", "--engine", "vllm")
    assert status == 0 and "speculative" not in shown


def test_a_drafter_of_another_dialect_is_exported_before(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vocab = json.loads((toy / "target" / "config.json").read_text())["vocab_size"]
    save_drafter(made("eagle3", vocab_size=vocab, draft_vocab_size=vocab), tmp_path / "mine")
    models = ("--target", toy / "target", "--drafter", "mine")
    _, shown, _ = run("serve", *models, "--engine", "vllm")
    export, server = shown.splitlines()
    status, _, errors = run(*shlex.split(export)[1:])
    assert status == 0, errors
    assert "runs/mine-vllm" in export and '"model": "runs/mine-vllm"' in server
    _, again, _ = run("serve", *models[:2], "--drafter", "runs/mine-vllm", "--engine", "vllm")
    assert again == f"{server}\n", "the exported drafter is loaded as it is"
    save_drafter(made("hydra", vocab_size=vocab, draft_vocab_size=vocab), tmp_path / "hydra")
    refused = run("serve", "--target", toy / "target", "--drafter", "hydra", "--engine", "sglang")
    check_error(refused, "--engine sglang with the drafter hydra: it takes no hydra drafters: train one of dflash")


@pytest.mark.parametrize("flag", ["--tp-size", "--tensor-parallel-size"])
@pytest.mark.parametrize("verb", ["serve", "bench"])
def test_tensor_parallelism_is_said_to_be_other_engines(run: Run, verb: str, flag: str) -> None:
    found = run(verb, flag, 2)
    check_error(found, f"No such option: {flag}")
    check_error(found, "Tensor parallelism is vLLM's and SGLang's")
    check_error(found, "--engine sglang --engine-args '--tp-size 2'")


def test_the_family_of_the_target_is_told_to_the_engine(run: Run, toy: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(toy / "target", target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3NextForCausalLM"]}))
    models = ("--target", target, "--drafter", toy / "drafter")
    assert "--mamba-scheduler-strategy extra_buffer" in run("serve", *models, "--engine", "sglang")[1]
    assert "mamba" not in run("serve", *models[:2], "--drafter", "none", "--engine", "sglang")[1]


def test_options_of_the_other_engine_are_refused(run: Run, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ("serve", "--target", toy / "target", "--drafter", toy / "drafter")
    check_error(run(*models, "--engine", "vllm", "--tree", 4, "--threads", 1), "--tree, --threads: of our own engine")
    check_error(run(*models, "--launch", "--engine-args", "x"), "--launch, --engine-args: for another engine")
    check_error(run(*models, "--engine", "tgi"), "--engine")


def test_a_key_is_in_no_command(run: Run, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads it from a variable; SGLang has a flag and a file of flags alone."""
    models = ("serve", "--target", toy / "target", "--drafter", "none", "--host", "0.0.0.0", "--engine")
    assert "set OUTRIDER_API_KEY to ask for a key" in run(*models, "vllm")[2]
    assert "give --engine-args '--config FILE' with api-key: KEY" in run(*models, "sglang")[2]
    assert not run(*models, "sglang", "--engine-args", "--config mine.yaml")[2]
    for word in ("--api-key secret", "--api-key=secret", "--seed 1 --admin-api-key secret"):
        refused = run(*models, "vllm", "--engine-args", word)
        check_error(refused, "--engine-args: every user of the machine reads a key there; put it into OUTRIDER_API_KEY")
        assert "secret" not in refused[1] + refused[2]
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    status, shown, errors = run(*models, "vllm")
    assert status == 0 and 'VLLM_API_KEY="$OUTRIDER_API_KEY" ' in shown and "secret" not in shown + errors
    assert "warning" not in errors
    check_error(run(*models, "sglang"), "sglang takes its key as a flag, which every user of the machine can read")


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_written(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vocab = json.loads((toy / "target" / "config.json").read_text())["vocab_size"]
    save_drafter(made("eagle3", vocab_size=vocab, draft_vocab_size=vocab), tmp_path / "mine")
    command = ("serve", "--target", toy / "target", "--drafter", "mine", "--engine", "vllm", "--launch")
    check_error(run(*command), f"--engine-python: {sys.executable} has no package vllm: name the python of")
    check_error(
        run(*command, "--engine-python", "/absent/python"), "--engine-python: the engine's command cannot be run"
    )
    check_error(run(*command, "--engine-command", "/absent/vllm"), "--engine-command: /absent/vllm is no program")
    assert not (tmp_path / "runs").exists()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).is_success
    except httpx.ConnectError:
        return False


def test_launch_becomes_the_engine(toy: Path, tmp_path: Path) -> None:
    """One process: the engine has the terminal and takes the signals; its key is in its environment alone."""
    port = free_port()
    command = [sys.executable, "-m", "outrider.cli.main", "serve", "--engine", "vllm", "--launch", "--port", str(port)]
    command += ["--target", str(toy / "target"), "--drafter", str(toy / "drafter")]
    command += ["--engine-command", str(executable(tmp_path / "vllm"))]
    ids = tmp_path / "ids"
    process = subprocess.Popen(
        command,
        env={**os.environ, "FAKE_ENGINE_WORKER": str(ids), "OUTRIDER_API_KEY": "kept-secret"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: answers(port) or process.poll() is not None, seconds=600)
        leader, worker = processes(ids)
        assert leader == process.pid
        about = Path(f"/proc/{leader}")
        if about.exists():
            assert b"VLLM_API_KEY=kept-secret" in (about / "environ").read_bytes().split(b"\0")
            assert b"kept-secret" not in (about / "cmdline").read_bytes()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        shown, _ = process.communicate(timeout=120)
    assert "--speculative-config" in shown and "kept-secret" not in shown and wait_until_gone([worker])
    assert process.returncode == -signal.SIGTERM
