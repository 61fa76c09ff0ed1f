"""P-EAGLE ready to serve: EAGLE-3's cache of committed pairs, and one pass for the whole draft.

    committed pairs | (f_{c-1}, anchor) (f_mask, mask) .. (f_mask, mask)      written behind them and forgotten

Shapes: R requests, K rows of one request, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.chain import sample_chain
from outrider.drafters.eagle3_serve import Eagle3Drafter, Eagle3Session
from outrider.drafters.method import Serving
from outrider.drafters.peagle.module import PEagle
from outrider.target import Target


class PEagleDrafter(Eagle3Drafter):
    """Serves one drafter for one target. Weights are copied; train the module, then build this again."""

    def __init__(self, module: PEagle, target: Target, serving: Serving) -> None:
        super().__init__(module, target, serving)
        self.mask_token_id = module.config.mask_token_id
        self.masked_H = self.features(module.folded_state_dict()["mask_hidden"].to(target.device)[None])[0]

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """A chain of up to gamma tokens per call, while their confidence is at least `floor`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `floor` is idle as yet.
        """
        sessions: list[Eagle3Session] = [call.session for call in calls]
        R, K = len(calls), longest_draft(calls, self.gamma)
        first_RH = torch.stack([session.waiting_H for session in sessions])
        state_RKH = torch.cat((first_RH[:, None], self.masked_H.expand(R, K - 1, -1)), dim=1)
        tokens = [token for call in calls for token in (call.anchor, *[self.mask_token_id] * (K - 1))]
        causal_RKK = torch.ones(K, K, dtype=torch.bool, device=state_RKH.device).tril().expand(R, -1, -1)
        h_XH = self.advance(sessions, state_RKH.flatten(0, 1), tokens, 0, 0, causal_RKK, spacing=1)
        return sample_chain(self.head, self.normed(h_XH).view(R, K, -1), calls, self.heads, floor)
