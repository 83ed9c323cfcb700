"""Adds one page for each package to the site, with the docstrings of its public modules.

A hook of mkdocs: the pages are made while the site is built and follow the tree of the sources, so
that a module that moves needs no change here.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("rlstack", "rlstack.agents", "rlstack.programs")


def modules_by_package() -> dict[str, list[str]]:
    """Returns the dotted names of the public modules of each package, packages sorted."""
    found: dict[str, list[str]] = {}
    for top in TOPS:  # links to folders are not followed
        folder = ROOT / top.replace(".", "/")
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            package, _, module = name.rpartition(".")
            if module == "__init__":
                found.setdefault(package, []).insert(0, package)
            elif not module.startswith("_"):
                found.setdefault(package, []).append(name)
    return dict(sorted(found.items()))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages to the navigation, below the package and its two largest parts."""
    tops: dict[str, list[str]] = {top: [] for top in TOPS}
    for name in modules_by_package():
        top = next(top for top in reversed(TOPS) if f"{name}.".startswith(f"{top}."))
        tops[top].append(_page(name))
    config.nav = [*(config.nav or []), {"API": [{top: pages} for top, pages in tops.items()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to the site."""
    for package, modules in modules_by_package().items():
        content = f"# {package}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
        files.append(File.generated(config, _page(package), content=content))
    return files


def _page(package: str) -> str:
    return f"api/{package}.md"
