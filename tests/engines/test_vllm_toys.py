"""vLLM 0.32 on a CPU against our own decoding, on toys: every draft block, every token, every tensor of the files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.checkpoints.checkpoint import Checkpoint
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import Drafter
from outrider.target.model import Target
from tests.engines import toys
from tests.engines.engine import ALWAYS_SHARED, INTERPRETED, UNREAD, Answer, Job, run_vllm

pytestmark = pytest.mark.engine
NEW = 24  # response tokens


@dataclass(frozen=True)
class Case:
    """A drafter as `outrider export --to` writes it."""

    method: str
    vocab: int = toys.VOCAB
    to: str = "vllm"

    def __str__(self) -> str:
        return f"{self.method}-{self.vocab}-{self.to}"

    @property
    def config(self) -> Any:
        config = toys.configs(self.vocab)[self.method]
        return replace(config, target_layer_ids=(0, 2, 3)) if self.to == "sglang" else config  # it fuses three


DFLASH, MEDUSA = Case("dflash"), Case("medusa")
CASES = [
    *[Case(method, vocab) for method in ("dflash", "dspark", "eagle3", "medusa") for vocab in (toys.VOCAB, 100)],
    Case("dflash", to="zlab"),
    Case("dspark", to="deepspec"),
    Case("eagle3", 100, to="sglang"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass
class Served:
    """All engines' answers and what they are compared with. Drafters have met the first half of the prompts."""

    target: Target
    prompts: list[list[int]]
    drafters: dict[Case, Drafter]
    answers: dict[object, Answer]


def edited(job: Job, destination: Path, field: str, value: object) -> Job:
    """The same work with one field changed in a copy of the drafter's config.json, wherever it is."""
    assert job.speculative is not None
    source = Path(job.speculative["model"])
    text = (source / "config.json").read_text()
    pattern = rf'("{field}": )[^,\s]+'
    assert re.search(pattern, text)
    destination.mkdir()
    (destination / "model.safetensors").symlink_to(source / "model.safetensors")
    (destination / "config.json").write_text(re.sub(pattern, rf"\g<1>{json.dumps(value)}", text))
    return replace(job, speculative={**job.speculative, "model": str(destination)})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("engine")
    target = toys.save_target(root / "target")
    plain = Job(root / "target", toys.prompts(8), NEW, max_num_seqs=4)
    drafters: dict[Case, Drafter] = {}
    trained: dict[Any, Checkpoint] = {}  # by its config: some cases are the same drafter in another dialect
    jobs: dict[object, Job] = {"plain": plain}
    for case in CASES:
        if case.config not in trained:
            out = root / "runs" / str(case)
            trained[case.config] = toys.train(case.config, target, plain.prompts[:4], NEW, out)
        checkpoint = trained[case.config]
        drafters[case] = checkpoint.serve(target)
        jobs[case] = plain.drafted(checkpoint, root / str(case), case.to)
    jobs["no bias"] = edited(jobs[MEDUSA], root / "no-bias", "medusa_fc_bias", False)
    jobs["turned"] = edited(jobs[DFLASH], root / "turned", "rope_theta", 10000.0)
    jobs["as installed"] = replace(jobs[DFLASH], repair=False)
    interpreted = {case: jobs.pop(case) for case in CASES if case.method == "dspark"}
    answers = run_vllm(list(jobs.values()), root / "vllm")
    answers += run_vllm(list(interpreted.values()), root / "interpreted", INTERPRETED)
    return Served(target, plain.prompts, drafters, dict(zip([*jobs, *interpreted], answers, strict=True)))


@pytest.mark.parametrize("case", ["plain", *CASES], ids=str)
def test_the_response_is_plain_decodings(served: Served, case: object) -> None:
    ours = [generate(served.target, prompt, rules=StopRules(NEW, stop_ids=())).tokens for prompt in served.prompts]
    assert served.answers[case].outputs == ours


