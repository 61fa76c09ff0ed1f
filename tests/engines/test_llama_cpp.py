"""SmolLM2 in llama.cpp's server, build 11434, on a CPU against our own decoding: the text, and what is accepted.

    target     its directory -> llama.cpp's converter            drafter    `outrider export` -> the same converter
    server     as `outrider bench --launch` starts it, with keys and values in float32 too; one request at a time

Drafters: a DFlash and a DSpark trained here on the whole vocabulary, until they know the answers to half of the
prompts; the packaged ones (the shipped DSpark has a reduced vocabulary) and the directories named in
OUTRIDER_DRAFTERS, where llama.cpp serves them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch

from outrider.backends.base import Launch, Speculation
from outrider.backends.export import export_drafter, target_facts
from outrider.backends.launch import free_port, launched
from outrider.backends.llama_cpp import LlamaCpp
from outrider.backends.openai import read_metrics
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash
from outrider.target.hub import EMBEDDED_ID, resolve_model
from outrider.target.model import Target
from tests.engines.engine import DIRECTORIES, our_acceptance, smollm_prompts
from tests.toys import small_training

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="`make test-llama-cpp` builds llama.cpp and runs this"),
]
TREE = Path(os.environ.get("LLAMA_CPP", ""))
SERVER = LlamaCpp()
# Otherwise keys and values are float16, and attention adds in another order.
EXACT = ("-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")
PROMPTS, NEW = 20, 32
KNOWN, KNOWN_LENGTH = 10, 1.6  # prompts that the drafters trained here know, and their accepted length on those
PATIENCE = 300.0  # seconds
TRAINED = [Path(method) for method in ("dflash", "dspark")]  # each stands for a directory that is not there yet
each_drafter = pytest.mark.parametrize(
    "directory", [*TRAINED, *DIRECTORIES], ids=lambda directory: "-".join(directory.parts[-3:])
)


@dataclass(frozen=True)
class Answer:
    """Responses, and what the server counted: rounds with a draft, drafted and accepted tokens."""

    outputs: list[list[int]]
    rounds: float
    drafted: float
    accepted: float


@dataclass
class Served:
    """`refused`: why llama.cpp serves some of them not."""

    prompts: list[list[int]]
    plain: Answer
    checkpoints: dict[Path, Checkpoint]
    answers: dict[Path, Answer]
    refused: dict[Path, str]

    def by(self, directory: Path) -> Answer:
        if directory in self.refused:
            assert directory not in TRAINED, self.refused[directory]
            pytest.skip(self.refused[directory])
        return self.answers[directory]


def convert(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """llama.cpp's own converter, from a Hugging Face directory to a GGUF file in float32."""
    command = [sys.executable, str(TREE / "convert_hf_to_gguf.py"), str(source)]
    command += ["--outtype", "f32", "--outfile", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(TREE / "python"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def gguf(source: Path, out: Path, *options: str) -> str:
    made = convert(source, out, *options)
    assert made.returncode == 0, made.stderr[-3000:]
    return str(out)


def ask(launch: Launch, prompts: list[list[int]], log: Path) -> Answer:
    """Greedy responses of a server that runs for them alone."""
    launch = replace(launch, port=free_port())
    url = f"http://127.0.0.1:{launch.port}"
    fields = {"n_predict": NEW, "temperature": 0.0, "return_tokens": True, **SERVER.request_fields}
    with (
        launched(SERVER.command(launch), url + SERVER.health, log, PATIENCE),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        outputs = []
        for prompt in prompts:
            response = client.post("/completion", json={"prompt": prompt, **fields}).raise_for_status()
            outputs.append([int(token) for token in response.json()["tokens"]])
        counted = read_metrics(client.get("/metrics").raise_for_status().text)
    names = SERVER.metrics
    rounds, drafted, accepted = (sum(counted[str(name)]) for name in (names.rounds, names.drafted, names.accepted))
    return Answer(outputs, rounds, drafted, accepted)


@pytest.fixture(scope="module")
def served(smollm: Target, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("llama.cpp")
    prompts = smollm_prompts(smollm, PROMPTS)
    known = small_training.answer(smollm, prompts[:KNOWN])
    found = {directory: directory for directory in DIRECTORIES}
    for method in TRAINED:
        sections = {"drafter": {"algorithm": str(method)}}  # the whole vocabulary
        found[method] = small_training.train_until(
            KNOWN_LENGTH, str(method), smollm, known, root / method, sections=sections
        ).directory
    checkpoints = {place: load_checkpoint(directory) for place, directory in found.items()}

    source, executable = resolve_model(EMBEDDED_ID), TREE / "build" / "bin" / "llama-server"
    target, facts = gguf(source, root / "target.gguf"), target_facts(EMBEDDED_ID, torch.float32)
    context = max(map(len, prompts)) + NEW
    plain = Launch(target, users=1, context=context, prompt_cache=False, executable=str(executable), extra=EXACT)
    served = Served(prompts, ask(plain, prompts, root / "plain.log"), checkpoints, {}, {})
    for number, (place, checkpoint) in enumerate(checkpoints.items()):
        exported, algorithm = root / f"exported-{number}", checkpoint.algorithm
        try:
            export_drafter(checkpoint, SERVER, exported, facts)
        except ValueError as error:
            served.refused[place] = str(error)
            continue
        drafter = gguf(exported, root / f"drafter-{number}.gguf", "--target-model-dir", str(source))
        speculation = Speculation(algorithm, checkpoint.config.gamma, drafter)
        launch = replace(plain, speculation=speculation)
        served.answers[place] = ask(launch, prompts, root / f"drafter-{number}.log")
    return served


def test_without_a_drafter_nothing_is_drafted(served: Served) -> None:
    assert served.plain.rounds == served.plain.drafted == 0


@each_drafter
def test_the_text_is_plain_decodings(served: Served, directory: Path) -> None:
    assert served.by(directory).outputs == served.plain.outputs


@each_drafter
def test_as_many_drafts_are_accepted(served: Served, smollm: Target, directory: Path) -> None:
    answer, drafter = served.by(directory), served.checkpoints[directory].serve(smollm)
    ours = our_acceptance(smollm, drafter, served.prompts, answer.outputs, NEW, cut=True)
    drafted, accepted = (sum(column) / len(ours) for column in zip(*ours, strict=True))
    tau = 1 + accepted
    print(f"{directory}: accepted length {1 + answer.accepted / answer.rounds:.3f} in llama.cpp, {tau:.3f} here")
    assert 1 + answer.accepted / answer.rounds == pytest.approx(tau, rel=0.01)
    assert answer.drafted / answer.rounds == pytest.approx(drafted, rel=0.01), "whole blocks but for a response's end"
    assert directory not in TRAINED or tau > 1.2, "rounds without accepted drafts show little"


def test_its_converter_has_no_place_for_a_reduced_vocabulary_of_dflash(served: Served, tmp_path: Path) -> None:
    """When this fails, backends/llama_cpp.py refuses more than it must."""
    config = replace(served.checkpoints[Path("dflash")].config, draft_vocab_size=512)
    save_drafter(Checkpoint(DrafterWeights(DFlash(config), torch.arange(512))), tmp_path / "reduced")
    made = convert(
        tmp_path / "reduced", tmp_path / "drafter.gguf", "--target-model-dir", str(resolve_model(EMBEDDED_ID))
    )
    assert made.returncode != 0 and "Can not map tensor 'model.d2t'" in made.stderr
