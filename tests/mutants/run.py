"""Run the named tests on every mutant and say which ones nothing notices: `make mutants`.

    copy of the tree --edit--> its tests --all pass--> survived
                                  | one fails, or they pass the time limit
                                  +---- they pass without the edit? ----> killed; if not: invalid

Third-party packages are imported once; each run of tests is a fork of that process, which imports the package from the
copy. So a mutant costs seconds. Results are appended as lines of JSON, and a mutant that has one is not run again.
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

from tests.mutants.edit import Mutant
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds of one run of tests
KILLED, SURVIVED, INVALID = "killed", "survived", "invalid"

# Imported before the forks, as far as they are installed: they take long and do not change.
PACKAGES = ("torch", "torch._dynamo", "transformers", "hypothesis", "matplotlib.pyplot", "pydantic", "rich", "typer")


@dataclass(frozen=True)
class Result:
    """The result for a mutant. `digest` changes with its edit; `by`: the test that failed, or those that passed."""

    name: str
    digest: str
    result: str
    by: str
    seconds: float


def digest(mutant: Mutant) -> str:
    """Changes when the mutant does."""
    return hashlib.sha256(repr(mutant).encode()).hexdigest()[:16]


def copy_tree(root: Path, place: Path) -> None:
    """Copy what git knows and does not ignore, as it is in the working tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        if name and (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)


def run_tests(place: Path, tests: str, limit: float) -> tuple[bool, str]:
    """Run tests of the tree at `place` up to the first that fails: (whether all passed, the failed test).

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
            done, raw = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if done else None
            time.sleep(0.05)
    finally:
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status is None:
        return False, f"{limit:.0f} seconds of {tests}"
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if status and not failed and status > 0:
        raise RuntimeError(f"pytest ended with {status} on {tests}:\n" + "\n".join(lines[-20:]))
    return status == 0, failed[0] if failed else tests


def _run_here(place: Path, tests: str, log: Path) -> None:
    """In the fork: become a process of the tree at `place`, run pytest, end."""
    status = 99
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.chdir(place)
        paths = [str(place / "src"), str(place)]
        sys.path[:0] = paths
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True  # a new text of the same size in the same second would not be seen
        for name in [name for name in sys.modules if name.partition(".")[0] in ("outrider", "tests", "conftest")]:
            del sys.modules[name]
        package = importlib.import_module("outrider").__file__ or ""
        assert package.startswith(paths[0]), f"the package comes from {package}, not from {paths[0]}"
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
        status = int(pytest.main([*options, f"tests/{tests}"]))
    except BaseException:  # a package that cannot be imported any more
        import traceback

        traceback.print_exc()
        print(f"ERROR {tests}")
    finally:
        sys.stdout.flush()
        os._exit(status)


class Worker:
    """A copy of the tree, in which mutants are tried one after another."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._sound: dict[str, bool] = {}

    def judge(self, mutant: Mutant) -> Result:
        """Try a mutant and restore the copy."""
        started = time.monotonic()
        path, text = mutant.applied(self.place)
        original = path.read_text()
        path.write_text(text)
        try:
            passed, by = run_tests(self.place, mutant.tests, LIMIT)
        finally:
            path.write_text(original)
        result = SURVIVED if passed else KILLED if self._passes(mutant.tests) else INVALID
        return Result(mutant.name, digest(mutant), result, by, round(time.monotonic() - started, 1))

    def _passes(self, tests: str) -> bool:
        """Whether tests pass without an edit."""
        if tests not in self._sound:
            self._sound[tests] = run_tests(self.place, tests, LIMIT)[0]
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


def main() -> None:
    """See the module's docstring; the exit status is 1 if a mutant survived or a result is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread and a copy of the tree")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="results, one JSON line each")
    options = parser.parse_args()
    if unknown := set(options.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no mutants {', '.join(sorted(unknown))}")
    out = options.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [m for m in MUTANTS if not options.names or m.name in options.names]
    left = [m for m in wanted if m.name not in known(out)]
    print(f"{len(wanted)} mutants, {len(left)} of them to run; results in {out}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PACKAGES if left else ():
        importlib.import_module(name)
    children = []
    for job in range(min(options.jobs, len(left))):
        child = os.fork()
        if not child:
            status = 1
            try:
                work(ROOT, left[job :: options.jobs], out)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    results = known(out)
    shown = [results[m.name] for m in wanted if m.name in results]
    print(dict(Counter(result.result for result in shown)))
    gaps = [result.name for result in shown if result.result != KILLED]
    if gaps or failed:
        sys.exit(f"survived or invalid: {', '.join(gaps) or 'none'}; {len(failed)} jobs failed")


if __name__ == "__main__":
    main()
