"""Add files of the repository to the site, rewrite links to them, and let long names in tables break.

MkDocs calls the functions named `on_...`.

Pages link to files as GitHub resolves them. A link to a page keeps working. A link to another file of the repository
leads to a copy of it in the site, as a page if it is Markdown or Python.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Path in the repository -> path in docs_dir, of pages that are kept outside docs.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.txt",
}
COPIES = "repository"  # the folder of the site for all other files
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
INLINE_CODE = re.compile(r"<code>[^<]+</code>")
BREAKS = re.compile(r"(?<=[\w)\]][/(=,])(?=[\w{\[])|(?<=\w)(?=\.[A-Za-z]{3})")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs, and all files that a page links to, directly or through another file."""
    for source, path in PAGES.items():
        files.append(_file(config, path, ROOT / source))
    todo = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    while todo:
        page, text = todo.pop()
        for link in _links(text):
            source = _source(page, urlsplit(link).path)
            if source is None or files.get_file_from_path(path := _path(source)):
                continue
            file = _file(config, path, ROOT / source)
            files.append(file)
            if path.endswith(".md"):
                todo.append((path, file.content_string))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page from paths in the repository to paths in the site."""

    def rewrite(match: re.Match[str]) -> str:
        parts = urlsplit(match[0])
        source = _source(page.file.src_uri, parts.path)
        if source is None:
            return match[0]
        path = os.path.relpath(_path(source), os.path.dirname(page.file.src_uri) or ".")
        return parts._replace(path=path).geturl()

    blocks = FENCE.split(markdown)
    return "".join(text if text.startswith("```") else LINK.sub(rewrite, text) for text in blocks)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let code in tables break after a slash, parenthesis or comma and before a dot; docs/site.css allows no other."""

    def cell(match: re.Match[str]) -> str:
        return INLINE_CODE.sub(lambda code: BREAKS.sub("<wbr>", code[0]), match[0])

    return CELL.sub(cell, html)


def _links(text: str) -> list[str]:
    return [link for part in FENCE.split(text) if not part.startswith("```") for link in LINK.findall(part)]


def _origin(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    for source, path in PAGES.items():
        if page == path:
            return source
    if page.startswith(f"{COPIES}/"):
        source = page.removeprefix(f"{COPIES}/")
        return source if (ROOT / source).is_file() else source.removesuffix(".md")
    return f"docs/{page}"


def _source(page: str, link: str) -> str | None:
    """Return the path in the repository of a link, or None for an address, an anchor or a missing file.

    MkDocs warns of a missing file itself.
    """
    if not link or link.startswith("/") or ":" in link:
        return None
    source = os.path.normpath(os.path.join(os.path.dirname(_origin(page)), link))
    return source if not source.startswith("..") and (ROOT / source).exists() else None


def _path(source: str) -> str:
    """Return the path in docs_dir of a file or folder of the repository."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if (ROOT / source).is_dir() or source.endswith(".py"):
        return f"{COPIES}/{source}.md"
    return f"{COPIES}/{source}"


def _file(config: MkDocsConfig, path: str, source: Path) -> File:
    """Return a file of the site. A folder becomes a page that links to its files, Python a page that shows it."""
    name = source.relative_to(ROOT).as_posix()
    if source.is_dir():
        names = sorted(one.name for one in source.iterdir() if one.is_file())
        text = "\n".join([f"# {name}", "", *(f"- [{one}]({source.name}/{one})" for one in names), ""])
        return File.generated(config, path, content=text)
    if source.suffix == ".py":
        return File.generated(config, path, content=f"# {name}\n\n```python\n{source.read_text()}```\n")
    return File.generated(config, path, content=source.read_bytes())
