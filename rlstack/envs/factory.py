"""Makes the backend for an environment's name or builder, and a type."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlstack.checks import WrongKindError
from rlstack.envs.adapters import EnvBuilder
from rlstack.envs.auto_reset import builder_name
from rlstack.envs.backend import Backend, PoolConfig
from rlstack.envs.cpp import library
from rlstack.envs.cpp.backend import CppBackend
from rlstack.envs.seats.showing import JOINT
from rlstack.imports import versions
from rlstack.references import import_named, load_object, nearest

if TYPE_CHECKING:
    import gymnasium

TYPES = ("auto", "cpp", "for_loop", "thread", "process", "jax")
_OF_GYMNAX = re.compile(r".+-(MinAtar|bsuite|misc)")
_JAX = "rlstack.jax_envs.backend:JaxBackend"  # text, because the other room imports this one

# Names with one of these prefixes have a backend of their own, which is imported when it is used:
# "module:callable" that takes the rest of the name and the config.
_PREFIXES = {"rust:": "rlstack.entity.native.backend:ProgramBackend"}


def make_backend(name_or_builder: str | EnvBuilder, type_: str, config: PoolConfig) -> Backend:
    """Returns a backend that runs ``config.size`` environments.

    Args:
      name_or_builder: see ``SyncEnv``.
      type_: one of ``TYPES``, or ``"async"``, which is ``"auto"`` for an asynchronous pool.
      config: the options of the pool.

    Raises:
      ValueError: unknown name or type.
      WrongKindError: ``name_or_builder`` is neither a name nor callable.
    """
    if type_ not in (*TYPES, "async"):
        raise ValueError(f"Env pool: type must be one of {TYPES}; got {type_!r}.")
    named = isinstance(name_or_builder, str)
    if not named and not callable(name_or_builder):
        raise WrongKindError(
            "Env pool: name_or_builder must be a name or a callable that builds an environment; "
            f"got {type(name_or_builder).__name__}."
        )
    if type_ != "jax" and config.options.get(JOINT):
        return _joint_backend(name_or_builder, type_, config)
    for prefix, backend in _PREFIXES.items():
        if isinstance(name_or_builder, str) and name_or_builder.startswith(prefix):
            if type_ not in ("auto", "async"):
                raise ValueError(
                    f"Env pool: {name_or_builder!r} steps its environments itself, so type must be "
                    f"'auto'; got {type_!r}. num_workers sets its number of threads."
                )
            _refuse_levels(config, name_or_builder)
            return load_object(backend)(name_or_builder.removeprefix(prefix), config)
    if type_ == "jax":
        return load_object(_JAX)(name_or_builder, config)
    if type_ in ("auto", "async", "cpp") and named and name_or_builder in library.names():
        name = str(name_or_builder)
        _refuse_levels(config, f"{name} of EnvPool")
        if len(library.seats(name, config.options)) == 1:
            return CppBackend(name, config)
        from rlstack.envs.seats.cpp_games import CppGames

        return CppGames(name, config)
    if type_ == "cpp":
        if not named:
            raise WrongKindError(
                "Env pool: type='cpp' needs the name of an EnvPool environment; got a builder. "
                "Use another type, or 'auto'."
            )
        if not (names := library.names()):
            raise ValueError(
                "Env pool: type='cpp' needs EnvPool, which is not installed: pip install envpool, "
                "or use another type."
            )
        raise ValueError(_unknown(str(name_or_builder), names, "EnvPool"))
    builder = resolve(name_or_builder) if isinstance(name_or_builder, str) else name_or_builder
    return _python_backend(builder, type_, config)


def _joint_backend(name_or_builder: str | EnvBuilder, type_: str, config: PoolConfig) -> Backend:
    from rlstack.envs.seats.joint import JointBackend

    options = {name: value for name, value in config.options.items() if name != JOINT}
    config = dataclasses.replace(config, options=options)
    number = len(seat_names(name_or_builder, type_, options))
    make_rows = functools.partial(make_backend, name_or_builder, type_)
    return JointBackend(make_rows, builder_name(name_or_builder), number, type_, config)


def _refuse_levels(config: PoolConfig, name: str) -> None:
    if config.levels:
        raise ValueError(
            f"Env pool: levels must be 0 for {name}, because nothing tells its environments which "
            f"level to begin; got {config.levels}. Use an environment of Gymnasium (--env.type "
            "for_loop, thread or process) or one in JAX (--env.type jax)."
        )


def _python_backend(builder: EnvBuilder, type_: str, config: PoolConfig) -> Backend:
    if type_ in ("auto", "for_loop"):
        from rlstack.envs.for_loop import ForLoopBackend

        return ForLoopBackend(builder, config)
    if type_ in ("async", "thread"):
        from rlstack.envs.thread import ThreadBackend

        return ThreadBackend(builder, config)
    from rlstack.envs.process.backend import ProcessBackend

    return ProcessBackend(builder, config)


class GymnasiumBuilder:
    """Builds a registered Gymnasium environment.

    It can be pickled. It contains the registration, because a worker process does not run the code
    that registered the environment.
    """

    def __init__(self, name: str):
        import gymnasium

        self.name = name
        self.spec = gymnasium.spec(name)

    def __call__(self, **options: Any) -> gymnasium.Env:
        """Returns the environment, without Gymnasium's checker: the pool checks each step."""
        import gymnasium

        return gymnasium.make(self.spec, disable_env_checker=True, **options)


