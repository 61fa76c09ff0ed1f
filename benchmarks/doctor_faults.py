"""Seeded faults on real servers, and whether `outrider doctor --base-url` names them.

    python -m benchmarks.doctor_faults prepare --work DIR          drafters, exports and GGUF files; once
    python -m benchmarks.doctor_faults run --work DIR --out faults.json
    python -m benchmarks.doctor_faults table faults.json

Every case starts a server (ours, vLLM's CPU build, llama.cpp) of SmolLM2-135M with one thing wrong or nothing
wrong, and runs the doctor as a process of its own, with the drafter as it was trained. A fault is made in one of three
places: in a copy of the checkpoint, in the server's flags, or in the server's code. The last is done in the server's
own environment by a `sitecustomize.py` on PYTHONPATH, which changes one module after it is imported.

A case passes where the cause is named first; a healthy server, where no cause is named. Finished cases are not run
again.

    VLLM_PYTHON   what tests/engines/vllm_environment.sh prints          cases of an engine that is
    LLAMA_CPP     what tests/engines/llama_cpp_environment.sh prints     not named are left out
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.backends.base import Launch, Speculation
from outrider.backends.export import export_drafter, target_facts
from outrider.backends.launch import free_port, launched
from outrider.backends.registry import engine_of
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.data.chat import Chat
from outrider.data.responses import FORMAT
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.evaluation.loadtest.load import mixed_prompts
from outrider.target.hub import EMBEDDED_ID, resolve_model
from outrider.target.model import load_target
from outrider.utils.measure import machine, versions
from outrider.utils.packaged import PACKAGE

SHIPPED = PACKAGE / "models" / "smollm2-135m-dspark"
TASKS = ["eval_math", "eval_code", "eval_chat"]  # those of the doctor's defaults
PATIENCE = 900.0  # seconds for a server to start
STEPS = {"dflash2": 90, "dflash1": 60, "medusa": 80}
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

Engine = Literal["outrider", "vllm", "llama.cpp"]
app = typer.Typer(add_completion=False)


# ----------------------------------------------------------------------------
# Faults of checkpoints: edits of a copy of the directory that the server loads.
# ----------------------------------------------------------------------------

Edit = Callable[[Path], None]
Tensors = dict[str, Tensor]


def config(**changes: Any) -> Edit:
    """Other fields of config.json, wherever they stand in it; those that stand nowhere are added at the top."""

    def change(section: dict[str, Any], name: str, value: Any) -> bool:
        found = name in section
        if found:
            section[name] = value
        inner = [change(part, name, value) for part in section.values() if isinstance(part, dict)]
        return found or any(inner)

    def edit(directory: Path) -> None:
        path = directory / "config.json"
        fields = json.loads(path.read_text())
        for name, value in changes.items():
            if not change(fields, name, value):
                fields[name] = value
        path.write_text(json.dumps(fields, indent=1))

    return edit


def tensors(change: Callable[[Tensors], None]) -> Edit:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path, metadata={"format": "pt"})

    return edit


def swapped_aux_layers(found: Tensors) -> None:
    first, second, *rest = found["fc.weight"].chunk(4, dim=1)
    found["fc.weight"] = torch.cat((second, first, *rest), dim=1)


def moved_vocabulary(found: Tensors) -> None:
    """Row i of the head stands for the token of row i - 1."""
    rows = torch.arange(len(found["d2t"]))
    found["d2t"] = (found["d2t"] + rows).roll(1) - rows


def without_sequential_head(found: Tensors) -> None:
    found["markov_head.markov_w2.weight"].zero_()


def without_last_layer(found: Tensors) -> None:
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        found[f"layers.1.{name}.weight"].zero_()


def rounded(bits: int) -> Callable[[Tensors], None]:
    def change(found: Tensors) -> None:
        most = 2 ** (bits - 1) - 1
        for tensor in (t for name, t in found.items() if name.endswith("proj.weight") or name == "fc.weight"):
            scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / most
            tensor.copy_((tensor.float() / scale).round() * scale)

    return change


def noisy(found: Tensors) -> None:
    """Weights as of another training: normal noise of a quarter of their spread."""
    generator = torch.Generator().manual_seed(0)
    for tensor in found.values():
        if tensor.is_floating_point() and tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor.copy_((tensor.float() + 0.25 * noise).to(tensor.dtype))


def tuned(found: Tensors) -> None:
    """Another fine-tune of the target: noise of a twentieth of their spread on the MLPs."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in found.items():
        if name.endswith("mlp.down_proj.weight"):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor.copy_((tensor.float() + 0.15 * noise).to(tensor.dtype))


