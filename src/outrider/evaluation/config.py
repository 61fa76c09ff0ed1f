"""Settings of measurements: eval, calibrate, profile, bench-drafters, compare and report.

Read by `--help`, so nothing here imports PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from outrider.backends.config import CheckpointTarget, DrafterDirectory
from outrider.config import (
    AUTO,
    CHOICES,
    DRAFTS,
    FILES,
    GENERAL,
    MODELS,
    PROMPTS,
    SAMPLING,
    SMOLLM2,
    TREE_FORM,
    Backend,
    Config,
    DrafterName,
    DrafterOrNone,
    Machine,
    MaxNewTokens,
    Prompts,
    Sampling,
    TargetName,
    TaskNames,
    Threshold,
    TreeText,
    Typical,
    argument,
    check_tree,
    option,
    rare,
)
from outrider.decoding.config import ProfileConfig

_CARD = "Model card"


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Decoding of tasks with and without a drafter (`evaluation.verbs.run_eval`)."""

    target: TargetName
    drafter: DrafterName = AUTO
    backend: Backend = "local"
    label: Annotated[
        str | None, rare(MODELS, "its name in comparisons; by default the algorithm, with the shape of its trees")
    ] = None
    tasks: TaskNames
    prompts: Prompts = Prompts()
    max_new_tokens: MaxNewTokens = 256
    sampling: Sampling = Sampling()
    draft_length: Annotated[
        int | None, option(DRAFTS, "drafts to verify (of a tree: nodes); else by cost, per round", min=0)
    ] = None
    confidence_threshold: Threshold = None
    block_size: Annotated[int | None, rare(DRAFTS, "rows of a block, if not as trained", min=1)] = None
    tree: TreeText = None
    typical: Typical = None
    concurrency: Annotated[int, rare(PROMPTS, "prompts decoded together, by the engine", min=1, max=1024)] = 1
    others: Annotated[
        bool, rare(GENERAL, "where it is no faster, try other drafters on a few prompts", "--others/--no-others")
    ] = True
    out: Annotated[Path, option(GENERAL, "directory for results.json and plots", beside="path")]
    machine: Machine = Machine()

    def check(self) -> None:
        if self.draft_length is not None and self.confidence_threshold is not None:
            raise ValueError("give --draft-length or --confidence-threshold, not both.")
        check_tree(self.tree, self.confidence_threshold)
        if self.backend == "mlx" and self.concurrency > 1:
            raise ValueError("--backend mlx decodes one prompt at a time: leave out --concurrency.")


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Config):
    """Results of eval side by side (evaluation/comparison.py)."""

    results: Annotated[tuple[str, ...], argument("directories of outrider eval --out, as DIR or NAME=DIR")]
    draft_cost: Annotated[
        Path | None, option(FILES, "JSON of outrider bench-drafters, to show as well", beside="path")
    ] = None
    question: Annotated[
        tuple[str, ...],
        option(
            GENERAL,
            "names set side by side, the first being compared with; repeatable",
            repeated=True,
            metavar="TEXT=A,B",
        ),
    ] = ()
    out: Annotated[Path | None, option(FILES, "directory for JSON, Markdown and pictures", beside="path")] = None
    allow_different: Annotated[
        bool, option(GENERAL, "compare other settings or machines, and say so", "--allow-different")
    ] = False

    @property
    def questions(self) -> dict[str, list[str]]:
        """{text: names that it sets side by side}; the text may have a `=`, names have none.

        Raises:
            ValueError: no text, or no name.
        """
        found = {}
        for question in self.question:
            text, _, names = question.rpartition("=")
            if not (text and names.strip(" ,")):
                raise ValueError(f"--question {question!r}: give TEXT=NAME,NAME.")
            found[text] = [name.strip() for name in names.split(",") if name.strip()]
        return found

    def check(self) -> None:
        assert self.questions is not None


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """One HTML page of what was measured (html_report.py)."""

    places: Annotated[tuple[Path, ...], argument("directories that other verbs wrote, or single files")]
    out: Annotated[Path, option(FILES, "HTML file", beside="path")] = Path("report.html")
    title: Annotated[str, option(FILES, "of the page")] = "Outrider report"


@dataclass(frozen=True, kw_only=True)
class DraftCostConfig(Config):
    """Seconds of drafts by their length (evaluation/draft_cost.py)."""

    drafters: Annotated[tuple[str, ...], argument(f"each as CHOICE or NAME=CHOICE. CHOICE: {CHOICES}")]
    target: TargetName = SMOLLM2
    tree: Annotated[
        tuple[str, ...],
        option(DRAFTS, f"that drafter drafts trees: {TREE_FORM}; repeatable", repeated=True, metavar="NAME=SIZE"),
    ] = ()
    block_size: Annotated[
        tuple[str, ...],
        option(DRAFTS, "that drafter's blocks have so many rows; repeatable", repeated=True, metavar="NAME=ROWS"),
    ] = ()
    context: Annotated[int, option(DRAFTS, "committed tokens before the draft", min=3)] = 256
    repeats: Annotated[int, option(DRAFTS, "rounds at every length, after two that are not counted", min=3)] = 20
    out: Annotated[Path | None, option(FILES, "JSON file for the figures, and a PNG beside it", beside="path")] = None
    machine: Machine = Machine()


