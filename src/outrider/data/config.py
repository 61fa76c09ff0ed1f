"""Settings of `outrider inspect`. `--help` imports this file, so it does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.config import MODELS, Config, argument, option

_RESPONSES, _DRAFTER = "Responses", "Drafter"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """Options for showing a responses file or a drafter."""

    path: Annotated[Path, argument("a responses file (*.jsonl), or a drafter directory in any dialect")]
    target: Annotated[
        str | None,
        option(
            MODELS,
            "target of the tokenizer or drafter; by default the one that the file names",
            beside="name",
        ),
    ] = None
    row: Annotated[int | None, option(_RESPONSES, "only this row", min=0)] = None
    limit: Annotated[int, option(_RESPONSES, "rows from the beginning", min=1)] = 5
    tokens: Annotated[bool, option(_RESPONSES, "show token boundaries", "--tokens")] = False
    html: Annotated[Path | None, option(_RESPONSES, "write a page here instead", beside="path")] = None
    tensors: Annotated[bool, option(_DRAFTER, "list its tensors", "--tensors")] = False
