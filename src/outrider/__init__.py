"""Outrider trains, calibrates, evaluates, serves and exports draft models for lossless speculative decoding.

    import outrider

    model = outrider.load("HuggingFaceTB/SmolLM2-135M-Instruct")
    print(model.generate("Name three rivers.", max_new_tokens=32))

`model.stream` yields the same text round by round, and `model.generate` takes a list of prompts, too. The parts are
public as well: `load_target`, `load_drafter`, `generate` and `stream` for one request, and `Engine` for many.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.api.model import Model, Response, load
    from outrider.checkpoints.checkpoint import load_drafter
    from outrider.decoding.engine import Engine
    from outrider.decoding.generate import generate, stream
    from outrider.decoding.request import StopRules
    from outrider.decoding.structured import GrammarCompiler, StructuredOutput
    from outrider.sampling import SamplingParams
    from outrider.target.model import load_target

__all__ = [
    "Engine",
    "GrammarCompiler",
    "Model",
    "Response",
    "SamplingParams",
    "StopRules",
    "StructuredOutput",
    "generate",
    "load",
    "load_drafter",
    "load_target",
    "stream",
]

_MODULES = {
    "Engine": "decoding.engine",
    "GrammarCompiler": "decoding.structured",
    "Model": "api.model",
    "Response": "api.model",
    "SamplingParams": "sampling",
    "StopRules": "decoding.request",
    "StructuredOutput": "decoding.structured",
    "generate": "decoding.generate",
    "load": "api.model",
    "load_drafter": "checkpoints.checkpoint",
    "load_target": "target.model",
    "stream": "decoding.generate",
}
__version__: str

# How long OpenMP's threads wait for each other by spinning, before torch is imported. By default they spin for so long
# that beside other work two threads are five times slower than one: each spins on the core that the other one needs.
SPIN, SPINS = "GOMP_SPINCOUNT", "1000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault(SPIN, SPINS)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import outrider` costs nothing."""
    if name == "__version__":
        return version("outrider")
    if name not in _MODULES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"outrider.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return [*__all__, "__version__"]


class _WhenImported(MetaPathFinder):
    """Let transformers' `AutoModel` open drafters (api/auto_model.py) once somebody imports it, and not before."""

    module = "transformers.models.auto.modeling_auto"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leave finding it to the other finders, and register behind its loading."""
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                import_module("outrider.api.auto_model").register()

            loader.exec_module = load_and_register
        return spec


if _WhenImported.module in sys.modules:
    import_module("outrider.api.auto_model").register()
else:
    sys.meta_path.insert(0, _WhenImported())
