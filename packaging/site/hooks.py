"""Hooks of MkDocs for `make docs`: generated pages, links that leave docs/, and tabs.

The reference of commands, settings and metrics is made of the code's own tables, so it is always
the code's. A page may link to a file of the repository beside docs/: the file is published too,
under its own path, and the link leads there. Sections that exclude each other become tabs.
"""

from __future__ import annotations

import os
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# An option's name stays on one line; a table that is too wide scrolls.
CSS = ".md-typeset td:first-child code { white-space: nowrap }"
# The sections of a page that become tabs: a reader needs one of them.
TABS = {"start/kubernetes.md": ("kind", "EKS", "On premises")}
LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the repository's files that pages link to."""
    files.append(File.generated(config, "site.css", content=CSS))
    make_docs = runpy.run_path(str(ROOT / "packaging/make_docs.py"))
    for name, text in make_docs["site_pages"]().items():
        files.append(File.generated(config, name, content=text))
    pending = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    found: set[Path] = set()
    for document in pending:
        if not document.is_file():
            continue  # a generated page
        for target in _links_outside(document):
            if target not in found:
                found.add(target)
                name = str(target.relative_to(ROOT))
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
                if target.suffix == ".md":
                    pending.append(target)
    return files


def _links_outside(document: Path) -> Iterator[Path]:
    for link in LINK.finditer(document.read_text()):
        target = _target(document, link[1])
        if target is not None and target.is_file() and DOCS not in target.parents:
            yield target


def _target(document: Path, link: str) -> Path | None:
    """The file of the repository that a link of a page names; a folder's is its README."""
    if "://" in link:
        return None
    target = Path(os.path.normpath(document.parent / link))
    return target / "README.md" if target.is_dir() else target


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Have links name pages by their places in the site."""
    document = Path(str(page.file.abs_src_path or DOCS / page.file.src_uri))
    place = Path(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        target = _target(document, link[1])
        if target is None:
            return link[0]
        base = DOCS if DOCS in target.parents else ROOT
        return f"]({os.path.relpath(target.relative_to(base), place)}{link[2]})"

    return _with_tabs(LINK.sub(moved, markdown), TABS.get(page.file.src_uri, ()))


def _with_tabs(markdown: str, titles: tuple[str, ...]) -> str:
    """Turn the sections that begin with these words into tabs; links to them lead to all."""
    tabs = []
    for title in titles:
        [section] = re.findall(rf"^## {title}\b.*?(?=^## |\Z)", markdown, re.DOTALL | re.MULTILINE)
        heading, _, text = section.partition("\n")
        label = heading.removeprefix("## ")
        anchor = re.sub(r"[^\w\- ]", "", label.lower()).replace(" ", "-")
        tabs.append((anchor, f'=== "{label}"\n{textwrap.indent(text, "    ")}'))
        markdown = markdown.replace(section, "" if len(tabs) < len(titles) else "<tabs>\n")
    anchors = "".join(f'<a id="{anchor}"></a>' for anchor, _ in tabs)
    shown = "\n".join(text for _, text in tabs)
    return markdown.replace("<tabs>\n", f"{anchors}\n\n{shown}\n")
