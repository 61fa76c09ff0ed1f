"""The model card: README.md of a drafter directory, made from outrider.json and the results of `outrider eval`.

Every statement comes from what was recorded or given; what was not recorded is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION, Checkpoint
from outrider.data.sources import shipped_sets, task_names
from outrider.evaluation.calibration.fit import Calibration
from outrider.evaluation.results import Results, TaskResult, listed
from outrider.sampling import SamplingParams
from outrider.target.hub import canonical_id
from outrider.training.setup import trainings
from outrider.utils.files import invalid_fields
from outrider.utils.measure import dtype_name
from outrider.utils.terminal import markdown_table


def confidences(stored: object, section: str, heading: str) -> str:
    """The part on confidences, from a `section` of outrider.json.

    served:  sigmoid(logit(c_k) / T_k + b_k),    c_k of the drafter's head, or of an estimator where it has none

    Raises:
        ValueError: `stored` is no calibration; names the field.
    """
    try:
        found = Calibration.model_validate(stored)
    except ValidationError as error:
        reason = invalid_fields(error)[0]
        raise ValueError(f"outrider.json: {section}.{reason}; run outrider calibrate again.") from error
    headings, *rows = calibration_rows(found)
    what, how = "A temperature per position", "is applied when the drafter is served."
    if any(found.offsets):
        what = "A temperature and an offset per position"
        how = "are applied when the drafter\nis served: sigmoid(logit(c) / temperature + offset)."
    parts = [
        f"## {heading}",
        f"{what} (Sequential Temperature Scaling) {how}\n"
        "Survival to position k against what was accepted, 20 bins, before -> after:",
        "\n".join(markdown_table(headings, rows)),
        f"Fitted on {found.fit_rounds:,} rounds of {', '.join(found.fitted_on)}; measured on "
        f"{found.measured_rounds:,} other rounds of {', '.join(found.measured_on)};\n"
        f"decoding at temperature {found.sampling['temperature']}. By chance: what as many rounds would show of "
        "perfect confidences.",
    ]
    if found.estimator is not None:
        certainty, entropy = found.estimator["weights"]
        biases = ", ".join(f"{bias:+.2f}" for bias in found.estimator["biases"])
        parts.insert(
            1,
            "The drafter has no confidence head. Its confidences are a logistic regression on its own distribution "
            f"p_k:\nc_k = sigmoid({certainty:.2f} logit(max p_k) {entropy:+.2f} entropy(p_k) + bias_k), "
            f"biases {biases}.",
        )
    return "\n\n".join(parts)


def calibration_rows(found: Calibration) -> list[list[str]]:
    """Headings, then a row per draft position; there is no column of offsets if all are 0."""
    offsets = [f"{offset:+.2f}" for offset in found.offsets] if any(found.offsets) else []
    before, after = found.before, found.after
    headings = ["k", "temperature", *(["offset"] if offsets else []), "ECE", "ECE by chance", "Brier", "ROC-AUC after"]
    rows = []
    for i, (t, area) in enumerate(zip(found.temperatures, after.roc_auc, strict=True)):
        eces, briers = (f"{b[i]:.3f} -> {a[i]:.3f}" for b, a in ((before.ece, after.ece), (before.brier, after.brier)))
        last = "-" if area is None else f"{area:.3f}"
        rows.append([str(i + 1), f"{t:.2f}", *offsets[i : i + 1], eces, f"{after.ece_noise[i]:.3f}", briers, last])
    return [headings, *rows]


# ----------------------------------------------------------------------------
# The section of measured figures: a row per task, the machine, and the commands.
# ----------------------------------------------------------------------------


def measured(many: Sequence[Results]) -> str:
    """The section of measured figures, with temperature, machine, versions and commands."""
    text = ("task", "verified", "same tokens")
    headings = (
        "task",
        "temperature",
        "verified",
        "turns",
        "tokens",
        "tau",
        "plain tok/s",
        "tok/s",
        "speedup",
        text[-1],
    )
    rows = [_row(task, results) for results in many for task in results.tasks]
    machines = dict.fromkeys(f"Measured on {listed(r.machine)}; {listed(r.versions)}." for r in many)
    lines = [
        *("## Measured", "", *markdown_table(headings, rows, text=text), ""),
        "tau: tokens per target pass, the target's own included. Plain and speculative decoding take turns in one\n"
        "run; speedup is over whole requests, prefill included, with quartiles over turns.",
        *("", *machines, "", "```", *map(eval_command, many), "```"),
    ]
    return "\n".join(lines)


def _row(task: TaskResult, results: Results) -> list[str]:
    low, _, high = task.speedup_quartiles
    same = {None: "sampled", True: "yes", False: "no"}[task.greedy_identical]
    same = f"{same}; {results.lossy}" if results.lossy else same
    cells = [task.task, str(results.settings["temperature"]), results.verified, str(task.turns), f"{task.tokens:,}"]
    cells += [f"{task.accepted_length:.2f}", f"{task.baseline_tokens_per_second:.1f}", f"{task.tokens_per_second:.1f}"]
    return [*cells, f"{task.speedup:.2f}x ({low:.2f}-{high:.2f})", same]


def eval_command(results: Results) -> str:
    """The command that measures the same again."""
    settings = results.settings
    options = {"target": settings["target"], "drafter": "DIR", "tasks": ",".join(map(_task_argument, results.tasks))}
    named = ("max_samples", "max_new_tokens", "draft_length", "confidence_threshold", "block_size", "tree")
    options |= {name: settings.get(name) for name in named}
    usual, always = asdict(SamplingParams()), ("temperature", "seed")
    sampling = settings["sampling"].items()
    options |= {name: value for name, value in sampling if name in always or value != usual.get(name)}
    if (together := settings.get("concurrency", 1)) > 1:
        options["concurrency"] = together
    if lossy := settings.get("lossy"):
        options["typical"] = f"{lossy['epsilon']:g},{lossy['delta']:g}"
    options |= {"target": target_name(options), "out": "OUT"}
    return "outrider eval " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items() if v is not None)


def _task_argument(task: TaskResult) -> str:
    shipped = task.task.partition("-for-")[0]  # a set that stood in for another, as data/sources.py calls it
    if shipped in shipped_sets():
        return shipped
    return task.task if task.task in task_names() else f"{task.task}.jsonl"


def target_name(metadata: Mapping[str, Any]) -> str:
    """The target's id, or the name alone of a local directory."""
    target = str(metadata["target"])
    return Path(target).expanduser().name if Path(target).expanduser().is_absolute() else target


