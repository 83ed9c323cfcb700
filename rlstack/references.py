"""Resolves names and functions that users give, and suggests corrections of misspelt names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlstack.checks import WrongKindError

# A function of the user's own, called a hook: "module:callable" in a config file and on the command
# line, or the callable itself in Python. The command line reads the field as text.
if TYPE_CHECKING:
    Hook = str | Callable[..., Any]
else:
    Hook = str

# Names in files of version 0.1, and those of today; the first that fits counts.
RENAMED = {
    "agents": "rlstack.agents",
    "programs.callbacks": "rlstack.programs.session.callbacks",
    "programs.components": "rlstack.programs.build",
    "programs.env_config": "rlstack.programs.config.env_config",
    "programs.experiment": "rlstack.programs.config.experiment",
    "programs.member_config": "rlstack.programs.config.member_config",
    "programs.policies.policy": "rlstack.programs.build.policies.policy",
    "programs.policies": "rlstack.programs.tools",
    "programs.policy_sets": "rlstack.programs.build.policies",
    "programs.presets": "rlstack.programs.config.presets",
    "programs.reports": "rlstack.programs.tools.report",
    "programs.tracking": "rlstack.programs.session",
    "programs": "rlstack.programs",
}


def renamed(module: str) -> str:
    """Returns the current name of a module, which may be given by an older name."""
    for old, new in RENAMED.items():
        if f"{module}.".startswith(f"{old}."):
            today = new + module[len(old) :]
            return today if _exists(today) and module not in ("agents", "programs") else module
    return module


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it does not exist
        return False


def import_named(module: str) -> ModuleType:
    """Imports a module that a config, a file of a run or the user names; see `renamed`.

    Raises:
      ImportError: there is no such module, or it cannot be imported.
    """
    return importlib.import_module(renamed(module))


def load_object(reference: str) -> Any:
    """Imports "module:name".

    Raises:
      ValueError: there is no such module or name.
    """
    module_name, _, name = reference.partition(":")
    if not (module_name and name):
        raise ValueError(f'{reference!r}: must be of the form "module:name".')
    try:
        module = import_named(module_name)
        return getattr(module, name)
    except ModuleNotFoundError as error:
        # The missing module may be a package of the path, but not one that the module imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r}; run where it can be imported, such "
            "as in its directory, or add its directory to PYTHONPATH."
        ) from error
    except AttributeError as error:
        public = [name for name in vars(module) if name[:1] != "_"]
        raise ValueError(
            f"{reference!r}: module {module_name} has no {name!r}{nearest(name, public)}"
        ) from error


def load_hook(field: str, hook: Hook) -> Any:
    """Returns the callable of a hook; imports it if the hook is "module:callable".

    Args:
      field: the field of the config that names the hook, for messages.
      hook: the hook.

    Raises:
      ValueError: there is no such module or name.
    """
    if not isinstance(hook, str):
        return hook
    try:
        return load_object(hook)
    except ValueError as error:
        raise ValueError(f"{field} {error}") from error


def call_factory(field: str, hook: Hook, wanted: str, *arguments: object) -> Any:
    """Calls a user's factory; returns its result.

    Args:
      field: the field of the config that names the factory, for messages.
      hook: the factory.
      wanted: the factory's signature and what it must return, for messages.
      *arguments: the arguments of the call.

    Raises:
      ValueError: there is no such module or name.
      WrongKindError: the factory is not callable, or does not take these arguments.
    """
    factory = load_hook(field, hook)
    check_callable(f"{field} {name_of(hook)} must be a function {wanted}", factory, *arguments)
    return factory(*arguments)


def check_callable(rule: str, function: Any, *arguments: object) -> None:
    """Checks that a user's function takes these arguments, without calling it.

    Args:
      rule: the beginning of the message, which says where and what is required.
      function: the function.
      *arguments: only their number is used.

    Raises:
      WrongKindError: the function is not callable, or does not take this number of arguments.
    """
    if not callable(function):
        raise WrongKindError(f"{rule}; got {type(function).__name__} {function!r:.80}.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise WrongKindError(f"{rule}; it does not take these arguments: {error}.") from None
    except ValueError:  # written in C, without a signature
        pass


def name_of(hook: object) -> str:
    """Returns a hook as "module:callable", as files record it.

    `load_object` finds the hook by this name if it is at the top level of a module.

    Raises:
      TypeError: the object is neither a text nor callable.
    """
    if isinstance(hook, str):
        return hook
    if not callable(hook):
        raise TypeError(f"{type(hook).__name__} {hook!r:.80} is neither a text nor callable.")
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{kind.__module__}:{kind.__qualname__}"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Ends a message about an unknown name: "; did you mean X?", with a name similar but for the
    version; else "; there are X, Y." of up to 50 names, else ".".
    """
    version = re.compile(r"[-_]v\d+$")
    names = sorted(known)
    newest = {version.sub("", known_name): known_name for known_name in names}
    close = difflib.get_close_matches(version.sub("", name), newest, n=1)
    if close:
        return f"; did you mean {prefix + newest[close[0]]!r}?"
    return f"; there are {prefix}{f', {prefix}'.join(names)}." if 0 < len(names) <= 50 else "."


class Sources:
    """The modules of a package in which each registers what it has, found by their text.

    So nobody keeps a list of them, and only those that are asked for are imported.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._texts: dict[str, str] = {}  # module -> its text, in alphabetical order

    def texts(self) -> Mapping[str, str]:
        """Returns the source of each module, by its name."""
        if not self._texts:
            for path in importlib.import_module(self._package).__path__:
                for module in sorted(found.name for found in pkgutil.iter_modules([path])):
                    text = Path(path, f"{module}.py").read_text(encoding="utf-8")
                    self._texts[f"{self._package}.{module}"] = text
        return self._texts

    def import_with(self, pattern: str) -> None:
        """Imports the modules with a line that begins with this regular expression."""
        for module, text in self.texts().items():
            if re.search(rf"^{pattern}", text, re.MULTILINE):
                importlib.import_module(module)

    def import_all(self) -> None:
        """Imports every module, in alphabetical order."""
        self.import_with("")