@each_case
def test_every_block_is_ours(served: Served, case: Case) -> None:
    blocks = served.answers[case].blocks(served.target, served.drafters[case], served.prompts)
    assert len(blocks) > 40
    assert [theirs for theirs, _ in blocks] == [ours for _, ours in blocks]


@each_case
def test_as_many_are_accepted_in_every_round(served: Served, case: Case) -> None:
    answer = served.answers[case]
    accepted = False
    for prompt, response, rounds in zip(served.prompts, answer.outputs, answer.rounds, strict=True):
        # The engine's first token comes from the prompt alone, undrafted; ours is drafted unless it is in the prompt.
        rules = StopRules(NEW - 1, stop_ids=())
        ours = generate(served.target, prompt + response[:1], served.drafters[case], rules=rules)
        counts = [1]
        for stats in ours.rounds:
            counts.append(counts[-1] + len(stats.tokens))
            accepted |= stats.accepted > 1
        assert [min(count, NEW) for count, _ in rounds] == counts
    assert accepted, "rounds without accepted drafts show little"


@each_case
def test_every_tensor_is_used_and_none_is_missing(served: Served, case: Case) -> None:
    target, drafter = served.answers[case].loads
    assert not target.ignored and not target.missing
    assert drafter.given and set(drafter.ignored) <= UNREAD
    assert set(drafter.missing) <= ALWAYS_SHARED | ({"lm_head.weight"} if case.vocab == toys.VOCAB else set())
    if case.method != "medusa":
        assert served.answers[case].shared == {"embed_tokens": True, "lm_head": case.vocab == toys.VOCAB}


def test_a_tensor_that_the_config_does_not_announce_is_seen_to_be_ignored(served: Served) -> None:
    loads = served.answers["no bias"].loads[1]
    assert loads.ignored == [name for name in loads.given if name.endswith(".bias")]


@pytest.mark.parametrize("case", ["turned", "as installed"])
def test_a_wrong_rotation_or_norm_gives_other_blocks(served: Served, case: str) -> None:
    """When "as installed" fails, vLLM norms keys as it should: the repair in vllm_worker.py can go."""
    drafter = served.drafters[DFLASH]
    blocks = served.answers[case].blocks(served.target, drafter, served.prompts)
    assert any(theirs != ours for theirs, ours in blocks)
    assert served.answers[case].outputs == served.answers["plain"].outputs


def block_of(page: str) -> str:
    """The Python of a page of the docs."""
    block = re.search(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / page).read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def run_there(code: str) -> str:
    """What code prints in vLLM's environment."""
    command = [os.environ["VLLM_PYTHON"], "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_temperatures_of_drafts_are_lost_and_the_page_repairs_it() -> None:
    """When this fails, vLLM copies temperatures to drafts on a CPU, and vllm-cpu-sampled-drafts has ended."""
    printed = run_there(f"""
import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
from vllm.utils import cpu_triton_utils
{block_of("engines.md")}
x, ends, out = torch.tensor([0.5, 0.0]), torch.tensor([2, 5], dtype=torch.int32), torch.full((5,), -3.0)
cpu_triton_utils._expand_kernel_impl(out, x, ends, 0, 1)
print(out.tolist(), expand_batch_to_tokens(x, ends, 5, 0, 1).tolist())
""")
    assert printed.splitlines()[-1] == "[-3.0, -3.0, -3.0, -3.0, -3.0] [0.5, 0.5, 1.0, 1.0, 1.0]"


def test_the_report_for_vllm_reproduces() -> None:
    """When this fails, vLLM norms every layer by its own weights: the report has been answered."""
    printed = run_there(block_of("upstream/vllm-cpu-rms-norm-rows.md"))
    off = [
        [float(x) for x in re.findall(r"by (\S+?)(?:,|$)", line)] for line in printed.splitlines() if "layer" in line
    ]
    assert len(off) == 3 and off[0][0] < 1e-5
    assert all(own > 0.1 and first < 1e-5 for own, first in off[1:])
