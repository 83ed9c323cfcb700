"""Parses the options of a command; a mistake becomes one line, with a suggestion."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rlstack.programs.config import options as dotted

T = TypeVar("T")

_POWER = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+?\d{1,2}")
_numbers = ConstructorRegistry()


class UsageError(ValueError):
    """The arguments of a command cannot be parsed."""


@_numbers.primitive_rule
def _integers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda args: whole_number(args[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """Parses an integer, written in digits or with a power of ten, such as 1e5.

    Raises:
      ValueError: the text is not an integer.
    """
    if _POWER.fullmatch(text) and float(text).is_integer():
        return int(Decimal(text))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, such as 100000 or 1e5; got {text!r}") from None


# tyro's words for a list with a value of another type, and for a list or None.
_WRONG_LIST = re.compile(
    r"(?:Could not find valid parse for arguments:|no type matching .* could be instantiated from)"
    r" \[(.*)\]"
)


class HelpPrinted(SystemExit):
    """A command has printed its help, and ends."""


def parse(options: type[T], prog: str, args: Sequence[str], **settings: Any) -> T:
    """Returns the options of a command; prints its help if the arguments ask for it.

    Args:
      options: the dataclass of the options.
      prog: the command's name, for the help and for errors.
      args: the arguments of the command.
      **settings: further arguments of `tyro.cli`.

    Raises:
      HelpPrinted: the help was printed.
      UsageError: an argument is wrong; the message is one line.
    """
    settings["registry"] = _numbers
    if any(arg in ("-h", "--help") for arg in args):
        try:
            return tyro.cli(options, prog=prog, args=args, **settings)
        except SystemExit as stop:
            raise HelpPrinted(stop.code) from None
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            return tyro.cli(options, prog=prog, args=args, **settings)
    except SystemExit as stop:
        if not stop.code:
            print(shown.getvalue(), end="")
            raise HelpPrinted(stop.code) from None
    known = _known(options, prog, settings)
    raise UsageError(f"{_unknown(args, known) or _first_part(shown.getvalue())} ({prog} --help)")


def _known(options: Any, prog: str, settings: dict[str, Any]) -> list[str]:
    """Returns the names of all options, as the help lists them."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(options, prog=prog, args=["--help"], **settings)
    return re.findall(r"^[\s│|]*(?:-\w, )?(--[\w.-]+)", shown.getvalue(), re.MULTILINE)


def _unknown(args: Sequence[str], known: Sequence[str]) -> str:
    """Returns the error for the first option that does not exist; "" if all options exist."""
    spellings = {name.replace("_", "-") for name in known}
    for arg in args:
        name = arg.partition("=")[0]
        if name.startswith("--") and name.replace("_", "-") not in spellings:
            return dotted.unknown(name, known)
    return ""


def _first_part(text: str) -> str:
    """Returns the first paragraph of tyro's error as one line, without its frame and its title."""
    paragraphs: list[list[str]] = [[]]
    for line in (line.strip() for line in text.splitlines()):
        inside = line.strip("│| ")
        if not inside.strip("─-"):  # a rule between paragraphs
            paragraphs.append([])
        elif not line.startswith(("╭", "╰")):
            paragraphs[-1].append(inside)
    # Without a frame the title is the first paragraph; with one it is part of the frame.
    found = [paragraph for paragraph in paragraphs if paragraph]
    chosen = found[0 if "╭" in text else 1 :][:1]
    message = " ".join(chosen[0]) if chosen else "its arguments cannot be parsed"
    message = message.removeprefix("Error parsing ").removesuffix(".")
    pairs = "must be names and values, such as length 4; a name or a value is missing"
    message = message.replace("Failed to parse key-value pairs!", pairs)
    return _WRONG_LIST.sub(
        r"must be values with spaces between them, such as 64 64; got \1", message
    )
