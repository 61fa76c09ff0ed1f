"""The commands of README and the site, the tests that run their verbs, and what a command needs that no test has.

docs/site/reference.py makes a page of it; tests/cli/test_cli.py holds it to the tests.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HISTORY = ("decisions.md", "log.md")  # what they say of the past stays
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CARDS = sorted((ROOT / "src" / "outrider" / "models").glob("*/README.md"))  # written by `outrider package`
MEASUREMENTS = ROOT / "docs" / "results.md"  # whose commands take minutes to hours on a quiet machine

# Files whose tests run a verb, on toy targets unless they are of the real SmolLM2 or of an engine.
RUN_BY = {
    "bench": ["evaluation/loadtest/test_bench.py", "evaluation/loadtest/test_bench_engines.py",
              "evaluation/loadtest/test_sampled.py",
              "evaluation/loadtest/test_several_drafters.py", "backends/test_add_an_engine.py",
              "engines/test_vllm_bench.py",
              "engines/test_llama_cpp.py", "serving/test_toy_server.py"],
    "bench-drafters": ["evaluation/test_compare.py"],
    "bench-table": ["cli/test_tables.py"],
    "calibrate": ["evaluation/test_shipped.py", "drafters/test_add_a_drafter.py",
                  "evaluation/calibration/test_calibrate_cli.py"],
    "compare": ["evaluation/test_compare.py"],
    "demo": ["cli/test_demo.py", "smollm/test_smollm.py"],
    "doctor": ["doctor/test_doctor.py", "doctor/test_doctor_server.py"],
    "eval": ["cli/test_cli.py", "evaluation/test_shipped.py", "smollm/test_smollm.py", "backends/test_mlx.py"],
    "experiment": ["evaluation/test_experiment.py"],
    "export": ["backends/test_export.py", "cli/test_cli.py"],
    "features": ["training/test_store_cli.py"],
    "generate": ["cli/test_cli.py", "report/test_report.py", "backends/test_mlx.py"],
    "init": ["cli/test_init.py"],
    "inspect": ["data/test_inspect.py", "cli/test_cli.py"],
    "models": ["checkpoints/test_published.py"],
    "package": ["evaluation/test_shipped.py"],
    "prepare": ["data/test_prepare.py", "data/test_tasks.py", "cli/test_demo.py"],
    "profile": ["decoding/test_profile.py"],
    "push": ["cli/test_push.py"],
    "recipe": ["cli/test_recipe.py"],
    "report": ["report/test_report.py"],
    "runs": ["cli/test_runs.py"],
    "serve": ["serving/test_other_engines.py", "report/test_report.py"],
    "simulate": ["evaluation/loadtest/test_simulate.py"],
    "train": ["training/test_train_cli.py", "training/test_estimate.py"],
}  # fmt: skip

# Commands of other programs, by how they begin: tests that do what they do, or who runs them.
OTHERS: dict[str, tuple[list[str], str]] = {
    "make demo": (["cli/test_demo.py", "smollm/test_smollm.py"], "make; the tests run `outrider demo`"),
    "make test": ([], "make; runs the tests"),
    "python3 -m venv": ([], "by hand, for every release"),
    "pip install": ([], "a registry; `make` installs the same extras from the checkout"),
    "curl": (["serving/test_inspector.py"], "a running server; the tests send the same request"),
}

NO_TEST = "no test has"
# What an option needs that makes no part of a test.
NEEDS = {
    **{(verb, "--device"): "a CUDA device; tests run the verb on a CPU" for verb in ("calibrate", "eval")},
    ("bench", "--engine-python"): "the engine; `make test-engines` runs such a command",
    **{(verb, "--thinking"): "a target that thinks; `generate` is tested with it" for verb in ("calibrate", "serve")},
}


LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")  # (file, anchor) of a relative link


def prose_of(page: Path) -> str:
    """A Markdown page without its fenced blocks."""
    return re.sub(r"^```[\s\S]*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a Markdown page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in texts}


def documented_commands(page: Path) -> list[tuple[list[str], bool]]:
    """Words behind `outrider` of every command on a Markdown page, and whether it stands in a block of commands."""
    text, found = page.read_text(encoding="utf-8"), []
    blocks = re.findall(r"^```(.*)\n([\s\S]*?)^```$|((?:^ {4,}\S.*\n)+)", text, re.MULTILINE)
    parts = [(fenced or indented, True) for kind, fenced, indented in blocks if kind in ("", "sh")]
    parts += [(command, False) for command in re.findall(r"(?<!`)`(outrider [a-z][^`\n]*)`", text)]
    for part, in_block in parts:
        known: dict[str, str] = {}  # T=gsm8k,humaneval in an earlier line of the block
        for line in part.replace("\\\n", " ").splitlines():
            if not re.search(r"\boutrider\b|^ *[A-Z]=", line):
                continue
            for name, value in known.items():
                line = re.sub(rf"\${name}\b", value, line)
            reader = shlex.shlex(line, posix=True, punctuation_chars=True)
            reader.whitespace_split = True
            for command in re.split(r"\0(?:[;|&]+|do)(?=\0)", "\0".join(["", *reader, ""])):
                words = command.strip("\0").split("\0")
                set_first = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
                known |= dict(word.split("=", 1) for word in words[:set_first])
                start = set_first if words[set_first : set_first + 1] == ["outrider"] else None
                start = words.index("outrider.cli.main") if "outrider.cli.main" in words else start
                end = min(words.index(mark) if mark in words else len(words) for mark in (">", "<"))
                found += [(words[start + 1 : end], in_block)] if start is not None else []
    return found


def words_of(test: Path) -> set[str]:
    """The texts in a test file's code, and their words; lists of a verb's options (`VERBS`) run nothing."""
    tree = ast.parse(test.read_text(encoding="utf-8"))
    run = [node for node in tree.body if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERBS")]
    texts = {
        node.value
        for part in run
        for node in ast.walk(part)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return texts | {word for text in texts for word in text.split()}


def command_rows() -> Iterator[tuple[Path, str, list[str], list[str]]]:
    """(page, command, the tests that run its verb with its options, what else it needs) of every block's command."""
    known = {verb: {name: words_of(ROOT / "tests" / name) for name in names} for verb, names in RUN_BY.items()}
    for page in PAGES:
        for words, in_block in documented_commands(page):
            if not in_block or page.name in HISTORY:
                continue
            files, options = known[words[0]], sorted({w.split("=")[0] for w in words if w.startswith("--")})
            needs = {NEEDS[words[0], option] for option in options if (words[0], option) in NEEDS}
            wanted = [option for option in options if (words[0], option) not in NEEDS]
            tests: list[str] = []
            for option in wanted:
                have = [name for name, found in files.items() if option in found]
                if not have and page != MEASUREMENTS:
                    needs.add(f"{NO_TEST} {option}")
                tests += [name for name in have[:1] if not set(have) & set(tests)]
            if page == MEASUREMENTS:
                needs.add("minutes to hours on a quiet machine: run by hand")
            yield page, f"outrider {shlex.join(words)}", tests or list(files)[:1], sorted(needs)


def other_rows() -> Iterator[tuple[Path, str, list[str], list[str]]]:
    """As `command_rows`, of the lines in blocks that begin with another program."""
    for page in PAGES:
        if page.name in HISTORY:
            continue
        blocks = re.findall(r"^```(.*)\n([\s\S]*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE)
        for line in "\n".join(block for kind, block in blocks if kind in ("", "sh")).replace("\\\n", " ").splitlines():
            if re.match(r"(make|pip|python3?|curl|git|docker|cmake|npm|apt-get) ", line) and "outrider.cli" not in line:
                begins = next((name for name in OTHERS if line.startswith(name)), None)
                tests, needs = OTHERS[begins] if begins is not None else ([], f"{NO_TEST} it")
                yield page, re.sub(r"\s+", " ", line.split(" # ")[0]).strip(), tests, [needs]
