"""What two ranks do in tests/evaluation/loadtest/test_bench_engines.py.

    torchrun --nproc-per-node 2 tests/toys/share_worker.py TOY OUT

TOY holds target/, drafter/ and tasks.jsonl.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from outrider.backends.local import NamedDrafter, choose_variants, engine_config, local_engines
from outrider.backends.transformers import load_causal_lm
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.checkpoints.describe import DrafterInfo
from outrider.data.sources import TaskSettings
from outrider.evaluation.evaluate import evaluate
from outrider.evaluation.loadtest.config import Sla
from outrider.evaluation.loadtest.engines import MeasuredEngine, compare_asked, transformers_engine
from outrider.evaluation.loadtest.load import mixed_prompts
from outrider.evaluation.loadtest.metrics import Journal
from outrider.evaluation.loadtest.sweep import Sweep, Workload, run_workload
from outrider.target.model import load_target
from outrider.training.parallel import Ranks, join
from tests.toys.tokenizer import byte_tokenizer

NEW = 6  # tokens of a response


def work(toy: Path, out: Path, ranks: Ranks) -> None:
    """An evaluation, and benchmarks of transformers and of our engine, their conversations shared by the ranks."""
    target = load_target(toy / "target")
    drafter = load_checkpoint(toy / "drafter").serve(target)
    config = TaskSettings(max_new_tokens=NEW)
    info = DrafterInfo(label="d", algorithm="dspark", gamma=drafter.gamma)
    results = evaluate(target, drafter, [str(toy / "tasks.jsonl")], config, info, ranks=ranks)
    (out / f"results{ranks.rank}.json").write_text(results.model_dump_json())

    prompts = mixed_prompts(byte_tokenizer(), [str(toy / "tasks.jsonl")], 4, seed=0)
    model = load_causal_lm(str(toy / "target"), "cpu", torch.float32)
    theirs = transformers_engine(model, sorted(target.eos_ids), 3, None)
    measure(theirs, Workload(prompts, 2, NEW), out / "transformers", ranks)

    load, names = Workload(prompts, 2, NEW), ("none", "fixed-2")
    variants = choose_variants([NamedDrafter("", drafter)], names)
    engines = local_engines(target, variants, lambda users: engine_config(load.longest + NEW, int(users), 64))
    ours = MeasuredEngine(engines, names, partial(compare_asked, target), exact=True)
    measure(ours, load, out / "local", ranks)


def measure(engine: MeasuredEngine, load: Workload, out: Path, ranks: Ranks) -> None:
    """Five requests of every variant, one user per rank."""
    sweep = Sweep("closed", (ranks.world,), tuple(engine.variants), 1, 5, None, NEW, Sla(600.0, 0.0))
    journal = ranks.from_main(lambda: Journal(out, {}))
    run_workload(
        sweep, engine, load, byte_tokenizer(), journal, thinking=False, ranks=ranks, on_progress=lambda *_: None
    )
    (out / f"prompts{ranks.rank}.json").write_text(json.dumps(load.prompts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join("cpu") as ranks:
        work(Path(sys.argv[1]), Path(sys.argv[2]), ranks)