def penalised(directory: Path) -> None:
    path = directory / "generation_config.json"
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | {"repetition_penalty": 1.3}))


def another_template(directory: Path) -> None:
    """The chat template with a system prompt of its own."""
    found = {path: path.read_text() for path in directory.iterdir() if path.suffix in (".json", ".jinja")}
    for path, text in found.items():
        for own in ("You are a helpful AI assistant named SmolLM, trained by Hugging Face",):
            if own in text:
                path.write_text(text.replace(own, "You are a pirate."))


# ----------------------------------------------------------------------------
# Faults of the server's code: source that runs in its process once a module is imported; `module` names that.
# ----------------------------------------------------------------------------

HOOK = """
import importlib.machinery, importlib.util, json, os, sys

class _Finder:
    def __init__(self, wanted):
        self.wanted = wanted

    def find_spec(self, name, path=None, target=None):
        if name not in self.wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load, code = spec.loader.exec_module, self.wanted.pop(name)

        def exec_module(module):
            load(module)
            exec(code, {"module": module})

        spec.loader.exec_module = exec_module
        return spec

_wanted = json.loads(os.environ.get("SEEDED_FAULT", "{}"))
if _wanted:
    sys.meta_path.insert(0, _Finder(_wanted))
"""

OUR_DFLASH, OUR_APP, OUR_RULE = "outrider.drafters.dflash", "outrider.serving.app", "outrider.decoding.verification"
VLLM_MODEL, VLLM_PROPOSER = "vllm.model_executor.models.qwen3_dflash", "vllm.v1.spec_decode.dflash"
VLLM_SAMPLER = "vllm.v1.sample.rejection_sampler"

LAYER_BY_LAYER = """
import torch
from vllm import _custom_ops as ops

def normalize(self, all_k):
    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
    return normed

module.DFlashQwen3Model._normalize_context_k = normalize
"""
EXPANDED = """
import torch

def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)

module.expand_batch_to_tokens = expanded
"""
MOVED_THERE = """
def moved(self, *arguments, own=module.DFlashProposer.build_model_inputs_first_pass):
    inputs, count = own(self, *arguments)
    return {**inputs, "positions": inputs["positions"] + 1}, count

module.DFlashProposer.build_model_inputs_first_pass = moved
"""
MOVED_HERE = """
def block_hidden(self, sessions, anchors):
    import torch
    rows, lengths = self.config.block_size, [session.length for session in sessions]
    tokens = self.module.block_tokens(torch.tensor(anchors))
    rope = tuple(x.unflatten(0, tokens.shape) for x in self.rope([n + k + 1 for n in lengths for k in range(rows)]))
    return self.module.blocks(self.embed(tokens), rope, self.caches.source(sessions, rows))

module.BlockDrafter.block_hidden = block_hidden
"""
LATE = """
def extend(self, sessions, tokens, aux, own=module.BlockDrafter.extend, last={}):
    import torch
    parts = list(aux.split([len(part) for part in tokens]))
    for place, (session, part) in enumerate(zip(sessions, parts)):
        if len(part):
            before = part[:1] if session.length == 0 else last[id(session)]
            parts[place], last[id(session)] = torch.cat((before, part[:-1])), part[-1:]
    own(self, sessions, tokens, torch.cat(parts))

module.BlockDrafter.extend = extend
"""
SCALED = """
def embed(self, tokens, own=module.BlockDrafter.embed):
    return own(self, tokens) * self.config.hidden_size ** 0.5

module.BlockDrafter.embed = embed
"""
COMPARED = """
def compared(draft, node, rows, source):
    import torch
    target = rows.row(node + 1)
    token = source.choose(target)
    for child in draft.children(node):
        if draft.tokens[child] == token:
            return child, None
    return None, torch.nn.functional.one_hot(torch.tensor(token), len(target)).to(target.dtype)

module._try_children = compared
"""
ENDS = """
async def collect(self, submission, own=module.Answer.collect, seen=[]):
    seen.append(1)
    if len(seen) > 6:
        import os
        os._exit(1)
    return await own(self, submission)

module.Answer.collect = collect
"""
HANGS = """
async def collect(self, submission, own=module.Answer.collect, seen=[]):
    seen.append(1)
    if len(seen) > 6:
        import asyncio
        await asyncio.sleep(3600)
    return await own(self, submission)

module.Answer.collect = collect
"""
LIES = """
async def collect(self, submission, own=module.Answer.collect):
    data = await own(self, submission)
    for choice in data["choices"]:
        choice.pop("trace", None)
    record = data["metrics"]["speculative_decoding"]
    record["acceptance_histogram"] = [record["num_spec_steps"], *record["acceptance_histogram"][1:]]
    record["num_spec_steps"] = sum(record["acceptance_histogram"])
    return data

module.Answer.collect = collect
"""


