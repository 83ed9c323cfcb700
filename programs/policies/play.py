"""`rlstack play`: an entity environment in the terminal, played by hand.

Each step shows the picture, the entities and, with a run's checkpoint, the value and probabilities
of its agent. Then the user chooses for every actor.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping

import jax
import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from programs.components.restored import Which, chosen_checkpoint, read_config
from programs.env_config import Option
from programs.policies.labels import GameLabels
from programs.policies.policy import Policy, Prediction, load
from programs.tracking.run_dir import RunDir
from rlstack.entity.adapter import EntityEnv, as_dm_env
from rlstack.entity.environment import Environment
from rlstack.entity.games import GAMES
from rlstack.entity.spaces import GLOBAL, SelectEntity
from rlstack.envs import SyncEnv
from rlstack.references import load_object, nearest
from rlstack.types import PyTree, TimeStep

Builder = Callable[..., EntityEnv | Environment]  # of a game, by its options
_MAX_LISTED = 12  # choices listed with their probabilities, the most likely first


class _Quit(Exception):  # noqa: N818  (a request, not an error)
    """The user asked to quit."""


def play(
    env: str,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    options: Mapping[str, Option] | None = None,
    agent: bool = False,
    seed: int = 0,
    params: Which = "last",
    console: Console | None = None,
) -> list[float]:
    """Lets the user play until they quit with ``q`` or the input ends.

    Args:
      env: a game of `rlstack.entity.games`, in any spelling of its name, or "module:callable".
      checkpoint: the directory of a run; the value and probabilities of its agent are shown, and
        the options of its environment are used.
      options: options of the game, which override those of the run.
      agent: whether Enter plays the agent's choice.
      seed: seed of the game.
      params: which params of the run: the last ones, or those with the best evaluation.
      console: receives the output; standard output by default.

    Returns:
      The returns of the finished episodes.

    Raises:
      ValueError: there is no such game or run, or the run is on another game.
    """
    builder = find_game(env)
    if agent and checkpoint is None:
        raise ValueError("play: --agent needs the run of an agent. Add --checkpoint RUN_DIR.")
    settings = dict(options or {})
    if checkpoint is not None:
        experiment = read_config(directory := RunDir.open(checkpoint))
        chosen_checkpoint(directory, experiment, params)  # before the game is built
        cfg = experiment.env
        if ":" not in cfg.name or load_object(cfg.name) is not builder:
            raise ValueError(
                f"play: {checkpoint} must be a run on {env}; it is a run on {cfg.name}."
            )
        settings = {**cfg.options, **cfg.eval_options, **settings}
    if "seed" in inspect.signature(builder).parameters:
        settings.setdefault("seed", seed)
    built = _adapted(env, builder, settings)

    def build(seed: int) -> EntityEnv:
        del seed  # the game has its seed already
        return built

    with SyncEnv(build, 1, "for_loop") as pool:
        policy = None if checkpoint is None else load(checkpoint, params=params, spec=pool.spec)
        game = _Game(pool, built, policy, agent, console or Console(highlight=False))
        try:
            while True:
                game.episode()
        except (_Quit, EOFError):
            game.console.print()
        return game.returns


def find_game(name: str) -> Builder:
    """Returns the builder of a game, named in any spelling or by "module:callable".

    Raises:
      ValueError: there is no such game; the message names the most similar one.
    """
    if name.startswith("rust:"):
        raise ValueError(
            f"play: a game must run in Python to be played by hand; got {name}. "
            "programs.policies.game_agent.play_program lets a run's agent play it."
        )
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


def _adapted(name: str, builder: Builder, options: dict[str, Option]) -> EntityEnv:
    try:
        built = builder(**options)
    except TypeError as error:
        raise ValueError(f"play: {name} does not accept these options: {error}.") from error
    if isinstance(built, EntityEnv):
        return built
    if not hasattr(built, "action_space") or not hasattr(built, "obs_space"):
        raise ValueError(
            f"play: {name} must build an entity environment (rlstack.entity.Environment); "
            f"got {type(built).__name__}."
        )
    return as_dm_env(built)


class _Game:
    """One environment, its pool, and the user who plays it."""

    def __init__(
        self,
        pool: SyncEnv,
        env: EntityEnv,
        policy: Policy | None,
        follows: bool,
        console: Console,
    ):
        self.returns: list[float] = []
        self.console = console
        self._pool, self._env, self._policy, self._follows = pool, env, policy, follows
        self._labels = GameLabels(env)
        self._nothing = {k: np.zeros((1, *s.shape), np.int32) for k, s in pool.spec.action.items()}
        self._timestep = pool.reset()

    def episode(self) -> None:
        """Plays one episode and starts the next one."""
        total, length, timestep = 0.0, 0, self._timestep
        while not timestep.last()[0]:
            prediction = self._predict(timestep)
            self._show(timestep, prediction)
            timestep = self._pool.step(self._ask(timestep, prediction))
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

    def _predict(self, timestep: TimeStep) -> Prediction | None:
        if self._policy is None:
            return None
        if timestep.first()[0]:
            self._policy.reset()
        row = jax.tree.map(lambda x: x[0], timestep)
        return self._policy.predict(row.observation, row.reward)

    # Output.

    def _show(self, timestep: TimeStep, prediction: Prediction | None) -> None:
        picture = Panel(Text(str(self._env.game)), expand=False)
        self.console.print(Columns([picture, *self._entities(timestep.observation)]))
        if prediction is not None and prediction.value is not None:
            self.console.print(f"the agent's value: {prediction.value:.3f}")

    def _entities(self, observation: PyTree) -> list[Table]:
        """Returns a table of features for each entity type that is present."""
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

    # Input.

    def _ask(self, timestep: TimeStep, prediction: Prediction | None) -> dict[str, np.ndarray]:
        """Asks for the choice of every actor; returns the action, int32 [1, capacity] by type."""
        action = {name: choices.copy() for name, choices in self._nothing.items()}
        observation, follows = timestep.observation, False
        for name, choices in action.items():
            actors = observation["actors"][name][0].tolist()
            legal = observation["action_mask"][name][0].reshape((len(actors), -1))
            for row, slot in enumerate(actors):
                if slot < 0:
                    continue
                predicted = None if prediction is None else int(prediction.action[name][row])
                if not follows:
                    options = {
                        int(i): self._labels.choice(name, int(i))
                        for i in np.flatnonzero(legal[row])
                    }
                    chances = None if prediction is None else prediction.probabilities.get(name)
                    self._list(f"{name} of {self._labels.entity(slot)}", options, predicted,
                               None if chances is None else chances[row])  # fmt: skip
                    chosen = self._choose(name, options)
                    follows = chosen is None
                choices[0, row] = predicted if follows else chosen
        return action

    def _list(
        self, title: str, options: dict[int, str], predicted: int | None, chances: np.ndarray | None
    ) -> None:
        order = list(options)
        if chances is not None:
            order.sort(key=lambda i: -chances[i])
        parts = []
        for i in order[:_MAX_LISTED]:
            chance = "" if chances is None else f" {chances[i]:.1%}"
            parts.append(f"{i} {options[i]}{chance}{' *' if i == predicted else ''}")
        rest = len(order) - _MAX_LISTED
        self.console.print(Text(f"{title}: {', '.join(parts)}"), end="")
        self.console.print(f", and {rest} more" if rest > 0 else "")

    def _choose(self, name: str, options: dict[int, str]) -> int | None:
        """Reads a legal choice; an empty line returns None, if Enter plays the agent's choice."""
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
            what = "not legal here" if self._is_masked(name, text) else "not a choice"
            self.console.print(Text(f"{text!r} is {what}; choose from {legal}, or q to quit."))

    def _is_masked(self, name: str, text: str) -> bool:
        """Says whether a text names a choice that exists but is not legal for this actor."""
        count = self._env.codec.slots.total
        kind = self._env.game.action_space[name]
        if not isinstance(kind, SelectEntity):
            count = len(kind.choices)
        if text.isdecimal():
            return int(text) < count
        return text in (self._labels.choice(name, i).lower() for i in range(count))

    def _read(self, hint: str) -> str:
        text = self.console.input(Text(hint)).strip().lower()
        if text == "q":
            raise _Quit
        return text
