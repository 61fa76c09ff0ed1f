"""What a drafter is served with besides its weights: the target's head, the draft vocabulary, calibration.

    draft logits = head[draft_ids] h        c_k = sigmoid(s_k / T_k + b_k)

Shapes: N rows, H draft hidden, V target vocab, Vd draft vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.chain import ChainHeads
from outrider.drafters.estimator import Estimator
from outrider.drafters.sequential import ConfidenceHead, VanillaMarkov
from outrider.target import Target
from outrider.target.linear import PackedLinear
from outrider.target.protocol import DecodingTarget

Head = Callable[[Tensor], Tensor]  # hidden states [N, H] -> draft logits [N, Vd]


@dataclass(frozen=True)
class Serving:
    """What a drafter is served with besides its weights.

    Attributes:
        draft_ids_Vd: the target's id of every draft token; None where the draft vocabulary is the target's.
        temperatures: T_k > 0 per draft position, that calibrate the confidences; None leaves them as they are.
        offsets: b_k per draft position, added to the logits after the temperatures; None: no offset.
        estimator: gives confidences where the drafter has no head for them.
        accuracy: a_k(i) per draft position and rank, which candidate trees are chosen by (drafters/candidates.py);
            None where nobody has measured them.
        head_VdH: the drafter's own LM head over its draft vocabulary, [M, Vd, H] where each of M heads has one; None:
            the target's.
        embedding_VH: its own token embedding; None: the target's.
        embedding_scale: what embeddings are multiplied by, where the checkpoint says so; None: unsaid.
    """

    draft_ids_Vd: Tensor | None = None
    temperatures: Sequence[float] | None = None
    offsets: Sequence[float] | None = None
    estimator: Estimator | None = None
    accuracy: Sequence[Sequence[float]] | None = None
    head_VdH: Tensor | None = None
    embedding_VH: Tensor | None = None
    embedding_scale: float | None = None

    def for_target(self, target: Target) -> Serving:
        """Without what is only a copy of the target's own tensors.

        Raises:
            ValueError: the drafter is made for embeddings multiplied by another factor than this target's.
        """
        check_embedding_scale(self.embedding_scale, target.embed_scale, target.name)
        rows_VdH = target.head_VD if self.draft_ids_Vd is None else target.head_VD[self.draft_ids_Vd.to(target.device)]
        head = None if _equal(self.head_VdH, rows_VdH) else self.head_VdH
        embedding_VH = None if _equal(self.embedding_VH, target.embed_VD) else self.embedding_VH
        return replace(self, head_VdH=head, embedding_VH=embedding_VH)

    def check(self, config: Any) -> None:
        """All of it fits the drafter.

        Raises:
            ValueError: another number of draft positions or draft ids, or a temperature that is not above 0.
        """
        if self.temperatures is not None and (len(self.temperatures) != config.gamma or min(self.temperatures) <= 0):
            raise ValueError(
                f"temperatures {list(self.temperatures)} must be {config.gamma} numbers above 0, one per draft "
                "position; calibrate this drafter again (outrider calibrate)."
            )
        if self.offsets is not None and len(self.offsets) != config.gamma:
            raise ValueError(
                f"offsets {list(self.offsets)} must be {config.gamma} numbers, one per draft position; "
                "calibrate this drafter again (outrider calibrate)."
            )
        if self.accuracy is not None and len(self.accuracy) != config.gamma:
            raise ValueError(
                f"candidate accuracies of {len(self.accuracy)} positions for a drafter of {config.gamma}; measure this "
                "drafter again (outrider calibrate)."
            )
        ids = config.vocab_size if self.draft_ids_Vd is None else len(self.draft_ids_Vd)
        if ids != config.draft_vocab_size:
            raise ValueError(
                f"{ids} draft ids for a draft vocabulary of {config.draft_vocab_size}; "
                "pass the checkpoint's draft_ids_Vd."
            )

    def head(self, target: Target, number: int = 0) -> PackedLinear:
        """The LM head over the draft vocabulary: hidden states [N, H] -> draft logits [N, Vd] in float32.

        Args:
            number: which, where the drafter has several.
        """
        if self.head_VdH is not None:
            own_VdH = self.head_VdH if self.head_VdH.dim() == 2 else self.head_VdH[number]
            return PackedLinear(own_VdH.to(target.device, torch.float32))
        if self.draft_ids_Vd is None and target.dtype == torch.float32:
            return target.head
        ids = self.draft_ids_Vd
        head_VH = target.head_VD if ids is None else target.head_VD[ids.to(target.device)]
        return PackedLinear(head_VH.float())

    def embedding(self, target: Target) -> Tensor:
        """What turns tokens into inputs of the drafter, [V, H]; the target's factor is applied to either."""
        return target.embed_VD if self.embedding_VH is None else self.embedding_VH.to(target.device)

    def chain_heads(
        self,
        target: DecodingTarget,
        sequential: VanillaMarkov | None = None,
        confidence: ConfidenceHead | None = None,
    ) -> ChainHeads:
        """What `sample_chain` reads besides hidden states."""
        ids = None if self.draft_ids_Vd is None else self.draft_ids_Vd.to(target.device)
        return ChainHeads(
            target.vocab_size, sequential, confidence, ids, self.temperatures, self.offsets, self.estimator
        )


WEIGHTS_ALONE = Serving()  # all the rest is the target's own


def capped(head: Head, multiplier: float, softcap: float | None) -> Head:
    """c tanh(m u / c) of the logits u [N, Vd] that `head` gives, m the multiplier, c the cap (None: m u)."""
    if multiplier == 1.0 and softcap is None:
        return head

    def logits(hidden_NH: Tensor) -> Tensor:
        scaled_NVd = head(hidden_NH) * multiplier
        return scaled_NVd if softcap is None else softcap * torch.tanh(scaled_NVd / softcap)

    return logits


def _equal(own: Tensor | None, theirs: Tensor) -> bool:
    """Whether a drafter's tensor is the target's, in all of its M copies."""
    if own is None or own.shape[-2:] != theirs.shape:
        return False
    copies = own if own.dim() > theirs.dim() else own[None]
    return all(torch.equal(one.to(theirs), theirs) for one in copies)


def check_embedding_scale(stated: float | None, factor: float, target: str) -> None:
    """What a checkpoint says embeddings are multiplied by is what its target multiplies them by.

    Raises:
        ValueError: it is not, by more than rounding to bfloat16 explains.
    """
    if stated is not None and not math.isclose(stated, factor, rel_tol=2**-8):
        raise ValueError(
            f"input_embedding_scale is {stated:g}, and {target} multiplies embeddings by {factor:g}: this drafter was "
            "made for another target, or its config.json does not say what it was trained with."
        )


def check_fits(config: Any, target: DecodingTarget, final: bool = False) -> None:
    """A drafter must have been made for this target.

    Args:
        final: whether its taps may include the last hidden state.

    Raises:
        ValueError: hidden size, vocabulary, depth or taps differ (the message says which).
    """
    for name, mine, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise ValueError(
                f"this drafter was made for another target: {name} is {mine}, {target.name} has {theirs}. "
                "Load the target it was trained on, or train a drafter for this one (outrider train)."
            )
    target.check_taps(config.target_layer_ids, final)
