"""`outrider prepare` as a process: kill -9 at random points, the last run's bytes, counts, recipes and mistakes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import TOY
from openai_server import ToyServer, dead_url, serving
from test_text import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.responses import beside, read_responses
from outrider.target import Target, load_target
from outrider.training.dataset import existing_responses, recipe_samples
from outrider.training.recipe import Recipe

KILLS = 3
# Imports once, then forks a child for every command it reads: a process that can be killed, without ten slow starts.
ZYGOTE = """
import json, os, sys
from outrider.cli import main
print("ready", flush=True)
for line in sys.stdin:
    args, log = json.loads(line)
    child = os.fork()
    if not child:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv = ["outrider", *args]
        code = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Zygote:
    """Runs commands one after another in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, *args: object, kill_when: Callable[[], bool] | None = None) -> tuple[int, str]:
        """(exit status, output); -9 when it was killed in time."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([list(map(str, args)), str(self.log)]) + "\n")
        self.process.stdin.flush()
        child = int(self._read())
        while kill_when is not None and Path(f"/proc/{child}/stat").exists():
            if kill_when():
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.005)
        status = int(self._read())
        return status, self.log.read_text()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    assert zygote.process.stdin is not None
    zygote.process.stdin.close()
    zygote.process.wait(timeout=10)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random target and 24 conversations of one or two turns (36 turns)."""
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": len(tokenizer), "num_hidden_layers": 2}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lines = [{"id": f"c{i}", "turns": ["word " + "abc"[i % 3] * (i % 7 + 1), "more"][: 1 + i % 2]} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def served(toy: Path) -> Target:
    return load_target(toy / "target")


def command(toy: Path, out: Path, *more: object) -> tuple[object, ...]:
    fixed = (
        "--threads",
        1,
        "--max-new-tokens",
        12,
        "--max-prompt-tokens",
        200,
        "--temperature",
        1.1,
        "--seed",
        5,
        "--batch-size",
        3,
    )
    return ("prepare", "--target", toy / "target", "--prompts", toy / "prompts.jsonl", "--out", out, *fixed, *more)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_again_and_again(
    zygote: Zygote, whole: Path, args: tuple[object, ...], out: Path, chance: random.Random
) -> int:
    """Run `args` killed at random sizes of the journal until it ends; how many runs died."""
    killed = 0
    for _ in range(KILLS):
        journal = beside(out, "journal")
        limit = size(journal) + chance.randrange(size(whole) // 3)
        status, output = zygote.run(*args, kill_when=lambda: size(journal) > limit)  # noqa: B023
        assert status in (0, -signal.SIGKILL), output
        killed += status != 0
        if status == 0:
            break
    status, output = zygote.run(*args)
    assert status == 0, output
    return killed


def test_killed_at_random_points_the_local_engine_ends_with_the_same_bytes(
    zygote: Zygote, toy: Path, tmp_path: Path
) -> None:
    status, output = zygote.run(*command(toy, tmp_path / "whole.jsonl"))
    assert status == 0, output
    assert "36 turns = 36 done + 0 skipped (prompt too long) + 0 failed + 0 waiting" in output
    assert "tokens/s in this run" in output and "finished by themselves" in output and "50%" in output
    out = tmp_path / "out.jsonl"
    killed = kill_again_and_again(zygote, tmp_path / "whole.jsonl", command(toy, out), out, random.Random(7))
    assert killed >= 2
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "whole.jsonl"], "nothing is left behind"


def test_killed_at_random_points_servers_end_with_the_same_bytes(
    zygote: Zygote, toy: Path, served: Target, tmp_path: Path
) -> None:
    chance = random.Random(3)
    faults = ["429", "500", "drop", "malformed"]

    def fault(number: int, body: dict[str, object]) -> str | None:
        time.sleep(0.01)
        return chance.choice(faults) if chance.random() < 0.2 else None

    with serving(ToyServer(served, fault)) as a, serving(ToyServer(served, fault)) as b:
        more = ("--base-url", a.url, "--base-url", b.url, "--base-url", dead_url(), "--concurrency", 2)
        status, output = zygote.run(*command(toy, tmp_path / "whole.jsonl", *more))
        assert status == 0 and "36 turns = 36 done" in output, output
        out = tmp_path / "out.jsonl"
        args = command(toy, out, *more)
        assert kill_again_and_again(zygote, tmp_path / "whole.jsonl", args, out, random.Random(1)) >= 2
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    status, output = zygote.run(*command(toy, tmp_path / "local.jsonl", "--batch-size", 1))
    assert status == 0
    assert read_responses(tmp_path / "local.jsonl")[1] == read_responses(out)[1], "server and engine say the same"


def test_failures_waiting_and_guessed_tokens_are_reported(
    zygote: Zygote, toy: Path, served: Target, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    with serving(ToyServer(served, lambda number, _: "400" if number in (2, 3) else None, ids=None)) as server:
        status, output = zygote.run(*command(toy, out, "--base-url", server.url, "--concurrency", 1, "--limit", 4))
        assert status == 0, output
        assert "6 turns = 3 done + 0 skipped (prompt too long) + 3 failed + 0 waiting" in output
        assert "100.0% of the responses came as text" in output and "r.failed.jsonl" in output
    status, output = zygote.run(
        *command(toy, out, "--base-url", dead_url(), "--model", "toy", "--limit", 4, "--retries", 0)
    )
    assert status == 2 and "cannot be reached" in output and "3 of 6 turns are waiting" in output


def test_a_recipe_gives_what_the_command_line_does_not(zygote: Zygote, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = {
        "target": str(toy / "target"),
        "out": str(out),
        "data": {
            "prompts": [{"path": str(toy / "prompts.jsonl"), "limit": 6}],
            "max_new_tokens": 9,
            "max_prompt_tokens": 99,
            "thinking": True,
            "held_out": 2,
        },
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    status, output = zygote.run("prepare", "--recipe", tmp_path / "r.yaml", "--max-new-tokens", 5, "--no-thinking")
    assert status == 0, output
    settings, replies = read_responses(out / "responses.jsonl")
    assert settings["max_new_tokens"] == 5 and settings["max_prompt_tokens"] == 99 and settings["thinking"] is False
    assert {r.id for r in replies} == {f"c{i}" for i in range(6)}


def test_mistakes_end_in_one_line(zygote: Zygote, toy: Path, tmp_path: Path) -> None:
    target = ("--target", toy / "target")
    for args, message in [
        (("--prompts", "train_math", "--out", "x.jsonl"), "--target is missing"),
        ((*target, "--out", tmp_path / "x.jsonl"), "--prompts is missing"),
        ((*target, "--prompts", "train_math"), "--out is missing"),
        ((*target, "--limit", 3, "--out", "x.jsonl"), "--limit and --max-turns belong to --prompts"),
        ((*target, "--prompts", "train_math", "--out", "x.jsonl"), "is 768 and"),
    ]:
        status, output = zygote.run("prepare", *args)
        assert status == 2 and message in output and "Traceback" not in output, output
    assert not (tmp_path / "x.jsonl").exists()


def recipe_for(toy: Path, out: Path, responses: Path) -> Recipe:
    data = {"responses": str(responses), "held_out": 4}
    return Recipe.model_validate({"target": str(toy / "target"), "out": str(out), "data": data})


def test_training_uses_a_finished_file_as_it_is(zygote: Zygote, toy: Path, served: Target, tmp_path: Path) -> None:
    responses = tmp_path / "r.jsonl"
    status, output = zygote.run(*command(toy, responses))
    assert status == 0, output
    before = responses.read_bytes()
    train, held_out, settings = recipe_samples(recipe_for(toy, tmp_path / "out", responses), served)
    assert len({s.id for s in held_out}) == 4 and len({s.id for s in train}) == 20
    assert responses.read_bytes() == before and settings["target"] == served.name
    tokens = sum(s.num_supervised for s in [*train, *held_out])
    assert tokens == sum(len(r.response) for r in read_responses(responses)[1])
    with pytest.raises(ValueError, match=r"nope\.jsonl do not exist"):
        recipe_samples(recipe_for(toy, tmp_path, tmp_path / "nope.jsonl"), served)
    beside(tmp_path / "half.jsonl", "journal").write_text("{}\n")
    with pytest.raises(ValueError, match="not complete: run the `outrider prepare`"):
        recipe_samples(recipe_for(toy, tmp_path, tmp_path / "half.jsonl"), served)
    assert served.tokenizer is not None
    plain = byte_tokenizer()
    plain.chat_template = str(plain.chat_template) + " "
    with pytest.raises(ValueError, match="another chat template"):
        existing_responses(responses, Target(served.model, plain, served.name))
    with pytest.raises(ValueError, match="another target"):
        existing_responses(responses, Target(served.model, served.tokenizer, "other"))
