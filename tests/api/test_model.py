"""`outrider.load`: one object that answers texts, chats, token ids and batches, as the functions below it do."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import outrider
from outrider.api.drafter import DrafterChoice
from outrider.data.chat import render
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.decoding.verification import TypicalAcceptance
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.targets import toy_target
from tests.toys.zlab import reference, saved

PROMPTS = ["say a word", "and another one", "hi"]


@pytest.fixture(scope="module")
def model(toy: Path) -> outrider.Model:
    return outrider.load(toy / "target", drafter=toy / "drafter", device="cpu")


def test_import_and_version_need_no_pytorch() -> None:
    code = "import sys, outrider; print(outrider.__version__, 'load' in dir(outrider), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [metadata.version("outrider"), "True", "False"]


def test_a_response_is_that_of_the_decoder(model: outrider.Model) -> None:
    """Text, chat messages and token ids say the same, streamed or whole."""
    assert model.target.tokenizer is not None and model.drafter is not None
    assert repr(model) == f"<outrider.Model {model.target.name}, drafter {model.drafter.name}>"
    tokens = render(model.target.tokenizer, [PROMPTS[0]], [])
    params, rules = SamplingParams(temperature=0.9, top_k=5, seed=4), StopRules(20)
    wanted = generate(model.target, tokens, model.drafter.drafter, params=params, rules=rules)
    options = {"temperature": 0.9, "top_k": 5, "seed": 4, "max_new_tokens": 20}
    for prompt in (PROMPTS[0], [{"role": "user", "content": PROMPTS[0]}], tokens):
        found = model.generate(prompt, **options)
        assert (found.tokens, found.text, found.finish) == (wanted.tokens, wanted.text, wanted.finish)
        assert found.rounds == len(wanted.rounds) and found.accepted_length == 20 / len(wanted.rounds)
        assert str(found) == "".join(chunk.text for chunk in model.stream(prompt, **options)) == wanted.text
    raw = model.generate(PROMPTS[0], raw=True, max_new_tokens=8).tokens
    assert raw == model.generate(model.target.tokenizer(PROMPTS[0])["input_ids"], max_new_tokens=8).tokens
    assert raw != model.generate(PROMPTS[0], max_new_tokens=8).tokens


def test_stops_and_mistakes(model: outrider.Model) -> None:
    whole = model.generate(PROMPTS[0], max_new_tokens=20).text
    for stop in (whole[6:8], [whole[6:8], "never"]):
        assert model.generate(PROMPTS[0], max_new_tokens=20, stop=stop).text == whole[: whole.index(whole[6:8])]
    for wrong, meant in (("temprature", "temperature"), ("max_tokens", "max_new_tokens")):
        with pytest.raises(TypeError, match=f"no keyword {wrong}; did you mean {meant}"):
            model.generate(PROMPTS[0], **{wrong: 1})
    for prompt in (None, 5, torch.tensor([1, 2]), [{"content": "no role"}]):
        with pytest.raises(TypeError, match="a prompt is a text, messages with a role each, or token ids"):
            model.generate(prompt)
    with pytest.raises(ValueError, match="top_p=2"):
        model.stream(PROMPTS[0], top_p=2.0)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(" ")
    with pytest.raises(ValueError, match="raw continues a text"):
        model.generate([{"role": "user", "content": "a"}], raw=True)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "coupled": True, "seed": 3}])
def test_a_batch_is_each_prompt_alone(model: outrider.Model, sampling: dict[str, float]) -> None:
    """In order, whether by the engine or, for a lossy rule, one by one; prompt i has the seed + i."""
    found = model.generate(PROMPTS, max_new_tokens=16, **sampling)
    for number, (prompt, response) in enumerate(zip(PROMPTS, found, strict=True)):
        own = {**sampling, "seed": sampling.get("seed", 0) + number}
        alone = model.generate(prompt, max_new_tokens=16, **own)
        assert (response.tokens, response.text, response.finish) == (alone.tokens, alone.text, alone.finish)
        assert alone.rounds <= response.rounds <= len(response.tokens)
    assert model.generate([]) == []
    if not sampling:
        lossy = {"typical": TypicalAcceptance(), "max_new_tokens": 16, "temperature": 1.0}
        wanted = [model.generate(prompt, seed=number, **lossy).tokens for number, prompt in enumerate(PROMPTS)]
        assert [response.tokens for response in model.generate(PROMPTS, seed=0, **lossy)] == wanted


def test_without_a_drafter_decoding_is_plain_and_auto_says_so(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: outrider.Model
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    with pytest.warns(UserWarning, match="no drafter for .*decoding is plain"):
        plain = outrider.load(str(toy / "target"))
    found = plain.generate(PROMPTS, max_new_tokens=12)
    assert all(response.accepted_length == 1 for response in found)
    assert [response.tokens for response in found] == [r.tokens for r in model.generate(PROMPTS, max_new_tokens=12)]
    assert (
        outrider.load(str(toy / "target"), None).drafter is outrider.load(str(toy / "target"), "none").drafter is None
    )


def test_spec_generate_answers_the_call_of_z_labs(tmp_path: Path) -> None:
    """The same call gives the same tokens, stop token included; another target is refused."""
    causal = toy_target("qwen3").model
    causal.lm_head.weight.data[3:] = 0  # three likely tokens: drafts of a random drafter are accepted now and then
    target = Target(causal, None, "toy")
    saved(tmp_path, "all")
    ours = outrider.Model(target, DrafterChoice("directory", str(tmp_path)).open(target))
    theirs = reference(tmp_path)
    prompt = torch.randint(4, 97, (1, 10), generator=torch.Generator().manual_seed(2))
    call = {"target": causal, "input_ids": prompt, "max_new_tokens": 40, "temperature": 0.0}
    wanted = theirs.spec_generate(**call, stop_token_ids=None)
    assert wanted.shape == (1, 50) and torch.equal(ours.spec_generate(**call), wanted)
    stop = [next(token for token in wanted[0, 11:].tolist() if token != wanted[0, 10])]
    cut = theirs.spec_generate(**call, stop_token_ids=stop)
    assert cut.shape[1] < 50 and torch.equal(ours.spec_generate(**call, stop_token_ids=stop), cut)
    call["temperature"] = 1.0
    torch.manual_seed(5)
    drawn = [ours.spec_generate(**call) for _ in range(2)]
    torch.manual_seed(5)
    assert torch.equal(ours.spec_generate(**call), drawn[0]) and not torch.equal(*drawn)
    with pytest.raises(ValueError, match="shape"):
        ours.spec_generate(input_ids=prompt.repeat(2, 1), max_new_tokens=4)
    other = copy.deepcopy(causal)
    other.config.vocab_size = 12
    with pytest.raises(ValueError, match="vocab_size 12"):
        ours.spec_generate(**{**call, "target": other})


def test_texts_to_copy_from_are_read_for_hybrids(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("say a word and another one")
    beside = f"hybrid:{toy / 'drafter'}"
    model = outrider.load(toy / "target", beside, "cpu", lookup=[tmp_path / "notes.txt"], lookup_responses=100)
    assert model.target.tokenizer is not None and model.drafter is not None
    tokens = model.target.tokenizer("say a word and another one", add_special_tokens=False)["input_ids"]
    library = model.drafter.drafter.library
    assert library is not None and library.responses == 100
    assert library.find(tuple(tokens[:4]), 99) == (4, tokens[4:])
    for drafter, message in ((toy / "drafter", "needs a hybrid drafter"), (None, "needs a hybrid drafter")):
        with pytest.raises(ValueError, match=message):
            outrider.load(toy / "target", drafter, "cpu", lookup_responses=10)
    with pytest.raises(ValueError, match=r"lookup: .*none\.txt"):
        outrider.load(toy / "target", beside, "cpu", lookup=[tmp_path / "none.txt"])
