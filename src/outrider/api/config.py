"""Settings of `outrider generate`. `--help` imports this file, so it does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.config import (
    AUTO,
    DRAFTS,
    PROMPTS,
    SAMPLING,
    SMOLLM2,
    Backend,
    Config,
    DrafterOrNone,
    Lookup,
    Machine,
    MaxNewTokens,
    Sampling,
    TargetName,
    Thinking,
    TreeText,
    Typical,
    argument,
    check_tree,
    option,
)


@dataclass(frozen=True, kw_only=True)
class AnswerSampling(Sampling):
    """`Sampling` with a random seed by default."""

    seed: Annotated[int | None, option(SAMPLING, "of random numbers; random by default")] = None


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """Options of `outrider generate`: arguments of `outrider.load` and `Model.stream`."""

    prompt: Annotated[str, argument("what to answer")]
    target: TargetName = SMOLLM2
    drafter: DrafterOrNone = AUTO
    backend: Backend = "local"
    raw: Annotated[bool, option(PROMPTS, "no chat template: continue the text")] = False
    thinking: Thinking = False
    max_new_tokens: MaxNewTokens = 256
    stop: Annotated[tuple[str, ...], option(SAMPLING, "text that ends the response; repeatable", repeated=True)] = ()
    sampling: AnswerSampling = AnswerSampling()
    confidence_threshold: Annotated[
        float | None, option(DRAFTS, "verify while so confident; else by cost, per round", min=0.0, max=1.0)
    ] = None
    tree: TreeText = None
    lookup: Lookup = ()
    typical: Typical = None
    show_rounds: Annotated[bool, option(DRAFTS, "colour drafts, corrections and bonus tokens")] = False
    trace: Annotated[Path | None, option(DRAFTS, "JSON file of every round, for outrider report", beside="path")] = None
    machine: Machine = Machine()

    def check(self) -> None:
        if any(
            "\ud800" <= character <= "\udfff" for character in self.prompt
        ):  # Python decodes invalid bytes to surrogates
            raise ValueError("the prompt is not UTF-8 text.")
        if not self.prompt.strip():
            raise ValueError("the prompt is empty: give at least one word to answer.")
        if self.raw and self.thinking:
            raise ValueError("--thinking needs the chat template, which --raw leaves out: drop one of them.")
        check_tree(self.tree, self.confidence_threshold)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `Model.stream`."""
        return {
            "raw": self.raw,
            "thinking": self.thinking,
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            **self.sampling.settings(),
            "confidence_threshold": self.confidence_threshold,
        }
