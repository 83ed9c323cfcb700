"""The API reference: docs/api.md, which reads well without a site, and the site's pages.

``python docs/api_pages.py`` (`make api`) writes docs/api.md: the public names of rlstack, and every
config with the meaning of its fields. As a hook of mkdocs this file adds one page for each package
with the docstrings of its public modules. Both follow the sources, so that a module that moves
needs no change here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

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
    from mkdocs.structure.files import File

    for package, modules in modules_by_package().items():
        content = f"# {package}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
        files.append(File.generated(config, _page(package), content=content))
    return files


def _page(package: str) -> str:
    return f"api/{package}.md"


PAGE = ROOT / "docs" / "api.md"
_INTRODUCTION = """\
# The public API

`make api` writes this page from the sources; a test fails when it is not current. The first part
has the names that `import rlstack` offers, the second what runs experiments, the third every
config. `help(ReplayConfig)` shows the same texts in Python, and `rlstack train PRESET --help-all`
those of all options of an experiment.
"""
_RUNNING = (
    "rlstack.programs.config.presets:preset",
    "rlstack.programs.config.presets.registry:like",
    "rlstack.agents:register",
    "rlstack.programs.run.train:run",
    "rlstack.programs.session.result:Result",
    "rlstack.programs.session.callbacks:Callback",
    "rlstack.programs.study.study:Study",
    "rlstack.programs.study.train:run",
)
_CONFIGS = ("rlstack.programs.config", "rlstack.configs", "rlstack.optimizers", "rlstack.agents")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)


def page() -> str:
    """Returns the text of docs/api.md."""
    import rlstack

    names = [name for name in rlstack.__all__ if name != "__version__"]
    public = [getattr(rlstack, name) for name in names]
    running = [
        getattr(importlib.import_module(module), name)
        for module, _, name in (text.partition(":") for text in _RUNNING)
    ]
    parts = [_INTRODUCTION, "## Names of rlstack\n"]
    for name, found in zip(names, public, strict=True):
        parts += _entry(f"rlstack.{name}", found)
    parts.append("## Experiments\n")
    for text, found in zip(_RUNNING, running, strict=True):
        parts += _entry(text.replace(":", "."), found)
    parts.append("## Configs\n")
    for found in _configs():
        if found not in public:
            parts += _entry(f"{found.__module__}.{found.__name__}", found)
    return "\n".join(parts)


def _configs() -> Iterator[Any]:
    """Yields the public dataclasses of the packages of configs, and the agents' own."""
    for top in _CONFIGS:
        folder = ROOT / top.replace(".", "/")
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in _parsed(str(path)).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Experiment")):
                    found = getattr(importlib.import_module(name), node.name)
                    if dataclasses.is_dataclass(found) and not node.name.startswith("_"):
                        yield found


def _entry(title: str, found: Any) -> list[str]:
    """Returns the lines of a class or a function."""
    node = _node_of(found)
    if node is None:  # a type alias or an instance
        return [f"### {title}\n", f"Defined in `{type(found).__module__}`.\n"]
    lines = [f"### {title}\n"]
    if isinstance(node, ast.ClassDef):
        lines += _class(found, node)
    else:
        lines += [_signature(node), _text(ast.get_docstring(node))]
    return [line for line in lines if line]


def _class(found: type, node: ast.ClassDef) -> list[str]:
    from rlstack.imports import field_docs

    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"```py\nclass {node.name}{f'({bases})' if bases else ''}\n```\n"]
    lines.append(_text(ast.get_docstring(node)))
    if dataclasses.is_dataclass(found):
        texts, source = field_docs.texts(found), _fields(found)
        rows = [
            f"- `{name}: {source[name]}`: {_plain(texts.get(name, ''))}".rstrip(": ")
            for name in (field.name for field in dataclasses.fields(found))
            if name in source
        ]
        lines += [*rows, ""] if rows else []
    for method in node.body:
        is_public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if isinstance(method, ast.FunctionDef) and (is_public or method.name == "__init__"):
            text = _text(ast.get_docstring(method))
            lines += [_signature(method), text] if text or is_public else [_signature(method)]
    return lines


def _fields(found: type) -> dict[str, str]:
    """Returns the type and the default of each field, as the source has them."""
    fields: dict[str, str] = {}
    for base in reversed(found.__mro__[:-1]):
        node = _node_of(base) if dataclasses.is_dataclass(base) else None
        for entry in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                default = f" = {ast.unparse(entry.value)}" if entry.value else ""
                fields[entry.target.id] = ast.unparse(entry.annotation) + default
    return fields


@functools.cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _node_of(found: Any) -> ast.ClassDef | ast.FunctionDef | None:
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return None
    for node in _parsed(str(inspect.getsourcefile(found))).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == found.__name__:
            return node
    return None


def _signature(node: ast.FunctionDef) -> str:
    """Returns the head of a function."""
    decorators = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
    head = "".join(f"@{name}\n" for name in decorators if name in ("property", "classmethod"))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    line = f"def {node.name}({arguments}){result}"
    if len(line) > 96:
        inner = textwrap.fill(arguments, 92, break_long_words=False, break_on_hyphens=False)
        line = f"def {node.name}(\n{textwrap.indent(inner, '    ')}\n){result}"
    return f"```py\n{head}{line}\n```\n"


def _text(docstring: str | None) -> str:
    """Returns a docstring as Markdown: the entries of its sections become lists."""
    if not docstring:
        return ""
    before, *rest = _SECTION.split(docstring)
    parts = [before.strip(), ""]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        inner, _, after = (
            (f"{body}\n").partition("\n\n") if "\n\n" in body.strip() else (body, "", "")
        )
        parts.append(f"{title}:\n")
        for line in inspect.cleandoc(inner.strip("\n")).splitlines():
            named = re.match(r"(\*{0,2}[\w.]+): (.*)", line)
            if named and title not in ("Returns", "Yields"):
                parts.append(f"- `{named[1]}`: {named[2]}")
            else:
                parts.append(f"  {line.strip()}" if title not in ("Returns", "Yields") else line)
        parts += ["", inspect.cleandoc(after).strip(), ""] if after.strip() else [""]
    return _plain("\n".join(parts).rstrip()) + "\n"


def _plain(text: str) -> str:
    """Returns a text whose stars and underscores are no Markdown, and double backquotes single."""
    pieces = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(
            r"(\*{2}|(?<=\w)\*(?=\w)|\|)", lambda m: "\\" + "\\".join(m[0]), pieces[i]
        )
    return "".join(pieces).replace("``", "`")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
