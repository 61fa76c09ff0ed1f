"""Compare features stored in bf16, int8 and fp8 by the held-out metrics of a trained drafter.

python -m benchmarks.features RECIPE --drafter DIR

float16 features -> encode -> decode -> held-out loss and expected accepted length, at the same anchors
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.responses import Sample
from outrider.drafters.base import DraftModule
from outrider.target.model import Target, load_target
from outrider.training.feature_store import StoreDtype, decode, encode
from outrider.training.features import Features, compute_features
from outrider.training.objective import BlockObjective
from outrider.training.recipe import load_recipe
from outrider.training.run import computing_dtype
from outrider.training.setup import prepare
from outrider.training.watch import held_out_batches, held_out_metrics
from outrider.utils.measure import set_up, usable_device

_ANCHORS_PER_SAMPLE = 24


def store_effect(
    target: Target,
    drafter: DraftModule,
    objective: BlockObjective,
    samples: Sequence[Sample],
    dtypes: Sequence[StoreDtype],
    anchors_per_sample: int,
) -> dict[str, dict[str, float]]:
    """{"float16": metrics, dtype: metrics, ...} on fixed anchors of `samples`."""
    aux_layers, scale_L = drafter.config.target_layer_ids, drafter.aux_scale_L
    with torch.no_grad():
        exact = list(compute_features(target, samples, aux_layers, scale_L))
        versions = {"float16": exact} | {d: [decode(encode(target, f, d)) for f in exact] for d in dtypes}

    def metrics(features: Sequence[Features]) -> dict[str, float]:
        batches = held_out_batches(
            samples, features, drafter.config.gamma, anchors_per_sample=anchors_per_sample, device=target.device
        )
        return held_out_metrics(drafter, objective, batches)

    return {name: metrics(features) for name, features in versions.items()}


def main(
    recipe: Annotated[Path, typer.Argument(help="a recipe: target, data and objective")],
    overrides: Annotated[list[str] | None, typer.Argument(help="fields to change, as for train")] = None,
    drafter: Annotated[Path | None, typer.Option(help="a trained drafter; OUT/drafter when left out")] = None,
) -> None:
    """Held-out expected accepted length of a trained drafter with features in each dtype."""
    chosen = load_recipe(recipe, overrides or [])
    set_up(chosen.threads)
    device = usable_device(chosen.device)
    run = prepare(
        chosen, load_target(chosen.target, computing_dtype(chosen.precision, device, Console().print), device)
    )
    checkpoint = load_checkpoint(drafter or Path(chosen.out) / "drafter", run.target.device, run.target.num_layers)
    ids = checkpoint.weights.draft_ids_Vd
    if ids is None:
        ids = torch.arange(run.target.vocab_size, device=run.target.device)
    objective = BlockObjective(run.target, ids, chosen.objective)
    effect = store_effect(
        run.target, checkpoint.weights.module, objective, run.held_out, ("bf16", "int8", "fp8"), _ANCHORS_PER_SAMPLE
    )
    table = Table("features", "loss", "tau, temperature 0", "tau, temperature 1")
    for name, metrics in effect.items():
        values = (metrics[k] for k in ("loss", "expected_length_greedy", "expected_length_sampled"))
        table.add_row(name, *(f"{value:.4f}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
