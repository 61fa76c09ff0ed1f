"""z-lab's DFlash 2: `architectures: ["DFlash2DraftModel"]`, z-lab's DFlash with four more fields in `dflash_config`.

    conv_kernel_size, conv_group_size, selector_rank, selector_top_k

Tensor names are our own. With a reduced draft vocabulary the successor codebook has its rows only. Nobody but us reads
that: no reader of DFlash 2 has a draft vocabulary, and formats/engines.py refuses to export one.

Source: the package `dflash` 0.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.drafters.dflash2 import DFLASH2, DFlash2Config
from outrider.drafters.dflash2.method import OWN_FIELDS
from outrider.formats.dialect import Parts, Source, TargetFacts, Written
from outrider.formats.dialects.zlab import ZLab
from outrider.formats.fields import Fields


def read_own(fields: Fields) -> dict[str, Any]:
    """What DFlash 2 has beside DFlash's fields, as the arguments of its config."""
    return {name: fields.integer(name) for name in OWN_FIELDS}


def write_own(config: DFlash2Config) -> dict[str, int]:
    """The same fields, all of them."""
    return {name: getattr(config, name) for name in OWN_FIELDS}


class ZLab2:
    """What DFlash 2 adds to z-lab's DFlash."""

    name = "z-lab"
    spelling = "DFlash2DraftModel"
    methods: tuple[str, ...] = (DFLASH2.name,)

    def __init__(self) -> None:
        self._zlab = ZLab()

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """The speculators library gives its own envelope the same architecture."""
        return self.spelling in (raw.get("architectures") or []) and "speculators_model_type" not in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> Parts:
        own = read_own(Fields(raw, source.where, self.name).section("dflash_config"))
        parts = self._zlab.read(raw, tensors, source)
        return replace(parts, method=DFLASH2, config=DFlash2Config(**vars(parts.config), **own))

    def write(self, parts: Parts, target: TargetFacts | None) -> Written:
        written = self._zlab.write(parts, target)
        nested = {**written.config["dflash_config"], **write_own(parts.config)}
        return replace(written, config={**written.config, "architectures": [self.spelling], "dflash_config": nested})
