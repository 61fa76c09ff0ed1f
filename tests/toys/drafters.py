"""Calls of a request for a draft, a one-layer language model that drafts, and a random MTP drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.drafters.base import DraftCall
from outrider.drafters.mtp import MTP, MTPConfig
from outrider.sampling import RandomSource, SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from tests.toys.targets import TOY, randomise


def call_for(
    session: Any,
    text: Sequence[int],
    params: SamplingParams | None = None,
    vocab: int = 97,
    source: RandomSource | None = None,
    **more: Any,
) -> DraftCall:
    """Of a request whose committed text, anchor included, is `text`."""
    params = params or SamplingParams()
    seen = SeenTokens(vocab, params, text)
    return DraftCall(
        session, text[-1], params, seen, source or SeededSource(params.seed or 0), position=len(text), **more
    )


# A small model.


def small_model(seed: int = 1, vocab: int = 97, tokenizer: object = None, **changes: object) -> Target:
    """One layer, with norms and weights away from their initial values."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**TOY, "num_hidden_layers": 1, "vocab_size": vocab, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return Target(model, cast(Any, tokenizer), f"small-{vocab}")


def make_mtp(target: Target, modules: int, gamma: int, draft_vocab: int = 97) -> MTP:
    config = MTPConfig.from_target(target, num_modules=modules, gamma=gamma, draft_vocab_size=draft_vocab)
    drafter = MTP(config)
    randomise(drafter)
    drafter.aux_scale_L.fill_(7.0)  # measured by training; states are normed on entry, so nothing may depend on it
    return drafter
