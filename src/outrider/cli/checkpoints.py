"""`outrider export` (a drafter as an engine loads it), `package` (a drafter to ship), `push` (it goes to the hub)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from outrider.cli.options import DRAFTS, EXPORTERS, FILES, MODELS, option
from outrider.utils.packaged import packaged
from outrider.utils.terminal import Terminal, terminal_table

_DTYPES = ("bfloat16", "float16", "float32")
DrafterDirectory = Annotated[Path, typer.Argument(help="drafter directory, in any dialect")]
CheckpointTarget = Annotated[str | None, option(MODELS, "id or directory; the one that the files name by default")]


def export_command(
    drafter: DrafterDirectory,
    *,
    to: Annotated[str | None, option(FILES, EXPORTERS, metavar="ENGINE")] = None,
    out: Annotated[Path | None, option(FILES, "a new directory")] = None,
    dtype: Annotated[str, option(FILES, "of the weights: float32, bfloat16 or float16")] = "float32",
    target: CheckpointTarget = None,
) -> None:
    """Write a drafter for an engine, with the command that serves it.

    Without --to and --out, show which engines take which drafters, and whether they take this one.
    """
    import torch

    from outrider.backends.export import export_drafter, refusals, target_facts, to_export
    from outrider.backends.registry import MARKS, engine_of, export_table
    from outrider.checkpoints.checkpoint import load_checkpoint, read_config, read_metadata
    from outrider.checkpoints.describe import named_target

    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(_DTYPES)}.")
    if (to is None) != (out is None):
        raise ValueError("--to ENGINE and --out OUT go together; without both, the engines that take it are shown.")
    engine = None if to is None else engine_of(to)
    if out is not None and out.exists():
        raise ValueError(f"--out {out} exists: export to a new directory.")
    drafter = packaged(drafter, "models")
    raw, _ = read_config(drafter)
    named = target or named_target(raw, read_metadata(drafter))
    console = Terminal(highlight=False, soft_wrap=True)
    if engine is None:
        headings, *rows = export_table()
        console.print(terminal_table(headings, rows, text=headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)))
        console.print(f"{MARKS}\n")
    if named is None:
        raise ValueError(f"{drafter} does not say which target it is for: name it with --target.")
    kind = getattr(torch, dtype)
    try:
        facts = target_facts(named, kind)
    except ValueError as error:
        raise ValueError(
            f"{error}{'' if target else f' {drafter} names this target: give another with --target.'}"
        ) from error
    checkpoint = load_checkpoint(drafter, num_target_layers=facts.num_layers)
    if engine is None or out is None:
        for name, reason in refusals(to_export(checkpoint, facts, kind), facts).items():
            console.print(reason or f"--to {name} --out OUT writes {drafter} for it.", markup=False)
        return
    exported = export_drafter(checkpoint, engine, out, target=facts, dtype=kind)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    console.print(f"{out}: {size:.1f} MB, {len(exported.written.tensors)} tensors", markup=False)
    for sentence in exported.written.fallbacks:
        console.print(f"left out: {sentence}", markup=False)
    for command in exported.commands:
        console.print(command, markup=False)


_PACKAGE_DTYPES = ("bfloat16", "float32")


def package_command(
    drafter: DrafterDirectory,
    *,
    out: Annotated[Path, option(FILES, "where to; its name is the model's. May be DRAFTER itself")],
    dtype: Annotated[str, option(FILES, "of the weights on disk: bfloat16 or float32")] = "bfloat16",
    results: Annotated[list[Path] | None, option("Model card", "results.json of outrider eval; repeatable")] = None,
    source: Annotated[list[str] | None, option("Model card", "a source of training prompts; repeatable")] = None,
    license: Annotated[str | None, option("Model card", "of the weights, as the hub spells it: apache-2.0")] = None,
    confidence_threshold: Annotated[
        float | None, option(DRAFTS, "threshold that outrider generate uses by default", min=0.0, max=1.0)
    ] = None,
    target: CheckpointTarget = None,
) -> None:
    """Write a drafter to ship, with a model card made from measurements.

    --target names the target anew, as where it was trained from a directory and is on the hub now.
    """
    import torch

    from outrider.backends.export import check_target, target_facts
    from outrider.checkpoints.checkpoint import load_checkpoint, save_drafter
    from outrider.checkpoints.dialects.base import UnknownDepth
    from outrider.decoding.policies import ThresholdPolicy
    from outrider.evaluation.model_card import model_card
    from outrider.evaluation.results import Results
    from outrider.target.hub import canonical_id

    if dtype not in _PACKAGE_DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(_PACKAGE_DTYPES)}.")
    if lost := foreign(out):
        raise ValueError(
            f"{out} holds something other than a drafter ({', '.join(lost[:3])}) and would be replaced; choose another "
            "place."
        )
    drafter = packaged(drafter, "models")
    facts = None if target is None else target_facts(target, torch.float32)
    try:
        checkpoint = load_checkpoint(drafter, num_target_layers=None if facts is None else facts.num_layers)
    except UnknownDepth as error:
        raise ValueError(
            f"{drafter} was made elsewhere; package a drafter that outrider train wrote. To write it for an engine: "
            f"outrider export {drafter} --to ENGINE --target TARGET --out OUT."
        ) from error
    if confidence_threshold is not None:
        recommended = {"confidence_threshold": ThresholdPolicy(confidence_threshold).threshold}
        checkpoint = replace(checkpoint, metadata={**checkpoint.metadata, "recommended": recommended})
    measured = [Results.load(path) for path in results or []]
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
        dtype=getattr(torch, dtype),
        results=measured,
        sources=source or [],
        license=license,
    )
    save_drafter(checkpoint, out, getattr(torch, dtype), card=card)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    Terminal().print(f"{out}: {size:.1f} MB, model card in README.md", highlight=False, markup=False, soft_wrap=True)


_OURS = ("config.json", "model.safetensors", "README.md", "outrider.json")


def push_command(
    drafter: Annotated[Path, typer.Argument(help="what outrider package wrote")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; made where it is not there")],
    *,
    public: Annotated[bool, option(FILES, "for everyone to read; otherwise for you alone", "--public")] = False,
) -> None:
    """Put a packaged drafter on the Hugging Face hub, with its model card."""
    missing = [name for name in _OURS if not (drafter / name).is_file()]
    if missing:
        raise ValueError(
            f"{drafter} lacks {', '.join(missing)}: outrider package {drafter} --out DIR writes a drafter with its "
            "model card; push that."
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

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
    size = sum((drafter / name).stat().st_size for name in _OURS) / 1e6
    who = "for everyone" if public else "private"
    Terminal().print(f"{done.repo_url}: {size:.1f} MB, {who}", highlight=False, markup=False, soft_wrap=True)


def foreign(out: Path) -> list[str]:
    """Names of what is at `out`, as no part of a drafter of ours, and would be lost if one were written there."""
    if not out.is_dir():
        return [out.name] if out.exists() else []
    names = sorted(path.name for path in out.iterdir())
    return [name for name in names if name not in _OURS] if "outrider.json" in names else names
