"""outrider doctor --target T --drafter D --data responses.jsonl: what is wrong, what it means, what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.runtime import load, set_up
from outrider.data.prompts import load_prompts
from outrider.evaluation.doctor import Case, as_json, examine, print_report, read_data, read_drafter, verdict
from outrider.formats import versions


def doctor(
    target: Annotated[str | None, typer.Option(help="model id or directory")] = None,
    drafter: Annotated[Path | None, typer.Option(help="drafter directory")] = None,
    data: Annotated[Path | None, typer.Option(help="responses file the drafter learns from")] = None,
    evaluation: Annotated[str | None, typer.Option("--eval", help="prompts that must not be in the data")] = None,
    samples: Annotated[int, typer.Option(min=1, help="conversations run through the models")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens decoded per conversation")] = 48,
    thinking: Annotated[bool, typer.Option(help="the mode the drafter is to serve in")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="file for the findings")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Check target, drafter and data against each other. Exit status 1 where a fault is found."""
    if target is None and drafter is None and data is None:
        raise ValueError("nothing to examine: give --target, --drafter or --data, best all three.")
    set_up(threads)
    console = Console()
    case = Case(thinking=thinking, samples=samples, max_new_tokens=max_new_tokens)
    if target is not None:
        case.loaded_target = load(target, device)
    if evaluation is not None:
        case.eval_prompts = load_prompts(evaluation)
    unread = [
        read_drafter(case, drafter, device) if drafter is not None else None,
        read_data(case, data) if data is not None else None,
    ]
    with console.status("examining") as status:
        found = examine(case, lambda check: status.update(f"examining: {check.name}"))
    findings = [finding for finding in unread if finding is not None] + found
    print_report(findings, console)
    if json_out is not None:
        paths = {"target": target, "drafter": drafter, "data": data, "eval": evaluation}
        inputs = {name: None if value is None else str(value) for name, value in paths.items()}
        inputs |= {"samples": str(samples), "max_new_tokens": str(max_new_tokens), "thinking": str(thinking)}
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps({**as_json(findings, inputs), "versions": versions()}, indent=1) + "\n")
    if verdict(findings) == "fault":
        raise typer.Exit(1)
