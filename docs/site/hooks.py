"""Pages of the site that are not files of docs/: README as its start, the README of benchmarks, generated ones.

MkDocs calls `on_files`. Links of a page that moves are rewritten; a link that leads nowhere ends a strict build.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "runs" / "reference"  # written by reference.py
PLACES = {"verbs": "reference/verbs.md", "recipe": "reference/recipe.md", "metrics": "reference/metrics.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    start = (ROOT / "README.md").read_text(encoding="utf-8")
    start = re.sub(r"\]\(docs/", "](", start).replace("](benchmarks/README.md)", "](reference/benchmarks.md)")
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](../")
    pages = {"index.md": start, "reference/benchmarks.md": benchmarks}
    for name in ("verbs", "recipe", "metrics", "symptoms"):
        pages[PLACES.get(name, f"{name}.md")] = (GENERATED / f"{name}.md").read_text(encoding="utf-8")
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    return files
