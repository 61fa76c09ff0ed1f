"""Plans of feature stores for toy samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.data.responses import Sample
from outrider.target.model import Target
from outrider.training.feature_store import StoreDtype, StorePlan, plan_store

AUX_LAYERS = (0, 2, 3)
SCALE = torch.tensor([1.0, 2.0, 3.0])


def plan_of(target: Target, samples: Sequence[Sample], dtype: StoreDtype = "int8", shard_tokens: int = 60) -> StorePlan:
    return plan_store(target, samples, AUX_LAYERS, SCALE, dtype, shard_tokens)
