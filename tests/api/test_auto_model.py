"""`AutoModel` of drafters: which class it opens, and that `spec_generate` gives the target's text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3Model

import outrider
from outrider.api.auto_model import DrafterModel
from outrider.checkpoints.checkpoint import save_drafter
from outrider.evaluation.evaluate import compare_greedy
from outrider.target.hub import EMBEDDED_ID, resolve_model
from outrider.target.model import Target
from outrider.utils.packaged import packaged
from tests.toys.dialects import made
from tests.toys.targets import TOY, toy_target

BOTH_ORDERS = """
{}
from transformers import AutoConfig, Qwen3Config, Qwen3Model
small = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
assert type(AutoModel.from_config(Qwen3Config(**small, head_dim=4, vocab_size=10))) is Qwen3Model
found = AutoModel.from_pretrained({!r})
assert type(found).__name__ == "DrafterModel" and callable(found.spec_generate), type(found)
"""
ORDERS = {
    "outrider first": "import outrider, sys\nassert 'torch' not in sys.modules\nfrom transformers import AutoModel",
    "transformers first": "from transformers import AutoModel\nimport outrider",
}


@pytest.mark.parametrize("order", ORDERS)
def test_importing_outrider_is_enough(order: str) -> None:
    """Before or after transformers; a plain model of the same type stays what it was."""
    program = BOTH_ORDERS.format(ORDERS[order], str(packaged("smollm2-135m-dspark", "models")))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("method", ["dspark", "dflash", "eagle3", "peagle", "hydra", "jetspec"])
def test_every_saved_drafter_opens_as_one(tmp_path: Path, method: str) -> None:
    """Those with layers of Qwen3 and Llama, and those that only Outrider reads."""
    save_drafter(made(method, "head" if method == "eagle3" else ""), tmp_path / "d")
    assert isinstance(AutoModel.from_pretrained(tmp_path / "d"), DrafterModel)


def test_a_plain_model_of_such_a_type_loads_as_before(tmp_path: Path) -> None:
    Qwen3Model(Qwen3Config(**TOY)).save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is Qwen3Model


def test_a_drafter_is_refused_for_another_target(tmp_path: Path) -> None:
    save_drafter(made("dspark", num_target_layers=9, target_layer_ids=(0, 1, 3)), tmp_path / "d")
    drafter = AutoModel.from_pretrained(tmp_path / "d")
    with pytest.raises(ValueError, match="9"):
        drafter.spec_generate(toy_target().model, torch.tensor([[5, 6, 7]]), max_new_tokens=4)


def test_spec_generate_gives_plain_decodings_text_on_smollm(smollm: Target) -> None:
    """The packaged drafter with transformers' own model of the target: greedy tokens are those of plain decoding."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model(EMBEDDED_ID), dtype=torch.float32)
    drafter = AutoModel.from_pretrained(packaged("smollm2-135m-dspark", "models"))
    assert smollm.tokenizer is not None
    ids = smollm.tokenizer("Q: What is 12 * 7? A:", return_tensors="pt")["input_ids"]
    plain = outrider.generate(smollm, ids[0].tolist(), rules=outrider.StopRules(40, stop_ids=())).tokens
    found = drafter.spec_generate(model, ids, max_new_tokens=40)
    assert found.shape == (1, ids.shape[1] + 40) and torch.equal(found[:, : ids.shape[1]], ids)
    assert compare_greedy(smollm, ids[0].tolist(), plain, found[0, ids.shape[1] :].tolist()) != "mismatch"
    stop = plain[9]
    cut = drafter.spec_generate(target=model, input_ids=ids, max_new_tokens=40, stop_token_ids=[stop])
    assert cut[0, -1] == stop and cut.shape[1] <= ids.shape[1] + 10
    drawn = [drafter.spec_generate(model, ids, 12, temperature=0.9) for _ in range(2)]
    assert all(one.shape[1] == ids.shape[1] + 12 for one in drawn) and not torch.equal(*drawn)