_NEEDED = ("target", "recipe", "step", "samples", "response_tokens")
_NOT_NUMBERS = ("optimizer", "target", "initialize_from_target")  # of a training
_RECORDED = (
    "max_new_tokens",
    "max_prompt_tokens",
    "temperature",
    "top_p",
    "top_k",
    "thinking",
    "dtype",
)  # of responses


def model_card(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: torch.dtype,
    results: Sequence[Results] = (),
    sources: Sequence[str] = (),
    license: str | None = None,
) -> str:
    """The text of README.md, with Hugging Face front matter.

    Args:
        sources: one line per source of prompts.
        license: an identifier of the hub (apache-2.0, ...).

    Raises:
        ValueError: outrider.json lacks what training records, or results are those of another drafter.
    """
    metadata = checkpoint.metadata
    missing = [name for name in _NEEDED if name not in metadata]
    if missing:
        raise ValueError(f"outrider.json has no {', '.join(missing)}: package a drafter that outrider train wrote.")
    for one in results:
        _check_same(one, checkpoint)
    parts = [
        _front_matter(metadata, license, checkpoint.algorithm),
        _introduction(checkpoint, name),
        _settings(checkpoint, dtype),
        _data(metadata, sources),
        _training(metadata),
        *([measured(results)] if results else []),
    ]
    for section, heading in ((CALIBRATION, "Confidences"), (SAMPLED_CALIBRATION, "Confidences of sampled requests")):
        if section in metadata:
            parts.append(confidences(metadata[section], section, heading))
    return "\n\n".join([*parts, _limits(checkpoint, results), _licence(checkpoint, license)]) + "\n"


