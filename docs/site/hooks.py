"""Pages of the site that are not files of docs/: README as its start, the README of benchmarks, generated ones.

MkDocs calls `on_files` and `on_page_markdown`. Links are written as the repository's viewer follows them, and are
rewritten for the site here; a link that leads nowhere ends a strict build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "runs" / "reference"  # written by reference.py
# Where a file of the repository is on the site. Pages of recipe fields and metrics are generated from these sources.
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "reference/benchmarks.md",
    "docs/site/symptoms.md": "symptoms.md",
    "src/outrider/training/recipe.py": "reference/recipe.md",
    "src/outrider/serving/metrics.py": "reference/metrics.md",
}
# Room for commands of 100 characters; names of options and files in tables break at spaces only.
STYLE = """
.md-grid { max-width: 76rem }
.md-typeset td code { word-break: normal; overflow-wrap: normal }
"""
ORIGINS = {place: origin for origin, place in PLACES.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are elsewhere in the repository, and the generated ones."""
    pages = {place: ROOT / origin for origin, place in PLACES.items() if origin.endswith(".md")}
    pages |= {f"reference/{name}.md": GENERATED / f"{name}.md" for name in ("verbs", "recipe", "metrics", "commands")}
    pages["symptoms.md"] = GENERATED / "symptoms.md"
    for place, path in pages.items():
        files.append(File.generated(config, place, content=path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "style.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them."""
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")

    def moved(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        there = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        place = PLACES.get(there, there.removeprefix("docs/"))
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|/)([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)
