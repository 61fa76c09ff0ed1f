"""What comes with the package as files: recipes, tables of experiments, a trained drafter. Imports no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).parents[1]
Kind = Literal["recipes", "experiments", "models"]


def packaged(path: str | Path, kind: Kind) -> Path:
    """`path` if such a file (of models: directory) is there, else the packaged one of that name, else `path` again.

    packaged("smollm2-135m/dspark", "recipes")        .../outrider/recipes/smollm2-135m/dspark.yaml
    packaged("recipes/large/dspark.yaml", "recipes")  the same way: the name may begin with the kind and end in .yaml
    packaged("smollm2-135m-dspark", "models")         .../outrider/models/smollm2-135m-dspark, a directory
    """
    path = Path(path)
    is_there = Path.is_dir if kind == "models" else Path.is_file
    if is_there(path) or path.is_absolute():
        return path
    name = path.relative_to(kind) if path.parts[:1] == (kind,) else path
    below = PACKAGE / kind
    return next((place for place in (below / f"{name}.yaml", below / name) if is_there(place)), path)


def name_of(directory: Path) -> str:
    """What `packaged` finds a drafter's directory by: its name alone where it came with the package."""
    return directory.name if directory.parent == PACKAGE / "models" else str(directory)
