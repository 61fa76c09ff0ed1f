"""Run the tests on every mutant and say which ones nothing notices: `make mutants`.

    copy of the tree --edit--> its named tests --all pass--> the tests of its room --all pass--> survived
                                     | one fails                   | one fails
                                     +---- that test passes without the edit? ----> killed by it; if not: invalid

Third-party packages are imported once; each run of tests is a fork of that process, which imports the package from the
copy. So a mutant costs seconds. A result is a line of JSON, and what has one is not run again: a run may be interrupted
at any time. A run that passes its time limit is a mutant killed by that limit, and counted apart.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutants import EQUIVALENT, MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NAMED_LIMIT, ROOM_LIMIT = 300.0, 900.0  # seconds of one run of tests
KILLED, TIMEOUT, SURVIVED, INVALID = "killed", "timeout", "survived", "invalid"

# Folders under tests/ that are run where the named tests pass, by the first part of the mutant's file.
FOLDERS = {
    "sampling.py": ("sampling", "verification", "decoding", "proof"),
    "decoding/verification.py": ("verification", "decoding", "proof"),
    "decoding": ("decoding", "engine", "proof"),
    "engine": ("engine", "decoding", "proof"),
    "scheduling": ("scheduling", "engine", "proof"),
    "target": ("target", "decoding", "engine"),
    "drafters": ("drafters", "decoding", "proof"),
    "training": ("training", "drafters"),
    "utils": ("training",),
    "data": ("data", "training"),
    "calibration": ("calibration",),
    "checkpoints": ("checkpoints", "drafters"),
    "evaluation": ("evaluation",),
    "cli": ("cli", "evaluation"),
    "api": ("api",),
    "loadtest": ("loadtest",),
    "backends": ("backends", "loadtest"),
    "serving": ("serving",),
    "report.py": ("report",),
}

# What the page counts by, by the beginning of the mutant's file; the first that fits.
AREAS = {
    "training/state.py": "resume",
    "training/trainer.py": "resume",
    "training/watch.py": "resume",
    "training": "training objective and data",
    "utils": "training objective and data",
    "data": "training objective and data",
    "sampling.py": "sampling",
    "decoding/verification.py": "verification",
    "decoding": "decoding",
    "engine": "engine",
    "scheduling": "scheduling",
    "target": "caches and target",
    "drafters": "drafting",
    "calibration": "calibration",
    "checkpoints": "formats",
    "evaluation": "evaluation and experiments",
    "cli": "evaluation and experiments",
    "api": "scheduling",
    "loadtest": "load tests",
    "backends": "load tests",
    "serving": "serving",
    "report.py": "report",
}

# Imported before the forks, as far as they are there: what takes long and is not ours.
PACKAGES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.generation.logits_process",
    "hypothesis",
    "matplotlib.pyplot",
    "pydantic",
    "rich",
    "safetensors.torch",
    "tokenizers",
    "typer",
    "yaml",
)


@dataclass(frozen=True)
class Result:
    """What became of a mutant. `digest` is of its edits; `by`: the test that failed, or the folders that all passed."""

    name: str
    digest: str
    result: str
    by: str
    seconds: float


def digest(mutant: Mutant) -> str:
    """Changes when the mutant does."""
    return hashlib.sha256(repr((mutant.file, mutant.edits)).encode()).hexdigest()[:16]


def copy_tree(root: Path, place: Path) -> None:
    """Copy what git knows and does not ignore, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)


