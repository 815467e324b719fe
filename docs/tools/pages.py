"""What the site makes of pages that are written for the repository: a hook of mkdocs (``hooks:`` in ``mkdocs.yml``).

Pages link to files of the repository that are no pages (``../examples/train.py``). Such a file gets a page of its own
in ``files/``, and the links lead there. The comments that ``tests/test_docs.py`` reads are taken out; an output gets a
title. Pages of ``how-to/`` and ``files/`` that the nav does not name come last in their sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALWAYS = {"CHANGELOG.md", "CONTRIBUTING.md"}  # have a page though none links to them
LINK = re.compile(r"\]\((?P<target>\.\./[^)\s#]*)(?P<heading>#[^)\s]*)?\)")
OUTPUT = re.compile(r"^(?P<indent> *)<!-- output -->\n+ *```text$", re.MULTILINE)
NOT_RUN = re.compile(r"^ *<!-- not run: .* -->\n", re.MULTILINE)


def linked(place: str, target: str) -> str | None:
    """The path in the repository of what a page, at a place below ``docs/``, links to, if that is a file elsewhere."""
    path = ((DOCS / place).parent / target).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(DOCS):
        return None
    return path.relative_to(ROOT).as_posix()


def files_with_pages() -> set[str]:
    """The files of the repository that have a page, by their paths in it."""
    found = set(ALWAYS)
    for page in DOCS.rglob("*.md"):
        targets = (link["target"] for link in LINK.finditer(page.read_text("utf-8")))
        found |= {name for target in targets if (name := linked(page.relative_to(DOCS).as_posix(), target))}
    return found


def place_of(name: str) -> str:
    """Where the page of a file lies, below ``docs/``. That of a README is named for its folder, and no index."""
    path = PurePosixPath("files", name)
    return (path.parent if path.stem == "README" else path).with_suffix(".md").as_posix()


def page_of(name: str) -> str:
    """The text of the page of a file: itself if it is Markdown, else a title and a block of code."""
    text = (ROOT / name).read_text("utf-8")
    if name.endswith(".md"):
        return text
    return f"# {name}\n\n```{PurePosixPath(name).suffix.removeprefix('.')}\n{text.rstrip()}\n```\n"


def for_site(markdown: str, place: str) -> str:
    """The text of a page, at a place below ``docs/``, as the site has it."""

    def moved(link: re.Match[str]) -> str:
        name = linked(place, link["target"])
        up = "../" * (len(PurePosixPath(place).parts) - 1)
        return f"]({up}{quote(place_of(name))}{link['heading'] or ''})" if name else link[0]

    markdown = OUTPUT.sub(r'\g<indent>```text title="Output"', markdown)
    return LINK.sub(moved, NOT_RUN.sub("", markdown))


def with_all_of(folder: str, nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """A nav in which the section that names pages of a folder has all of them, those that it does not name last."""
    found: list[Any] = []
    for section in nav:
        for title, named in section.items() if isinstance(section, dict) else ():
            if isinstance(named, list) and any(str(page).startswith(folder) for page in named):
                more = sorted(page for page in pages if page.startswith(folder) and page not in named)
                section = {title: [*named, *more]}
        found.append(section)
    return found


def on_config(config: MkDocsConfig) -> Any:
    """mkdocs begins: what is new goes into the nav; ``mkdocs serve`` builds again when a file with a page changes."""
    names = files_with_pages()
    pages = [*(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")), *map(place_of, names)]
    for folder in ("how-to/", "files/"):
        config.nav = with_all_of(folder, config.nav or [], pages)
    config.watch = [*config.watch, *(str(ROOT / name) for name in names)]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """mkdocs has found the pages: those of files of the repository are added."""
    from mkdocs.structure.files import File

    for name in sorted(files_with_pages()):
        files.append(File.generated(config, place_of(name), content=page_of(name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """mkdocs has read a page."""
    return for_site(markdown, page.file.src_uri)
