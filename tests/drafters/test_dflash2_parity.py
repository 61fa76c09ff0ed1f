"""Our DFlash 2 against z-lab's own PyTorch model (`dflash` 0.1.0), from the checkpoint we write.

As tests/test_dflash_parity.py for DFlash; beside the blocks, what the selector makes of them: greedy paths, and at
temperature 1 the candidates' distributions along the path that was drawn.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel, _make_cache, dflash_generate
from safetensors.torch import load_file
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DraftCall, DrafterWeights
from outrider.drafters.dflash2 import DFlash2, DFlash2Config
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from tests.toys.oracle import drafted_with, row_of
from tests.toys.targets import randomise, toy_config, toy_target
from tests.toys.zlab import PATTERNS, ROUNDS, TOLERANCE, check_training_forward, reference_block

OWN = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}

SHAPES: dict[str, dict[str, Any]] = {**PATTERNS, "capped": {"output_multiplier": 0.7, "final_logit_softcapping": 2.0}}


def saved(directory: Path, shape: str = "all") -> DFlash2:
    """A random drafter with non-unit norms and aux layer scales, written to `directory`."""
    shared = vars(toy_config(dspark=False, **SHAPES[shape]))
    drafter = DFlash2(DFlash2Config(**{**shared, **OWN}))
    randomise(drafter)
    with torch.no_grad():  # the selector has to change what the parallel logits say
        drafter.candidate_selector.predecessor_codebook.mul_(10)
        drafter.candidate_selector.successor_codebook.mul_(5)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    save_drafter(Checkpoint(DrafterWeights(drafter)), directory)
    return drafter.eval().requires_grad_(False)


def reference(directory: Path) -> DFlash2DraftModel:
    """The reference's own loader on our directory, which must consume every tensor."""
    model, info = DFlash2DraftModel.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert not info.get("error_msgs")
    return model.eval().requires_grad_(False)


def head(target: Target) -> Any:
    return lambda hidden: hidden @ target.head_VD.T


def test_the_reference_loader_consumes_every_tensor_unchanged(tmp_path: Path) -> None:
    drafter, model = saved(tmp_path), reference(tmp_path)
    written, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert set(written) == set(drafter.state_dict())
    for name, tensor in written.items():
        theirs = f"{name}.weight" if name.endswith("codebook") else name
        assert torch.equal(state.pop(theirs), tensor), name
    assert not state
    assert (model.block_size, model.mask_token_id, model.candidate_selector.top_k) == (4, 3, 5)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_served_blocks_and_paths_equal_the_reference_over_rounds(tmp_path: Path, shape: str) -> None:
    target = toy_target("qwen3")
    before, model = saved(tmp_path, shape), reference(tmp_path)
    served = [DrafterWeights(drafter).serve(target) for drafter in (before, load_checkpoint(tmp_path).weights.module)]
    sessions = [drafter.new_session(64) for drafter in served]
    generator = torch.Generator().manual_seed(5)
    aux_TLD = 5 * torch.randn(sum(ROUNDS), 3, 32, generator=generator)
    cache, start, bent = _make_cache(model.config), 0, 0
    for number, count in enumerate(ROUNDS):
        new, start = aux_TLD[start : start + count], start + count
        anchor = int(torch.randint(4, 97, (), generator=generator))
        expected_KH = reference_block(model, target, new, anchor, start, cache)
        anchors, logits_1KV = torch.tensor([anchor]), model.compute_logits(expected_KH[None], head(target))
        path, _, _ = model.candidate_selector.select(expected_KH[None], logits_1KV, anchors, 0.0)
        bent += int((path != logits_1KV.argmax(-1)).sum())
        for drafter, session in zip(served, sessions, strict=True):
            drafter.extend([session], [[0] * count], new)
            torch.testing.assert_close(
                drafter.block_hidden([session], [anchor])[0], expected_KH, atol=TOLERANCE, rtol=0
            )
            greedy, drawn = (
                DraftCall(session, anchor, params, SeenTokens(97), SeededSource(number))
                for params in (SamplingParams(), SamplingParams(temperature=0.7))
            )
            proposals = drafter.propose([greedy, drawn])
            assert proposals[0].tokens == path[0].tolist()
            check_sampled(model, expected_KH, logits_1KV, anchor, proposals[1])
    assert bent > len(ROUNDS), "a selector that changes nothing would prove nothing"


def check_sampled(model: DFlash2DraftModel, hidden_KH: Tensor, logits_1KV: Tensor, anchor: int, proposal: Any) -> None:
    """The reference's q at every position, given the tokens that were drawn before it."""
    assert len(proposal.tokens) == len(hidden_KH)
    previous = anchor
    for k, token in enumerate(proposal.tokens):
        _, candidates, q = model.candidate_selector.select(
            hidden_KH[None, k : k + 1], logits_1KV[:, k : k + 1], torch.tensor([previous]), 0.7
        )
        expected_V = torch.zeros(97).scatter_(0, candidates[0, 0], q[0, 0])
        torch.testing.assert_close(row_of(proposal, k), expected_V, atol=TOLERANCE, rtol=0)
        assert drafted_with(proposal)[k] == pytest.approx(expected_V[token].item(), abs=TOLERANCE)
        previous = token


def test_the_training_forward_equals_the_reference(tmp_path: Path) -> None:
    drafter = saved(tmp_path)
    check_training_forward(drafter, reference(tmp_path))


def test_whole_decoding_equals_the_references(tmp_path: Path) -> None:
    """The same text in the same rounds."""
    model = toy_target("qwen3").model
    model.lm_head.weight.data[8:] = 0  # few likely tokens: drafts of a random drafter are accepted now and then
    target = Target(model, None, "toy")
    saved(tmp_path)
    prompt = torch.randint(4, 97, (1, 10), generator=torch.Generator().manual_seed(2))
    starts: list[int] = []
    draft = reference(tmp_path)
    draft.register_forward_hook(
        lambda module, args, kwargs, output: starts.append(
            int(kwargs["position_ids"][0, -1]) + 1 - kwargs["noise_embedding"].shape[1]
        ),
        with_kwargs=True,
    )
    output = dflash_generate(draft, target.model, prompt, 60, stop_token_ids=None)
    served = load_checkpoint(tmp_path).weights.serve(target)
    # The reference samples its first token from the prefill; ours drafts for it too. Give it the same anchor.
    first = output[0, :11].tolist()
    generation = generate(target, first, served, rules=StopRules(59, stop_ids=()))
    assert first + generation.tokens == output[0].tolist()
    steps = [b - a for a, b in itertools.pairwise(starts)]
    assert len(set(steps)) >= 2, "accepted lengths should vary"
    assert [r.accepted + 1 for r in generation.rounds][: len(steps)] == steps
