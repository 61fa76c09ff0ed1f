"""`outrider doctor`: what is wrong with target, drafter and data, or with a server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from outrider.cli.common import counting, show_lines
from outrider.config import API_KEY
from outrider.doctor.config import DoctorConfig
from outrider.utils.measure import default_dtype, usable_device, versions
from outrider.utils.packaged import packaged
from outrider.utils.terminal import Terminal


def doctor(config: DoctorConfig) -> None:
    """Check target, drafter and data, or a server; status 1 if a fault is found."""
    from outrider.doctor.evidence import verdict
    from outrider.utils.files import check_outputs

    check_outputs(files=[config.json_out])
    examine = _examine_files if config.base_url is None else _examine_server
    if verdict(examine(config)) == "fault":
        raise typer.Exit(1)


def _examine_files(config: DoctorConfig) -> list[Any]:
    from outrider.data.sources import load_prompts
    from outrider.doctor.checkpoints import (
        LONG,
        QUICK,
        QUICK_SAMPLES,
        QUICK_TOKENS,
        Inputs,
        examine,
        left_out,
        read_data,
        read_drafter,
        replaced,
    )
    from outrider.doctor.evidence import as_json, print_findings, print_summary
    from outrider.target.model import load_target

    console, target, data, device = Terminal(), config.target, config.data, config.machine.device
    drafter = None if config.drafter is None else packaged(config.drafter, "models")
    for place, path in (("--drafter", drafter), ("--data", data)):
        if path is not None and not path.exists():
            raise ValueError(f"{place} {path}: there is nothing of that name.")
    samples, max_new_tokens = config.samples, config.max_new_tokens
    few, short = min(samples, QUICK_SAMPLES), min(max_new_tokens, QUICK_TOKENS)
    inputs = Inputs(thinking=config.thinking, samples=few, max_new_tokens=short)
    if config.evaluation is not None:
        inputs.eval_prompts = load_prompts(config.evaluation)
    if target is not None:
        inputs.loaded_target = load_target(target, default_dtype(device), device)
    unread = [
        read_drafter(inputs, drafter, str(usable_device(device))) if drafter is not None else None,
        read_data(inputs, data) if data is not None else None,
    ]
    with counting(console, "doctor") as on_progress:
        found = examine(inputs, partial(on_progress, "quick checks"), QUICK)
    findings = [finding for finding in unread if finding is not None] + found
    print_findings(findings, console)
    rest = left_out(inputs)
    if config.quick:
        samples, max_new_tokens = few, short
    else:
        show_lines(console, f"{rest}. Now these, which take longer:")
        inputs = replace(inputs, samples=samples, max_new_tokens=max_new_tokens)
        with counting(console, "doctor") as on_progress:
            longer = examine(inputs, partial(on_progress, "longer checks"), LONG)
        print_findings([finding for finding in longer if finding not in findings], console)
        findings = replaced(findings, longer)
    print_summary(findings, console)
    if config.quick:
        show_lines(console, f"{rest}. The same command without --quick examines them.")
    if config.json_out is not None:
        paths = {"target": target, "drafter": drafter, "data": data, "eval": config.evaluation}
        examined = {name: None if value is None else str(value) for name, value in paths.items()}
        examined |= {
            "samples": str(samples),
            "max_new_tokens": str(max_new_tokens),
            "thinking": str(config.thinking),
            "quick": str(config.quick),
        }
        _write(config.json_out, {**as_json(findings, examined), "versions": versions()})
    return findings


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _examine_server(config: DoctorConfig) -> list[Any]:
    from outrider.backends.openai import Endpoint, served_model, shown_url
    from outrider.checkpoints.checkpoint import load_checkpoint
    from outrider.doctor.evidence import as_json, print_findings, print_summary
    from outrider.doctor.servers import Question, ServerClient, examine_server, print_causes, server_json
    from outrider.evaluation.loadtest.load import mixed_prompts
    from outrider.target.model import load_target

    assert config.base_url is not None and config.target is not None and config.drafter is not None
    console, device = Terminal(), config.machine.device
    urls = (config.base_url, config.baseline_url)
    endpoints = [Endpoint(url, config.served_model, os.environ.get(API_KEY)) for url in urls if url]
    model = served_model(endpoints)
    loaded = load_target(config.target, default_dtype(device), device)
    if loaded.tokenizer is None:
        raise ValueError(f"{config.target} has no tokenizer: a server is asked in text.")
    found = [load_checkpoint(path, loaded.device, loaded.num_layers).weights for path in (config.drafter, *config.also)]
    for weights in found:
        weights.module.check_target(loaded)
    own, *others = [weights.for_target(loaded) for weights in found]
    prompts = mixed_prompts(loaded.tokenizer, config.tasks, config.questions, seed=0, thinking=config.thinking)
    asked = [Question(prompt.name.partition("/")[0], prompt.tokens, prompt.chat) for prompt in prompts]
    clients = [
        ServerClient(
            one,
            model,
            loaded,
            max_new_tokens=config.max_new_tokens,
            timeout=config.timeout,
            thinking=config.thinking,
        )
        for one in endpoints
    ]
    with counting(console, "doctor") as on_progress:
        report = examine_server(
            clients[0],
            own,
            asked,
            temperatures=list(config.temperatures),
            baseline=clients[1] if config.baseline_url else None,
            others={str(path): weights for path, weights in zip(config.also, others, strict=True)},
            on_progress=on_progress,
        )
    seen = [replace(f, meaning="", remedy="") for f in report.findings if f.group == "server"]
    print_findings(seen, console)
    print_causes(report.findings, console)
    print_summary(report.findings, console)
    if config.json_out is not None:
        examined: dict[str, Any] = {"base_url": shown_url(config.base_url), "target": config.target}
        examined |= {"drafter": str(config.drafter), "tasks": list(config.tasks)}
        data = {**as_json(report.findings, examined), **server_json(report), "versions": versions()}
        _write(config.json_out, data)
    return report.findings