# ----------------------------------------------------------------------------
# The cases.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One server.

    Attributes:
        cause: the doctor's name of what is wrong; None: nothing is.
        drafter: of `prepare`; the doctor is given it as it is.
        edit: of the copy that the server loads; `target_edit`: of the target's copy.
        code: faults of the server's code, by module.
        drafts: a draft's tokens as the server is told; None: the drafter's own number.
        flags: of the server, `asked`: of the doctor.
        gguf: type of the target's file, for llama.cpp.
        silent: without vLLM's per-request records.
    """

    name: str
    engine: Engine
    cause: str | None
    fault: str = ""
    drafter: str = "dspark"
    edit: Edit | None = None
    target_edit: Edit | None = None
    code: dict[str, str] = field(default_factory=dict)
    drafts: int | None = None
    flags: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    gguf: str = "f32"
    silent: bool = False


def ours(name: str, cause: str | None, fault: str, **fields: Any) -> Case:
    return Case(f"ours: {name}", "outrider", cause, fault, **fields)


def vllm(name: str, cause: str | None, fault: str, **fields: Any) -> Case:
    fields = {"drafter": "dflash2", **fields}
    return Case(f"vLLM: {name}", "vllm", cause, fault, **fields)


def llama(name: str, cause: str | None, fault: str, **fields: Any) -> Case:
    return Case(f"llama.cpp: {name}", "llama.cpp", cause, fault, **fields)


# vLLM 0.32 on a CPU has two defects (docs/engines), each a case below; elsewhere they are repaired.
SAMPLES = {VLLM_SAMPLER: EXPANDED}
REPAIRED = {VLLM_MODEL: LAYER_BY_LAYER, **SAMPLES}

FAULTS = [
    ours("aux layers", "aux layers", "aux layers + 1", edit=config(target_layer_ids=[2, 11, 19, 28])),
    ours("order", "order of aux layers", "first two aux layers exchanged in fc", edit=tensors(swapped_aux_layers)),
    ours("mask token", "mask token", "mask_token_id 0", edit=config(mask_token_id=0)),
    ours("layout", "block layout", "sample_from_anchor false", edit=config(sample_from_anchor=False, block_size=8)),
    ours("causal", "attention inside the block", "is_causal true", edit=config(is_causal=True)),
    ours("rope", "RoPE base", "rope_theta 10000", edit=config(rope_theta=10000.0)),
    ours("vocabulary", "reduced vocabulary", "d2t moved by one row", edit=tensors(moved_vocabulary)),
    ours("markov", "sequential head", "markov_w2 zeros", edit=tensors(without_sequential_head)),
    ours("stale", "weights", "weights with noise; --also names them", edit=tensors(noisy), asked=("--also", "SPOILED")),
    ours("quantised drafter", "weights", "matrices of 4 bits", edit=tensors(rounded(4))),
    ours("layer", "weights", "last draft layer zeros", edit=tensors(without_last_layer)),
    ours("positions", "position ids", "server's code: block positions + 1", code={OUR_DFLASH: MOVED_HERE}),
    ours("late", "features", "server's code: features one token late", code={OUR_DFLASH: LATE}),
    ours("embedding", "embedding scale", "server's code: embeddings times 24", code={OUR_DFLASH: SCALED}),
    ours("compared", "sampling on one side", "server's code: drawn drafts compared, not verified",
         code={OUR_RULE: COMPARED}),
    ours("target", "text", "another target: noise on its MLPs", target_edit=tensors(tuned)),
    ours("template", "prompt", "chat template with another system prompt", target_edit=another_template),
    vllm("norms", "norms of context keys", "norms of vLLM 0.32 as they are, two draft layers", code=SAMPLES),
    vllm("sampled", "sampled text", "temperatures of vLLM 0.32 as they are", drafter="dflash1"),
    vllm("drafts", "draft length", "num_speculative_tokens 3", code=REPAIRED, drafts=3),
    vllm("rope", "RoPE base", "rope_theta 10000", code=REPAIRED, edit=config(rope_theta=10000.0)),
    vllm("stale", "weights", "weights with noise; --also names them", code=REPAIRED, edit=tensors(noisy),
         asked=("--also", "SPOILED")),
    vllm("positions", "position ids", "server's code: block positions + 1",
         code={**REPAIRED, VLLM_PROPOSER: MOVED_THERE}),
    vllm("aux layers", "aux layers", "aux layers + 1", code=REPAIRED,
         edit=config(target_layer_ids=[2, 11, 19, 28])),
    vllm("penalty", "defaults", "repetition_penalty 1.3 in the target's generation_config.json", code=REPAIRED,
         target_edit=penalised),
    llama("drafts", "draft length", "--spec-draft-n-max 3, its default", drafts=3),
    llama("target", "text", "target converted to tq2_0", gguf="tq2_0"),
    llama("rope", "RoPE base", "rope_theta 10000 in the file", edit=config(rope_theta=10000.0)),
    llama("stale", "weights", "weights with noise; --also names them", edit=tensors(noisy),
          asked=("--also", "SPOILED")),
    llama("template", "prompt", "--chat-template llama2", flags=("--chat-template", "llama2")),
]  # fmt: skip

BROKEN = [
    ours("ends", "answers", "the process ends after 6 answers", code={OUR_APP: ENDS}),
    ours("hangs", "answers", "no answer after the sixth", code={OUR_APP: HANGS}, asked=("--timeout", "5")),
    ours("lies", "counters", "rounds counted too often", code={OUR_APP: LIES}),
    vllm("silent", "counters", "no per-request records, --disable-log-stats", drafter="dflash1", silent=True,
         code=SAMPLES, flags=("--disable-log-stats",)),
]  # fmt: skip

HEALTHY = [
    ours("healthy", None, "shipped DSpark, defaults"),
    ours("healthy, sampled", None, "shipped DSpark, temperature 1", asked=("--temperature", "1")),
    ours("healthy, long", None, "shipped DSpark, 96 tokens", asked=("--max-new-tokens", "96", "--questions", "12")),
    ours("healthy, short", None, "shipped DSpark, 16 tokens", asked=("--max-new-tokens", "16")),
    ours("healthy, dflash", None, "DFlash, two layers", drafter="dflash2"),
    ours("healthy, medusa", None, "Medusa", drafter="medusa"),
    vllm("healthy, one layer", None, "DFlash, one layer", drafter="dflash1", code=SAMPLES),
    vllm("healthy, two layers", None, "DFlash, two layers, norms repaired", code=REPAIRED),
    vllm("healthy, medusa", None, "Medusa", drafter="medusa", code=SAMPLES),
    llama("healthy", None, "shipped DSpark, defaults"),
    llama("healthy, greedy", None, "shipped DSpark, temperature 0, 64 tokens",
          asked=("--temperature", "0", "--max-new-tokens", "64")),
]  # fmt: skip

CASES = [*FAULTS, *BROKEN, *HEALTHY]


# ----------------------------------------------------------------------------
# Drafters.
# ----------------------------------------------------------------------------


def bare_dflash(out: Path, layers: int) -> None:
    """The shipped DSpark's backbone as a DFlash of its first `layers` layers, to go on training from."""
    shipped = load_checkpoint(SHIPPED).weights
    own = shipped.config
    names = {one.name: getattr(own, one.name) for one in fields(DFlashConfig)}
    shape = {**names, "num_hidden_layers": layers, "block_size": own.gamma + 1, "sample_from_anchor": False}
    module = DFlash(DFlashConfig(**shape))
    found = shipped.module.state_dict()
    module.load_state_dict({name: found[name] for name in module.state_dict()})
    save_drafter(Checkpoint(DrafterWeights(module, shipped.draft_ids_Vd)), out)


