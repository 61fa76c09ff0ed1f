"""How many tokens drafters are expected to have accepted per round, by kind of text, along the same responses.

    outrider prepare --target TARGET --prompts gsm8k --limit 40 --max-new-tokens 128 --out KINDS/gsm8k-0.jsonl
    python -m benchmarks.acceptance KINDS/*.jsonl --drafter DIR --drafter OTHER --out acceptance.json

A row is a responses file, and all drafters are asked at the same positions of it. The expected accepted length of a
block (bonus included, at temperatures 0 and 1) is training's held-out metric (training/watch.py): it follows from the
target's text and needs no decoding, so many more positions are counted in the same time than `outrider eval` counts.
A standard error is over conversations, each with its mean.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.responses import Sample, stored_samples
from outrider.target.model import Target, load_target
from outrider.training.dataset import existing_responses
from outrider.training.features import compute_features, measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision
from outrider.training.run import computing_dtype
from outrider.training.setup import CALIBRATION_SAMPLES
from outrider.training.watch import held_out_batches, held_out_metrics
from outrider.utils.measure import dtype_name, machine, set_up, today, usable_device, versions

_LENGTHS = {"0": "expected_length_greedy", "1": "expected_length_sampled"}


def lengths(target: Target, directory: Path, samples: list[Sample], anchors_per_sample: int) -> dict[str, list[float]]:
    """The mean expected accepted length of every sample's anchors, by temperature."""
    weights = load_checkpoint(directory, target.device, target.num_layers).weights
    module, ids_Vd = weights.module, weights.draft_ids_Vd
    layers = module.config.target_layer_ids
    scale_L = measure_aux_scale(target, samples[:CALIBRATION_SAMPLES], layers)
    module.rescale_aux(scale_L)
    if ids_Vd is None:
        ids_Vd = torch.arange(target.vocab_size, device=target.device)
    precision: Precision = "bfloat16" if target.dtype == torch.bfloat16 else "float32"
    objective = BlockObjective(target, ids_Vd, module.config.objective(), precision=precision)
    features = list(compute_features(target, samples, layers, aux_scale_L=scale_L))
    batches = held_out_batches(
        samples, features, module.config.gamma, anchors_per_sample=anchors_per_sample, device=target.device
    )
    metrics = [held_out_metrics(module, objective, [batch]) for batch in batches]
    return {temperature: [m[name] for m in metrics] for temperature, name in _LENGTHS.items()}


def main(
    responses: Annotated[list[Path], typer.Argument(help="responses of the target to prompts of one kind each")],
    drafter: Annotated[list[Path], typer.Option(help="drafter directory; repeatable")],
    target: Annotated[str, typer.Option(help="model id or directory")] = "HuggingFaceTB/SmolLM2-135M-Instruct",
    anchors: Annotated[int, typer.Option(help="positions of each conversation")] = 48,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Expected accepted length of drafters along the same responses."""
    set_up(threads)
    device = usable_device("cpu")
    model = load_target(target, computing_dtype("auto", device, Console().print), device)
    texts = {file.stem: stored_samples(file, existing_responses(file, model)[1]) for file in responses}
    table = Table("drafter", "text", "conversations", "T=0", "T=1")
    figures = []
    for directory in drafter:
        for text, samples in texts.items():
            found = lengths(model, directory, samples, anchors)
            row = {"drafter": str(directory), "text": text, "conversations": len(samples)}
            for temperature, values in found.items():
                spread = statistics.stdev(values) / len(values) ** 0.5
                row |= {f"tau_{temperature}": statistics.mean(values), f"standard_error_{temperature}": spread}
            figures.append(row)
            table.add_row(
                directory.name,
                text,
                str(len(samples)),
                *(f"{row[f'tau_{t}']:.2f} +- {row[f'standard_error_{t}']:.2f}" for t in _LENGTHS),
            )
    Console().print(table)
    if out is not None:
        about = {"date": today(), "target": target, "dtype": dtype_name(model.dtype), "anchors": anchors}
        about |= {"machine": machine(), "versions": versions()}
        out.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
