"""Modules that are imported when one of their attributes is first used.

Some packages import others that few of their users need, and that take long to import.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_IMPORTING = threading.RLock()  # of deferred packages


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Returns the ``__getattr__`` of a package that imports some of its names on first use.

    Args:
      package: the package's ``__name__``.
      modules: name -> the module of the package that defines the name.
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find


@contextlib.contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Puts off the import of some modules that are not imported yet.

    Modules that the body imports get stand-ins for them. After the body, a stand-in imports its
    module when one of its attributes is used, or when a function is called that was imported from
    it. While the body runs, calls of such functions do nothing and return None.

    Args:
      names: the names of the modules; a package comes before the modules in it.
    """
    stand_ins = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    for name, module in stand_ins.items():
        package, _, short = name.rpartition(".")
        if package in stand_ins:
            setattr(stand_ins[package], short, module)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _StandIn(ModuleType):
    """Stands for a module until it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # importing a module of a package reads the package's __path__
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), name)
        return self._call_of(name)

    def _call_of(self, name: str) -> Callable[..., Any]:
        """Returns a function that, when called, imports the module and calls its function."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(self.__name__) is self:
                return None
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


def defer_package(name: str) -> None:
    """Puts off the import of a package until one of its attributes is used.

    The modules in it can be imported earlier; this does not import the package. Does nothing if the
    package was imported already, or is not installed.

    Args:
      name: the name of the package. The package around it must import its packages on first use, as
        SciPy does.
    """
    outer = None if name in sys.modules else importlib.util.find_spec(name.partition(".")[0])
    if outer is None or outer.submodule_search_locations is None:
        return
    spec = PathFinder.find_spec(name, outer.submodule_search_locations)
    if spec is not None:
        package: Any = importlib.util.module_from_spec(spec)
        package.__class__ = _Deferred
        sys.modules[name] = package


class _Deferred(ModuleType):
    """A package that is imported when an attribute is used that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        with _IMPORTING:
            if isinstance(self, _Deferred):
                spec: Any = self.__spec__
                if spec.loader_state is _IMPORTING:  # its own import asks for the attribute
                    raise AttributeError(name)
                spec.loader_state = _IMPORTING
                try:
                    spec.loader.exec_module(self)
                    self.__class__ = ModuleType  # type: ignore[assignment]
                finally:
                    spec.loader_state = None
        return getattr(self, name)