def _check_same(results: Results, checkpoint: Checkpoint) -> None:
    target, step = canonical_id(checkpoint.metadata["target"]), checkpoint.metadata["step"]
    expected = {"target": target, "drafter_step": step, "gamma": checkpoint.config.gamma}
    theirs = {**results.settings, "target": canonical_id(str(results.settings.get("target")))}
    for name, value in expected.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"the results are of another drafter: their {name} is {theirs.get(name)}, this one has {value}. Give "
                "results.json files of outrider eval with this drafter."
            )


def _front_matter(metadata: Mapping[str, Any], license: str | None, algorithm: str) -> str:
    fields: dict[str, Any] = {} if license is None else {"license": license}
    if not Path(metadata["target"]).expanduser().is_dir():  # a model of the hub
        fields["base_model"] = target_name(metadata)
    fields |= {"library_name": "outrider", "pipeline_tag": "text-generation"}
    fields["tags"] = ["speculative-decoding", "draft-model", algorithm]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _introduction(checkpoint: Checkpoint, name: str) -> str:
    """What the model is, and how it is used."""
    target, kind = target_name(checkpoint.metadata), type(checkpoint.weights.module).__name__
    return (
        f"# {name}\n\n"
        f"A {kind} draft model for speculative decoding of **{target}**, trained with\n"
        "Outrider. It proposes blocks of tokens; the target scores a block in one forward and keeps the longest\n"
        "accepted prefix. The output has exactly the target's distribution; at temperature 0 it is the same text\n"
        "up to numerical ties. This model generates nothing by itself.\n\n"
        "## Use\n\n```\n"
        f'outrider generate "Name three rivers." --target {target} --drafter {name} --show-rounds\n'
        f"outrider eval --target {target} --drafter {name} --tasks my_prompts.jsonl --out eval\n```\n\n"
        "A directory inside `models/`, or inside the directory `$OUTRIDER_MODELS` names, is found without `--drafter`."
    )


