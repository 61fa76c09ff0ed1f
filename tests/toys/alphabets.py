"""A target that continues alphabets with a stride ("aceg" -> "ikmo..."), and a drafter on its responses.

Both are trained for a moment, so that acceptance is far above chance and everything the drafter reads matters to it.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.chat import render
from outrider.data.regenerate import Response
from outrider.data.responses import FORMAT, Reply, join_turns
from outrider.drafters.config import mask_token_id
from outrider.drafters.dspark import DSpark
from outrider.drafters.loss import ObjectiveConfig
from outrider.sampling import SamplingParams
from outrider.target.model import Target, load_target
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Recipe
from outrider.training.setup import Run
from outrider.training.trainer import Trainer
from tests.toys.decoding import generate_batch
from tests.toys.targets import TOY, toy_config
from tests.toys.tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% if not enable_thinking %}-{% endif %}{% endif %}"
)
AUX_LAYERS = (0, 1, 3)
STEPS = 150


def toy_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def alphabet(rng: random.Random) -> tuple[str, str]:
    """A user turn and its continuation; one in six is a "!", answered by "!" and a stop."""
    if rng.random() < 1 / 6:
        return "!" + rng.choice(string.ascii_letters) * rng.randrange(1, 6), "!<|im_end|>"
    stride, start, length = rng.choice([1, 3, 5, 7]), rng.randrange(26), rng.randrange(3, 7)
    letters = "".join(chr(97 + (start + i * stride) % 26) for i in range(length + 24))
    return letters[:length], letters[length:]


def train_target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    rng = random.Random(0)
    torch.manual_seed(0)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fields = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": stop, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, **fields}))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 20) * (1 - step / STEPS)
        rows = []
        for _ in range(16):
            turn, continuation = alphabet(rng)
            prompt = render(tokenizer, [turn], [])
            response = list(tokenizer(continuation)["input_ids"])
            rows.append((torch.tensor(prompt + response), torch.tensor([-100] * len(prompt) + response)))
        pad = torch.nn.utils.rnn.pad_sequence
        inputs = pad([r[0] for r in rows], batch_first=True)
        labels = pad([r[1] for r in rows], batch_first=True, padding_value=-100)
        optimizer.zero_grad()
        model(inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def write_responses(path: Path, settings: dict[str, Any], replies: list[Reply]) -> Path:
    lines = [{"format": FORMAT, "settings": settings}, *map(asdict, replies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def decode(target: Target, prompts: list[list[int]], temperature: float = 0.0) -> list[Response]:
    seeds = list(range(len(prompts)))
    return generate_batch(target, prompts, 40, SamplingParams(temperature=temperature), seeds)


def train_pair(home: Path) -> Path:
    """target/, drafter/ and responses.jsonl that belong together, below `home`."""
    tokenizer = toy_tokenizer()
    model = train_target(tokenizer)
    model.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    target = load_target(home / "target")

    rng = random.Random(1)
    turns = list(dict.fromkeys(alphabet(rng)[0] for _ in range(64)))
    prompts = [render(tokenizer, [turn], []) for turn in turns]
    replies = [
        Reply(f"c{number}", 0, prompt, r.tokens, r.finished)
        for number, (prompt, r) in enumerate(zip(prompts, decode(target, prompts), strict=True))
    ]
    settings = {"target": target.name, "temperature": 0.0, "max_new_tokens": 40}
    write_responses(home / "responses.jsonl", settings, replies)

    samples = join_turns(replies)
    vocab = target.vocab_size
    shapes = {"vocab_size": vocab, "mask_token_id": mask_token_id(target, None), "target_layer_ids": AUX_LAYERS}
    torch.manual_seed(0)
    drafter = DSpark(toy_config(**shapes, draft_vocab_size=40, rope_theta=5000.0, markov_rank=4))
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], AUX_LAYERS))
    ids = choose_draft_ids(samples, vocab, 40, target.eos_ids)
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0))
    fields: dict[str, Any] = {"target": str(home / "target"), "out": str(home), "data": {"prompts": [{"path": "x"}]}}
    schedule = {"steps": STEPS, "sequences_per_step": 4, "anchors_per_sequence": 12, "learning_rate": 1e-2}
    recipe = Recipe.model_validate({**fields, "optimizer": schedule})
    Trainer(recipe, Run(target, drafter, objective, ids, True, samples[8:], samples[:8])).train()
    return home