def resolve(name: str) -> EnvBuilder:
    """Returns a builder for a Gymnasium id or for ``"package.module:callable"``.

    Raises:
      ValueError: there is no such id, module or callable; the message suggests similar ids.
    """
    import gymnasium

    if ":" in name:
        module_name, attribute = name.split(":", 1)
        try:
            module = import_named(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Env pool: {name!r} must name an importable module; got: {error}."
            ) from error
        found = getattr(module, attribute, None)
        if callable(found):
            return found
        if attribute not in gymnasium.registry:
            raise ValueError(
                f"Env pool: {name!r} must name a callable; {module_name} has no callable "
                f"{attribute!r}."
            )
        return GymnasiumBuilder(name)
    if name in gymnasium.registry:
        return GymnasiumBuilder(name)
    if name in library.names():
        raise ValueError(
            f"Env pool: {name!r} must run with type='cpp', because only EnvPool has it; the "
            f"installed Gymnasium has not{nearest(name, gymnasium.registry)}"
        )
    raise ValueError(_unknown(name, [*library.names(), *gymnasium.registry], "EnvPool, Gymnasium"))


def seat_names(
    name_or_builder: str | EnvBuilder, type_: str, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the name of each seat of one game in a pool, or its number if the game names none.

    An environment of one agent has one seat.

    Raises:
      ValueError: there is no such game, or its option ``agents`` is no number of seats.
    """
    builder: Any = name_or_builder
    if isinstance(builder, str):
        if ":" not in builder and type_ in ("auto", "cpp", "async") and builder in library.names():
            return library.seats(builder, options)
        named = ":" in builder and not builder.startswith("rust:")
        builder = resolve(builder) if named else None
    found = getattr(builder, "seats", None)
    if callable(found):
        return tuple(found(**options))
    agents = options.get("agents", 1)
    if not isinstance(agents, int) or agents < 1:
        raise ValueError(f"env.options: agents must be a number of seats; got {agents!r}.")
    return tuple(map(str, range(agents)))


def _unknown(name: str, known: Iterable[str], where: str) -> str:
    if name.startswith(versions.PREFIXED) or _OF_GYMNAX.fullmatch(name):
        return f"Env pool: {name!r} names an environment in JAX, which needs --env.type jax."
    return f"Env pool: the name must be an id of {where}; got {name!r}{nearest(name, known)}"
