"""Points the links of notebooks at pages of the site.

A hook of mkdocs: links between sources, such as ``../topologies.md``, work where notebooks are read
and on code hosts. mkdocs converts them in Markdown pages only.
"""

from __future__ import annotations

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r'href="([^":#]+\.(?:md|ipynb))(#[^"]*)?"')


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the content of a page with the links of a notebook changed.

    Raises:
      PluginError: there is no such page.
    """
    here = page.file.src_uri
    if not here.endswith(".ipynb"):
        return html

    def converted(link: re.Match[str]) -> str:
        target = files.get_file_from_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(here), link[1]))
        )
        if target is None:
            raise PluginError(f"{here}: there is no page {link[1]}")
        return f'href="{target.url_relative_to(page.file)}{link[2] or ""}"'

    return _LINK.sub(converted, html)
