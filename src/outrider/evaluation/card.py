"""outrider.json + results.json of `outrider eval` -> README.md of a drafter directory, with Hugging Face front matter.

Every statement comes from what was recorded or given; what was not recorded is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from outrider.drafters import DSparkConfig
from outrider.drafters.catalogue import method_of
from outrider.evaluation.card_confidences import confidences
from outrider.evaluation.card_results import listed, measured, target_name
from outrider.evaluation.results import Results
from outrider.formats import Checkpoint
from outrider.target.resolve import canonical_id, dtype_name
from outrider.training.drafter import trainings

_NEEDED = ("target", "recipe", "step", "samples", "response_tokens")
_NOT_NUMBERS = ("optimizer", "target", "initialize_from_target")  # of a training


@dataclass(frozen=True)
class CardFacts:
    """What the files do not say.

    `sources`: one line per source of prompts. `license`: an identifier of the hub (apache-2.0, ...), None to name none.
    """

    name: str
    dtype: torch.dtype
    results: Sequence[Results] = ()
    sources: Sequence[str] = ()
    license: str | None = None


def model_card(checkpoint: Checkpoint, facts: CardFacts) -> str:
    """The text of README.md.

    Raises:
        ValueError: outrider.json lacks what training records, or results are those of another drafter.
    """
    metadata = checkpoint.metadata
    missing = [name for name in _NEEDED if name not in metadata]
    if missing:
        raise ValueError(f"outrider.json has no {', '.join(missing)}: package a drafter that outrider train wrote.")
    for results in facts.results:
        _check_same(results, checkpoint)
    parts = [
        _front_matter(metadata, facts, checkpoint.drafter.algorithm),
        _introduction(checkpoint, facts),
        _use(metadata, facts.name),
        _settings(checkpoint, facts.dtype),
        _data(metadata, facts.sources),
        _training(metadata),
    ]
    if facts.results:
        parts.append(measured(facts.results))
    if "calibration" in metadata:
        parts.append(confidences(metadata["calibration"]))
    parts += [_limits(checkpoint, facts.results), _licence(checkpoint, facts.license)]
    return "\n\n".join(parts) + "\n"


def _check_same(results: Results, checkpoint: Checkpoint) -> None:
    expected = {
        "target": canonical_id(checkpoint.metadata["target"]),
        "drafter_step": checkpoint.metadata["step"],
        "gamma": checkpoint.drafter.config.gamma,
    }
    theirs = {**results.settings, "target": canonical_id(str(results.settings.get("target")))}
    for name, value in expected.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"the results are of another drafter: their {name} is {theirs.get(name)}, this one has {value}. Give "
                "results.json files of outrider eval with this drafter."
            )


def _front_matter(metadata: Mapping[str, Any], facts: CardFacts, algorithm: str) -> str:
    fields: dict[str, Any] = {} if facts.license is None else {"license": facts.license}
    if not Path(metadata["target"]).expanduser().is_dir():  # a model of the hub
        fields["base_model"] = target_name(metadata)
    fields |= {"library_name": "outrider", "pipeline_tag": "text-generation"}
    fields["tags"] = ["speculative-decoding", "draft-model", algorithm]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _introduction(checkpoint: Checkpoint, facts: CardFacts) -> str:
    return (
        f"# {facts.name}\n\n"
        f"A {type(checkpoint.drafter).__name__} draft model for speculative decoding of "
        f"**{target_name(checkpoint.metadata)}**, trained with\n"
        "Outrider. It proposes blocks of tokens, the target checks a block in one pass and keeps what fits its own\n"
        "distribution. The output is distributed exactly as the target's; at temperature 0 it is the same text,\n"
        "numerical ties apart. On its own this model generates nothing."
    )


def _use(metadata: Mapping[str, Any], name: str) -> str:
    target = target_name(metadata)
    return (
        "## Use\n\n```\n"
        f'outrider generate "Name three rivers." --target {target} --drafter {name} --show-rounds\n'
        f"outrider eval --target {target} --drafter {name} --tasks my_prompts.jsonl --out eval\n```\n\n"
        "A directory inside `models/`, or inside the directory `$OUTRIDER_MODELS` names, is found without `--drafter`."
    )


def _settings(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    config = checkpoint.drafter.config
    parameters = sum(p.numel() for p in checkpoint.drafter.parameters())
    size = f"{parameters * dtype.itemsize / 1e6:.1f} MB as {dtype_name(dtype)}"
    rows = [
        ("parameters", f"{parameters / 1e6:.1f} million, {size}"),
        *([("draft layers", str(config.num_hidden_layers))] if hasattr(config, "num_hidden_layers") else []),
        ("drafts per block (gamma)", str(config.gamma)),
        ("tapped target layers", ", ".join(map(str, config.target_layer_ids))),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
    ]
    if isinstance(config, DSparkConfig):
        head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
        rows += [("sequential head", head), ("confidence head", "yes" if config.enable_confidence_head else "no")]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(
        ["## Model", "", "| | |", "|---|---|", *lines, "", "Embedding and LM head are the target's, not stored here."]
    )


def _data(metadata: Mapping[str, Any], sources: Sequence[str]) -> str:
    lines = [
        "## Data",
        "",
        f"{metadata['samples']:,} conversations with {metadata['response_tokens']:,} response tokens. The responses "
        "are the target's own,\nregenerated from the prompts; the loss covers generated tokens only.",
        "",
        *(f"* {source}" for source in sources),
        *([""] if sources else []),
        f"Settings: {listed(metadata['recipe']['data'])}.",
    ]
    return "\n".join(lines)


def _training(metadata: Mapping[str, Any]) -> str:
    recipe = metadata["recipe"]
    lines = ["## Training", "", f"{metadata['step']:,} steps of {recipe['optimizer']['steps']:,}."]
    if metadata.get("history"):
        lines += ["It went on from a drafter that was trained before:", ""]
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
    config, data = checkpoint.drafter.config, checkpoint.metadata["recipe"]["data"]
    lines = [
        "## Limits",
        "",
        "* It fits this one target. What the output says, and what is wrong with it, is the target's.",
    ]
    lines.append("* How much it helps depends on the text: the closer to the training prompts, the more is accepted.")
    if config.draft_vocab_size < config.vocab_size:
        lines.append("* Tokens outside the draft vocabulary are never drafted; the target adds them itself.")
    if {"max_prompt_tokens", "max_new_tokens"} <= set(data):
        longest = data["max_prompt_tokens"] + data["max_new_tokens"]
        lines.append(f"* Trained on contexts of at most {longest} tokens a turn; longer ones are untested.")
    slower = [f"{t.task} (temperature {r.settings['temperature']})" for r in many for t in r.tasks if t.speedup < 1]
    if slower:
        lines.append(f"* Slower than plain decoding on {', '.join(slower)} where it was measured.")
    return "\n".join(lines)


def _licence(checkpoint: Checkpoint, license: str | None) -> str:
    """Weights are derived from whatever any training behind them began with."""
    metadata = checkpoint.metadata
    text = f"## Licence\n\nWeights: {license}." if license else "## Licence"
    if metadata.get("history"):
        text += "\n\nTraining went on from an earlier drafter, whose licence applies to these weights too."
    if method_of(checkpoint.drafter.algorithm).initialize is not None:
        copied = [{**metadata, **stage} for stage in trainings(metadata) if stage.get("initialize_from_target")]
        if sources := dict.fromkeys(map(target_name, copied)):
            text += (
                "\n\nWhere shapes allow it (Llama and Qwen3 targets) the draft layers start as copies of the target's "
                f"last layers, so the weights\nare derived from {' and '.join(sources)}, whose licence applies to them."
            )
    return text
