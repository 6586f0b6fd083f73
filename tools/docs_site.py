"""Hooks of mkdocs.yml: pages and examples that stand outside of docs, links to them, and no address of another host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_OUTSIDE = re.compile(r"\]\((?:\.\./)+(examples/[^)#]+)\)")
_REMOTE = re.compile(
    r"<(?:script|img|iframe|link(?! rel=.?canonical))\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)


def on_files(files: Files, config: Any) -> Files:
    for path, origin in PAGES.items():
        text = (ROOT / origin).read_text().replace("](docs/", "](")
        files.append(File.generated(config, path, content=text))
    for example in sorted((ROOT / "examples").rglob("*.*")):
        if example.is_file() and example.suffix != ".pyc":
            path = f"examples/{example.relative_to(ROOT / 'examples')}"
            files.append(File.generated(config, path, content=example.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """On GitHub `../examples/x` is a file of the repository; in the site it is `examples/x`."""
    up = "../" * page.file.src_uri.count("/")
    return _OUTSIDE.sub(rf"]({up}\1)", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The site works from a file system without a network."""
    remote = _REMOTE.findall(output)
    if remote:
        raise PluginError(f"{page.file.src_uri} loads from another host: {remote[0]}")
    return output
