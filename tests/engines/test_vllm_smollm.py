"""SmolLM2 in vLLM 0.32 on a CPU against our own decoding: the text, the blocks, and how many drafts are accepted.

Drafters: the packaged ones and the directories named in OUTRIDER_DRAFTERS (separated as in PATH). Where none is named,
one of each method is trained here, until it knows the answers to half of the prompts. DSpark runs in Triton's
interpreter and is given a few prompts only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import pytest

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint
from outrider.target.hub import EMBEDDED_ID, resolve_model
from outrider.target.model import Target
from tests.engines.engine import (
    ALWAYS_SHARED,
    DIRECTORIES,
    INTERPRETED,
    NAMED,
    UNREAD,
    Answer,
    Job,
    our_acceptance,
    run_vllm,
    smollm_prompts,
)
from tests.toys import small_training

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPTS, FEW, NEW = 20, 4, 32
KNOWN, KNOWN_LENGTH = 10, 1.6  # prompts that the drafters trained here know, and their accepted length on those
TOLERANCE = {"dflash": 0.01, "dspark": 0.01, "eagle3": 0.02, "medusa": 0.02}  # of the accepted length
# Each stands for a directory that is not there yet.
TRAINED = [] if NAMED else [Path(method) for method in ("dflash", "eagle3", "medusa")]
each_drafter = pytest.mark.parametrize(
    "directory", [*DIRECTORIES, *TRAINED], ids=lambda directory: "-".join(directory.parts[-3:])
)


@dataclass
class Served:
    """`plain` answers all prompts, a drafter's job may have the first of them only."""

    plain: Answer
    checkpoints: dict[Path, Checkpoint]
    jobs: dict[Path, Job]
    answers: dict[Path, Answer]

    def by(self, directory: Path) -> Answer:
        if directory not in self.answers:
            pytest.skip("vLLM serves no drafter of this method")
        return self.answers[directory]


@pytest.fixture(scope="module")
def served(smollm: Target, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("engine")
    prompts = smollm_prompts(smollm, PROMPTS)
    found = {directory: load_checkpoint(directory) for directory in DIRECTORIES}
    known = small_training.answer(smollm, prompts[:KNOWN]) if TRAINED else []
    for method in TRAINED:
        folder = root / "training" / method
        trained = small_training.train_until(KNOWN_LENGTH, str(method), smollm, known, folder)
        found[method] = load_checkpoint(trained.directory)
    checkpoints = {place: checkpoint for place, checkpoint in found.items() if checkpoint.algorithm in TOLERANCE}
    assert checkpoints, "vLLM serves none of these drafters, so there is nothing to compare"
    job = Job(resolve_model(EMBEDDED_ID), prompts, NEW, max_num_seqs=PROMPTS)
    jobs: dict[Path, Job] = {Path(): job}
    interpreted: dict[Path, Job] = {}
    for number, (directory, checkpoint) in enumerate(checkpoints.items()):
        drafted = job.drafted(checkpoint, root / str(number))
        if checkpoint.algorithm == "dspark":
            interpreted[directory] = replace(drafted, prompts=prompts[:FEW])
        else:
            jobs[directory] = drafted
    answers = dict(zip(jobs, run_vllm(list(jobs.values()), root / "vllm"), strict=True))
    if interpreted:
        made = run_vllm(list(interpreted.values()), root / "interpreted", INTERPRETED)
        answers |= dict(zip(interpreted, made, strict=True))
    return Served(answers.pop(Path()), checkpoints, jobs | interpreted, answers)


@each_drafter
def test_the_text_is_plain_decodings(served: Served, directory: Path) -> None:
    found = served.by(directory).outputs
    assert found == served.plain.outputs[: len(found)]


@each_drafter
def test_every_tensor_is_used_and_none_is_missing(served: Served, directory: Path) -> None:
    for load in served.by(directory).loads:
        assert load.given and set(load.ignored) <= UNREAD
        assert set(load.missing) <= ALWAYS_SHARED | {"lm_head.weight"}


@each_drafter
def test_the_blocks_are_ours(served: Served, smollm: Target, directory: Path) -> None:
    answer, prompts = served.by(directory), served.jobs[directory].prompts
    blocks = answer.blocks(smollm, served.checkpoints[directory].serve(smollm), prompts)
    other = [(theirs, ours) for theirs, ours in blocks if theirs != ours]
    # The last bits of a sum depend on how many rows a product has, so two drafts that are as likely may change places.
    assert len(blocks) > 5 * len(prompts) and len(other) <= 0.01 * len(blocks), other


@each_drafter
def test_as_many_drafts_are_accepted(served: Served, smollm: Target, directory: Path) -> None:
    answer, checkpoint = served.by(directory), served.checkpoints[directory]
    drafter, prompts = checkpoint.serve(smollm), served.jobs[directory].prompts
    tau = 1 + mean(accepted for _, accepted in our_acceptance(smollm, drafter, prompts, answer.outputs, NEW))
    method = checkpoint.algorithm
    print(f"{method}: accepted length {answer.accepted_length:.3f} in vLLM, {tau:.3f} here")
    assert answer.accepted_length == pytest.approx(tau, rel=TOLERANCE[method])
    assert directory not in TRAINED or tau > 1.2, "rounds without accepted drafts show little"
