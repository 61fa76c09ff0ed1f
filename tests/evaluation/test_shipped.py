"""Shipping a drafter: found for its target, packaged small with an honest card, calibrated in place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import outrider.api.model as api
import outrider.checkpoints.published as shipped_module
from outrider.checkpoints.checkpoint import Checkpoint, add_metadata, load_checkpoint, read_metadata, save_drafter
from outrider.checkpoints.describe import DrafterInfo
from outrider.checkpoints.published import shipped_drafter
from outrider.decoding.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.decoding.request import Output
from outrider.drafters.base import DrafterWeights
from outrider.drafters.confidence import ConfidenceScaling, SampledScaling
from outrider.drafters.dspark import DSpark
from outrider.evaluation.model_card import _taken, model_card
from outrider.evaluation.results import Results
from outrider.target.hub import EMBEDDED_ID, canonical_id
from tests.toys.command_line import Run, check_error
from tests.toys.dialects import released_medusa
from tests.toys.shipped import TRAINED, tasks_file, trained
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise, toy_config, toy_target


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, and no packaged drafters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    monkeypatch.setattr(shipped_module, "PACKAGE", tmp_path / "package")


def marked(directory: Path, target: str) -> Path:
    directory.mkdir(parents=True)
    add_metadata(directory, target=target)
    return directory


def test_the_places_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shipped_drafter(EMBEDDED_ID) is None
    packaged = marked(tmp_path / "package" / "models" / "a", EMBEDDED_ID)
    assert shipped_drafter(EMBEDDED_ID) == shipped_drafter("SmolLM2-135M-Instruct") == packaged
    local = marked(tmp_path / "models" / "b", "SmolLM2-135M-Instruct")
    assert shipped_drafter(EMBEDDED_ID) == local.relative_to(tmp_path)
    marked(tmp_path / "models" / "a-other", "someone/else")
    marked(tmp_path / "models" / ".b.half.old", EMBEDDED_ID)
    (tmp_path / "models" / "empty").mkdir()
    assert shipped_drafter(EMBEDDED_ID) == local.relative_to(tmp_path) and shipped_drafter("nobody/here") is None
    mine = marked(tmp_path / "mine" / "z", EMBEDDED_ID)
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "mine"))
    assert shipped_drafter(EMBEDDED_ID) == mine
    assert shipped_drafter("someone/else") == Path("models/a-other"), "the other places still count"
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        shipped_drafter(EMBEDDED_ID)


def test_a_local_target_is_the_same_by_any_path(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    found = marked(tmp_path / "models" / "d", str(tmp_path / "target"))
    assert shipped_drafter("target") == shipped_drafter("./target/") == found.relative_to(tmp_path)
    assert canonical_id("some/id") == "some/id"


def test_generate_and_eval_use_the_shipped_drafter(run: Run, toy: Path, tmp_path: Path) -> None:
    command = ("generate", "say a word", "--target", toy / "target", "--max-new-tokens", 12)
    plain = run(*command)
    assert plain[0] == 0 and "plain decoding, no drafter for" in plain[2]
    assert "none in models/, none published" in plain[2] and "outrider init" in plain[2]
    trained(toy, tmp_path / "models" / "toy-dspark")
    drafted = run(*command)
    assert drafted[0] == 0 and drafted[1] == plain[1] and "; drafter models/toy-dspark" in drafted[2]
    off = run(*command, "--drafter", "none")
    assert off[0] == 0 and "12 tokens in 12 rounds" in off[2] and off[2].strip().endswith("; plain decoding")
    evaluation = (
        "eval",
        "--target",
        toy / "target",
        "--tasks",
        tasks_file(tmp_path / "t.jsonl"),
        "--out",
        tmp_path / "e",
    )
    found = run(*evaluation, "--max-new-tokens", 8)
    assert found[0] == 0, found[2]
    assert json.loads((tmp_path / "e" / "results.json").read_text())["settings"]["drafter"] == "models/toy-dspark"
    check_error(run(*evaluation, "--drafter", "none"), "--drafter none: no drafter for")


def test_generate_follows_the_recommended_threshold(
    monkeypatch: pytest.MonkeyPatch, run: Run, toy: Path, tmp_path: Path
) -> None:
    chosen: list[Policy] = []

    def stream(*values: Any, policy: Policy, **named: Any) -> Iterator[Output]:
        chosen.append(policy)
        return decode(*values, policy=policy, **named)

    decode = api.stream
    monkeypatch.setattr(api, "stream", stream)
    trained(toy, tmp_path / "models" / "d", recommended={"confidence_threshold": 1.0})
    command = ("generate", "say a word", "--target", toy / "target", "--max-new-tokens", 12)
    assert "tau 1.00" in run(*command)[2], "no confidence reaches 1: nothing is verified"
    assert run(*command, "--confidence-threshold", 0.5)[0] == run(*command, "--drafter", "none")[0] == 0
    assert chosen == [ThresholdPolicy(1.0), ThresholdPolicy(0.5), FixedPolicy()]


def test_calibrate_stores_temperatures_that_are_then_served(run: Run, toy: Path, tmp_path: Path) -> None:
    drafter = trained(toy, tmp_path / "d")
    before = {p.name: p.read_bytes() for p in drafter.iterdir()}
    tasks = tasks_file(tmp_path / "mine.jsonl", 8)
    command = ("calibrate", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks)
    check_error(run(*command, "--max-new-tokens", 4), "are too few, 100 is the least")
    assert {p.name: p.read_bytes() for p in drafter.iterdir()} == before
    found = run(*command, "--max-new-tokens", 32, "--plot", tmp_path / "plots" / "r.png")
    assert found[0] == 0, found[2]
    assert "others" in found[1] and "temperatures stored in" in found[1]
    assert (tmp_path / "plots" / "r.png").read_bytes()[:4] == b"\x89PNG"
    stored = read_metadata(drafter)
    calibration = stored.pop("calibration")
    assert {"format": 1, **stored} == json.loads(before["outrider.json"]), "nothing else changed"
    assert sorted(p.name for p in drafter.iterdir()) == sorted(before)
    assert len(calibration["temperatures"]) == 7 and calibration["fitted_on"] == ["mine"]
    assert calibration["fit_rounds"] >= 100 <= calibration["measured_rounds"]
    assert calibration["sampling"]["temperature"] == 0 and calibration["versions"]["outrider"]
    for side in ("before", "after"):
        assert all(len(calibration[side][name]) == 7 for name in ("ece", "ece_noise", "brier", "roc_auc"))
    assert calibration["after"]["ece"][0] < calibration["before"]["ece"][0], "a random head is wrong, and fixable"
    assert run(*command, "--max-new-tokens", 32)[0] == 0
    again = read_metadata(drafter)["calibration"]
    assert again == calibration, "fitted on raw confidences, whatever is stored already"
    served = run("generate", "hi", "--target", toy / "target", "--drafter", drafter, "--max-new-tokens", 5)
    assert served[0] == 0, served[2]


def test_fit_tasks_and_tasks_are_kept_apart(run: Run, toy: Path, tmp_path: Path) -> None:
    drafter = trained(toy, tmp_path / "d")
    fit, tasks = tasks_file(tmp_path / "fit.jsonl", 4), tasks_file(tmp_path / "held.jsonl", 5)
    command = ("calibrate", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks, "--fit-tasks", fit)
    assert run(*command, "--max-new-tokens", 50, "--temperature", 1)[0] == 0
    assert "calibration" not in read_metadata(drafter), "greedy requests have a fit of their own"
    found = read_metadata(drafter)["calibration_sampled"]
    assert (found["fitted_on"], found["measured_on"]) == (["fit"], ["held"])
    assert found["measured_rounds"] > found["fit_rounds"] and found["sampling"]["temperature"] == 1


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.evaluation.evaluate.decode_turns", lambda *_, **__: pytest.fail("decoded"))
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "word " * 400)))
    command = ("eval", "--target", toy / "target", "--drafter", "ngram", "--tasks", prompts, "--out", tmp_path / "out")
    status, _, errors = run(*command, "--draft-length", 2)
    assert status == 2 and "mine, prompt 3 (" in errors and "shorten the prompt" in errors


def test_a_checkpoint_serves_its_temperatures() -> None:
    drafter = DSpark(toy_config())
    temperatures = [1.0, 2.0, 0.5, 3.0]
    checkpoint = Checkpoint(
        DrafterWeights(drafter), {"calibration": {"temperatures": temperatures, "offsets": [0.0] * 4}}
    )
    assert checkpoint.serve(toy_target()).heads.scaling == ConfidenceScaling(temperatures, [0.0] * 4)
    assert checkpoint.weights.serve(toy_target()).heads.scaling == ConfidenceScaling()
    nan = {"temperatures": [float("nan")] * 4, "offsets": [0.0] * 4}
    other = {"temperatures": [3.0] * 4, "offsets": [1.0] * 4, "sampling": {"temperature": 0.8}}
    both = Checkpoint(checkpoint.weights, {**checkpoint.metadata, "calibration_sampled": other}).serve(toy_target())
    sampled = ConfidenceScaling([3.0] * 4, [1.0] * 4)
    assert both.heads.scaling == ConfidenceScaling(temperatures, [0.0] * 4)
    assert both.heads.sampled == SampledScaling(0.8, sampled)
    alone = Checkpoint(checkpoint.weights, {"calibration_sampled": other}).serve(toy_target()).heads
    assert (alone.scaling, alone.sampled) == (sampled, None), "what there is serves all"
    for wrong in ({"sampling": {"temperature": 0.0}}, {"sampling": {}}, {"offsets": [1.0]}):
        metadata = {**checkpoint.metadata, "calibration_sampled": {**other, **wrong}}
        with pytest.raises(ValueError, match="calibrat"):
            Checkpoint(checkpoint.weights, metadata).serve(toy_target())
    for broken in ({}, {"temperatures": ["hot"]}, {"temperatures": 3}, {"temperatures": temperatures}, nan, None):
        with pytest.raises(ValueError, match="calibrat"):
            Checkpoint(DrafterWeights(drafter), {"calibration": broken}).serve(toy_target())
    with pytest.raises(ValueError, match="must be 4 numbers above 0"):
        Checkpoint(DrafterWeights(drafter), {"calibration": {"temperatures": [1.0], "offsets": [0.0]}}).serve(
            toy_target()
        )


@pytest.mark.parametrize("metadata, found", [({"step": 3}, "format is None"), ({"format": 2}, "format is 2")])
def test_metadata_of_another_format_is_refused(tmp_path: Path, metadata: dict[str, object], found: str) -> None:
    (tmp_path / "outrider.json").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=rf"outrider\.json: {found}.*this version reads format 1.*delete the file"):
        read_metadata(tmp_path)
    with pytest.raises(ValueError, match="this version reads"):
        add_metadata(tmp_path, recommended={})


def test_metadata_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    add_metadata(tmp_path, step=3)
    add_metadata(tmp_path, recommended={"x": 1})
    assert read_metadata(tmp_path) == {"step": 3, "recommended": {"x": 1}}
    with pytest.raises(TypeError):
        add_metadata(tmp_path, step=object())
    assert read_metadata(tmp_path)["step"] == 3 and [p.name for p in tmp_path.iterdir()] == ["outrider.json"]


@torch.inference_mode()
def test_bfloat16_weights_are_half_the_size_and_served_in_float32(tmp_path: Path) -> None:
    drafter = DSpark(toy_config(draft_vocab_size=40))
    randomise(drafter)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3000.0, 7.0]))
    ids = torch.arange(50, 90)
    for dtype in (torch.float32, torch.bfloat16):
        save_drafter(Checkpoint(DrafterWeights(drafter, ids)), tmp_path / str(dtype), dtype)
    small, large = tmp_path / "torch.bfloat16", tmp_path / "torch.float32"
    stored = load_file(small / "model.safetensors")
    assert stored.pop("d2t").dtype == torch.int64 and {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((small / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((large / "config.json").read_text())["dtype"] == "float32"
    half, full = load_checkpoint(small), load_checkpoint(large)
    assert {p.dtype for p in half.weights.module.parameters()} == {torch.float32}
    for name, tensor in full.weights.module.state_dict().items():
        torch.testing.assert_close(half.weights.module.state_dict()[name], tensor, rtol=2**-8, atol=0)
    served = half.serve(toy_target())
    assert (
        served.module.fc(torch.zeros(1, 96)).dtype == torch.float32 and served.module.norm.weight.dtype == torch.float32
    )
    save_drafter(half, tmp_path / "again", torch.bfloat16)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()


def test_package_writes_a_card_of_what_was_measured(run: Run, toy: Path, tmp_path: Path) -> None:
    drafter, out = trained(toy, tmp_path / "d"), tmp_path / "models" / "toy-dspark"
    command = ("eval", "--target", toy / "target", "--tasks", tasks_file(tmp_path / "chat.jsonl"), "--drafter", drafter)
    limits = ("--max-new-tokens", 8, "--confidence-threshold", 0.25)
    assert run(*command, *limits, "--out", tmp_path / "e1")[0] == 0
    assert run(*command, "--max-new-tokens", 8, "--temperature", 1, "--out", tmp_path / "e2")[0] == 0
    files = [tmp_path / name / "results.json" for name in ("e1", "e2")]
    found = run(
        "package", drafter, "--out", out, "--results", files[0], "--results", files[1], "--source", "poems of one word",
        "--license", "apache-2.0", "--confidence-threshold", 0.25,
    )  # fmt: skip
    assert found[0] == 0, found[2]
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors", "outrider.json"]
    assert read_metadata(out)["recommended"] == {"confidence_threshold": 0.25}
    assert (out / "model.safetensors").stat().st_size < 0.6 * (drafter / "model.safetensors").stat().st_size
    card = (out / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["license"] == "apache-2.0" and fields["pipeline_tag"] == "text-generation"
    assert "dspark" in fields["tags"] and "base_model" not in fields, "a local directory is no model of the hub"
    results = [Results.load(path) for path in files]
    first = results[0].tasks[0]
    row = next(line for line in body.splitlines() if line.startswith("| chat | 0.0 | while c >= 0.25 |"))
    assert f"| {first.accepted_length:.2f} |" in row and f"{first.speedup:.2f}x" in row and row.endswith("| yes |")
    assert any(line.startswith("| chat | 1.0 | whole block |") and "sampled" in line for line in body.splitlines())
    for fact in ("1,234 conversations", "56,789 response tokens", "* poems of one word", "20 steps of 20", "2.35"):
        assert fact in body, fact
    assert "--tasks chat.jsonl --max-new-tokens 8 --confidence-threshold 0.25 --temperature 0.0" in body
    warned = next((line for line in body.splitlines() if "Slower than plain decoding" in line), "")
    for temperature, result in ((0.0, results[0]), (1.0, results[1])):
        assert (f"chat (temperature {temperature:g}, " in warned) == (result.tasks[0].speedup < 1)
    assert "licence applies" in body and "## Confidences" not in body
    assert str(tmp_path) not in card and str(toy) not in card, "no paths of this machine"
    generated = run("generate", "hi", "--target", toy / "target", "--max-new-tokens", 4)
    assert generated[0] == 0 and "drafter models/toy-dspark" in generated[2]
    assert run("package", out, "--out", out)[0] == 0 and "chat" not in (out / "README.md").read_text()
    shutil.copytree(toy / "target", tmp_path / "published")
    renamed = run(
        "package", drafter, "--out", out, "--target", tmp_path / "published", "--results", files[0],
    )  # fmt: skip
    assert renamed[0] == 0, renamed[2]
    assert read_metadata(out)["target"] == str(tmp_path / "published")
    assert (out / "README.md").read_text().count("--target published") == 3, "generate, eval, and the measurement"


def test_package_refuses_what_it_cannot_vouch_for(run: Run, toy: Path, tmp_path: Path) -> None:
    drafter, out = trained(toy, tmp_path / "d"), tmp_path / "out"
    other = released_medusa(tmp_path / "medusa", 97)
    check_error(run("package", other, "--out", out), "was made elsewhere; package a drafter that outrider train wrote")
    check_error(run("package", toy / "drafter", "--out", out), "outrider.json has no target, recipe, step")
    save_toy_target(tmp_path / "deeper", layers=6)
    deeper = run("package", drafter, "--out", out, "--target", tmp_path / "deeper")
    check_error(deeper, "this drafter was made for another target: num_target_layers is")
    check_error(
        run("package", drafter, "--out", out, "--dtype", "int8"), "--dtype 'int8': choose one of bfloat16, float32"
    )
    check_error(run("package", drafter, "--out", out, "--results", tmp_path / "no"), "no; give results.json")
    (tmp_path / "bad.json").write_text('{"tasks": 3}')
    bad = run("package", drafter, "--out", out, "--results", tmp_path / "bad.json")
    check_error(bad, "is not a results.json")
    unsure = run("package", drafter, "--out", out, "--confidence-threshold", 2)
    check_error(unsure, "'--confidence-threshold': Input should be less than or equal to 1")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    check_error(run("package", drafter, "--out", tmp_path / "photos"), "holds something other than a drafter")
    assert (tmp_path / "photos" / "cat.jpg").is_file() and not out.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter_step": 19}, "their drafter_step is 19, this one has 20"),
        ({"target": "someone/else"}, "their target is someone/else"),
        ({"gamma": 9}, "their gamma is 9, this one has 4"),
    ],
)
def test_results_of_another_drafter_are_refused(settings: dict[str, object], message: str) -> None:
    checkpoint = Checkpoint(DrafterWeights(DSpark(toy_config())), {**TRAINED, "target": EMBEDDED_ID})
    right = {"target": "SmolLM2-135M-Instruct", "drafter_step": 20, "gamma": 4, "policy": "FixedPolicy(length=None)"}
    right |= {"temperature": 0.0, "sampling": {}}

    def card(settings: dict[str, object]) -> str:
        info = DrafterInfo(label="d", algorithm="dspark", gamma=4)
        results = Results(tasks=[], settings=settings, versions={}, machine={}, drafter=info)
        return model_card(checkpoint, name="d", dtype=torch.bfloat16, results=[results])

    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card(right)
    with pytest.raises(ValueError, match=message):
        card({**right, **settings})


@pytest.mark.parametrize(
    ("history", "sources"),
    [
        ([], []),
        ([{"step": 3}], []),
        ([{"step": 3, "target": "a/base", "initialize_from_target": True}], ["a/base"]),
        (
            [{"initialize_from_target": True}, {}, {"target": "a/base", "initialize_from_target": True}],
            ["x/y", "a/base"],
        ),
    ],
)
def test_the_licence_of_what_training_began_with(history: list[dict[str, Any]], sources: list[str]) -> None:
    """It went on from a checkpoint: the target's layers were copied long ago, if ever."""
    recipe = {**TRAINED["recipe"], "initialize_from_target": False}
    metadata = {**TRAINED, "target": "x/y", "recipe": recipe, "history": history}
    card = model_card(
        Checkpoint(DrafterWeights(DSpark(toy_config())), metadata), name="d", dtype=torch.float32, license="mit"
    )
    licence = card[card.index("## Licence") :]
    assert "Weights: mit." in licence and ("earlier drafter, whose licence applies" in licence) == bool(history)
    derived = f"are derived from {' and '.join(sources)}, whose licence" in licence
    assert derived == bool(sources) == ("derived" in licence)
    assert ("not recorded" in card) == ({} in history)


