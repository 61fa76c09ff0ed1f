"""One adapter per checkpoint dialect; whole directories written atomically."""

from outrider.formats.checkpoint import Checkpoint, load_drafter, save_drafter, versions

__all__ = ["Checkpoint", "load_drafter", "save_drafter", "versions"]