@app.command()
def prepare(work: Annotated[Path, typer.Option(help="directory for what is made")]) -> None:
    """Train the DFlash and Medusa drafters on the target's answers to the doctor's own prompts."""
    work.mkdir(parents=True, exist_ok=True)
    answers = work / "answers.jsonl"
    if not answers.exists():
        target = load_target(EMBEDDED_ID)
        assert target.tokenizer is not None
        settings = {"target": target.name, "chat_template_sha256": Chat.of(target).template_sha256}
        rows: list[dict[str, Any]] = [{"format": FORMAT, "settings": settings}]
        for prompt in mixed_prompts(target.tokenizer, TASKS, 36, seed=0):
            tokens = list(prompt.tokens)
            response = generate(target, tokens, rules=StopRules(64)).tokens
            rows.append({"id": prompt.name, "turn": 0, "prompt": tokens, "response": response, "finished": True})
        answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("dflash2", "dflash1", "medusa"):
        if (work / name).exists():
            continue
        recipe: dict[str, Any] = {
            "target": EMBEDDED_ID,
            "out": str(work / f"training-{name}"),
            "data": {"responses": str(answers), "held_out": 1},
            "drafter": {"algorithm": name.rstrip("12")},
            "objective": {"confidence": 0.0},
            "optimizer": {
                "steps": STEPS[name],
                "sequences_per_step": 3,
                "anchors_per_sequence": 20,
                "learning_rate": 5e-4 if name.startswith("dflash") else 2e-3,
            },
            "watch": {"decode_every": None},
            "eval_every": STEPS[name],
            "save_every": STEPS[name],
        }
        if name.startswith("dflash"):
            start = work / f"start-{name}"
            if not start.exists():
                bare_dflash(start, int(name[-1]))
            recipe["start_from"] = str(start)
        else:
            recipe["drafter"]["draft_vocab_size"] = 4096
        path = work / f"{name}.yaml"
        path.write_text(json.dumps(recipe))  # YAML holds JSON
        subprocess.run([*_outrider("train"), str(path)], check=True)
        shutil.copytree(work / f"training-{name}" / "drafter", work / name)


