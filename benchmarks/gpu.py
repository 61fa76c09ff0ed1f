"""The first minutes on a GPU: predictions written down, then tests, decoding, prototypes and training steps.

    python -m benchmarks.gpu --out docs/results/gpu [--size 8b|tiny] [--minutes 8] [--device cuda]

predictions.json is written before anything runs; measured.json is written anew after every part, each figure beside
its prediction. A part begins only while its minutes are left, so that one command ends in time.

The target has random weights in the shape of Qwen3-8B, made on the device: what a step costs does not depend on values.
    tests        pytest -m cuda
    decoding     a plain step and a DSpark round of 1, 8 and 32 users, with CUDA graphs and without; waits of the host
    prototypes   attention of 32 users by our paged call, by FlashAttention's varlen call on contiguous keys, and by one
                 masked call on gathered keys; the head's products with float32 results
    training     steps of a DSpark of five layers at 2,048 anchors, by part; compilations
    compiled     the same steps with compiled draft layers, on a GPU alone
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.data.responses import Sample
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import UNCALIBRATED, DrafterWeights
from outrider.target.model import Target
from outrider.target.paged_attention import Plan, Reader, attend, plan
from outrider.training.features import Features, logit_summary
from outrider.training.objective import BlockObjective
from outrider.training.parallel import Ranks
from outrider.training.recipe import Recipe, load_recipe
from outrider.training.setup import Run, new_drafter, training_precision
from outrider.training.trainer import Trainer
from outrider.utils.measure import machine, quartiles, set_up, to_host, usable_device, versions

USERS = (1, 8, 32)
_CONTEXT, _STEPS = 512, 6
_MOST_TOKENS = 200  # of a response: more than the timed steps can give
_NAME = "Qwen/Qwen3-8B"
_SHAPE = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_SHAPE |= {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
_SHAPE |= {"num_key_value_heads": 8, "tie_word_embeddings": False}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
_BANDWIDTH = {"a100": 2.0e12, "h100": 3.35e12, "h200": 4.8e12, "b200": 8.0e12}  # bytes of memory a second, data sheets
_LAUNCH = (4e-6, 12e-6)  # seconds of the host that a kernel launched from Python takes


@dataclass(frozen=True)
class Prediction:
    """A figure is expected in [low, high]; `why` in a few words."""

    low: float
    high: float
    why: str


def shape(size: str) -> dict[str, Any]:
    return _SHAPE if size == "8b" else {**_SHAPE, **_TINY, "max_position_embeddings": 4096}


def small_recipe(size: str) -> Recipe:
    """`large/dspark` with few sequences a step, which is what is timed."""
    sequences, anchors = (4, 512) if size == "8b" else (2, 8)
    changes = ["optimizer.epochs=null", "optimizer.steps=100", "watch.decode_every=null"]
    changes += [f"optimizer.sequences_per_step={sequences}", f"optimizer.anchors_per_sequence={anchors}"]
    if size == "tiny":
        changes += ["drafter.num_hidden_layers=2", "drafter.num_aux_layers=3", "drafter.markov_rank=8"]
    return load_recipe(Path("large/dspark"), changes)


def predictions(size: str, kind: str) -> dict[str, Prediction]:
    """From what is known before a run: bytes read, operations, and what a launch costs. Of a GPU of that kind."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_SHAPE))
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    read = 2 * weights / _BANDWIDTH[kind]
    fast, slow = _LAUNCH
    alike = {
        "syncs of a greedy step": Prediction(0, 1, "launched ahead, counted on the simulated device"),
        "compilations in training": Prediction(1, 6, "forward and backward, few kinds of shapes"),
        "compilations after two steps": Prediction(0, 0, "shapes are dynamic"),
    }
    if size != "8b":
        return alike
    return alike | {
        "plain step, 1 user, eager": Prediction(max(read, 704 * fast), 1.5 * max(read, 704 * slow), "704 launches"),
        "plain step, 1 user, graph": Prediction(read, 1.5 * read, "weights are read once"),
        "plain step, 8 users, graph": Prediction(read, 1.7 * read, "weights once, keys of 8 contexts"),
        "plain step, 32 users, graph": Prediction(read, 2.5 * read, "keys of 32 contexts"),
        "dspark round, 1 user, graph": Prediction(read, 1.8 * read, "two graphs, launched ahead"),
        "dspark round, 32 users, graph": Prediction(read, 4 * read, "256 rows, keys of 32 contexts"),
        "paged call / gathered call, 32 users": Prediction(0.15, 0.6, "gathered keys are read, written and read again"),
        "paged call / varlen call, 32 users": Prediction(0.8, 2.0, "Triton against FlashAttention, same keys"),
        "float32 head / bfloat16 products with float32 sums": Prediction(3, 12, "tensor cores against float32"),
    }


