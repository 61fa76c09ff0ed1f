"""Padded batches and compiled draft layers: padding changes no loss and no gradient, shapes are few, layers are one
graph each and are compiled for the first batches alone; without a compiler training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import outrider.drafters.flex as flex_module
import outrider.drafters.layers as layers
import outrider.training.parallel as parallel
from outrider.drafters.flex import Compilation, flex_block_attention
from outrider.drafters.layers import split_attention
from outrider.target.linear import padded_size
from outrider.training.batches import BlockBatch, build_batch, idle_batch
from outrider.training.objective import BlockObjective
from outrider.training.parallel import ParallelStep, compiles, join
from outrider.training.recipe import Precision
from outrider.training.trainer import Trainer
from outrider.training.watch import held_out_batches, held_out_metrics
from tests.toys.targets import toy_target
from tests.toys.training import SECTIONS, fresh_trainer

KINDS = {"num_hidden_layers": 3, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
MORE = {
    "dflash_input": {"num_aux_layers": 2, "block_size": 4},
    "domino": {"num_aux_layers": 2, "block_size": 4},
    "jetspec": {"num_aux_layers": 2, "block_size": 4},
    "lilicorr": {"num_aux_layers": 2, "block_size": 4},
}


def gradients(trainer: Trainer, batch: BlockBatch) -> tuple[float, list[Tensor], list[Tensor]]:
    """Loss, figures per supervised position, and the gradients of all parameters."""
    run = trainer.run
    run.drafter.zero_grad()
    output = run.objective(run.drafter, batch, torch.tensor(50.0), progress=0.5)
    output.loss.backward()
    return output.loss.item(), [*output[1:]], [p.grad for p in run.drafter.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", [*SECTIONS, *MORE])
def test_padding_changes_no_loss_no_figure_and_no_gradient(method: str, tmp_path: Path) -> None:
    trainer = fresh_trainer(method, tmp_path, toy_target("qwen3"), drafter=MORE.get(method, {}))
    run = trainer.run
    gamma, chosen = run.drafter.config.gamma, [(0, [4, 9]), (1, [0, 5, 6]), (1, [8])]
    chosen = [(i, [max(a, run.held_out[i].spans[0][0] - 1) for a in anchors]) for i, anchors in chosen]
    features = [trainer.held_out[i] for i, _ in chosen]
    plain, padded = (build_batch(chosen, run.held_out, features, gamma, padded=wide) for wide in (False, True))
    assert (plain.blocks, len(plain.previous_NK)) == (6, 6)
    assert (padded.blocks, len(padded.previous_NK), len(padded.aux_SLD)) == (6, 16, 32)
    loss, figures, grads = gradients(trainer, plain)
    loss_padded, figures_padded, grads_padded = gradients(trainer, padded)
    assert loss_padded == pytest.approx(loss, abs=1e-6) and len(grads) == len(grads_padded) > 0
    for x, y in zip(figures + grads, figures_padded + grads_padded, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
    metrics = [
        held_out_metrics(
            run.drafter,
            run.objective,
            held_out_batches(run.held_out, trainer.held_out, gamma, 24, torch.device("cpu"), padded=wide),
        )
        for wide in (False, True)
    ]
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-6)


def test_sizes_are_few_and_little_larger() -> None:
    for least in (16, 128):
        sizes = {padded_size(count, least) for count in range(1, 16 * least * 2**3 + 1)}
        assert len(sizes) == 8 + 8 * 4 and all(size % least == 0 for size in sizes)
        for count in (1, 127, 128, 129, 1000, 1025, 5000, 2**14):
            assert count <= padded_size(count, least) <= max(count + least - 1, 1.125 * count)
    assert [padded_size(count, 128) for count in (128, 129, 2048, 2049)] == [128, 256, 2048, 2304]


@pytest.mark.parametrize(("precision", "padded"), [("float32", False), ("bfloat16", True)])
def test_batches_are_padded_where_each_shape_has_kernels_of_its_own(
    precision: Precision, padded: bool, tmp_path: Path
) -> None:
    trainer = fresh_trainer("dspark", tmp_path, toy_target("qwen3"))
    run, recipe = trainer.run, trainer.recipe
    objective = BlockObjective(run.target, run.draft_ids_Vd, recipe.objective, precision)
    assert ParallelStep(run.drafter, objective, recipe, ranks=trainer.ranks).padded is padded


def test_a_rank_without_work_has_padded_batches_too(tmp_path: Path) -> None:
    trainer = fresh_trainer("dspark", tmp_path, toy_target("qwen3"))
    batch = idle_batch(trainer.run.drafter, padded=True)
    assert len(batch.previous_NK) == len(batch.aux_SLD) == sum(batch.layout.lengths) == 16
    trainer.parallel.backward(batch, torch.tensor(1.0), last=True, counts=False)
    assert all(p.grad is None or not p.grad.any() for p in trainer.run.drafter.parameters())


def ends(trainer: Trainer, steps: int | None = None) -> list[Tensor]:
    """The weights of the padded run after so many steps."""
    trainer.parallel.padded = True
    trainer.train(stop_after=steps)
    return list(trainer.run.drafter.state_dict().values())


def test_a_padded_run_resumes_exactly_and_ends_as_one_without(tmp_path: Path) -> None:
    target, make = toy_target("qwen3"), partial(fresh_trainer, "dspark")
    whole, unpadded = make(tmp_path / "whole", target), make(tmp_path / "unpadded", target)
    expected = ends(whole)
    ends(make(tmp_path / "parts", target), 3)
    found = ends(make(tmp_path / "parts", target))
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    unpadded.train()
    for x, y in zip(expected, unpadded.run.drafter.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().count("train") for name in ("whole", "unpadded")]
    assert lines == [4, 4]


# ----------------------------------------------------------------------------
# Compiled layers. FlexAttention's compiled backward needs a GPU: here the graphs run operation by operation with its
# dense reference, for one drafter after the backward was traced as well (aot_eager).
# ----------------------------------------------------------------------------


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Layers compiled on this CPU, and the backend that they are compiled by."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    compile, chosen = torch.compile, {"backend": "eager"}
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, **(chosen | options)))
    monkeypatch.setattr(layers, "kernel_of", lambda _: flex_block_attention)
    monkeypatch.setattr(layers, "_fused", Compilation("never"))
    monkeypatch.setattr(flex_module, "_TILE", 16)
    torch.compiler.reset()
    counters.clear()
    yield chosen
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("method", "drafter", "graphs", "backend"),
    [
        pytest.param("dspark", {}, 3, "aot_eager", id="dspark"),
        pytest.param("dspark", KINDS, 5, "eager", id="kinds", marks=pytest.mark.slow),
        pytest.param("dflash2", {}, 3, "eager", id="dflash2", marks=pytest.mark.slow),
    ],
)
def test_layers_are_one_graph_each_compiled_in_the_first_epoch_alone(
    method: str,
    drafter: dict[str, Any],
    graphs: int,
    backend: str,
    compiling: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer's and the others' with gradients, and one without, for each pattern of attention among them."""
    compiling["backend"] = backend
    shapes: list[tuple[int, int]] = []
    built = build_batch

    def noted(*args: Any, **options: Any) -> BlockBatch:
        batch = built(*args, **options)
        shapes.append((len(batch.previous_NK), len(batch.aux_SLD)))
        return batch

    monkeypatch.setattr("outrider.training.trainer.build_batch", noted)
    optimizer = {"steps": 9, "sequences_per_step": 4, "anchors_per_sequence": 12, "learning_rate": 1e-2}
    changes: dict[str, Any] = {"optimizer": optimizer, "drafter": drafter, "eval_every": 3}
    trainer = fresh_trainer(method, tmp_path / "compiled", toy_target("qwen3"), compile=True, **changes)
    trainer.train(stop_after=3)
    first = dict(counters["stats"])
    assert first["unique_graphs"] == graphs and not counters["graph_break"]
    again = fresh_trainer(method, tmp_path / "compiled", toy_target("qwen3"), compile=True, **changes)
    again.train()
    assert counters["stats"] == first and not counters["graph_break"], "nothing more was compiled"
    assert len(shapes) == 9 and len(set(shapes)) > 1 and all(n % 16 == s % 16 == 0 for n, s in shapes)
    monkeypatch.setattr(layers, "kernel_of", lambda _: split_attention)
    plain = fresh_trainer(method, tmp_path / "plain", toy_target("qwen3"), **changes)
    plain.train()
    pairs = zip(again.run.drafter.parameters(), plain.run.drafter.parameters(), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-2)
    assert again.last_metrics["loss"] == pytest.approx(plain.last_metrics["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("mode", ["alone", "ddp", "fsdp"])
def test_compiled_layers_are_recomputed_and_sharded(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode != "alone":
        monkeypatch.setenv("OUTRIDER_PROCESS_GROUP", "1")
    losses = []
    for compile, kernel in ((True, flex_block_attention), (None, split_attention)):
        monkeypatch.setattr(layers, "kernel_of", lambda _, kernel=kernel: kernel)
        optimizer = {"steps": 2, "sequences_per_step": 3, "checkpoint_activations": True, "max_anchors_per_forward": 30}
        with join("cpu") as ranks:
            made = fresh_trainer("dspark", tmp_path / str(compile), toy_target("qwen3"), compile=compile,
                                 optimizer=optimizer, **({} if mode == "alone" else {"parallel": mode}))  # fmt: skip
            trainer = Trainer(made.recipe, made.run, ranks) if mode != "alone" else made
            losses.append(trainer.train()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and not counters["graph_break"]


class Broken:
    """torch.compile of what cannot be compiled."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __call__(self, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def fails(*_: Any, **__: Any) -> Any:
            raise self.error("no Triton here\nand much more")

        return fails


def steps_where_compiling_fails(error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A run whose layers are compiled by default, as on a GPU."""
    with monkeypatch.context() as patched:
        patched.setattr(parallel, "compiled", Broken(error))
        patched.setattr(parallel, "compiles", lambda *_: True)
        trainer = fresh_trainer("dspark", tmp_path, toy_target("qwen3"))
        trainer.train()
    return trainer


def test_training_goes_on_uncompiled_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps_where_compiling_fails(RuntimeError, tmp_path / "a", monkeypatch)
    told = [str(w.message) for w in caught if "compile" in str(w.message)]
    assert told == ["draft layers run uncompiled, for torch.compile failed (RuntimeError: no Triton here)"]
    expected = ends(fresh_trainer("dspark", tmp_path / "b", toy_target("qwen3"), compile=False))
    assert all(torch.equal(x, y) for x, y in zip(found.run.drafter.state_dict().values(), expected, strict=True))


def test_full_memory_is_no_reason_to_go_on_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        steps_where_compiling_fails(torch.OutOfMemoryError, tmp_path, monkeypatch)


def test_what_was_asked_for_is_compiled_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "compiled", Broken(RuntimeError))
    with pytest.raises(RuntimeError, match="no Triton here"):
        fresh_trainer("dspark", tmp_path, toy_target("qwen3"), compile=True).train()


@pytest.mark.parametrize(
    ("method", "asked", "device", "expected"),
    [
        ("dspark", None, "cuda", True),
        ("dspark", False, "cuda", False),
        ("dspark", None, "cpu", False),
        ("dspark", True, "cpu", True),
        ("eagle3", None, "cuda", False),
        ("dflash_input", None, "cuda", False),
        ("dspark_v4", None, "cuda", False),
    ],
)
def test_layers_are_compiled_on_a_gpu_by_default(
    method: str, asked: bool | None, device: str, expected: bool, tmp_path: Path
) -> None:
    trainer = fresh_trainer(method, tmp_path, toy_target("qwen3"), drafter=MORE.get(method, {}))
    assert not trainer.parallel.padded
    recipe = trainer.recipe.model_copy(update={"compile": asked})
    assert compiles(trainer.run.drafter, recipe, torch.device(device)) is expected


def test_attention_that_cannot_be_fused_goes_sequence_by_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_fused", Compilation("draft attention goes sequence by sequence"))
    kernel_of, cuda = layers.kernel_of, torch.device("cuda")
    monkeypatch.setattr(layers, "kernel_of", lambda _: kernel_of(cuda))
    monkeypatch.setattr(flex_module, "_flex_kernel", lambda _: Broken(RuntimeError)(print))
    with pytest.warns(UserWarning, match=r"sequence by sequence, for torch.compile failed \(RuntimeError: no Triton"):
        found = ends(fresh_trainer("peagle", tmp_path / "a", toy_target("qwen3")))
    assert layers.kernel_of(cuda) is split_attention
    expected = ends(fresh_trainer("peagle", tmp_path / "b", toy_target("qwen3")))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)
