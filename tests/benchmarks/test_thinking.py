"""The template of a toy thinking mode: SmolLM2's own where nothing is thought."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.target.model import Target

TEMPLATE = (Path(__file__).parents[2] / "benchmarks" / "thinking.jinja").read_text()
ASKED = {"role": "user", "content": "How much is 2 + 2?"}
SYSTEM = {"role": "system", "content": "You are brief."}


@pytest.mark.parametrize("messages", [[ASKED], [SYSTEM, ASKED], [ASKED, {"role": "assistant", "content": "4"}, ASKED]])
def test_without_thinking_it_is_the_models_own(smollm: Target, messages: list[dict[str, str]]) -> None:
    assert smollm.tokenizer is not None
    own = smollm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for thinking in (False, True):
        found = smollm.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert (found == own) is not thinking
        assert found.endswith("<|im_start|>assistant\n" + "<think>\n" * thinking)
        assert ("step by step" in found) is thinking
