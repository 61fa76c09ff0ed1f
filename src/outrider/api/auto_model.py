"""`transformers.AutoModel` of a drafter's directory: a model with `spec_generate`, as z-lab's dflash drafters have it.

    import outrider
    drafter = AutoModel.from_pretrained(DIRECTORY)
    ids = drafter.spec_generate(target=model, input_ids=ids, max_new_tokens=64, stop_token_ids=[eos])

A drafter's config.json names its layers' model_type (qwen3, llama, or ours), by which transformers alone would fill one
of its own classes and drop the drafter's tensors. So `register`, which `import outrider` arranges for, puts a choice in
that place: a config whose `architectures` name a drafter opens as `DrafterModel`, any other as before. No code that
comes with a checkpoint is run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

# Nothing of this package is imported here: transformers may be imported by a module of it that is not done yet.

_SHARED = {"Qwen3": "qwen3", "Llama": "llama"}  # classes of transformers whose config.json drafters write
_PATTERNS = ["*.safetensors", "*.json"]


class OutriderDrafterConfig(PretrainedConfig):
    """config.json of the drafters that only Outrider reads."""

    model_type = "outrider_drafter"


class DrafterModel(nn.Module):
    """A drafter from its directory; it is read for a target when there is one, and follows its type and device."""

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        super().__init__()
        self.directory, self.config = directory, config
        self._opened: tuple[Any, Any] | None = None  # the latest target, and its `Model` with this drafter

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, config: PretrainedConfig, **kwargs: Any) -> DrafterModel:
        """Find the drafter, by directory or hub id.

        Raises:
            ValueError: it is in no known dialect.
        """
        from outrider.checkpoints.checkpoint import read_config

        kept = {key: kwargs.get(key) for key in ("revision", "cache_dir", "token", "local_files_only")}
        given = {key: value for key, value in kept.items() if value is not None}
        directory = Path(name)
        if not directory.is_dir():
            directory = Path(snapshot_download(str(name), allow_patterns=_PATTERNS, **given))
        read_config(directory)
        return cls(directory, config)

    def spec_generate(
        self,
        target: Any,
        input_ids: Tensor,
        max_new_tokens: int = 256,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Tensor:
        """Decode with this drafter and a transformers model: ids [1, T + new] of the prompt and the response.

        Tokens are the target's at temperature 0, but for ties, and have its distribution above. Arguments as those of
        `Model.spec_generate`. What decoding needs of a target is made at its first use and kept until another one's;
        the target becomes one without gradients.

        Raises:
            ValueError: the drafter is damaged or made for another target, or `input_ids` is not [1, T].
        """
        if self._opened is None or self._opened[0] is not target:
            self._opened = (target, self._open(target))
        ids: Tensor = self._opened[1].spec_generate(
            None,
            input_ids,
            max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        return ids

    def _open(self, target: Any) -> Any:
        from outrider.api.drafter import DrafterChoice
        from outrider.api.model import Model
        from outrider.target.model import Target

        ours = Target(target, None, name=str(getattr(target, "name_or_path", "") or type(target).__name__))
        return Model(ours, DrafterChoice("directory", str(self.directory)).open(ours))


class _DrafterOr:
    """In AutoModel's table, in the place of one of transformers' classes, as which it passes otherwise."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def __getattr__(self, attribute: str) -> Any:
        module = import_module(f"transformers.models.{self._kind}.modeling_{self._kind}")
        return getattr(getattr(module, f"{self._name}Model"), attribute)

    def from_pretrained(self, name: Any, *args: Any, config: PretrainedConfig, **kwargs: Any) -> Any:
        from outrider.checkpoints.registry import dialects

        kind: Any = DrafterModel if any(one.reads(config.to_dict()) for one in dialects()) else None
        opened = self.__getattr__("from_pretrained") if kind is None else kind.from_pretrained
        return opened(name, *args, config=config, **kwargs)


def register() -> None:
    """Make `AutoModel` open drafters; once."""
    AutoConfig.register(OutriderDrafterConfig.model_type, OutriderDrafterConfig, exist_ok=True)
    AutoModel.register(OutriderDrafterConfig, DrafterModel, exist_ok=True)
    for name, kind in _SHARED.items():
        config = getattr(import_module(f"transformers.models.{kind}.configuration_{kind}"), f"{name}Config")
        AutoModel.register(config, _DrafterOr(name, kind), exist_ok=True)
