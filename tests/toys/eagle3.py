"""Random EAGLE-3 drafters for toy targets, inputs of their training forward, and calls for a draft."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import BlockInputs, DraftCall
from outrider.drafters.cache import DraftSession
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.layers import BlockLayout
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from tests.toys.targets import randomise


def make_drafter(target: Target, gamma: int = 4, draft_vocab: int = 97, seed: int = 0, **flags: bool) -> Eagle3:
    """Random, norms away from one, aux hidden states of very different scales; `flags`: of its config."""
    chosen = {"gamma": gamma, "target_layer_ids": [0, 2, 3], "draft_vocab_size": draft_vocab}
    module = Eagle3(replace(Eagle3Config.from_target(target, **chosen), **flags))
    randomise(module, seed)
    module.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return module


def inputs_for(target: Target, lengths: list[int], anchors: list[int], sequence: list[int], gamma: int) -> BlockInputs:
    """Random aux hidden states and tokens around these anchors; returns what the training room would make of them."""
    generator = torch.Generator().manual_seed(3)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(4, 97, shape, generator=generator)

    aux_SLD = 5 * torch.randn(sum(lengths), 3, 32, generator=generator)
    layout = BlockLayout(lengths, torch.tensor(anchors), torch.tensor(sequence))
    next_tokens_S, previous_NK = tokens(sum(lengths)), tokens(len(anchors), gamma)
    starts = [0, *itertools.accumulate(lengths)]
    for n, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        if anchor:
            previous_NK[n, 0] = next_tokens_S[starts[number] + anchor - 1]

    def embed(ids: Tensor) -> Tensor:
        return F.embedding(ids, target.embed_VD) * target.embed_scale

    tokens_S = torch.cat([F.pad(part[:-1], (1, 0), value=4) for part in next_tokens_S.split(lengths)])
    return BlockInputs(aux_SLD, tokens_S, next_tokens_S, layout=layout, previous_NK=previous_NK, embed=embed)


def call_of(
    session: DraftSession, anchor: int, limit: int | None = None, params: SamplingParams | None = None
) -> DraftCall:
    params = params or SamplingParams()
    return DraftCall(session, anchor, params, SeenTokens(97), SeededSource(params.seed or 0), limit)