def _outrider(*words: str) -> list[str]:
    return [sys.executable, "-c", "from outrider.cli.main import main; main()", *words]


# ----------------------------------------------------------------------------
# Servers.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The directories of one case."""

    work: Path
    case: Case

    @property
    def trained(self) -> Path:
        """The drafter as it was trained, which the doctor is given."""
        return SHIPPED if self.case.drafter == "dspark" else self.work / self.case.drafter

    @property
    def home(self) -> Path:
        return self.work / "cases" / self.case.name.replace(": ", "-").replace(", ", "-").replace(" ", "-")

    @property
    def spoiled(self) -> Path:
        """The copy of the drafter with its fault, as `outrider` reads it."""
        return self.home / "drafter"


def _spoil(place: Place) -> tuple[Path, Path]:
    """Target and drafter that the server loads, in the package's dialect."""
    case, source = place.case, resolve_model(EMBEDDED_ID)
    shutil.rmtree(place.home, ignore_errors=True)
    place.home.mkdir(parents=True)
    target, drafter = source, place.trained
    if case.target_edit is not None:
        target = place.home / "target"
        shutil.copytree(source, target)
        case.target_edit(target)
    if case.edit is not None:
        shutil.copytree(drafter, place.spoiled)
        (place.spoiled / "outrider.json").unlink(missing_ok=True)  # its hashes are of the right weights
        case.edit(place.spoiled)
        drafter = place.spoiled
    return target, drafter