def test_the_card_shows_the_calibration() -> None:
    quality = {"ece": [0.2, 0.1], "ece_noise": [0.01, 0.02], "brier": [0.25, 0.125], "roc_auc": [0.75, None]}
    calibration = {
        "temperatures": [1.5, 0.75], "offsets": [0.0, 0.0], "estimator": None,
        "fitted_on": ["a"], "measured_on": ["b"], "fit_rounds": 1000,
        "measured_rounds": 2000, "before": quality, "after": {**quality, "ece": [0.03, 0.04]},
        "sampling": {"temperature": 0.7}, "max_new_tokens": 9, "versions": {}, "machine": {},
    }  # fmt: skip
    metadata = {**TRAINED, "target": "x/y", "calibration": calibration}
    card = model_card(Checkpoint(DrafterWeights(DSpark(toy_config())), metadata), name="d", dtype=torch.float32)
    assert "| 1 | 1.50 | 0.200 -> 0.030 | 0.010 | 0.250 -> 0.250 | 0.750 |" in card
    assert "| 2 | 0.75 | 0.100 -> 0.040 | 0.020 | 0.125 -> 0.125 | - |" in card
    assert "1,000 rounds of a; measured on 2,000 other rounds of b" in card and "temperature 0.7" in card
    assert "offset" not in card and "no confidence head" not in card
    more = {"offsets": [0.25, -1.5], "estimator": {"weights": [0.8, -0.4], "biases": [0.1, -0.2]}}
    metadata["calibration"] = calibration | more
    card = model_card(Checkpoint(DrafterWeights(DSpark(toy_config())), metadata), name="d", dtype=torch.float32)
    assert "| k | temperature | offset | ECE |" in card and "sigmoid(logit(c) / temperature + offset)" in card
    assert "| 1 | 1.50 | +0.25 | 0.200 -> 0.030 |" in card and "| 2 | 0.75 | -1.50 | 0.100 -> 0.040 |" in card
    assert "sigmoid(0.80 logit(max p_k) -0.40 entropy(p_k) + bias_k), biases +0.10, -0.20." in card
    metadata["calibration"] = calibration
    del calibration["before"]
    with pytest.raises(ValueError, match=r"calibration\.before: Field required; run outrider calibrate again"):
        model_card(Checkpoint(DrafterWeights(DSpark(toy_config())), metadata), name="d", dtype=torch.float32)
    assert "## Measured" not in card and "license" not in card.split("---")[1]


@pytest.mark.parametrize(
    ("step", "anchors_per_step", "taken"), [(3000, None, True), (4680, None, False), (3000, 64, False)]
)
def test_a_card_says_how_many_conversations_an_unfinished_pass_took(
    step: int, anchors_per_step: int | None, taken: bool
) -> None:
    optimizer = {"sequences_per_step": 4, "anchors_per_step": anchors_per_step}
    metadata = {"recipe": {"optimizer": optimizer}, "step": step, "samples": 18_722}
    assert _taken(metadata) == (" Its 3,000 steps took 12,000 of them." if taken else "")
