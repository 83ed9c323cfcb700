"""Who beats whom: the versions of a policy against one another, with ratings."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstack.envs.pool import SyncEnv
from rlstack.math.ratings import Ratings, rate, tables
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import Pool, environment_spec
from rlstack.programs.build.policies.history import VersionedInferencer
from rlstack.programs.build.policies.members import Division, Member, divide, make_games
from rlstack.programs.build.policies.versions import Versions, read_versions
from rlstack.programs.build.restored import newest_checkpoint, read_params
from rlstack.programs.build.seeds import role_key, role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from rlstack.types import StepType

_SIDES = 2  # each pair of players plays in both seats


class Tournament(NamedTuple):
    """The results of a tournament of P players."""

    names: tuple[str, ...]  # [P] POLICY@FRAMES, the oldest version first, the newest params last
    win_rates: np.ndarray  # [P, P] of the row's player against the column's; 1/2 on the diagonal
    games: np.ndarray  # [P, P]
    ratings: Ratings  # Elo points, [P] each

    def summary(self) -> dict[str, Any]:
        """Returns the results as numbers and lists, for JSON."""
        rows = zip(
            self.names, *(np.round(column, 1).tolist() for column in self.ratings), strict=True
        )
        return {
            "players": list(self.names),
            "win_rates": np.round(self.win_rates, 4).tolist(),
            "games": self.games.astype(int).tolist(),
            "ratings": {
                name: {"elo": value, "low": low, "high": high} for name, value, low, high in rows
            },
        }


def tournament(
    run_dir: str | Path, games: int = 100, versions: int = 8, seed: int | None = None
) -> Tournament:
    """Plays the newest params of a policy and its earlier versions against one another.

    All players choose their actions as the earlier versions did in training. The players of a pair
    change seats after half of their games. A version that was saved at the frames of the newest
    params is the same player as these.

    Args:
      run_dir: a run of self-play: one policy that learns, and one that is its earlier versions.
      games: number of games of each pair, even.
      versions: number of earlier versions, at most; they are spread evenly over the history.
      seed: seed of the games; by default the seed of the run.

    Raises:
      ValueError: the run is not one of self-play, or has no checkpoint.
    """
    if games < _SIDES or games % _SIDES:
        raise ValueError(f"tournament: games must be even and at least 2; got {games}.")
    directory = RunDir.open(run_dir)
    experiment = read_config(directory, several=True)
    if seed is not None:
        experiment = dataclasses.replace(experiment, seed=seed)
    learner, history, division = _of_selfplay(experiment, directory.path)
    path = newest_checkpoint(directory, experiment)
    spec = environment_spec(experiment)
    params = read_params(path, learner.experiment, spec, policy=learner.name)
    earlier = read_versions(path, history, params)
    now = int(checkpoint.read_metadata(path)["env_frames"])
    chosen = _spread(earlier.slots[earlier.frames < now], versions)  # one of now is the newest
    frames = dict(zip(earlier.slots.tolist(), earlier.frames.tolist(), strict=True))
    cfg = dataclasses.replace(history.cfg.history, max_versions=len(chosen) + 1)
    players = Versions(cfg, earlier.params(chosen[0])[1])
    for slot in chosen[1:]:
        players.add(frames[slot], earlier.params(slot)[1])
    players.add(now, params)
    pairs = np.array(list(itertools.combinations(range(len(chosen) + 1), 2)))
    with _make_pool(experiment, division, _SIDES * len(pairs)) as pool:
        scores, met = _play(pool, players, pairs, (learner, history), division, games)
    wins, played = tables(scores, met, len(chosen) + 1)
    rates = np.divide(wins, played, out=np.full_like(wins, 0.5), where=played > 0)
    names = [f"{learner.name}@{frames[slot]}" for slot in chosen] + [f"{learner.name}@{now}"]
    return Tournament(tuple(names), rates, played, rate(scores, met, len(names)))


def _of_selfplay(experiment: Experiment, where: Path) -> tuple[Member, Member, Division]:
    """Returns the policy that learns and the one that is its history.

    Raises:
      ValueError: there are others, or there is no such pair.
    """
    division = divide(experiment) if experiment.policies else Division((), {})
    histories = [member for member in division.members.values() if member.kind == "history"]
    if len(histories) != 1 or len(division.members) != _SIDES:
        raise ValueError(
            f"{where} must be a run of self-play, with one policy that learns and one that is its "
            f"history; its policies are {', '.join(division.members) or 'one without a name'}."
        )
    return division.members[histories[0].cfg.history.of], histories[0], division


def _make_pool(experiment: Experiment, division: Division, games: int) -> Pool:
    number = games * division.num_seats
    cfg = dataclasses.replace(experiment.evaluation_env, num_envs=number)
    return make_games(cfg, division.num_seats, role_seed(experiment.seed, "tournament"))


def _spread(slots: np.ndarray, number: int) -> list[int]:
    """Returns at most this many of the slots, evenly spaced, the first among them."""
    at = np.linspace(0, len(slots) - 1, min(number, len(slots)))
    return slots[np.round(at).astype(int)].tolist()


def _play(
    pool: Pool,
    players: Versions,
    pairs: np.ndarray,
    sides: tuple[Member, Member],
    division: Division,
    games: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Plays all pairs at once; returns the score of each game's first player, and its players."""
    assert isinstance(pool, SyncEnv)
    # Game 2 p is pair p, and game 2 p + 1 the same pair in the other seats.
    met = np.stack([pairs, pairs[:, ::-1]], axis=1).reshape(-1, _SIDES)
    num_games = len(met)
    slots: np.ndarray = np.zeros((num_games, division.num_seats), np.int64)
    for side, member in enumerate(sides):
        slots[:, list(member.seats)] = met[:, side : side + 1]
    slots = slots.ravel()
    history = sides[1]
    inferencer = VersionedInferencer(
        make_agent(history.experiment, pool.spec, greedy=history.cfg.greedy),
        players,
        lambda begins, _: slots[begins],
        len(slots),
        role_key(history.experiment.seed, "tournament"),
        history.experiment.total_envs,
    )
    returns = np.zeros((num_games, division.num_seats))
    ended = np.zeros(num_games, np.int64)
    scores, found = [], []
    timestep = pool.reset()
    while (ended < games // _SIDES).any():
        timestep = pool.step(inferencer.inference(None, timestep).agent_output.action)
        returns += np.asarray(timestep.reward).reshape(returns.shape)
        kinds = np.asarray(timestep.step_type).reshape(returns.shape)  # FIRST if a seat has left
        over = (kinds != StepType.MID).all(axis=1) & (kinds == StepType.LAST).any(axis=1)
        for game in np.flatnonzero(over & (ended < games // _SIDES)):
            first, second = (returns[game, list(member.seats)].mean() for member in sides)
            scores.append((np.sign(first - second) + 1.0) / 2.0)
            found.append(met[game])
        ended += over
        returns[over] = 0.0
    return np.array(scores), np.array(found)
