"""Find drafters for a target: those on this machine, and those published on the hub.

    $OUTRIDER_MODELS/*/    ./models/*/    outrider/models/*/ in the installed package

Directories are searched in this order and then by name; a match has the target in its outrider.json.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError

from outrider.checkpoints.checkpoint import METADATA, read_metadata
from outrider.checkpoints.registry import UnknownDialect, dialect_of
from outrider.target.hub import canonical_id, complete_model, lineage, shape_differences
from outrider.utils.packaged import PACKAGE


def shipped_drafter(target: str) -> Path | None:
    """Return the drafter directory for a target (an id or a directory); None if there is none.

    Raises:
        ValueError: $OUTRIDER_MODELS is no directory, or an outrider.json is invalid.
    """
    name = canonical_id(target)
    return next((directory for made_for, directory in shipped_drafters() if made_for == name), None)


def shipped_drafters() -> Iterator[tuple[str, Path]]:
    """Yield (id or absolute path of the target, directory) of every drafter on this machine, in search order.

    Raises:
        ValueError: see `shipped_drafter`.
    """
    seen: set[Path] = set()
    for folder in _places():
        for directory in sorted(path.parent for path in folder.glob(f"[!.]*/{METADATA}")):
            made_for = read_metadata(directory).get("target")
            if isinstance(made_for, str) and directory.resolve() not in seen:
                seen.add(directory.resolve())  # $OUTRIDER_MODELS may be models/
                yield canonical_id(made_for), directory


def _places() -> list[Path]:
    places = [Path("models"), PACKAGE / "models"]
    configured = os.environ.get("OUTRIDER_MODELS")
    if not configured:
        return places
    if not Path(configured).is_dir():
        raise ValueError(f"OUTRIDER_MODELS={configured} is not a directory; set it to the directory of your drafters.")
    return [Path(configured), *places]


# ----------------------------------------------------------------------------
# Drafters that others have published, by target: what `outrider models` lists and `--drafter auto` downloads.
#
# The repositories are named on public pages. Targets of z-lab's and AngelSlim's drafters are mostly inferred from the
# repository name; that three of yuhuili's four are pickles is inferred from the fourth. None was downloaded: opening a
# drafter checks its shapes against the target, but not its training.
#
# `rows` counts the rows of a block (with an anchor row, if it has one) or the steps of a chain; None: see the
# checkpoint's config. `thinking` is None if the page does not describe the training texts. `architecture` is the value
# in the maker's config.json; `auto` takes a drafter only if a dialect here reads it.
#
# Sources: README of github.com/z-lab/dflash and the collection z-lab/dflash on the hub (DFlash, DFlash 2); "Released
# Checkpoints" in the README of github.com/deepseek-ai/DeepSpec (Qwen3 and Gemma 4, all of them "in non-thinking mode")
# and its modeling code; the hub pages of yuhuili (EAGLE-3 by its authors); AngelSlim's EAGLE-3 as vLLM's tests and
# its pull request 22333 (their architecture) name them. DeepSeek-V4-Flash-DSpark is target and drafter; the README of
# DeepSeek-V4-Flash-0731 names it.
# ----------------------------------------------------------------------------


_PATTERNS = ["*.safetensors", "*.json"]
_OBSTACLES = {
    "pickle": "its weights are a pickle, which can run code when read; ask its authors for safetensors",
    "layers": "no drafter here has layers of its kind",
}


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    Attributes:
        known: an obstacle to reading it besides its architecture.
        marks: fields of its config.json without which its architecture would be a target's.
    """

    target: str
    repo: str
    algorithm: Literal["dflash", "dflash2", "dspark", "dspark_v4", "eagle3"]
    architecture: str
    rows: int | None = None
    thinking: bool | None = None
    known: Literal["pickle"] | None = None
    marks: tuple[str, ...] = ()

    @property
    def dialect(self) -> str | None:
        """Dialect of its architecture, as `outrider inspect` names it; None if no dialect here reads it."""
        try:
            fields = {"architectures": [self.architecture], **dict.fromkeys(self.marks)}
            return dialect_of(fields, self.repo).name
        except UnknownDialect:
            return None

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be read, "pickle" or "layers"; None if it can be read."""
        return self.known or (None if self.dialect else "layers")


def _zlab(target: str, repo: str, rows: int | None = None, thinking: bool | None = None) -> Published:
    return Published(target, f"z-lab/{repo}", "dflash", architecture="DFlashDraftModel", rows=rows, thinking=thinking)


def _deepspec(target: str, name: str, family: str = "Qwen3") -> list[Published]:
    block, chain = f"{family}DSparkModel", f"{family}Eagle3Model"
    return [
        Published(target, f"deepseek-ai/dspark_{name}_block7", "dspark", architecture=block, rows=7, thinking=False),
        Published(target, f"deepseek-ai/dflash_{name}_block7", "dflash", architecture=block, rows=7, thinking=False),
        Published(target, f"deepseek-ai/eagle3_{name}_ttt7", "eagle3", architecture=chain, rows=7, thinking=False),
    ]


def _angelslim(size: str) -> Published:
    return Published(
        f"Qwen/Qwen3-{size}", f"AngelSlim/Qwen3-{size}_eagle3", "eagle3", architecture="LlamaForCausalLMEagle3"
    )


def _yuhuili(target: str, name: str) -> Published:
    return Published(target, f"yuhuili/EAGLE3-{name}", "eagle3", architecture="LlamaForCausalLM", known="pickle")


# Of several for one target the first is what `auto` takes: in DSpark's Table 1 its drafters come first on every target.
PUBLISHED: tuple[Published, ...] = (
    *_deepspec("Qwen/Qwen3-4B", "qwen3_4b"),
    *_deepspec("Qwen/Qwen3-8B", "qwen3_8b"),
    *_deepspec("Qwen/Qwen3-14B", "qwen3_14b"),
    *_deepspec("google/gemma-4-12B-it", "gemma4_12b", "Gemma4"),
    _zlab("Qwen/Qwen3-4B", "Qwen3-4B-DFlash-b16", 16, thinking=False),
    _zlab("Qwen/Qwen3-8B", "Qwen3-8B-DFlash-b16", 16, thinking=False),
    _zlab("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-30B-A3B-DFlash"),
    _zlab("Qwen/Qwen3-Coder-Next", "Qwen3-Coder-Next-DFlash"),
    _zlab("Qwen/Qwen3.5-4B", "Qwen3.5-4B-DFlash"),
    _zlab("Qwen/Qwen3.5-9B", "Qwen3.5-9B-DFlash"),
    _zlab("Qwen/Qwen3.5-27B", "Qwen3.5-27B-DFlash", 16),
    _zlab("Qwen/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-DFlash", 16),
    _zlab("Qwen/Qwen3.5-122B-A10B", "Qwen3.5-122B-A10B-DFlash"),
    _zlab("Qwen/Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B-DFlash"),
    _zlab("Qwen/Qwen3.6-27B", "Qwen3.6-27B-DFlash"),
    _zlab("Qwen/Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-DFlash"),
    Published("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", "dflash2", architecture="DFlash2DraftModel", rows=8),
    _zlab("openai/gpt-oss-20b", "gpt-oss-20b-DFlash"),
    _zlab("openai/gpt-oss-120b", "gpt-oss-120b-DFlash"),
    _zlab("meta-llama/Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    _zlab("google/gemma-4-26B-A4B-it", "gemma-4-26B-A4B-it-DFlash", 16),
    _zlab("google/gemma-4-31B-it", "gemma-4-31B-it-DFlash"),
    _zlab("moonshotai/Kimi-K2.5", "Kimi-K2.5-DFlash"),
    Published(
        "deepseek-ai/DeepSeek-V4-Flash-DSpark",
        "deepseek-ai/DeepSeek-V4-Flash-DSpark",
        "dspark_v4",
        architecture="DeepseekV4ForCausalLM",
        rows=5,
        marks=("dspark_block_size",),
    ),
    _angelslim("1.7B"),
    _angelslim("4B"),
    _angelslim("8B"),
    _angelslim("14B"),
    _angelslim("32B"),
    _yuhuili("meta-llama/Llama-3.1-8B-Instruct", "LLaMA3.1-Instruct-8B"),
    _yuhuili("meta-llama/Llama-3.3-70B-Instruct", "LLaMA3.3-Instruct-70B"),
    _yuhuili("lmsys/vicuna-13b-v1.3", "Vicuna1.3-13B"),
    _yuhuili("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-Distill-LLaMA-8B"),
)


def published_for(target: str, thinking: bool = False) -> list[Published]:
    """List a target's published drafters that can be read here, best first.

    With `thinking`, drafters trained without thinking come last.
    """
    readable = [entry for entry in PUBLISHED if entry.target.lower() == target.lower() and entry.obstacle is None]
    return sorted(readable, key=lambda entry: thinking and entry.thinking is False)


class Offer(NamedTuple):
    """A drafter made for a target or for a similar model.

    Attributes:
        made_for: the target itself, its base model, or a model of the same shapes and vocabulary.
        drafter: a directory on this machine, or a published checkpoint.
        named: whether the target's files name `made_for`; otherwise only shapes and vocabulary match.
        misfit: why it cannot serve the target; "" if no local file contradicts it.
    """

    made_for: str
    drafter: Path | Published
    named: bool = True
    misfit: str = ""

    def relation(self, target: str) -> str:
        """Describe how the target relates to `made_for`; "" if they are the same."""
        if self.made_for == canonical_id(target):
            return ""
        if self.misfit:
            return f"{target} is a fine-tune of {self.made_for}, whose drafters do not fit it: {self.misfit}"
        return f"{target} {'is a fine-tune of' if self.named else 'has the shapes and vocabulary of'} {self.made_for}"


def drafters_for(target: str, thinking: bool = False) -> Iterator[Offer]:
    """Yield drafters for a target, best first: for itself, for its base models, then for models of the same shapes.

    Local drafters come before published ones for each model. The output does not depend on the drafter.

    Raises:
        ValueError: see `shipped_drafter`.
    """
    local = list(shipped_drafters())

    def made_for(model: str) -> Iterator[Path | Published]:
        yield from (directory for its_target, directory in local if its_target == model)
        yield from published_for(model, thinking)

    name = canonical_id(target)
    yield from (Offer(name, drafter) for drafter in made_for(name))  # needs no file of the target
    models = lineage(target)
    for base in models[1:]:
        misfit = "; ".join(shape_differences(target, base) or ())
        yield from (Offer(base, drafter, misfit=misfit) for drafter in made_for(base))
    for model, directory in local:
        if model not in models and shape_differences(target, model) == []:
            yield Offer(model, directory, named=False)


def published_by(repo: str) -> Published | None:
    """Return the entry of a repository; None if it is not listed."""
    return next((entry for entry in PUBLISHED if entry.repo.lower() == repo.lower()), None)


def fetch(entry: Published) -> Path:
    """Return the checkpoint's directory in the Hugging Face cache; download it if necessary.

    Raises:
        ValueError: its format cannot be read here, or it is neither in the cache nor can be downloaded.
    """
    if entry.obstacle is not None:
        raise ValueError(f"the drafter {entry.repo} cannot be read: {_OBSTACLES[entry.obstacle]}.")
    try:
        cached = Path(snapshot_download(entry.repo, local_files_only=True, allow_patterns=_PATTERNS))
        if complete_model(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        pass
    try:
        return Path(snapshot_download(entry.repo, allow_patterns=_PATTERNS))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the drafter {entry.repo} for {entry.target} is not in the Hugging Face cache and cannot be downloaded "
            f"({type(error).__name__}). Fetch it with network (hf download {entry.repo}), give --drafter DIR, or "
            "decode plainly with --drafter none."
        ) from error
