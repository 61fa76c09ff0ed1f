"""Measure the peak memory of one forward and backward of the loss, against the loss from whole logits.

    python -m benchmarks.objective [--anchors N --vocab V ...] --out DIR       all cases, a table and a plot
    python -m benchmarks.objective --case '{"anchors": 8, ...}'                one case in this process, JSON on stdout

    peak = VmHWM after the call - VmRSS before it          each case in a process of its own

Inputs (hidden states, head, W2, labels) and a small warm-up call come before the baseline; writing 5 to
/proc/self/clear_refs sets the high-water mark back to what is resident then (Linux). On CUDA:
`torch.cuda.max_memory_allocated` above the memory allocated before the call.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import matplotlib.pyplot as plt
import torch
import typer
from pydantic import TypeAdapter
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.straightforward import full_logit_objective
from outrider.drafters.fused_loss import DraftLogits, HeadProducts, TargetView, fused_loss
from outrider.drafters.loss import ObjectiveConfig, confidence_loss
from outrider.utils.measure import machine, set_up, versions

_DTYPES = ("float32", "bfloat16", "float64")
_CHECK_ROWS = 64  # of the head's log-sum-exp, while the inputs are made


@dataclass(frozen=True)
class MemoryCase:
    """One measurement. `dtype` is that of head and products; `gradients` names a file to write them to.

    float64 is there for the gradients: in float32 the total variation's gradient jumps wherever rounding decides
    which of two probabilities is the larger, on either side.
    """

    variant: Literal["ours", "straightforward"]
    anchors: int
    gamma: int
    vocab: int
    hidden: int
    rank: int = 256
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    threads: int = 1
    gradients: str | None = None


@dataclass(frozen=True)
class MemoryResult:
    """Bytes above the baseline, seconds of the measured call, its loss."""

    case: MemoryCase
    peak_bytes: int
    seconds: float
    loss: float


def measure_apart(case: MemoryCase) -> MemoryResult:
    """Run `measure` in a fresh process.

    Raises:
        ValueError: it failed; most likely there was not enough memory.
    """
    command = [sys.executable, "-m", "benchmarks.objective", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        reason = "it was killed, most likely for memory" if done.returncode < 0 else done.stderr[-300:]
        raise ValueError(
            f"measuring {case.variant} at {case.anchors} anchors x {case.gamma} x {case.vocab} failed: {reason}; "
            "lower --anchors, --vocab or --hidden."
        )
    return TypeAdapter(MemoryResult).validate_json(done.stdout)


def relative_errors(ours: Path, theirs: Path) -> dict[str, float]:
    """||a - b|| / ||b|| of each gradient in two files."""
    mine, others = load_file(ours), load_file(theirs)
    return {
        name: ((mine[name].double() - other.double()).norm() / other.double().norm()).item()
        for name, other in others.items()
    }


@dataclass
class _Inputs:
    trained: dict[str, Tensor]
    head_VH: Tensor
    view: TargetView
    weights_N: Tensor


def _inputs(case: MemoryCase, positions: int) -> _Inputs:
    """Hidden states with peaked, similar distributions on both sides, as late in training."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    work = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator(case.device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device, dtype=work)

    head_VH = torch.empty(case.vocab, case.hidden, dtype=dtype, device=case.device)
    for rows in head_VH.split(4096):
        rows.copy_(rand(len(rows), case.hidden) * (4 / case.hidden**0.5))  # logits of standard deviation 4
    target_NH = rand(positions, case.hidden).to(dtype)
    trained = {
        "hidden": (target_NH.to(work) + 0.3 * rand(positions, case.hidden)),
        "latent": rand(positions, case.rank),
        "w2": rand(case.vocab, case.rank) * (0.3 / case.rank**0.5),
        "confidence": rand(positions),
    }
    head = HeadProducts(head_VH, dtype)
    lse, argmax = [], []
    for rows in target_NH.split(_CHECK_ROWS):
        logits = torch.zeros(len(rows), case.vocab, dtype=dtype, device=case.device)
        head.add_logits(logits, rows)
        lse.append(logits.to(work).logsumexp(-1))
        argmax.append(logits.argmax(-1))
    labels = torch.cat(argmax)
    view = TargetView(target_NH, torch.cat(lse), labels, labels)
    weights = ObjectiveConfig().position_weights(case.gamma, labels.device).repeat(positions // case.gamma)
    return _Inputs({k: v.requires_grad_() for k, v in trained.items()}, head_VH, view, weights)


def _loss(case: MemoryCase, given: _Inputs) -> Tensor:
    trained, head, view = given.trained, given.head_VH, given.view
    config = ObjectiveConfig()
    if case.variant == "ours":
        w_N = given.weights_N / given.weights_N.sum()
        logits = DraftLogits(trained["hidden"], trained["latent"], trained["w2"])
        drafts = fused_loss(logits, HeadProducts(head, head.dtype), view, terms=config.terms(w_N))
        return (
            drafts.loss + config.confidence * (w_N * confidence_loss(trained["confidence"], drafts.acceptance_N)).sum()
        )
    latent, w2 = trained["latent"].to(head.dtype), trained["w2"].to(head.dtype)
    return full_logit_objective(  # no name holds the logits here, so they go as soon as they can
        torch.addmm(trained["hidden"].to(head.dtype) @ head.T, latent, w2.T),
        view.hidden_ND @ head.T,
        None,
        view.labels_N,
        trained["confidence"],
        given.weights_N,
        config,
    )


def measure(case: MemoryCase) -> MemoryResult:
    """Measure in this process; see the module docstring."""
    torch.set_num_threads(case.threads)
    small = MemoryCase(**{**asdict(case), "vocab": 64, "anchors": 2})
    _loss(small, _inputs(small, 2 * case.gamma)).backward()
    given = _inputs(case, case.anchors * case.gamma)
    before = _reset_peak(case.device)
    started = time.perf_counter()
    loss = _loss(case, given)
    loss.backward()
    peak = _peak(case.device) - before
    seconds = time.perf_counter() - started
    if case.gradients is not None:
        gradients = {name: leaf.grad for name, leaf in given.trained.items() if leaf.grad is not None}
        save_file(gradients, case.gradients)
    return MemoryResult(case, peak, seconds, loss.item())


def _reset_peak(device: str) -> int:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak(device: str) -> int:
    return _status_bytes("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def plot_objective_memory(results: Sequence[MemoryResult], path: Path) -> None:
    """Peak bytes against anchors x gamma x V, both axes logarithmic, one line per variant."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for variant in sorted({r.case.variant for r in results}):
        of_variant = [r for r in results if r.case.variant == variant]
        sizes = [r.case.anchors * r.case.gamma * r.case.vocab for r in of_variant]
        axes.loglog(sizes, [r.peak_bytes / 2**30 for r in of_variant], marker="o", label=variant)
    case = results[0].case
    axes.set(xlabel="anchors x gamma x V", ylabel="peak above the inputs, GiB")
    axes.set_title(f"One forward and backward of the objective (V {case.vocab:,}, {case.dtype})")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    anchors: Annotated[int, typer.Option(min=4, help="of the largest case; the others are 1/4 and 1/2 of it")] = 512,
    gamma: Annotated[int, typer.Option(min=1)] = 7,
    vocab: Annotated[int, typer.Option(min=64)] = 151_936,
    hidden: Annotated[int, typer.Option(min=1)] = 2560,
    rank: Annotated[int, typer.Option(min=1, help="of the sequential head")] = 256,
    dtype: Annotated[
        str, typer.Option(help="of head and vocabulary-sized products: float32, bfloat16, float64 (exact gradients)")
    ] = "float32",
    device: str = "cpu",
    out: Annotated[Path, typer.Option(help="directory for the figures and the plot")] = Path("runs/benchmarks"),
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    case: Annotated[str | None, typer.Option(help="measure this one case in this process; JSON")] = None,
) -> None:
    """Peak memory of one forward and backward of the objective, each in a process of its own."""
    if case is not None:
        print(json.dumps(asdict(measure(TypeAdapter(MemoryCase).validate_json(case)))))
        return
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of: {', '.join(_DTYPES)}.")
    set_up(threads)
    console = Console()
    threads_used = torch.get_num_threads()
    largest = MemoryCase("ours", anchors, gamma, vocab, hidden, rank, cast("Any", dtype), device, threads=threads_used)
    results: list[MemoryResult] = []
    with tempfile.TemporaryDirectory() as place:
        files = {variant: Path(place) / f"{variant}.safetensors" for variant in ("ours", "straightforward")}
        for count in (anchors // 4, anchors // 2, anchors):
            for variant, path in files.items():
                gradients = str(path) if count == anchors else None
                results.append(
                    measure_apart(replace(largest, variant=cast("Any", variant), anchors=count, gradients=gradients))
                )
                peak = f"{results[-1].peak_bytes / 2**20:,.0f} MiB"
                console.print(f"{count} anchors, {variant}: {peak}, {results[-1].seconds:.1f} s", highlight=False)
        errors = relative_errors(files["ours"], files["straightforward"])
    ratio = results[-2].peak_bytes / max(results[-1].peak_bytes, 1)  # of a tiny case the peak may not rise at all
    differences = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    console.print(
        f"at {anchors} x {gamma} x {vocab} ours takes {ratio:.3f} of the straightforward peak; gradients differ by "
        f"{differences} (relative)",
        highlight=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    measured = [asdict(r) for r in results]
    for result in measured:
        del result["case"]["gradients"]  # a temporary file
    figures = {"results": measured, "ratio": ratio, "gradient_relative_error": errors}
    environment = {"machine": machine(), "versions": versions()}
    (out / "objective_memory.json").write_text(json.dumps({**figures, **environment}, indent=1) + "\n")
    plot_objective_memory(results, out / "objective_memory.png")


if __name__ == "__main__":
    typer.run(main)