def run_tests(place: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests of the tree at `place` up to the first that fails: ("passed" | "failed" | TIMEOUT, the failed test).

    Raises:
        RuntimeError: there are no such tests.
    """
    log = place.parent / "log"
    child = os.fork()
    if not child:
        _run_here(place, tests, log)
    started, status = time.monotonic(), None
    try:
        while status is None and time.monotonic() - started < limit:
            done, found = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if done else None
            time.sleep(0.05)
    finally:
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status is None:
        return TIMEOUT, f"{limit:.0f} seconds of {' '.join(tests)}"
    if status == 0:
        return "passed", ""
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        return "failed", failed[0]
    if status < 0:
        return "failed", tests[0]  # the process died of a signal
    raise RuntimeError(f"pytest ended with {status} on {' '.join(tests)}:\n" + "\n".join(lines[-20:]))


def _run_here(place: Path, tests: Sequence[str], log: Path) -> None:
    """In the fork: become a process of the tree at `place`, run pytest, end."""
    status = 99
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # whatever had taken their place
        os.chdir(place)
        paths = [str(place / "src"), str(place)]
        sys.path[:0] = paths
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True  # a new text of the same size in the same second would not be seen
        for name in [name for name in sys.modules if name.partition(".")[0] in ("outrider", "tests", "conftest")]:
            del sys.modules[name]
        found = importlib.import_module("outrider").__file__ or ""
        assert found.startswith(paths[0]), f"the package comes from {found}, not from {paths[0]}"
        import pytest

        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
        status = int(pytest.main([*arguments, *tests]))
    except BaseException:  # a package that cannot be imported any more
        import traceback

        traceback.print_exc()
        print(f"ERROR {tests[0]}")
    finally:
        sys.stdout.flush()
        os._exit(status)


class Worker:
    """A copy of the tree, in which mutants are tried one after another."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._sound: dict[tuple[str, ...], bool] = {}

    def judge(self, mutant: Mutant) -> Result:
        """Try a mutant; the copy is as before afterwards."""
        started, path = time.monotonic(), mutant.path(self.place)
        whole = path.read_text()
        folders = tuple(
            f"tests/{name}" for name in FOLDERS[mutant.file.split("/")[0]] if (self.place / "tests" / name).is_dir()
        )
        path.write_text(mutant.applied(whole))
        try:
            for tests, limit in (((mutant.tests,), NAMED_LIMIT), (folders, ROOM_LIMIT)):
                outcome, by = run_tests(self.place, tests, limit)
                if outcome != "passed":
                    break
        finally:
            path.write_text(whole)
        if outcome == "passed":
            result, by = SURVIVED, " ".join(folders)
        elif outcome == TIMEOUT:
            result = TIMEOUT if self._passes(tests, limit) else INVALID
        else:
            result = KILLED if self._passes((by,), limit) else INVALID
        return Result(mutant.name, digest(mutant), result, by, round(time.monotonic() - started, 1))

    def _passes(self, tests: tuple[str, ...], limit: float) -> bool:
        """Whether tests pass without an edit."""
        if tests not in self._sound:
            self._sound[tests] = run_tests(self.place, tests, limit)[0] == "passed"
        return self._sound[tests]


def known(path: Path) -> dict[str, Result]:
    """Results at `path` of mutants as they are now, by name; the latest counts."""
    if not path.exists():
        return {}
    now = {mutant.name: digest(mutant) for mutant in MUTANTS}
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return {result.name: result for result in results if now.get(result.name) == result.digest}


def work(root: Path, mutants: Sequence[Mutant], out: Path) -> None:
    """Judge mutants in a copy of the tree at `root` and append their results to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        copy_tree(root, place)
        worker = Worker(place)
        for mutant in mutants:
            result = worker.judge(mutant)
            with out.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(f"{result.name:40} {result.result:9} {result.seconds:5.0f} s  {result.by}", flush=True)


def area(mutant: Mutant) -> str:
    """One of `AREAS`."""
    return next(name for start, name in AREAS.items() if mutant.file.startswith(start))


def table(results: dict[str, Result]) -> str:
    """The results as a page of the documentation."""
    from outrider.utils.measure import machine, today  # only now: the forks import the package from their copies

    found = machine()
    place = f"{found['cpu']}, {found['cores']} cores, {found['memory_gb']} GB"
    counts = Counter(result.result for result in results.values())
    survivors = [m for m in MUTANTS if m.name in results and results[m.name].result == SURVIVED]
    argued = sum(m.name in EQUIVALENT for m in survivors)
    lines = [
        "# Mutants",
        "",
        f"{len(MUTANTS)} broken versions of the code (`tests/mutants/mutants.py`), {len(results)} of them run by "
        f"`make mutants`: {counts[KILLED]} killed by a test, {counts[TIMEOUT]} by a time limit, {counts[SURVIVED]} "
        f"survived, {argued} of them for a reason given below; {counts[INVALID]} invalid (the test that failed does so "
        "without the edit).",
        "",
        f"`make mutants`, {today()}, {place}, one thread per job.",
        "",
        "| area | mutants | killed | by a time limit | survived | of them argued |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(area(m) for m in MUTANTS):
        here = [m for m in MUTANTS if area(m) == name]
        by = Counter(results[m.name].result for m in here if m.name in results)
        reasons = sum(m in survivors and m.name in EQUIVALENT for m in here)
        lines.append(f"| {name} | {len(here)} | {by[KILLED]} | {by[TIMEOUT]} | {by[SURVIVED]} | {reasons} |")
    lines.append("")
    if survivors:
        lines += ["| survived | what is wrong with it | why nothing can notice |", "|---|---|---|"]
        lines += [f"| {m.name} | {_cell(m.what)} | {_cell(EQUIVALENT.get(m.name, '**a gap**'))} |" for m in survivors]
        lines.append("")
    lines += ["| mutant | what is wrong with it | file | noticed by |", "|---|---|---|---|"]
    for m in MUTANTS:
        if m.name in results and m not in survivors:
            by = results[m.name]
            lines.append(f"| {m.name} | {_cell(m.what)} | {m.file} | {by.result} {_cell(by.by)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """See the module's docstring; the exit status is 1 where a survivor has no reason or a result is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread and a copy of the tree")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="results, one JSON line each")
    parser.add_argument("--table", type=Path, help="write the results there as Markdown")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no mutants {', '.join(sorted(unknown))}")
    for mutant in MUTANTS:
        mutant.applied(mutant.path(ROOT).read_text())  # a mutant that no longer fits stops here
    out = chosen.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [m for m in MUTANTS if not chosen.names or m.name in chosen.names]
    left = [m for m in wanted if m.name not in known(out)]
    print(f"{len(wanted)} mutants, {len(left)} of them to run; results in {out}", flush=True)
    if left:
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in PACKAGES:
            importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(1)
    children = []
    for job in range(min(chosen.jobs, len(left))):
        child = os.fork()
        if not child:
            status = 1
            try:
                work(ROOT, left[job :: chosen.jobs], out)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    results = {m.name: known(out)[m.name] for m in wanted if m.name in known(out)}
    if chosen.table is not None:
        chosen.table.write_text(table(results))
    print(dict(Counter(result.result for result in results.values())))
    gaps = [
        r.name for r in results.values() if r.result == INVALID or (r.result == SURVIVED and r.name not in EQUIVALENT)
    ]
    if gaps or failed:
        sys.exit(f"survived without a reason, or invalid: {', '.join(gaps) or 'none'}; {len(failed)} jobs failed")


if __name__ == "__main__":
    main()
