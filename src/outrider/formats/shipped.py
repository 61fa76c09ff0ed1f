"""target -> the drafter that comes with Outrider, or that you keep beside your work:

    $OUTRIDER_MODELS/*/    ./models/*/    models/*/ of the checkout this package was installed from

the first directory, in this order and then by name, whose outrider.json says it was trained on the target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from outrider.formats.checkpoint import METADATA, read_metadata
from outrider.target.resolve import canonical_id


def shipped_drafter(target: str) -> Path | None:
    """The drafter directory for a target (an id or a directory), None if there is none.

    Raises:
        ValueError: $OUTRIDER_MODELS is not a directory, or an outrider.json on the way is not JSON.
    """
    wanted = canonical_id(target)
    return next((directory for made_for, directory in shipped_drafters() if made_for == wanted), None)


def shipped_drafters() -> Iterator[tuple[str, Path]]:
    """(its target's id or absolute path, directory) of every drafter on this machine, in that order.

    Raises:
        ValueError: see `shipped_drafter`.
    """
    seen: set[Path] = set()
    for folder in _places():
        for directory in sorted(path.parent for path in folder.glob(f"[!.]*/{METADATA}")):
            made_for = read_metadata(directory).get("target")
            if isinstance(made_for, str) and directory.resolve() not in seen:
                seen.add(directory.resolve())  # models/ here may be the checkout's
                yield canonical_id(made_for), directory


def _places() -> list[Path]:
    places = [Path("models"), Path(__file__).resolve().parents[3] / "models"]  # src/outrider/formats/ of a checkout
    configured = os.environ.get("OUTRIDER_MODELS")
    if not configured:
        return places
    if not Path(configured).is_dir():
        raise ValueError(f"OUTRIDER_MODELS={configured} is not a directory; name the one that holds your drafters.")
    return [Path(configured), *places]
