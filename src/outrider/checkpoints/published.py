"""target -> the drafter that comes with Outrider, or that you keep beside your work:

    $OUTRIDER_MODELS/*/    ./models/*/    outrider/models/*/ in the installed package

the first directory, in this order and then by name, whose outrider.json says it was trained on the target.
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
                seen.add(directory.resolve())  # $OUTRIDER_MODELS may be models/
                yield canonical_id(made_for), directory


def _places() -> list[Path]:
    places = [Path("models"), PACKAGE / "models"]
    configured = os.environ.get("OUTRIDER_MODELS")
    if not configured:
        return places
    if not Path(configured).is_dir():
        raise ValueError(f"OUTRIDER_MODELS={configured} is not a directory; name the one that holds your drafters.")
    return [Path(configured), *places]


# ----------------------------------------------------------------------------
# Drafters that others have published, by target: what `outrider models` lists and `--drafter auto` downloads.
#
# Repositories are those that public pages name. Which target a drafter of z-lab's or AngelSlim's is for was mostly read
# off its name, and that three of yuhuili's four hold pickles follows from the one that was looked at. None was
# downloaded: shapes are checked against the target when a drafter is opened, its training is not.
#
# `rows` of a block (anchor included where the first row is one) or steps of a chain, None where the checkpoint's own
# config says it; `thinking` None where the page does not tell how its texts were made. `architecture` is what the
# maker's code writes into config.json; whether a reader here knows it decides what `auto` takes.
#
# Sources: README of github.com/z-lab/dflash and the collection z-lab/dflash on the hub (DFlash, DFlash 2); "Released
# Checkpoints" in the README of github.com/deepseek-ai/DeepSpec (Qwen3 and Gemma 4, all of them "in non-thinking mode")
# and its modeling code; the hub pages of yuhuili (EAGLE-3 by its authors); AngelSlim's EAGLE-3 as vLLM's tests and
# its pull request 22333 (their architecture) name them.
# ----------------------------------------------------------------------------


_PATTERNS = ["*.safetensors", "*.json"]
_OBSTACLES = {
    "pickle": "its weights are a pickle, which can run code when it is read; ask its authors for safetensors",
    "layers": "its layers are of a kind that no drafter here has",
}


@dataclass(frozen=True)
class Published:
    """One checkpoint. `known`: what stands against reading it, besides its architecture."""

    target: str
    repo: str
    algorithm: Literal["dflash", "dflash2", "dspark", "eagle3"]
    architecture: str
    rows: int | None = None
    thinking: bool | None = None
    known: Literal["pickle"] | None = None

    @property
    def dialect(self) -> str | None:
        """The dialect of its architecture, as `outrider inspect` calls it; None: none that is read here."""
        try:
            return dialect_of({"architectures": [self.architecture]}, self.repo).name
        except UnknownDialect:
            return None

    @property
    def obstacle(self) -> str | None:
        """Why it is not read here, in a word: "pickle" or "layers"; None: it is read."""
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
    """A target's drafters that are read here, as far as is known, best first.

    With `thinking`, those not made without it come first.
    """
    found = [entry for entry in PUBLISHED if entry.target.lower() == target.lower() and entry.obstacle is None]
    return sorted(found, key=lambda entry: thinking and entry.thinking is False)


class Offer(NamedTuple):
    """A drafter that was made for a target or for a model like it.

    Attributes:
        made_for: the target itself, a model that it was fine-tuned from, or one of the same shapes and vocabulary.
        drafter: a directory on this machine, or a published checkpoint.
        named: whether the target's files name `made_for`; else only shapes and vocabulary agree.
        misfit: why it cannot serve the target; "" if it can, as far as files here tell.
    """

    made_for: str
    drafter: Path | Published
    named: bool = True
    misfit: str = ""

    def relation(self, target: str) -> str:
        """What the target is to `made_for`, in words; "" where they are the same."""
        if self.made_for == canonical_id(target):
            return ""
        if self.misfit:
            return f"{target} is a fine-tune of {self.made_for}, whose drafters do not fit it: {self.misfit}"
        return f"{target} {'is a fine-tune of' if self.named else 'has the shapes and vocabulary of'} {self.made_for}"


def drafters_for(target: str, thinking: bool = False) -> Iterator[Offer]:
    """Drafters for a target, best first: its own, its base models', then those for models of the same shapes.

    Of each model those on this machine come before published ones. Output is the target's whatever drafts for it.

    Raises:
        ValueError: see `shipped_drafter`.
    """
    here = list(shipped_drafters())

    def made_for(model: str) -> Iterator[Path | Published]:
        yield from (directory for its_target, directory in here if its_target == model)
        yield from published_for(model, thinking)

    own = canonical_id(target)
    yield from (Offer(own, drafter) for drafter in made_for(own))  # before any file of the target is looked for
    models = lineage(target)
    for base in models[1:]:
        misfit = "; ".join(shape_differences(target, base) or ())
        yield from (Offer(base, drafter, misfit=misfit) for drafter in made_for(base))
    for model, directory in here:
        if model not in models and shape_differences(target, model) == []:
            yield Offer(model, directory, named=False)


def published_by(repo: str) -> Published | None:
    """The entry of a repository."""
    return next((entry for entry in PUBLISHED if entry.repo.lower() == repo.lower()), None)


def fetch(entry: Published) -> Path:
    """The checkpoint's directory in the Hugging Face cache, downloaded if need be.

    Raises:
        ValueError: it is not read here, or not in the cache and cannot be had.
    """
    if entry.obstacle is not None:
        raise ValueError(f"the drafter {entry.repo} is not read here: {_OBSTACLES[entry.obstacle]}.")
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
            f"the drafter {entry.repo} for {entry.target} is not in the Hugging Face cache and cannot be had from the "
            f"hub ({type(error).__name__}). Download it where there is network (hf download {entry.repo}), or give "
            "--drafter DIR; --drafter none decodes plainly."
        ) from error