@dataclass(frozen=True, kw_only=True)
class FitSampling(Sampling):
    """How the text is sampled that confidences are fitted on."""

    temperature: Annotated[float, option(SAMPLING, "as you will serve; 0: the likeliest token", min=0.0)] = 0.0


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Config):
    """The fit of confidences to acceptance (evaluation/calibration/calibrate.py)."""

    target: TargetName
    drafter: Annotated[str, option(MODELS, "drafter directory; what is found is stored in it", beside="drafter")]
    tasks: Annotated[tuple[str, ...], option(PROMPTS, "JSONL files or shipped sets it never saw", beside="name")]
    fit_tasks: Annotated[
        tuple[str, ...] | None, option(PROMPTS, "fit on these; else on half of --tasks", beside="name")
    ] = None
    fit: Annotated[
        Literal["likelihood", "sts"],
        option(GENERAL, "likelihood: temperatures and offsets; sts: DSpark's temperatures of least calibration error"),
    ] = "likelihood"
    prompts: Prompts = Prompts()
    max_new_tokens: MaxNewTokens = 256
    sampling: FitSampling = FitSampling()
    plot: Annotated[Path | None, option(FILES, "PNG file for reliability diagrams", beside="path")] = None
    sweep: Annotated[Path | None, option(FILES, "PNG file of figures by threshold; JSON beside it", beside="path")] = (
        None
    )
    rounds: Annotated[
        Path | None,
        option(FILES, "NPZ file of collected rounds: used if it exists, else written", beside="path"),
    ] = None
    export_sglang: Annotated[Path | None, option(FILES, "directory for SGLang's calibration file", beside="path")] = (
        None
    )
    machine: Machine = Machine()

    @property
    def about_confidences(self) -> bool:
        """Whether options are given that only drafters with confidences have."""
        return self.fit != "likelihood" or any((self.fit_tasks, self.plot, self.rounds, self.sweep, self.export_sglang))


@dataclass(frozen=True, kw_only=True)
class MachineProfileConfig(Config):
    """The measurement of what a step costs (decoding/profile.py)."""

    out: Annotated[Path, option(FILES, "JSON file for the profile", beside="path")]
    plot: Annotated[bool, option(FILES, "a PNG beside the profile")] = False
    tables: Annotated[bool, option(FILES, "print all that was measured", "--tables")] = False
    export_sglang: Annotated[
        Path | None, option(FILES, "directory for SGLang's table of steps per second", beside="path")
    ] = None
    target: TargetName = SMOLLM2
    drafter: DrafterOrNone = AUTO
    tree: TreeText = None
    steps: ProfileConfig = ProfileConfig()
    machine: Machine = Machine()


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(Config):
    """A table of drafters to train and compare (evaluation/experiment.py)."""

    table: Annotated[Path, argument("YAML with rows of recipes, seeds and tasks, or a packaged one")]
    overrides: Annotated[tuple[str, ...], argument("fields to change: seeds=[0] threads=1 ...")] = ()
    rows: Annotated[
        tuple[str, ...] | None, option(GENERAL, "only these rows, and those whose drafters they are (a,b)")
    ] = None
    dry_run: Annotated[bool, option(GENERAL, "only print the commands", "--dry-run")] = False


@dataclass(frozen=True, kw_only=True)
class PackageConfig(Config):
    """A drafter to ship, and what its model card says (evaluation/package.py)."""

    drafter: DrafterDirectory
    out: Annotated[Path, option(FILES, "where to; its name is the model's. May be DRAFTER itself", beside="path")]
    dtype: Annotated[
        str, option(FILES, "of the weights on disk: bfloat16 or float32", choices=("bfloat16", "float32"))
    ] = "bfloat16"
    results: Annotated[
        tuple[Path, ...],
        option(_CARD, "results.json of outrider eval; repeatable", repeated=True, beside="path"),
    ] = ()
    source: Annotated[tuple[str, ...], option(_CARD, "a source of training prompts; repeatable", repeated=True)] = ()
    license: Annotated[str | None, option(_CARD, "of the weights, as the hub spells it: apache-2.0")] = None
    confidence_threshold: Annotated[
        float | None, option(DRAFTS, "threshold that outrider generate uses by default", min=0.0, max=1.0)
    ] = None
    target: CheckpointTarget = None


@dataclass(frozen=True, kw_only=True)
class PushConfig(Config):
    """A packaged drafter, and where it goes on the hub."""

    drafter: Annotated[Path, argument("what outrider package wrote")]
    repo: Annotated[str, argument("OWNER/NAME on the hub; made where it is not there")]
    public: Annotated[bool, option(FILES, "for everyone to read; otherwise for you alone", "--public")] = False
