"""The drafter of docs/add-a-drafter.md (tests/toys/example_drafter.py), installed as a distribution of its own: the
command line trains, serves, calibrates and exports it, and names what has no place for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DrafterWeights
from outrider.target.model import load_target
from outrider.training.dataset import choose_draft_ids
from tests.toys.alignment import check_alignment
from tests.toys.example_drafter import Bigram, BigramConfig, BigramDrafter
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise, toy_samples, toy_target

PAGE = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"
EXAMPLE = Path(__file__).parents[1] / "toys" / "example_drafter.py"
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1.0"
[tool.setuptools]
py-modules = ["{module}"]
[project.entry-points."outrider.drafters"]
{method} = "{module}:METHOD"
"""
RECIPE = """
target: {here}/target
out: {here}/out
precision: float32
data: {{prompts: [{{path: prompts.jsonl}}], max_new_tokens: 16, max_prompt_tokens: 100, held_out: 3}}
drafter: {{algorithm: bigram, gamma: 4, draft_vocab_size: 100}}
objective: {{ce: 1.0}}
optimizer: {{steps: 60, sequences_per_step: 4, learning_rate: 1.0e-2}}
watch: {{decode_every: 30, decode_prompts: 2, decode_tokens: 8}}
eval_every: 30
"""
Run = Callable[..., tuple[int, str, str]]


def install(project: Path, site: Path, *, method: str, module: str, text: str) -> None:
    """Build a distribution of one module and install it into `site`, without network."""
    project.mkdir()
    (project / f"{module}.py").write_text(text)
    (project / "pyproject.toml").write_text(PROJECT.format(name=module.replace("_", "-"), module=module, method=method))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(site), str(project)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def outrider(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`outrider ARGS` in a process that has the example installed, and a package that cannot be imported."""
    here = tmp_path_factory.mktemp("packages")
    site = here / "site"
    install(here / "good", site, method="bigram", module="bigram_drafter", text=EXAMPLE.read_text())
    install(here / "broken", site, method="hopeless", module="hopeless_drafter", text="import no_such_module\n")

    def run(*args: object) -> tuple[int, str, str]:
        path = os.pathsep.join([str(site), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", "from outrider.cli.main import main; main()", *map(str, args)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        )
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return run


def test_the_page_shows_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in PAGE.read_text()


@pytest.mark.slow
def test_from_a_recipe_to_an_export(tmp_path: Path, outrider: Run) -> None:
    save_toy_target(tmp_path / "target", layers=3)
    prompts = [json.dumps({"id": f"p{i}", "turns": [f"prompt {i}"]}) for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(here=tmp_path))
    out_dir = tmp_path / "out"
    drafter = out_dir / "drafter"
    there = ("--target", tmp_path / "target", "--drafter", drafter)
    tasks = ("--tasks", tmp_path / "prompts.jsonl")

    status, out, err = outrider("train", tmp_path / "recipe.yaml")
    assert status == 0, err
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["group"] == "train"]
    assert "bigram drafter" in out and losses[-1] < losses[0]
    config = json.loads((drafter / "config.json").read_text())
    assert config["architectures"] == ["OutriderBigramModel"] and config["algorithm"] == "bigram"

    status, out, err = outrider("eval", *there, *tasks, "--max-new-tokens", 24, "--out", tmp_path / "eval")
    assert status == 0, err
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["settings"]["gamma"] == 4

    status, out, err = outrider("calibrate", *there, *tasks, "--max-new-tokens", 64)
    assert status == 0 and "Survival to position" in out, err

    to = ("--target", tmp_path / "target", "--out")
    status, out, err = outrider("export", drafter, "--to", "vllm", *to, tmp_path / "exported")
    assert status == 0 and '"method": "bigram"' in out, err
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["algorithm"] == "bigram"
    status, out, err = outrider("export", drafter, "--to", "sglang", *to, tmp_path / "other")
    assert status == 2 and "takes no bigram drafters" in err

    texts = []
    for which in (drafter, "none"):
        generate_args = ("prompt 3", "--target", tmp_path / "target", "--drafter", which, "--max-new-tokens", 24)
        status, out, err = outrider("generate", *generate_args)
        assert status == 0, err
        texts.append(out.splitlines()[0])
    assert texts[0] == texts[1]

    status, out, err = outrider("doctor", *there, "--data", out_dir / "responses.jsonl", "--max-new-tokens", 24)
    assert "nothing to check in bigram drafters: positions" in " ".join(out.split()), out
    assert "the check itself broke" not in out and "trained = served" in out

    # going on from it: a contradiction is named
    more = [f"out={tmp_path / 'more'}", f"start_from={drafter}", "drafter.gamma=3"]
    status, out, err = outrider("train", tmp_path / "recipe.yaml", *more)
    assert status == 2 and "gamma is 3, there 4" in err
    status, out, err = outrider("train", tmp_path / "recipe.yaml", "drafter.markov_rank=3")
    assert status == 2 and "drafter.markov_rank: no field of bigram" in err

    # what cannot be loaded breaks nothing but the method it would bring
    status, out, err = outrider("train", tmp_path / "recipe.yaml", "drafter={algorithm: hopeless}")
    assert status == 2 and "hopeless-drafter" in err and "no_such_module" in err
    config["architectures"] = ["OutriderHopelessModel"]
    (drafter / "config.json").write_text(json.dumps({**config, "algorithm": "hopeless"}))
    status, out, err = outrider("inspect", drafter)
    assert "hopeless-drafter" in out + err


def test_help_needs_no_package_to_work(outrider: Run) -> None:
    status, out, _ = outrider("--help")
    assert status == 0 and "train" in out


def test_it_is_served_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = toy_target(), toy_samples(4)
    module = Bigram(BigramConfig.from_target(target, draft_vocab_size=60))
    randomise(module)
    module.aux_scale_L.fill_(3.0)
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    assert check_alignment(target, module, samples, ids) > 50
    before = module.read.weight.clone()
    module.rescale_aux(torch.tensor([6.0]))
    assert not torch.equal(before, module.read.weight)
    assert check_alignment(target, module, samples, ids) > 50
    inner = BigramDrafter.extend

    def one_late(self: BigramDrafter, sessions: Any, tokens: Any, aux_TLD: Tensor) -> None:
        inner(self, sessions, tokens, aux_TLD.roll(1, 0))

    monkeypatch.setattr(BigramDrafter, "extend", one_late)
    with pytest.raises(AssertionError):
        check_alignment(target, module, samples, ids)


def test_decoding_with_it_is_greedy_decoding(tmp_path: Path) -> None:
    save_toy_target(tmp_path / "target", layers=3)
    target = load_target(tmp_path / "target")
    module = Bigram(BigramConfig.from_target(target))
    randomise(module)
    drafter = DrafterWeights(module.eval()).serve(target)
    rules = StopRules(24, stop_ids=())
    for prompt in ([1, 2, 3], [4, 5], [6]):
        plain, drafted = generate(target, prompt, rules=rules), generate(target, prompt, drafter, rules=rules)
        assert plain.tokens == drafted.tokens
        engine = Engine(target, drafter, config=EngineConfig(2, num_blocks=32))
        engine.submit(Request("r", prompt, rules=rules))
        together: list[int] = []
        while not engine.idle:
            together += [token for output in engine.step() for token in output.tokens]
        assert together == plain.tokens
