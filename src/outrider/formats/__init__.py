"""One adapter per checkpoint dialect; whole directories written atomically; shipped drafters."""

from outrider.formats.checkpoint import (
    METADATA,
    Checkpoint,
    add_metadata,
    load_drafter,
    read_metadata,
    save_drafter,
    versions,
)
from outrider.formats.shipped import shipped_drafter, shipped_drafters

__all__ = [
    "METADATA",
    "Checkpoint",
    "add_metadata",
    "load_drafter",
    "read_metadata",
    "save_drafter",
    "shipped_drafter",
    "shipped_drafters",
    "versions",
]
