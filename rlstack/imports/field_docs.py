"""The texts below the fields of dataclasses, which Python itself keeps nowhere."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any


@functools.cache
def texts(kind: Any) -> dict[str, str]:
    """Returns the documentation of each field of a dataclass: the string below it, or "".

    Raises:
      OSError: the source cannot be read, as that of a class made in a terminal.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if not hasattr(base, "__dataclass_fields__"):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body: list[ast.stmt] = node.body if isinstance(node, ast.ClassDef) else []
        for entry, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                words = str(text.value).split() if isinstance(text, ast.Constant) else []
                found[entry.target.id] = " ".join(words)
    return found


def docstring(kind: Any, own: str) -> str:
    """Returns the docstring of a dataclass, followed by the texts of its fields."""
    try:
        found = texts(kind)
    except (OSError, TypeError, SyntaxError, ValueError):
        return own
    fill = functools.partial(textwrap.fill, width=98, break_on_hyphens=False)
    lines = [
        fill(f"{field}: {text}", initial_indent="  ", subsequent_indent="    ")
        for field, text in found.items()
        if text
    ]
    return "\n".join([inspect.cleandoc(own), *(["\nAttributes:", *lines] if lines else [])])
