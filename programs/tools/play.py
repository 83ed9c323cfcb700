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

from rlstack.entity.adapter import EntityEnv, as_dm_env
from rlstack.entity.environment import Environment
from rlstack.entity.games import GAMES
from rlstack.entity.spaces import GLOBAL
from rlstack.envs import SyncEnv
from rlstack.programs.build.policies.policy import Policy, Prediction, load
from rlstack.programs.build.restored import Which, chosen_checkpoint
from rlstack.programs.build.seeds import check_seed
from rlstack.programs.config.env_config import Option
from rlstack.programs.pictures.labels import GameLabels
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.seats.asking import Asker, Quit
from rlstack.references import load_object, nearest
from rlstack.types import PyTree, TimeStep

Builder = Callable[..., EntityEnv | Environment]  # makes a game from its options


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
      agent: True to let Enter play the agent's choice.
      seed: seed of the game.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      console: receives the output; standard output by default.

    Returns:
      The returns of the finished episodes.

    Raises:
      ValueError: there is no such game or run, the run is on another game, or the seed is negative
        or too large.
    """
    check_seed(seed)
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
        except (Quit, EOFError):
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
            "rlstack.programs.tools.game_agent.play_program lets a run's agent play it."
        )
    if ":" in name:
        return load_object(name)

    def folded(text: str) -> str:
        return text.replace("-", "").replace("_", "").lower()

    known = {folded(game): builder for game, builder in GAMES.items()}
    if folded(name) in known:
        return known[folded(name)]
    close = nearest(name, map(_kebab, GAMES))
    raise ValueError(f'there is no game {name!r}{close} Or give "module:callable".')


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
        self._pool, self._env, self._policy = pool, env, policy
        self._asker = Asker(console, GameLabels(env), pool.spec.action, follows)
        self._nothing = {k: np.zeros((1, *s.shape), np.int32) for k, s in pool.spec.action.items()}
        self._timestep = pool.reset()

    def episode(self) -> None:
        """Plays one episode and starts the next one."""
        total, length, timestep = 0.0, 0, self._timestep
        while not timestep.last()[0]:
            prediction = self._predict(timestep)
            self._show(timestep, prediction)
            observation = jax.tree.map(lambda x: x[0], timestep.observation)
            action = self._asker.ask(observation, prediction)
            timestep = self._pool.step(jax.tree.map(lambda x: x[None], action))
            reward = float(timestep.reward[0])
            total, length = total + reward, length + 1
            self.console.print(f"step {length}: reward {reward:g}, return so far {total:g}")
        self._show(timestep, None)
        self.returns.append(total)
        ended = "truncated" if timestep.discount[0] else "over"
        self.console.print(f"[bold]The episode is {ended} after {length} steps: return {total:g}.")
        self._asker.read("Enter for another, q to quit: ")
        self._timestep = self._pool.step(self._nothing)

    def _predict(self, timestep: TimeStep) -> Prediction | None:
        if self._policy is None:
            return None
        if timestep.first()[0]:
            self._policy.reset()
        row = jax.tree.map(lambda x: x[0], timestep)
        return self._policy.predict(row.observation, row.reward)

    def _show(self, timestep: TimeStep, prediction: Prediction | None) -> None:
        picture = Panel(Text(str(self._env.game)), expand=False)
        observation = jax.tree.map(lambda x: x[0], timestep.observation)
        self.console.print(Columns([picture, *entity_tables(self._env, observation)]))
        if prediction is not None and prediction.value is not None:
            self.console.print(f"the agent's value: {prediction.value:.3f}")


def entity_tables(env: EntityEnv, observation: PyTree) -> list[Table]:
    """Returns a table of features for each entity type that an observation of a game has."""
    tables = []
    space = env.game.obs_space
    for kind, slots in env.codec.slots.ranges():
        is_global = kind == GLOBAL
        names = space.global_features if is_global else space.entities[kind].features
        count = 1 if is_global else int(observation["count"][kind])
        if not count or (is_global and not names):
            continue
        table = Table("#", *names, title="global" if is_global else kind)
        for row in range(count):
            features = observation["features"][kind][row].tolist() if names else []
            hidden = not is_global and not observation["visible"][kind][row]
            number = f"{slots[row]}{' (hidden)' if hidden else ''}"
            table.add_row(number, *(f"{value:.4g}" for value in features))
        tables.append(table)
    return tables
