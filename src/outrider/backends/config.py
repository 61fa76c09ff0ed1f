"""Settings of exports. Read by `--help`, so nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.config import EXPORTERS, FILES, MODELS, Config, argument, option

DrafterDirectory = Annotated[Path, argument("drafter directory, in any dialect")]
CheckpointTarget = Annotated[
    str | None, option(MODELS, "id or directory; the one that the files name by default", beside="name")
]


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """A drafter written for an engine; without `to` and `out`, which engines take it (backends/export.py)."""

    drafter: DrafterDirectory
    to: Annotated[str | None, option(FILES, EXPORTERS, metavar="ENGINE")] = None
    out: Annotated[Path | None, option(FILES, "a new directory", beside="path")] = None
    dtype: Annotated[
        str,
        option(FILES, "of the weights: float32, bfloat16 or float16", choices=("bfloat16", "float16", "float32")),
    ] = "float32"
    target: CheckpointTarget = None

    def check(self) -> None:
        if (self.to is None) != (self.out is None):
            raise ValueError("--to ENGINE and --out OUT go together; without both, the engines that take it are shown.")