def _settings(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    config = checkpoint.config
    parameters = sum(p.numel() for p in checkpoint.weights.module.parameters())
    size = f"{parameters * dtype.itemsize / 1e6:.1f} MB as {dtype_name(dtype)}"
    rows = [
        ("parameters", f"{parameters / 1e6:.1f} million, {size}"),
        *([("draft layers", str(config.num_hidden_layers))] if hasattr(config, "num_hidden_layers") else []),
        ("drafts per block (gamma)", str(config.gamma)),
        ("aux layers of the target", ", ".join(map(str, config.target_layer_ids))),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
    ]
    lines = [f"| {name} | {value} |" for name, value in [*rows, *config.describe_heads()]]
    lines += ["", "Embedding and LM head are the target's, not stored here."]
    return "\n".join(["## Model", "", "| | |", "|---|---|", *lines])


def _taken(metadata: Mapping[str, Any]) -> str:
    """How many of the conversations were used, where the steps ended before the first pass over them."""
    optimizer = metadata["recipe"]["optimizer"]
    per_step, steps = optimizer.get("sequences_per_step"), metadata["step"]
    if per_step is None or optimizer.get("anchors_per_step") is not None:  # a step then takes as many as it needs
        return ""
    # What does not fill a pass's last step is left out of it.
    unfinished = steps * per_step <= metadata["samples"] - per_step
    return f" Its {steps:,} steps took {steps * per_step:,} of them." if unfinished else ""


def _data(metadata: Mapping[str, Any], sources: Sequence[str]) -> str:
    last = " in the last training" if metadata.get("history") else ""
    recorded = metadata.get("responses") or metadata["recipe"]["data"]
    lines = [
        *("## Data", ""),
        f"{metadata['samples']:,} conversations with {metadata['response_tokens']:,} response tokens{last}."
        f"{_taken(metadata)}\nThe responses are the target's own, regenerated from the prompts; the loss covers "
        "generated tokens only.",
        *("", *(f"* {source}" for source in sources)),
        *([""] if sources else []),
        f"Recorded with the responses: {listed({name: recorded[name] for name in _RECORDED if name in recorded})}.",
    ]
    return "\n".join(lines)


def _training(metadata: Mapping[str, Any]) -> str:
    recipe = metadata["recipe"]
    lines = ["## Training", "", f"{metadata['step']:,} steps of {recipe['optimizer']['steps']:,}."]
    if metadata.get("history"):
        lines += ["It started from the drafter of earlier trainings:", ""]
        lines += [f"{number}. {_stage(stage)}" for number, stage in enumerate(metadata["history"], start=1)]
        lines += ["", "The last training:"]
    lines += ["", f"* optimizer: {listed(recipe['optimizer'])}", f"* objective: {listed(recipe['objective'])}"]
    if metadata.get("held_out"):
        lengths = {k: f"{v:.2f}" for k, v in metadata["held_out"].items() if k.startswith("expected_length")}
        lines.append(f"* held-out conversations: {listed(lengths)}")
    if metadata.get("versions"):
        lines.append(f"* versions: {listed(metadata['versions'])}")
    return "\n".join(lines)


def _stage(stage: Mapping[str, Any]) -> str:
    numbers = {name: value for name, value in stage.items() if name not in _NOT_NUMBERS}
    rate = stage.get("optimizer", {}).get("learning_rate")
    return listed({**numbers, **({} if rate is None else {"learning rate": rate})}) or "not recorded"


def _limits(checkpoint: Checkpoint, many: Sequence[Results]) -> str:
    config, data = checkpoint.config, checkpoint.metadata["recipe"]["data"]
    lines = [
        "## Limits",
        "",
        "* It fits this target only; the content and the errors of the output are the target's.",
        "* How much it helps depends on the text: the closer to the training prompts, the more is accepted.",
    ]
    if config.draft_vocab_size < config.vocab_size:
        lines.append("* Tokens outside the draft vocabulary are never drafted; the target adds them itself.")
    if {"max_prompt_tokens", "max_new_tokens"} <= set(data):
        longest = data["max_prompt_tokens"] + data["max_new_tokens"]
        lines.append(f"* Trained on contexts of at most {longest} tokens a turn; longer ones are untested.")
    slower = [f"{t.task} (temperature {r.settings['temperature']:g}, {r.verified})"
              for r in many for t in r.tasks if t.speedup < 1]  # fmt: skip
    if slower:
        lines.append(f"* Slower than plain decoding on {', '.join(slower)} when measured.")
    return "\n".join(lines)


def _licence(checkpoint: Checkpoint, license: str | None) -> str:
    """The section on licences: of the weights, and of what their trainings started from."""
    metadata = checkpoint.metadata
    text = f"## Licence\n\nWeights: {license}." if license else "## Licence"
    if metadata.get("history"):
        text += "\n\nTraining started from an earlier drafter, whose licence applies to these weights as well."
    if checkpoint.weights.module.starts_from_target():
        copied = [{**metadata, **stage} for stage in trainings(metadata) if stage.get("initialize_from_target")]
        if sources := dict.fromkeys(map(target_name, copied)):
            text += (
                "\n\nWhere shapes allow it (Llama and Qwen3 targets) the draft layers start as copies of the target's "
                f"last layers, so the weights\nare derived from {' and '.join(sources)}, whose licence applies to them."
            )
    return text
