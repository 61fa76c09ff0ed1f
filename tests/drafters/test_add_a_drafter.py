"""The drafter of docs/add-a-drafter.md (tests/toys/example_drafter.py) is trained, saved, loaded, served and refused by
name where it has no place; the package is changed by its line in checkpoints/registry.py alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.checkpoints.registry as catalogue
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.checkpoints.registry import Method
from outrider.data.responses import read_responses
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DrafterWeights
from outrider.target.model import load_target
from outrider.training.dataset import choose_draft_ids
from outrider.training.recipe import load_recipe
from tests.toys.alignment import check_alignment
from tests.toys.command_line import Run, in_process
from tests.toys.example_drafter import Bigram, BigramConfig, BigramDrafter
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise, toy_samples, toy_target

BIGRAM = Method(BigramConfig, Bigram)

PAGE = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"
EXAMPLE = Path(__file__).parents[1] / "toys" / "example_drafter.py"


def test_the_page_shows_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in PAGE.read_text()


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BUILT_IN", (*catalogue.BUILT_IN, BIGRAM))


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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider ARGS` in this process: (exit status, stdout, stderr)."""
    return in_process(monkeypatch, capfd)


def test_from_a_recipe_to_lossless_decoding(tmp_path: Path, run: Run) -> None:
    save_toy_target(tmp_path / "target", layers=3)
    prompts = [json.dumps({"id": f"p{i}", "turns": [f"prompt {i}"]}) for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(here=tmp_path))
    status, out, err = run("train", tmp_path / "recipe.yaml")
    assert status == 0, err
    assert "bigram drafter" in out
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["group"] == "train"]
    assert losses[-1] < losses[0]

    config = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["OutriderBigramModel"] and config["algorithm"] == "bigram"
    checkpoint = load_checkpoint(tmp_path / "out" / "drafter")
    target = load_target(tmp_path / "target")
    drafter = checkpoint.serve(target)
    _, replies = read_responses(tmp_path / "out" / "responses.jsonl")
    accepted = 0
    rules = StopRules(24, stop_ids=())
    for prompt in (reply.prompt for reply in replies[:4]):
        plain, drafted = generate(target, prompt, rules=rules), generate(target, prompt, drafter, rules=rules)
        assert plain.tokens == drafted.tokens
        accepted += sum(r.accepted for r in drafted.rounds)
        engine = Engine(target, drafter, config=EngineConfig(2, num_blocks=32))
        engine.submit(Request("r", prompt, rules=rules))
        together: list[int] = []
        while not engine.idle:
            together += [token for output in engine.step() for token in output.tokens]
        assert together == plain.tokens
    assert accepted > 0

    there = ("--target", tmp_path / "target", "--drafter", tmp_path / "out" / "drafter")
    tasks = ("--tasks", tmp_path / "prompts.jsonl", "--max-new-tokens", 8, "--out", tmp_path / "eval")
    status, out, err = run("eval", *there, *tasks)
    assert status == 0, err
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["settings"]["gamma"] == 4
    status, out, err = run("doctor", *there, "--data", tmp_path / "out" / "responses.jsonl", "--max-new-tokens", 24)
    assert "nothing to check in bigram drafters: positions" in " ".join(out.split()), out
    assert "the check itself broke" not in out and "trained = served" in out

    there_and_out = ("--target", tmp_path / "target", "--out", tmp_path / "exported")
    status, out, err = run("export", tmp_path / "out" / "drafter", "--to", "vllm", *there_and_out)
    assert status == 2 and "bigram" in " ".join(err.split()), err
    status, out, err = run("calibrate", *there, "--tasks", tmp_path / "prompts.jsonl")
    assert status == 2 and "drafts of bigram cannot be calibrated" in " ".join(err.split()), err

    # going on from it: the same function with new scales, and a contradiction is named
    out_dir = tmp_path / "out"
    more = ["optimizer.steps=62", f"out={tmp_path / 'more'}", f"start_from={out_dir / 'drafter'}"]
    status, out, err = run("train", tmp_path / "recipe.yaml", *more, "drafter.gamma=3")
    assert status == 2 and "gamma is 3, there 4" in " ".join(err.split())
    more.append(f"data.responses={out_dir / 'responses.jsonl'}")
    status, out, err = run("train", tmp_path / "recipe.yaml", *more, "initialize_from_target=false")
    assert status == 0, err


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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"gamma": None}, "Outrider dialect needs the field 'gamma'"),
        ({"depth": 2}, "bigram drafter has no fields depth"),
    ],
)
def test_a_config_of_ours_is_read_strictly(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    module = Bigram(BigramConfig.from_target(toy_target()))
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path)
    assert load_checkpoint(tmp_path).config == module.config
    config = {**json.loads((tmp_path / "config.json").read_text()), **edit}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


def test_recipes_know_its_fields_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "target: t\nout: o\ndata: {prompts: [{path: train_math}]}\ndrafter: {algorithm: bigram, gamma: 2}\n"
    )
    assert load_recipe(path).model_dump()["drafter"]["gamma"] == 2
    with pytest.raises(ValueError, match=r"drafter\.markov_rank: no field of bigram .*which have .*gamma, rank"):
        load_recipe(path, ["drafter.markov_rank=3"])
    assert all(m.name == m.section().algorithm for m in catalogue.methods())
