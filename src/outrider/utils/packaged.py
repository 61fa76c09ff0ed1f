"""Find files that come with the package: recipes, experiment tables, a trained drafter. Imports no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).parents[1]
Kind = Literal["recipes", "experiments", "models"]


def packaged(path: str | Path, kind: Kind) -> Path:
    """Return `path` if it exists (for models: as a directory), else the packaged one of that name, else `path`.

    packaged("smollm2-135m/dspark", "recipes")        .../outrider/recipes/smollm2-135m/dspark.yaml
    packaged("recipes/large/dspark.yaml", "recipes")  likewise: the name may begin with the kind and end in .yaml
    packaged("smollm2-135m-dspark", "models")         .../outrider/models/smollm2-135m-dspark, a directory
    """
    path = Path(path)
    exists = Path.is_dir if kind == "models" else Path.is_file
    if exists(path) or path.is_absolute():
        return path
    name = path.relative_to(kind) if path.parts[:1] == (kind,) else path
    below = PACKAGE / kind
    return next((place for place in (below / f"{name}.yaml", below / name) if exists(place)), path)


def name_of(directory: Path) -> str:
    """Return the name by which `packaged` finds a drafter: its name if it is packaged, else its path."""
    return directory.name if directory.parent == PACKAGE / "models" else str(directory)