@contextmanager
def _serving(place: Place, threads: int) -> Iterator[str]:
    """The case's server; its URL."""
    case, port = place.case, free_port()
    target, drafter = _spoil(place)
    site = place.work / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(HOOK)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep) if case.engine == "outrider" else []
    environment = {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, own)]),
        "SEEDED_FAULT": json.dumps(case.code),
        "OMP_NUM_THREADS": str(threads),
    }
    if case.engine == "outrider":
        command = _outrider("serve", "--target", str(target), "--drafter", str(drafter), "--port", str(port))
        command += ["--threads", str(threads), *case.flags]
    else:
        command = _foreign(place, target, drafter, port)
        environment |= VARIABLES
    (place.home / "command.txt").write_text(shlex.join(command))
    url = f"http://127.0.0.1:{port}"
    health = f"{url}/v1/models" if case.engine == "outrider" else f"{url}/health"
    with launched(command, health, place.home / "server.log", PATIENCE, environment):
        yield url


def _foreign(place: Place, target: Path, drafter: Path, port: int) -> list[str]:
    """The command of vLLM's or llama.cpp's server, with the drafter exported for it."""
    case, exported = place.case, place.home / "exported"
    checkpoint, engine = load_checkpoint(drafter), engine_of(case.engine)
    export_drafter(checkpoint, engine, exported, target_facts(str(target), torch.float32))
    speculation = Speculation.of(checkpoint.weights, str(exported))
    speculation = replace(speculation, drafts=case.drafts or speculation.drafts)
    launch = Launch(str(target), speculation, port=port, context=640, users=8, dtype="float32", prompt_cache=False)
    if case.engine == "vllm":
        python = os.environ["VLLM_PYTHON"]
        command = engine.command(replace(launch, python=python, extra=("--enforce-eager", *case.flags)))
        if case.silent:
            at = command.index("--per-request-spec-decode-metrics")
            return command[:at] + command[at + 2 :]
        return ["detailed" if word == "summary" else word for word in command]
    tree = Path(os.environ["LLAMA_CPP"])
    files = place.work / f"target-{case.gguf}.gguf", place.home / "drafter.gguf"
    if not files[0].exists():
        _gguf(tree, target, files[0], "--outtype", case.gguf)
    _gguf(tree, exported, files[1], "--outtype", "f32", "--target-model-dir", str(target))
    launch = replace(
        launch,
        target=str(files[0]),
        speculation=replace(speculation, drafter=str(files[1])),
        executable=str(tree / "build" / "bin" / "llama-server"),
        extra=("-t", "2", *case.flags),
    )
    return engine.command(launch)


def _gguf(tree: Path, source: Path, out: Path, *options: str) -> None:
    command = [sys.executable, str(tree / "convert_hf_to_gguf.py"), str(source), "--outfile", str(out), *options]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree / "python")}, check=True, capture_output=True)


# ----------------------------------------------------------------------------
# Runs and their table.
# ----------------------------------------------------------------------------


def _examined(place: Place, url: str, threads: int, asked: Sequence[str]) -> dict[str, Any]:
    """What the doctor says of the server, and the seconds that it took."""
    report = place.home / "report.json"
    command = _outrider("doctor", "--base-url", url, "--target", EMBEDDED_ID, "--drafter", str(place.trained))
    words = [str(place.spoiled) if word == "SPOILED" else word for word in (*asked, *place.case.asked)]
    command += ["--threads", str(threads), "--json", str(report), *words]
    started, began = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with (place.home / "doctor.txt").open("w") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
    seconds = time.perf_counter() - started
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    if not report.exists():
        raise RuntimeError(f"{place.case.name}: the doctor wrote no report, status {status}")
    measured = {"seconds": round(seconds, 1), "processor_seconds": round(used, 1), "status": status}
    return {**measured, **json.loads(report.read_text())}


