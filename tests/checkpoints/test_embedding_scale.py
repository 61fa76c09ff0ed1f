"""Gemma multiplies embeddings by sqrt(hidden_size): said in what we export, checked in what we read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _draft_value, _raw_input_embeddings
from torch import Tensor

from outrider.backends.export import export_drafter, target_facts
from outrider.backends.registry import engine_of
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.checkpoints.describe import describe
from outrider.checkpoints.dialects.base import TargetFacts
from outrider.drafters.dflash import BlockDrafter
from outrider.target.model import Target
from outrider.training.setup import load_start
from tests.toys.dialects import FACTS, made
from tests.toys.targets import toy_target
from tests.toys.training import going_on

THEIRS = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel}
GEMMA = 32**0.5


def facts_of(target: Target) -> TargetFacts:
    return replace(FACTS, embedding_VH=target.embed_VD, head_VH=target.head_VD, embedding_scale=target.embed_scale)


@pytest.mark.parametrize("method", THEIRS)
@torch.inference_mode()
def test_z_labs_model_draws_the_blocks_that_ours_draws_for_gemma(tmp_path: Path, method: str) -> None:
    """Its input is the raw embedding times what config.json says, as `dflash_generate` makes it."""
    target = toy_target("gemma3_text")
    export_drafter(made(method), engine_of("zlab"), tmp_path / "d", facts_of(target))
    theirs = THEIRS[method].from_pretrained(tmp_path / "d").eval()
    aux_TLD = 3 * torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(1))
    block = torch.tensor([[9, 3, 3, 3]])

    def drawn(scale: float) -> Tensor:
        hidden: Tensor = theirs(
            target_hidden=aux_TLD.flatten(-2)[None],
            noise_embedding=_raw_input_embeddings(target.model, block, scale),
            position_ids=torch.arange(10)[None],
        )
        return hidden[0, 1:]

    ours = load_checkpoint(tmp_path / "d").serve(target)
    assert isinstance(ours, BlockDrafter)
    session = ours.new_session(16)
    ours.extend([session], [[0] * 6], aux_TLD)
    mine = ours.block_hidden([session], [9])[0]
    stated = float(_draft_value(theirs.config, "input_embedding_scale", 1.0))
    torch.testing.assert_close(mine, drawn(stated), atol=1e-4, rtol=0)
    assert (mine - drawn(1.0)).abs().max() > 0.1, "a factor that changes nothing would prove nothing"


@pytest.mark.parametrize("method", THEIRS)
def test_a_factor_that_is_not_the_targets_is_an_error_wherever_the_drafter_meets_a_target(
    tmp_path: Path, method: str
) -> None:
    gemma, other = toy_target("gemma"), toy_target("qwen3")
    export_drafter(made(method), engine_of("zlab"), tmp_path / "d", facts_of(gemma))
    checkpoint = load_checkpoint(tmp_path / "d")
    assert checkpoint.weights.embedding_scale == pytest.approx(GEMMA)
    assert ("embeddings multiplied by", "5.65685") in describe(tmp_path / "d")
    checkpoint.serve(gemma)
    message = (
        r"input_embedding_scale is 5\.65685, and toy.* multiplies embeddings by 1: this drafter was made for another"
    )
    with pytest.raises(ValueError, match=message):
        checkpoint.serve(other)
    recipe = going_on(method, tmp_path / "d", tmp_path / "run")
    load_start(recipe, gemma)
    with pytest.raises(ValueError, match=message):
        load_start(recipe, other)
    with pytest.raises(ValueError, match=message):
        export_drafter(checkpoint, engine_of("zlab"), tmp_path / "e", FACTS)


def test_rounding_is_no_difference_and_silence_leaves_it_to_the_target(tmp_path: Path) -> None:
    gemma = toy_target("gemma")
    replace(made("dflash").weights, embedding_scale=torch.tensor(GEMMA).bfloat16().item()).serve(gemma)
    save_drafter(made("dflash"), tmp_path / "d")
    unsaid = load_checkpoint(tmp_path / "d")
    assert unsaid.weights.embedding_scale is None
    unsaid.serve(gemma)
    save_drafter(Checkpoint(replace(unsaid.weights, embedding_scale=GEMMA)), tmp_path / "e")
    assert load_checkpoint(tmp_path / "e").weights.embedding_scale == GEMMA, "what was said is kept"


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        *[
            (engine, method)
            for engine in ("vllm", "speculators")
            for method in ("dflash", "dflash2", "dspark", "eagle3")
        ],
        ("sglang", "eagle3"),
        ("deepspec", "dspark"),
    ],
)
def test_engines_that_give_drafters_bare_embeddings_are_refused_for_gemma(
    tmp_path: Path, engine: str, method: str
) -> None:
    with pytest.raises(ValueError, match=rf"--to {engine}: input_embedding_scale 5\.65685 has no place there"):
        export_drafter(made(method), engine_of(engine), tmp_path / "d", replace(FACTS, embedding_scale=GEMMA))
    assert not list(tmp_path.iterdir())


def test_engines_that_give_drafters_the_targets_embeddings_are_not(tmp_path: Path) -> None:
    for engine, method in (
        ("sglang", "dflash2"),
        ("sglang", "dspark"),
        ("llama.cpp", "dflash"),
        ("llama.cpp", "dspark"),
        ("vllm", "medusa"),
    ):
        scaled = replace(FACTS, embedding_scale=GEMMA)
        export_drafter(made(method), engine_of(engine), tmp_path / engine / method, scaled)


def test_the_factor_comes_from_the_targets_files(tmp_path: Path) -> None:
    """In the type of the weights, to which the family rounds it."""
    toy_target("gemma3_text").model.bfloat16().save_pretrained(tmp_path / "gemma")
    scale = target_facts(str(tmp_path / "gemma"), torch.float32).embedding_scale
    assert scale == torch.tensor(GEMMA).bfloat16().item() != GEMMA
    toy_target("qwen3").model.save_pretrained(tmp_path / "qwen")
    assert target_facts(str(tmp_path / "qwen"), torch.float32).embedding_scale == 1.0
