"""`rlstack play`: an entity environment in the terminal, played by hand.

Each step shows the picture, the entities and, with a run's checkpoint, what its agent thinks; then
every actor is asked for its choice.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from programs.experiment import Option
from programs.run.adviser import Advice, Adviser
from rlstack.entity.adapter import EntityEnv, as_dm_env
from rlstack.entity.games import GAMES
from rlstack.entity.spaces import GLOBAL, SelectEntity
from rlstack.envs import SyncEnv
from rlstack.references import load_object, nearest
from rlstack.types import TimeStep

_MAX_LISTED = 12  # choices that are listed with their probabilities, the likeliest first


class _Quit(Exception):  # noqa: N818, it is no error
    """The player has had enough."""


def play(
    env: str,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    options: Mapping[str, Option] | None = None,
    agent: bool = False,
    seed: int = 0,
    console: Console | None = None,
) -> list[float]:
    """Lets the user play until they quit, by ``q`` or the end of the input.

    Args:
      env: a game of `rlstack.entity.games`, in any spelling of its name, or "module:callable".
      checkpoint: directory of a run whose agent's opinion is shown; its environment's options are
        taken over.
      options: of the game, over these.
      agent: whether Enter plays the agent's choice.
      seed: of the game.
      console: where to; standard output by default.

    Returns:
      The returns of the episodes that were played to their ends.

    Raises:
      ValueError: there is no such game or run, or they do not belong together.
    """
    builder = find_game(env)
    if agent and checkpoint is None:
        raise ValueError("play: agent needs a run to play as. Add --checkpoint RUN_DIR.")
    adviser = None if checkpoint is None else Adviser(checkpoint)
    settings = dict(options or {})
    if adviser is not None:
        cfg = adviser.experiment.env
        if ":" not in cfg.name or load_object(cfg.name) is not builder:
            raise ValueError(f"play: {checkpoint} must be a run on {env}; it is one on {cfg.name}.")
        settings = {**cfg.options, **cfg.eval_options, **settings}
    if "seed" in inspect.signature(builder).parameters:
        settings.setdefault("seed", seed)
    built = _adapted(env, builder, settings)

    def build(seed: int) -> EntityEnv:
        del seed  # it has it already
        return built

    with SyncEnv(build, 1, "for_loop") as pool:
        if adviser is not None:
            adviser.load(pool.spec)
        game = _Game(pool, built, adviser, agent, console or Console(highlight=False))
        try:
            while True:
                game.episode()
        except (_Quit, EOFError):
            game.console.print()
        return game.returns


def find_game(name: str) -> Callable[..., Any]:
    """Returns the builder of a game that is named in any spelling, or by "module:callable".

    Raises:
      ValueError: there is none; the message names the nearest.
    """
    if ":" in name:
        return load_object(name)

    def folded(text: str) -> str:
        return text.replace("-", "").replace("_", "").lower()

    known = {folded(game): builder for game, builder in GAMES.items()}
    if folded(name) in known:
        return known[folded(name)]
    close = nearest(name, {_kebab(game): None for game in GAMES})
    raise ValueError(f'play: there is no game {name!r}{close} Or give "module:callable".')


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


def _adapted(name: str, builder: Callable[..., Any], options: dict[str, Any]) -> EntityEnv:
    try:
        built = builder(**options)
    except TypeError as error:
        raise ValueError(f"play: {name} does not take these options: {error}.") from error
    if isinstance(built, EntityEnv):
        return built
    if not hasattr(built, "action_space") or not hasattr(built, "obs_space"):
        raise ValueError(
            f"play: {name} must build an entity environment (rlstack.entity.Environment); "
            f"got {type(built).__name__}."
        )
    return as_dm_env(built)


class _Game:
    """One environment, its pool, and the one who plays."""

    def __init__(
        self,
        pool: SyncEnv,
        env: EntityEnv,
        adviser: Adviser | None,
        follows: bool,
        console: Console,
    ):
        self.returns: list[float] = []
        self.console = console
        self._pool, self._env, self._adviser, self._follows = pool, env, adviser, follows
        self._nothing = {k: np.zeros((1, *s.shape), np.int32) for k, s in pool.spec.action.items()}
        self._timestep = pool.reset()

    def episode(self) -> None:
        """Plays one episode and leaves the next one begun."""
        total, length, timestep = 0.0, 0, self._timestep
        while not timestep.last()[0]:
            advice = None if self._adviser is None else self._adviser(timestep)
            self._show(timestep, advice)
            timestep = self._pool.step(self._ask(timestep, advice))
            reward = float(timestep.reward[0])
            total, length = total + reward, length + 1
            self.console.print(f"step {length}: reward {reward:g}, return so far {total:g}")
        self._show(timestep, None)
        self.returns.append(total)
        ended = "truncated" if timestep.discount[0] else "over"
        self.console.print(f"[bold]The episode is {ended} after {length} steps: return {total:g}.")
        if self._read("Enter for another, q to quit: ") == "q":
            raise _Quit
        self._timestep = self._pool.step(self._nothing)

    # What is shown.

    def _show(self, timestep: TimeStep, advice: Advice | None) -> None:
        shown = [Panel(Text(str(self._env.game)), expand=False)]
        shown += self._entities(timestep.observation)
        self.console.print(Columns(shown))
        if advice is not None and advice.value is not None:
            self.console.print(f"the agent's value: {advice.value:.3f}")

    def _entities(self, observation: Any) -> list[Any]:
        """One table a type that is there, headed by its features."""
        tables = []
        space = self._env.game.obs_space
        for kind, slots in self._env.codec.slots.ranges():
            is_global = kind == GLOBAL
            names = space.global_features if is_global else space.entities[kind].features
            count = 1 if is_global else int(observation["count"][kind][0])
            if not count or (is_global and not names):
                continue
            table = Table("#", *names, title="global" if is_global else kind)
            for row in range(count):
                features = observation["features"][kind][0, row].tolist() if names else []
                hidden = not is_global and not observation["visible"][kind][0, row]
                number = f"{slots[row]}{' (hidden)' if hidden else ''}"
                table.add_row(number, *(f"{value:.4g}" for value in features))
            tables.append(table)
        return tables

    # What is asked.

    def _ask(self, timestep: TimeStep, advice: Advice | None) -> dict[str, np.ndarray]:
        """Asks every actor for its choice; returns the action, int32 [1, capacity] by type."""
        action = {name: choices.copy() for name, choices in self._nothing.items()}
        observation, follows = timestep.observation, False
        for name, choices in action.items():
            actors = observation["actors"][name][0].tolist()
            legal = observation["action_mask"][name][0].reshape((len(actors), -1))
            for row, slot in enumerate(actors):
                if slot < 0:
                    continue
                advised = None if advice is None else int(advice.action[name][0, row])
                if not follows:
                    options = {
                        int(i): self._label(name, int(i)) for i in np.flatnonzero(legal[row])
                    }
                    chances = None if advice is None else advice.probabilities.get(name)
                    self._list(f"{name} of {self._entity(slot)}", options, advised,
                               None if chances is None else chances[row])  # fmt: skip
                    chosen = self._choose(name, options)
                    follows = chosen is None
                choices[0, row] = advised if follows else chosen
        return action

    def _list(
        self, title: str, options: dict[int, str], advised: int | None, chances: np.ndarray | None
    ) -> None:
        order = list(options)
        if chances is not None:
            order.sort(key=lambda i: -chances[i])
        parts = []
        for i in order[:_MAX_LISTED]:
            chance = "" if chances is None else f" {chances[i]:.1%}"
            parts.append(f"{i} {options[i]}{chance}{' *' if i == advised else ''}")
        rest = len(order) - _MAX_LISTED
        self.console.print(Text(f"{title}: {', '.join(parts)}"), end="")
        self.console.print(f", and {rest} more" if rest > 0 else "")

    def _choose(self, name: str, options: dict[int, str]) -> int | None:
        """Reads until a legal choice comes, or, with the agent's to follow, an empty line."""
        labels = {label.lower(): i for i, label in options.items()}
        hint = "number or label, Enter for the agent's: " if self._follows else "number or label: "
        while True:
            text = self._read(hint)
            if not text and self._follows:
                return None
            if text in labels:
                return labels[text]
            if text.isdecimal() and int(text) in options:
                return int(text)
            legal = ", ".join(f"{i} {label}" for i, label in options.items())
            what = "not legal here" if self._is_masked(name, text) else "no choice"
            self.console.print(Text(f"{text!r} is {what}; there are {legal}, and q to quit."))

    def _is_masked(self, name: str, text: str) -> bool:
        """Whether a text names a choice that there is, though not for this actor."""
        count = self._env.codec.slots.total
        kind = self._env.game.action_space[name]
        if not isinstance(kind, SelectEntity):
            count = len(kind.choices)
        if text.isdecimal():
            return int(text) < count
        return text in (self._label(name, i).lower() for i in range(count))

    def _label(self, name: str, choice: int) -> str:
        kind = self._env.game.action_space[name]
        return self._entity(choice) if isinstance(kind, SelectEntity) else kind.choices[choice]

    def _entity(self, slot: int) -> str:
        """An entity's name: its id where it has one, else type and row."""
        for kind, slots in self._env.codec.slots.ranges():
            if slot in slots:
                if kind == GLOBAL:
                    return "global"
                seen = self._env.last_observation
                ids = () if seen is None else seen.ids.get(kind, ())
                row = slot - slots[0]
                return str(ids[row]) if row < len(ids) else f"{kind} {row}"
        raise AssertionError(slot)

    def _read(self, hint: str) -> str:
        text = self.console.input(Text(hint)).strip().lower()
        if text == "q":
            raise _Quit
        return text
