"""Measure one target forward by number of tokens (chain and tree), and plain decoding against transformers.

    python -m benchmarks.forward --out FILE.json

The SPS curve (steps per second at B tokens) is what a verification budget is traded against (DSpark, arXiv 2607.05147).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.draft import Draft
from outrider.target.hub import EMBEDDED_ID
from outrider.target.linear import packing_disabled
from outrider.target.model import Target, load_target
from outrider.utils.measure import machine, quartiles, set_up, versions

TREE_NODES = (7, 16, 60)
TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32)


@dataclass(frozen=True)
class ForwardPoint:
    """Seconds of one forward of `tokens` tokens, as (lower quartile, median, upper quartile)."""

    tokens: int
    packed: tuple[float, float, float]
    linear: tuple[float, float, float]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def forward_curve(target: Target, context: int, repeats: int) -> list[ForwardPoint]:
    """The cost of 1..32 tokens, packed weights and `F.linear` taking turns."""
    with packing_disabled():
        unpacked = Target(target.model, target.tokenizer, target.name)
    variants = (target, unpacked)
    tokens = torch.randint(0, target.vocab_size, (1, context + TOKEN_COUNTS[-1]), generator=torch.Generator())
    caches = [variant.new_cache(context + TOKEN_COUNTS[-1]) for variant in variants]
    for variant, cache in zip(variants, caches, strict=True):
        variant.forward(tokens[:, :context], cache, logits=0)
    seconds: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 2):
        for count in TOKEN_COUNTS:
            for which, (variant, cache) in enumerate(zip(variants, caches, strict=True)):
                cache.rollback(context)
                block = tokens[:, context : context + count]
                spent = _seconds(partial(variant.forward, block, cache, logits=None))
                if repeat >= 2:
                    seconds.setdefault((count, which), []).append(spent)
    return [ForwardPoint(n, quartiles(seconds[n, 0]), quartiles(seconds[n, 1])) for n in TOKEN_COUNTS]


@dataclass(frozen=True)
class TreePoint:
    """Quartiles of the seconds to verify an anchor and `nodes` drafts, as a tree or a chain, and to keep a path."""

    nodes: int
    tree: tuple[float, float, float]
    chain: tuple[float, float, float]
    keep: tuple[float, float, float]


@torch.inference_mode()
def tree_curve(target: Target, context: int, repeats: int) -> list[TreePoint]:
    """The cost of trees in which every node has two children, beside chains of as many drafts, taking turns."""
    most = TREE_NODES[-1]
    tokens = torch.randint(0, target.vocab_size, (1, context + most + 1), generator=torch.Generator())
    tokens = tokens.to(target.device)
    cache = target.new_cache(context + most + 1)
    target.forward(tokens[:, :context], cache, logits=0)
    seconds: dict[tuple[int, str], list[float]] = {}

    def timed(nodes: int, what: str, call: Callable[[], object]) -> None:
        seconds.setdefault((nodes, what), []).append(_seconds(call))

    for _ in range(repeats + 2):
        for nodes in TREE_NODES:
            tree = Draft(list(range(nodes)), [(node - 2) // 2 for node in range(nodes)])
            block = tokens[:, context : context + nodes + 1]
            kept = [0, *(node + 1 for node in tree.path(nodes - 1))]
            forward = partial(target.forward, block, cache, logits=None)
            timed(nodes, "chain", forward)
            cache.rollback(context)
            timed(nodes, "tree", partial(forward, parents=tree.row_parents))
            timed(nodes, "keep", partial(cache.keep_path, context, kept))
            cache.rollback(context)
    measured = {key: quartiles(values[2:]) for key, values in seconds.items()}  # two rounds of warming up
    return [TreePoint(n, measured[n, "tree"], measured[n, "chain"], measured[n, "keep"]) for n in TREE_NODES]


def plain_against_transformers(target: Target, repeats: int, new_tokens: int = 64) -> dict[str, float | bool]:
    """Greedy decoding of the same prompt both ways, in turns: tokens per second and their ratio."""
    assert target.tokenizer is not None
    prompt = target.tokenizer("Speculative decoding is a way to make a language model answer faster. ")["input_ids"]
    ids = torch.tensor([prompt], device=target.device)
    rules = StopRules(new_tokens, stop_ids=())

    def theirs() -> list[int]:
        with torch.inference_mode():
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())

    # min_new_tokens keeps their stop tokens from being chosen, so the texts may part at one; compare up to there.
    ours_tokens, their_tokens = generate(target, prompt, rules=rules).tokens, theirs()
    stop = next((i for i, t in enumerate(ours_tokens) if t in target.eos_ids), new_tokens)
    ours, others = [], []
    for _ in range(repeats):
        ours.append(_seconds(lambda: generate(target, prompt, rules=rules)))
        others.append(_seconds(theirs))
    low, ratio, high = quartiles([b / a for a, b in zip(ours, others, strict=True)])
    return {
        "outrider": new_tokens / statistics.median(ours),
        "transformers": new_tokens / statistics.median(others),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "identical": ours_tokens[:stop] == their_tokens[:stop],
    }


def main(
    target: Annotated[str, typer.Option(help="model id or directory")] = EMBEDDED_ID,
    context: Annotated[int, typer.Option(min=1, help="tokens already in the cache")] = 256,
    repeats: Annotated[int, typer.Option(min=3)] = 15,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print the SPS curve (1..32 tokens, packed and F.linear), trees, and plain decoding against transformers."""
    set_up(threads)
    console = Console()
    loaded = load_target(target)
    curve = forward_curve(loaded, context, repeats)
    view = Table(title=f"one forward after {context} cached tokens: milliseconds, median (quartiles)")
    for heading in ("tokens", "packed", "F.linear", "packed / 1", "SPS"):
        view.add_column(heading, justify="right", no_wrap=True)
    one = curve[0].packed[1]
    for point in curve:
        cells = [f"{q[1] * 1e3:.1f} ({q[0] * 1e3:.1f}-{q[2] * 1e3:.1f})" for q in (point.packed, point.linear)]
        view.add_row(str(point.tokens), *cells, f"{point.packed[1] / one:.2f}x", f"{1 / point.packed[1]:.1f}")
    console.print(view)
    trees = tree_curve(loaded, context, repeats)
    tree_view = Table(title="anchor and drafts as a tree (two children per node) or a chain: milliseconds, median")
    for heading in ("drafts", "tree", "chain", "tree / chain of 7", "keep the path"):
        tree_view.add_column(heading, justify="right", no_wrap=True)
    for branched in trees:
        cells = [f"{q[1] * 1e3:.1f} ({q[0] * 1e3:.1f}-{q[2] * 1e3:.1f})" for q in (branched.tree, branched.chain)]
        ratio = f"{branched.tree[1] / trees[0].chain[1]:.2f}x"
        tree_view.add_row(str(branched.nodes), *cells, ratio, f"{branched.keep[1] * 1e3:.2f}")
    console.print(tree_view)
    plain = plain_against_transformers(loaded, repeats=min(repeats, 5))
    console.print(
        f"plain decoding: outrider {plain['outrider']:.1f} tok/s, "
        f"transformers.generate {plain['transformers']:.1f} tok/s, ratio {plain['ratio']:.2f} "
        f"(quartiles {plain['ratio_low']:.2f}-{plain['ratio_high']:.2f}), same tokens: "
        f"{'yes' if plain['identical'] else 'no'}"
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"curve": [vars(p) for p in curve], "trees": [vars(p) for p in trees], "plain": plain}
        about = {"machine": machine(), "versions": versions(), "context": context, "repeats": repeats}
        out.write_text(json.dumps(figures | about, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