def random_target(size: str, device: torch.device) -> Target:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape(size)), dtype=torch.bfloat16)
    words = Tokenizer(WordLevel({"<mask>": 0}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>")
    return Target(model, tokenizer, _NAME)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median, after two runs that are not counted."""
    found = []
    for repeat in range(repeats + 2):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        if repeat >= 2:
            found.append(time.perf_counter() - began)
    return quartiles(found)[1]


def seconds_of_steps(engine: Engine, repeats: int) -> float:
    """Median of steps in a row after two that are not counted; where they are launched ahead, from read to read."""
    found = []
    for _ in range(repeats + 2):
        engine.step()
        assert engine.last is not None
        found.append(engine.last.seconds)
    return quartiles(found[2:])[1]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decoding(target: Target, size: str) -> dict[str, float]:
    """Seconds of steps in which all users decode, and waits of the host in one."""
    found: dict[str, float] = {}
    recipe = small_recipe(size)
    module = new_drafter(recipe, target).to(target.device)
    context = min(_CONTEXT, target.max_context // 4)
    for drafted in (False, True):
        drafter = DrafterWeights(module).serve(target, UNCALIBRATED) if drafted else None
        for users, captures in [(1, False), *((count, True) for count in USERS)]:
            if target.graphs is not None:
                target.graphs.captures = captures
            blocks = users * (-(-(context + _MOST_TOKENS + 16) // EngineConfig.block_size) + 1)
            engine = Engine(target, drafter, config=EngineConfig(users, 4096, num_blocks=blocks))
            for user in range(users):
                tokens = [(7 * user + 13 * i) % 500 + 5 for i in range(context)]
                engine.submit(Request(str(user), tokens, rules=StopRules(_MOST_TOKENS, stop_ids=())))
            while engine.last is None or engine.last.requests < users or engine.last.prefill_tokens:
                engine.step()
            what = f"{'dspark round' if drafted else 'plain step'}, {users} user{'s' * (users > 1)}"
            name = f"{what}, {'graph' if captures else 'eager'}"
            found[name] = seconds_of_steps(engine, _STEPS)
            assert not engine.idle, "the responses ended while steps were timed"
            if drafted and captures and target.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    engine.step()
                torch.cuda.set_sync_debug_mode("default")
                waits = sum("synchronizing" in str(warning.message) for warning in caught)
                found["syncs of a greedy step"] = max(found.get("syncs of a greedy step", 0), waits)
            del engine
            gc.collect()
    return found


def prototypes(target: Target) -> dict[str, float]:
    """Attention as it is and what could take its place, and what stands in for a float32 head."""
    device, config = target.device, target.config
    users, rows, keys = 32, 8, min(2048, target.max_context)
    K, G, E = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads, config.head_dim
    pool = torch.randn(2, K, users * keys, E, dtype=target.dtype, device=device)
    q = torch.randn(users * rows, K * G, E, dtype=target.dtype, device=device)
    slots = torch.arange(users * keys, device=device).flip(0)
    mask = torch.zeros(users, 1, rows * G, keys, dtype=target.dtype, device=device)

    def gathered() -> Tensor:
        k, v = (part.index_select(1, slots).unflatten(1, (users, keys)).transpose(0, 1) for part in pool)
        folded = q.view(users, rows, K, G, E).permute(0, 2, 1, 3, 4).reshape(users, K, rows * G, E)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)

    ends = torch.arange(users + 1, dtype=torch.int32, device=device)
    flat_k, flat_v = (part.transpose(0, 1).contiguous() for part in pool)

    def varlen() -> Tensor:
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q, flat_k, flat_v, ends * rows, ends * keys, rows, keys, 0.0, True, False
        )[0]
        return found

    page = 16
    pages = list(reversed(range(users * keys // page)))
    tables = [pages[user * keys // page : (user + 1) * keys // page] for user in range(users)]
    host = plan([Reader(keys - rows, range(keys - rows, keys), table) for table in tables], G, page)
    made = Plan.of(torch.from_numpy(host.numbers).to(device), host.sizes, page, split=host.split)

    def paged() -> Tensor:
        return attend(q, pool[0], pool[1], plan=made)

    hidden = torch.randn(2048, target.hidden_size, dtype=target.dtype, device=device)
    weight32 = target.head_VD.float() if device.type == "cuda" else target.head_VD[:64].float()
    found = {"gathered call": seconds_of(gathered, device, 10)}
    if device.type == "cuda":
        found["varlen call"] = seconds_of(varlen, device, 10)
        found["paged call"] = seconds_of(paged, device, 10)
        for other in ("varlen call", "gathered call"):
            found[f"paged call / {other}, 32 users"] = found["paged call"] / found[other]
        wide = seconds_of(lambda: torch.mm(hidden, target.head_VD.T, out_dtype=torch.float32), device, 10)
        narrow = seconds_of(lambda: hidden.float() @ weight32.T, device, 10)
        found["float32 head / bfloat16 products with float32 sums"] = narrow / wide
    return found


def time_steps(target: Target, recipe: Recipe, prompt: int, response: int) -> dict[str, float]:
    """`Trainer.rehearse` of two steps of a new drafter, on random features of conversations of one length."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    drafter = new_drafter(recipe, target).to(target.device)
    ids = torch.arange(drafter.config.draft_vocab_size, device=target.device)
    tokens = torch.randint(target.vocab_size, (prompt + response,), generator=torch.Generator().manual_seed(0))
    sample = Sample("random", tokens.tolist(), ((prompt, prompt + response),))
    samples = [sample] * recipe.optimizer.sequences_per_step
    objective = BlockObjective(target, ids, recipe.objective, precision=training_precision(recipe, target))
    run = Run(target, drafter, objective, ids, len(ids) < target.vocab_size, samples=samples, held_out=[sample])
    aux_SLD = draw(sample.length - 1, len(drafter.config.target_layer_ids), target.hidden_size).half()
    hidden_RD = draw(response, target.hidden_size).half()
    features = Features(aux_SLD, hidden_RD, *to_host(logit_summary(target, hidden_RD.to(target.device))))
    return Trainer(recipe, run, Ranks(device=target.device)).rehearse(2, [features] * len(samples))


def training(target: Target, size: str) -> dict[str, float]:
    """Seconds of a step on features at hand, memory, and how often something was compiled."""
    from torch._dynamo.utils import counters

    prompt, response = (500, 1000) if size == "8b" else (8, 24)
    changes = {"precision": "bfloat16", "device": str(target.device), "compile": False}
    recipe = small_recipe(size).model_copy(update=changes)
    counters.clear()
    first = time_steps(target, recipe, prompt, response)
    compiled = counters["stats"]["unique_graphs"]
    second = time_steps(target, recipe, prompt, response)
    after = counters["stats"]["unique_graphs"] - compiled
    return {
        "training step, with compilations": first["step_seconds"],
        "training step": second["step_seconds"],
        "training peak memory, GB": second["peak_memory_gib"] * 2**30 / 1e9,
        "compilations in training": compiled,
        "compilations after two steps": after,
    }


def compiled(target: Target, size: str) -> dict[str, float]:
    """Seconds of a step with compiled draft layers, and how many graphs that took."""
    from torch._dynamo.utils import counters

    if target.device.type != "cuda":
        return {}
    changes = {"precision": "bfloat16", "device": str(target.device), "compile": True}
    counters.clear()
    step = time_steps(target, small_recipe(size).model_copy(update=changes), 500, 1000)
    graphs = counters["stats"]["unique_graphs"]
    return {"training step, layers compiled": step["step_seconds"], "graphs of layers": graphs}


def tests(minutes: float) -> dict[str, float]:
    """How many tests of the mark passed and failed."""
    if importlib.util.find_spec("pytest") is None:
        return {"tests: pytest is not installed": 1}
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--no-header"]
    try:
        done = subprocess.run(command, timeout=60 * minutes, capture_output=True, text=True, check=False)
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode() + "\n0 in time"
    print(text[-4000:])
    words = text.strip().splitlines()[-1].replace(",", "").split()
    return {f"tests {kind}": float(words[words.index(kind) - 1]) for kind in ("passed", "failed") if kind in words}


def main(
    out: Annotated[Path, typer.Option()],
    size: Annotated[str, typer.Option(help="8b or tiny")] = "8b",
    device: Annotated[str, typer.Option()] = "cuda",
    kind: Annotated[str, typer.Option(help="of the GPU, for the predictions")] = "h100",
    minutes: Annotated[float, typer.Option()] = 8.0,
    parts: Annotated[str, typer.Option()] = "tests,decoding,prototypes,training,compiled",
) -> None:
    """Write the predictions, run the parts while there is time, and write what was found beside them."""
    began = time.perf_counter()
    set_up(None)
    expected = predictions(size, kind)
    out.mkdir(parents=True, exist_ok=True)
    (out / "predictions.json").write_text(
        json.dumps({"gpu": kind, "size": size, "figures": {n: vars(p) for n, p in expected.items()}}, indent=1)
    )
    there = usable_device(device)
    target = random_target(size, there)
    runs: dict[str, tuple[float, Callable[[], dict[str, float]]]] = {  # minutes that must be left, and the part
        "tests": (3.0, lambda: tests(3.0)),
        "decoding": (1.5, lambda: decoding(target, size)),
        "prototypes": (0.5, lambda: prototypes(target)),
        "training": (1.0, lambda: training(target, size)),
        "compiled": (2.0, lambda: compiled(target, size)),
    }
    measured: dict[str, Any] = {"machine": machine(), "versions": versions(), "gpu": kind, "size": size, "figures": {}}
    for name in parts.split(","):
        needed, run = runs[name]
        if time.perf_counter() - began > 60 * (minutes - needed):
            print(f"{name}: no time left")
            continue
        try:
            figures: dict[str, Any] = run()
        except Exception as error:  # the other parts are measured all the same
            figures = {f"{name} failed": f"{type(error).__name__}: {error}"[:400]}
        for figure, value in figures.items():
            row: dict[str, Any] = {"measured": value}
            if figure in expected:
                row |= vars(expected[figure])
                row["as predicted"] = expected[figure].low <= value <= expected[figure].high
            measured["figures"][figure] = row
            print(figure, json.dumps(row))
        measured["seconds"] = time.perf_counter() - began
        (out / "measured.json").write_text(json.dumps(measured, indent=1))
    if any(figure.endswith("failed") for figure in measured["figures"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
