"""`outrider package` (a drafter to ship, with its model card) and `push` (it goes to the hub)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from outrider.backends.export import check_target, target_facts
from outrider.checkpoints.checkpoint import load_checkpoint, save_drafter
from outrider.checkpoints.dialects.base import UnknownDepth
from outrider.decoding.policies import ThresholdPolicy
from outrider.evaluation.config import PackageConfig, PushConfig
from outrider.evaluation.model_card import model_card
from outrider.evaluation.results import Results
from outrider.target.hub import canonical_id
from outrider.utils.packaged import packaged

_OURS = ("config.json", "model.safetensors", "README.md", "outrider.json")


def package_drafter(config: PackageConfig) -> int:
    """Write a drafter to ship; the bytes of its directory.

    Raises:
        ValueError: the drafter was made elsewhere, is for another target, or something else would be replaced.
    """
    if lost := foreign(config.out):
        raise ValueError(
            f"{config.out} holds something other than a drafter ({', '.join(lost[:3])}) and would be replaced; "
            "choose another place."
        )
    out, target = config.out, config.target
    drafter = packaged(config.drafter, "models")
    facts = None if target is None else target_facts(target, torch.float32)
    try:
        checkpoint = load_checkpoint(drafter, num_target_layers=None if facts is None else facts.num_layers)
    except UnknownDepth as error:
        raise ValueError(
            f"{drafter} was made elsewhere; package a drafter that outrider train wrote. To write it for an engine: "
            f"outrider export {drafter} --to ENGINE --target TARGET --out OUT."
        ) from error
    if config.confidence_threshold is not None:
        recommended = {"confidence_threshold": ThresholdPolicy(config.confidence_threshold).threshold}
        checkpoint = replace(checkpoint, metadata={**checkpoint.metadata, "recommended": recommended})
    measured = [Results.load(path) for path in config.results]
    if target is not None and facts is not None:
        check_target(checkpoint.weights, facts)
        before = canonical_id(str(checkpoint.metadata.get("target")))
        for one in measured:
            if canonical_id(str(one.settings.get("target"))) == before:
                one.settings["target"] = canonical_id(target)
        checkpoint = replace(checkpoint, metadata={**checkpoint.metadata, "target": canonical_id(target)})
    card = model_card(
        checkpoint,
        name=out.resolve().name,
        dtype=getattr(torch, config.dtype),
        results=measured,
        sources=config.source,
        license=config.license,
    )
    save_drafter(checkpoint, out, getattr(torch, config.dtype), card=card)
    return sum(file.stat().st_size for file in out.iterdir())


def push_drafter(config: PushConfig) -> tuple[str, int]:
    """Put a packaged drafter on the hub: (its address, bytes).

    Raises:
        ValueError: it is not packaged, or the hub refuses it or does not answer.
    """
    drafter, repo, public = config.drafter, config.repo, config.public
    missing = [name for name in _OURS if not (drafter / name).is_file()]
    if missing:
        raise ValueError(
            f"{drafter} lacks {', '.join(missing)}: outrider package {drafter} --out DIR writes a drafter with its "
            "model card; push that."
        )
    no_answer: Any = HfHubHTTPError.__mro__[1]  # of the HTTP library in use: httpx, or httpx2 in later releases
    api = HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(repo).private:
            raise ValueError(f"{repo} is public already: --public adds to it; for a private one choose another name.")
        done = api.upload_folder(
            repo_id=repo, folder_path=drafter, allow_patterns=[*_OURS], commit_message="Drafter of outrider package"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "; hf auth login, or HF_TOKEN with the right to write" if status in (401, 403) else ""
        reason = error.server_message or error.response.reason_phrase
        raise ValueError(f"the hub at {api.endpoint} refuses {repo}: {status} {reason}{remedy}.") from error
    except no_answer as error:
        raise ValueError(f"no answer from the hub at {api.endpoint}: {error}.") from error
    except HFValidationError as error:
        raise ValueError(f"{repo}: {' '.join(str(error).split())}") from error
    return str(done.repo_url), sum((drafter / name).stat().st_size for name in _OURS)


def foreign(out: Path) -> list[str]:
    """Names of what is at `out`, as no part of a drafter of ours, and would be lost if one were written there."""
    if not out.is_dir():
        return [out.name] if out.exists() else []
    names = sorted(path.name for path in out.iterdir())
    return [name for name in names if name not in _OURS] if "outrider.json" in names else names
