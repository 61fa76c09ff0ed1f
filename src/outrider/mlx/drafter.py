"""DFlash and DSpark over an MLX target: the backbone and the matrices over the vocabulary in MLX, the walk as ever.

    taps -> extend -> draft cache          anchor -> block in MLX -> h_1..h_K -> sample_chain -> Proposal
                                                      U_k = head h_k and W2 l_k in MLX, asked for by the walk

The walk through the block (drafters/chain.py) draws, warps and stops at low confidence; it is the code that every other
drafter uses, so what is proved of it holds here. Its heads' small parts stay in torch. Embedding and LM head are the
target's, or the drafter's own where it brings others (mlx/own.py). Shapes: as in backbone.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx
import torch
from mlx_lm.models.cache import KVCache
from torch import Tensor, nn

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.block import DFLASH, DSPARK
from outrider.drafters.chain import sample_chain
from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.sequential import VanillaMarkov
from outrider.drafters.serving import capped, check_embedding_scale, check_fits
from outrider.formats import Checkpoint
from outrider.mlx.arrays import to_mlx, to_torch
from outrider.mlx.backbone import Backbone
from outrider.mlx.head import OutputRows
from outrider.mlx.own import shared_or_own
from outrider.mlx.target import MLXTarget

_DRAFTED_HERE = (DFLASH.name, DSPARK.name)


class MLXDrafter:
    """A `Drafter` (drafters/base.py) for a target of mlx-lm, in the target's own type.

    Raises:
        ValueError: another kind of drafter, or one made for another target.
    """

    def __init__(self, checkpoint: Checkpoint, target: MLXTarget) -> None:
        module = checkpoint.drafter
        if not isinstance(module, DFlash) or module.algorithm not in _DRAFTED_HERE:
            raise ValueError(
                f"the MLX backend drafts with {' and '.join(_DRAFTED_HERE)} checkpoints and n-grams; this drafter is "
                f"{module.algorithm}: serve it with the local backend."
            )
        config = module.config
        check_fits(config, target)
        serving = checkpoint.serving()
        serving.check(config)
        check_embedding_scale(serving.embedding_scale, target.embed_scale, target.name)
        self.config, self.taps, self.gamma = config, tuple(config.target_layer_ids), config.gamma
        self.embed_scale, self.dtype = target.embed_scale, target.dtype
        self.embed, _ = shared_or_own(serving.embedding_VH, target.embed, target.dtype)
        ids_Vd = None if serving.draft_ids_Vd is None else to_mlx(serving.draft_ids_Vd)
        head, rows_Vd = shared_or_own(serving.head_VdH, target.head, target.dtype, ids_Vd)
        rows = OutputRows(head, target.dtype, rows_Vd)
        self.head = capped(rows, config.output_multiplier, config.final_logit_softcapping)
        self.backbone = _backbone(module, target.dtype)
        sequential = module.markov_head if isinstance(module, DSpark) else None
        if sequential is not None:
            sequential = _with_output_in_mlx(sequential, target.dtype)
        confidence = module.confidence_head if isinstance(module, DSpark) else None
        self.heads = serving.chain_heads(target, sequential, confidence)

    def new_session(self, capacity: int) -> list[KVCache]:
        """An empty draft cache; it grows by itself."""
        return [KVCache() for _ in range(self.config.num_hidden_layers)]

    def extend(
        self, sessions: Sequence[list[KVCache]], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None
    ) -> None:
        """Append the features of newly committed tokens (raw taps, session after session)."""
        assert taps_TLD is not None
        for session, part in zip(sessions, taps_TLD.split([len(part) for part in tokens]), strict=True):
            self.backbone.extend(session, to_mlx(part.flatten(1))[None].astype(self.dtype))
            mx.async_eval([cache.state for cache in session])  # begun, not waited for

    def block_hidden(self, session: list[KVCache], anchor: int) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [gamma, H]. No cache grows."""
        block = mx.array([[anchor] + [self.config.mask_token_id] * (self.config.block_size - 1)])
        return to_torch(self.backbone(session, self.embed(block) * self.embed_scale)[0])

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `floor`."""
        hidden_RKH = torch.stack([self.block_hidden(call.session, call.anchor) for call in calls])
        return sample_chain(self.head, hidden_RKH[:, : longest_draft(calls, self.gamma)], calls, self.heads, floor)


def _backbone(module: DFlash, dtype: mx.Dtype) -> Backbone:
    backbone = Backbone(module.config)
    heads = ("markov_head.", "confidence_head.")
    state = {name: tensor for name, tensor in module.folded_state_dict().items() if not name.startswith(heads)}
    backbone.load_weights([(name, to_mlx(tensor).astype(dtype)) for name, tensor in state.items()])
    mx.eval(backbone.parameters())
    return backbone


def _with_output_in_mlx(head: VanillaMarkov, dtype: mx.Dtype) -> VanillaMarkov:
    """The same head, whose W2 [Vd, r] is MLX's: it is as tall as the vocabulary, and read at every position."""
    head = copy.deepcopy(head)
    output = _MLXLinear(head.markov_w2.weight, dtype)
    head.markov_w2 = output  # type: ignore[assignment]
    return head


class _MLXLinear(nn.Module):
    def __init__(self, weight: Tensor, dtype: mx.Dtype) -> None:
        super().__init__()
        self.dtype, self.weight_MN = dtype, to_mlx(weight).astype(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return to_torch(to_mlx(x).astype(self.dtype) @ self.weight_MN.T)
