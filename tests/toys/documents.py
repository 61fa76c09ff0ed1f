"""Documents of uneven lengths for packed prefills, and how far a packed prefill is from separate ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.target.model import Target

DOCUMENT_AUX_LAYERS = (-1, 0, 2, 3)
LENGTHS = (5, 31, 1, 17)  # beyond the toys' sliding window of 16, and a single token


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def apart(target: Target, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The same through the cached forward, one document at a time."""
    output = target.forward(torch.tensor([tokens]), target.new_cache(len(tokens)), DOCUMENT_AUX_LAYERS, logits=0)
    assert output.aux_BTLD is not None
    return output.aux_BTLD[0], output.hidden_BTD[0]


def largest_difference(target: Target, packed: tuple[Sequence[Tensor], Sequence[Tensor]]) -> float:
    differences = [0.0]
    for document, aux_layers, hidden in zip(documents(), *packed, strict=True):
        expected_aux, expected_hidden = apart(target, document)
        assert aux_layers.shape == expected_aux.shape and hidden.shape == expected_hidden.shape
        differences += [(aux_layers - expected_aux).abs().max().item(), (hidden - expected_hidden).abs().max().item()]
    return max(differences)
