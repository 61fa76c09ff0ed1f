"""Accuracies of candidates: ranks against the drafter's own chain, stored, and what trees are then made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import outrider.cli.calibrate as calibrate
import outrider.evaluation.calibration.calibrate as calibration
import outrider.evaluation.calibration.candidates as candidates
from outrider.api.drafter import DrafterChoice
from outrider.checkpoints.checkpoint import Checkpoint, add_metadata, load_checkpoint, read_metadata, save_drafter
from outrider.data.sources import TaskSettings
from outrider.drafters.base import DraftCalibration, DrafterWeights
from outrider.drafters.draft import TreeSize
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.hydra import Hydra, HydraConfig, HydraDrafter
from outrider.drafters.medusa import (
    HeadsDrafter,
    HeadsModule,
    Medusa,
    MedusaConfig,
    MedusaDrafter,
    StaticTreeDrafter,
)
from outrider.drafters.trees import assumed_accuracy, best_tree, expected_length
from outrider.evaluation.calibration.candidates import expected_lengths, true_ranks
from outrider.target.model import Target, load_target
from tests.toys.command_line import Run, check_error
from tests.toys.heads import VOCAB, Text, forced_call, toy_heads
from tests.toys.oracle import row_of
from tests.toys.targets import randomise, toy_target
from tests.toys.tokenizer import byte_tokenizer

IDS = torch.arange(0, VOCAB, 3)


def served(name: str, target: Target) -> HeadsDrafter:
    size = len(IDS) if name == "reduced" else VOCAB
    medusa = name == "medusa"
    module: HeadsModule = Medusa(toy_heads()) if medusa else Hydra(toy_heads(HydraConfig, draft_vocab_size=size))
    randomise(module)
    if isinstance(module, Medusa):
        return MedusaDrafter(DrafterWeights(module), target)
    return HydraDrafter(DrafterWeights(module, IDS if name == "reduced" else None), target)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["medusa", "hydra", "reduced"])
@torch.inference_mode()
def test_ranks_are_those_in_the_distributions_of_a_chain(name: str) -> None:
    """Teacher-forced through `propose`, position by position."""
    target = toy_target()
    drafter = served(name, target)
    prompt = [5, 9, 12]
    response = [int(token) for token in torch.randint(4, VOCAB, (19,), generator=torch.Generator().manual_seed(2))]
    tokens = [*prompt, *(token // 3 * 3 if name == "reduced" and i % 4 else token for i, token in enumerate(response))]
    hidden_TH = target.forward(torch.tensor([tokens]), target.new_cache(len(tokens)), logits=0).hidden_BTD[0]
    ranks_NK = true_ranks(target, drafter, prompt, tokens[3:])
    assert ranks_NK.shape == (19, 4)
    ids = IDS if name == "reduced" else torch.arange(VOCAB)
    missing = 0
    for n, at in enumerate(range(2, 21)):
        session = drafter.new_session(30)
        drafter.extend([session], [tokens[:at]], hidden_TH[:at, None])
        after = tokens[at + 1 : at + 5]
        assert ranks_NK[n, len(after) :].tolist() == [-1] * (4 - len(after)), "behind the end of the text"
        for k, token in enumerate(after):
            if not set(after[:k]) <= set(ids.tolist()):
                continue  # no chain can be forced through a token that cannot be drafted
            indices = [int((ids == t).nonzero()) for t in after[:k]]
            text = Text(torch.tensor(tokens), hidden_TH)
            call = forced_call(drafter, text, at, session, k + 1)
            call.source.indices[:] = [*indices, 0]  # type: ignore[attr-defined]
            row_V = row_of(drafter.propose([call])[0], k, VOCAB)
            can = token in ids
            missing += not can
            expected = int((row_V[ids] > row_V[token]).sum()) if can else len(ids)
            assert ranks_NK[n, k] == expected
    assert (missing > 0) == (name == "reduced")


def test_trees_follow_measured_accuracies() -> None:
    target = toy_target()
    module = Medusa(toy_heads())
    flat, steep = [[0.2] * 5] * 4, [[0.9] + [0.01] * 4] * 4
    for accuracy in (flat, steep, None):
        drafter = MedusaDrafter(DrafterWeights(module), target, DraftCalibration(accuracy=accuracy))
        expected = best_tree(accuracy or assumed_accuracy(4), 4)
        assert drafter.with_trees(TreeSize(4)).tree == expected
    assert best_tree(flat, 4).depth == 1 and best_tree(steep, 4).depth == 4, "the test's difference"
    with pytest.raises(ValueError, match=r"tree 4,top_k=2: .* ask for 4 nodes alone"):
        drafter.with_trees(TreeSize(4, top_k=2))
    with pytest.raises(ValueError, match=r"accuracies of 3 positions for a drafter of 4; measure .* \(outrider calib"):
        MedusaDrafter(DrafterWeights(module), target, DraftCalibration(accuracy=flat[:3]))


def test_a_measured_shape_is_never_worse_by_its_own_measure() -> None:
    accuracy = [[0.7, 0.1, 0.05], [0.2, 0.15, 0.1], [0.6, 0.3, 0.01]]
    found = expected_lengths([[*row, *[0.0] * 7] for row in accuracy])
    assert [nodes for nodes, _, _ in found] == [4, 8, 16, 32, 60]
    assert all(mine >= default for _, mine, default in found) and any(mine > default for _, mine, default in found)
    assert found[0][1] == pytest.approx(expected_length(best_tree(accuracy, 4), accuracy))
    assert [nodes for nodes, _, _ in expected_lengths([[0.5] * 10])] == [4, 8], "one head has ten candidates"
    few = expected_lengths(accuracy)  # three ranks a head: the default tree has no more
    assert [nodes for nodes, _, _ in few] == [4, 8, 16, 32] and few[0][1] == found[0][1]


def test_all_prompts_are_read_before_any_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[object] = []
    monkeypatch.setattr(candidates, "target_texts", lambda *args: answered.append(args))
    target = toy_target()
    good = tmp_path / "good.jsonl"
    good.write_text('{"turns": ["say"]}\n')
    with pytest.raises(ValueError, match=r"no prompt file .*mistyped"):
        candidates.measure_candidates(
            Target(target.model, byte_tokenizer(), "toy"), served("medusa", target), [str(good), "mistyped"],
            TaskSettings(), {},
        )  # fmt: skip
    assert not answered


@pytest.mark.parametrize("thinking", [False, True])
def test_the_thinking_mode_reaches_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thinking: bool
) -> None:
    target, tokenizer, asked = toy_target(), byte_tokenizer(), list[list[int]]()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% endif %}"

    def answered(target: object, prompts: list[list[int]], config: TaskSettings) -> list[list[int]]:
        asked.extend(prompts)
        return [[1, 2, 3] for _ in prompts]

    monkeypatch.setattr(candidates, "target_texts", answered)
    monkeypatch.setattr(candidates, "true_ranks", lambda *_, **__: torch.zeros(1000, 2, dtype=torch.long))
    (tmp_path / "tasks.jsonl").write_text('{"turns": ["say"]}\n')
    candidates.measure_candidates(
        Target(target.model, tokenizer, "toy"), served("medusa", target), [str(tmp_path / "tasks.jsonl")],
        TaskSettings(thinking=thinking), {},
    )  # fmt: skip
    assert [tokenizer.decode(prompt) for prompt in asked] == ["sayT" if thinking else "say"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_table_says_what_lengths_mean_where_siblings_are_drawn(temperature: float) -> None:
    found = candidates.Candidates(
        accuracy=[[0.5] * 10] * 2, positions=200, tasks=["a"], sampling={"temperature": temperature},
        max_new_tokens=8, versions={},
    )  # fmt: skip
    title = str(calibrate.candidates_table(found).title)
    assert ("at temperature 0.7 they are drawn, so a guide only" in title) == (temperature > 0)


def test_the_checkpoint_decides_before_the_target_is_loaded(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object) -> Target:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(calibration, "load_target", load)
    heads = {"vocab_size": 64, "draft_vocab_size": 64, "num_target_layers": 5, "hidden_size": 32}
    attention = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    eagle = Eagle3(Eagle3Config(**heads, **attention, target_layer_ids=(0, 1, 3)))
    for module, options, message in (
        (
            eagle,
            (),
            "the drafts of eagle3 cannot be calibrated, only those with confidences (dflash, dspark, dflash2",
        ),
        (Medusa(MedusaConfig(**heads, num_heads=2, num_layers=1)), ("--sweep", "s.png"), "heads without confidences"),
    ):
        save_drafter(Checkpoint(DrafterWeights(module)), tmp_path / module.algorithm)
        command = ("calibrate", "--target", toy / "target", "--drafter", tmp_path / module.algorithm, "--tasks", "x")
        check_error(run(*command, *options), message)


def test_calibrate_stores_what_tree_uses(run: Run, toy: Path, tmp_path: Path) -> None:
    target = load_target(toy / "target")
    vocab = target.vocab_size
    module = Medusa(
        MedusaConfig(
            hidden_size=32, vocab_size=vocab, draft_vocab_size=vocab, num_target_layers=5, num_heads=3, num_layers=1
        )
    )
    randomise(module)
    directory, tasks = tmp_path / "medusa", tmp_path / "mine.jsonl"
    save_drafter(Checkpoint(DrafterWeights(module)), directory)
    tasks.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(4)))
    command = ("calibrate", "--target", toy / "target", "--drafter", directory, "--tasks", tasks)
    check_error(run(*command, "--max-new-tokens", 8), "fewer than 100 tokens")
    check_error(run(*command, "--plot", tmp_path / "a.png"), "heads without confidences")
    assert "candidates" not in read_metadata(directory)
    status, stdout, stderr = run(*command, "--max-new-tokens", 60)
    assert status == 0, stderr
    assert "Accuracy of the likeliest candidate by head" in " ".join(stdout.split()) and "assumed shape" in stdout
    stored = read_metadata(directory)["candidates"]
    assert len(stored["accuracy"]) == 3 and stored["tasks"] == ["mine"] and stored["positions"] > 100
    opened = DrafterChoice("directory", str(directory)).open(target, tree=TreeSize(6))
    assert isinstance(opened.drafter, StaticTreeDrafter) and opened.name.endswith("(tree of 6, measured accuracies)")
    assert opened.drafter.tree == best_tree(stored["accuracy"], 6)
    add_metadata(directory, candidates={"accuracy": "high"})
    with pytest.raises(ValueError, match=r"candidates\.accuracy: Input should be a valid list"):
        load_checkpoint(directory).serve(target)
    assert run(*command, "--max-new-tokens", 60)[0] == 0, "which is mended by measuring again"
    load_checkpoint(directory).serve(target)
