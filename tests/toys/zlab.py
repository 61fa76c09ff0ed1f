"""Our DFlash against z-lab's own PyTorch model (`dflash` 0.1.0), from the checkpoint we write.

The reference loads our directory with its own `from_pretrained`: every tensor consumed, none missing. Then the same
aux hidden states and anchors go through both: served (cache growing round by round), trained (all anchors at once), and
whole decoding against the reference's `dflash_generate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, _crop_to
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash
from outrider.drafters.layers import BlockLayout
from outrider.target.model import Target
from tests.toys.targets import randomise, toy_config, toy_target

TOLERANCE = 1e-4
ROUNDS = (9, 1, 4, 2, 1, 3, 4, 1, 2)  # committed tokens before each block: the prompt, then accepted + 1
WINDOW = {"sliding_window": 7}  # shorter than the context, longer than the block of 4
KINDS = {**WINDOW, "layer_types": ("sliding_attention", "full_attention")}
PATTERNS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": WINDOW,
    "causal": {"is_causal": True},
    "a window in one layer": KINDS,
    "a causal window in one layer": {**KINDS, "is_causal": None},
}


def saved(directory: Path, attention_patterns: str, **changes: float) -> DFlash:
    """A random drafter with non-unit norms and aux layer scales, written to `directory`."""
    drafter = DFlash(toy_config(dspark=False, **PATTERNS[attention_patterns], **changes))
    randomise(drafter)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    save_drafter(Checkpoint(DrafterWeights(drafter)), directory)
    return drafter.eval().requires_grad_(False)


def reference(directory: Path) -> DFlashDraftModel:
    """The reference's own loader on our directory, which must consume every tensor."""
    model, info = DFlashDraftModel.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert not info.get("error_msgs")
    return model.eval().requires_grad_(False)


def reference_block(
    model: DFlashDraftModel, target: Target, aux_TLD: Tensor, anchor: int, start: int, cache: Any = None
) -> Tensor:
    """One draft block as `dflash_generate` runs it; the block is cropped from the cache afterwards."""
    tokens = torch.tensor([[anchor] + [model.mask_token_id] * (model.block_size - 1)])
    hidden = model(
        target_hidden=aux_TLD.flatten(-2)[None],
        noise_embedding=torch.nn.functional.embedding(tokens, target.embed_VD),
        position_ids=torch.arange(start - len(aux_TLD), start + model.block_size)[None],
        past_key_values=cache,
        use_cache=cache is not None,
    )[0, 1:]
    if cache is not None:
        _crop_to(cache, start)
    return hidden


def check_training_forward(drafter: DFlash, model: DFlashDraftModel) -> None:
    """Blocks of two sequences in one training forward are those that the reference drafts one by one."""
    target = toy_target("qwen3")
    lengths, anchors, sequence = [11, 20], [1, 6, 11, 2, 13, 14, 20], [0, 0, 0, 1, 1, 1, 1]
    aux_SLD = 5 * torch.randn(sum(lengths), 3, 32)
    tokens_N = torch.randint(4, 97, (len(anchors),))
    layout = BlockLayout(lengths, torch.tensor(anchors), torch.tensor(sequence))
    embedded = torch.nn.functional.embedding(drafter.block_tokens(tokens_N), target.embed_VD)
    trained = drafter(aux_SLD, embedded, layout)
    for block, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        context = aux_SLD[lengths[0] * number :][:anchor]
        expected = reference_block(model, target, context, int(tokens_N[block]), anchor)
        torch.testing.assert_close(trained[block], expected, atol=TOLERANCE, rtol=0)