def _outcome(place: Place, found: dict[str, Any]) -> dict[str, Any]:
    """What the results keep of a report; `work` stands in for the directory's path."""
    case = place.case
    findings = [{k: f[k] for k in ("check", "status", "figure")} for f in found["findings"]]
    named = [cause["cause"] for cause in found["causes"]]
    return {
        "case": case.name,
        "server": case.engine,
        "drafter": case.drafter,
        "fault": case.fault,
        "cause": case.cause,
        "named": [{k: c[k] for k in ("cause", "probability", "status")} for c in found["causes"]],
        "rank": named.index(case.cause) + 1 if case.cause in named else None,
        "verdict": found["verdict"],
        "seconds": found["seconds"],
        "processor_seconds": found["processor_seconds"],
        "accepted_length": found["server"].get("accepted_length"),
        "findings": [one | {"figure": one["figure"].replace(str(place.work), "work")} for one in findings],
    }


def _shown(outcome: dict[str, Any]) -> str:
    """The causes named, with their likelihoods; what was seen directly has none."""
    named = [c["cause"] + ("" if c["probability"] is None else f" {c['probability']:.0%}") for c in outcome["named"]]
    return ", ".join(named) or "nothing"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The results so far, by case."""
    return {one["case"]: one for one in json.loads(path.read_text())["cases"]} if path.exists() else {}


def _written(path: Path, outcomes: Iterable[dict[str, Any]]) -> None:
    data = {"machine": machine(), "versions": versions(), "cases": list(outcomes)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


@app.command()
def run(
    work: Annotated[Path, typer.Option(help="directory of `prepare`")],
    out: Annotated[Path, typer.Option(help="results; finished cases in it are kept")],
    only: Annotated[list[str] | None, typer.Option(help="cases whose names contain this")] = None,
    exact: Annotated[list[str] | None, typer.Option(help="cases of these names")] = None,
    again: Annotated[bool, typer.Option(help="run finished cases again")] = False,
    threads: Annotated[int, typer.Option(help="of server and doctor each")] = 2,
    asked: Annotated[str, typer.Option(help="further options of every doctor")] = "",
) -> None:
    """Run the cases that are not finished."""
    missing = {"vllm": "VLLM_PYTHON" not in os.environ, "llama.cpp": "LLAMA_CPP" not in os.environ, "outrider": False}
    for case in CASES:
        if missing[case.engine] or not (exact is None or case.name in exact):
            continue
        if only and not any(part in case.name for part in only):
            continue
        if case.name in _read(out) and not again:
            continue
        place, started = Place(work.resolve(), case), time.perf_counter()
        try:
            with _serving(place, threads) as url:
                outcome = _outcome(place, _examined(place, url, threads, shlex.split(asked)))
        except (ValueError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        _written(out, (_read(out) | {case.name: outcome}).values())
        named = _shown(outcome)
        print(
            f"{case.name}: {named}; cause {case.cause}, rank {outcome['rank']}; doctor {outcome['seconds']:.0f} s, "
            f"all {time.perf_counter() - started:.0f} s",
            flush=True,
        )


@app.command()
def table(path: Annotated[Path, typer.Argument(help="results of `run`")]) -> None:
    """Print the results as the tables of docs/results.md."""
    cases = json.loads(path.read_text())["cases"]
    print("| server | fault | named | rank | s |\n|---|---|---|---:|---:|")
    for one in cases:
        named = _shown(one)
        rank = (one["rank"] or "not named") if one["cause"] else "false alarm" if one["named"] else "-"
        print(f"| {one['server']} | {one['fault']} | {named} | {rank} | {one['seconds']:.0f} |")


if __name__ == "__main__":
    app()
