"""Resolves the policies of an experiment: which seats each plays, and its own experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rlstack.agents import AGENTS
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.envs import factory
from rlstack.envs.pool import SyncEnv
from rlstack.envs.seats import joint
from rlstack.envs.seats.showing import JOINT
from rlstack.envs.seats.views import SharedPool
from rlstack.exploration import RunCounts
from rlstack.programs.build import opponents
from rlstack.programs.build.environments import Pool, make_env
from rlstack.programs.build.restored import counts_at
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.member_config import MemberConfig, is_fixed
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.references import nearest

Kind = Literal["learning", "fixed", "frozen", "history"]


class Member(NamedTuple):
    """One policy of a set.

    `experiment` is an ordinary experiment of this policy alone. Its ``env.num_envs`` is the number
    of rows that the policy plays.
    """

    name: str
    # One of: learning; fixed: an agent that does not learn; frozen: the agent of a run; history:
    # earlier versions of another policy.
    kind: Kind
    cfg: MemberConfig
    seats: tuple[int, ...]  # the seats that the policy plays in each game
    experiment: Experiment

    def rows(self, num_envs: int, num_seats: int) -> list[int]:
        """Returns the rows of its seats in all games of a pool with this many rows."""
        return [
            game + seat for game in range(0, num_envs, num_seats) for seat in sorted(self.seats)
        ]


class Division(NamedTuple):
    """The policies of an experiment, and the seats of its games."""

    seat_names: tuple[str, ...]
    members: Mapping[str, Member]

    @property
    def num_seats(self) -> int:
        """The number of seats of one game."""
        return len(self.seat_names)

    @property
    def learning(self) -> list[Member]:
        """The policies that learn."""
        return [member for member in self.members.values() if member.kind == "learning"]


def divide(experiment: Experiment) -> Division:
    """Resolves the policies of an experiment.

    Raises:
      ValueError: a seat has no policy or several, no policy learns, the environments are no whole
        games, or a policy cannot be what its config says.
    """
    cfg = experiment.env
    names = seat_names(cfg)
    if cfg.num_envs % len(names):
        raise ValueError(
            f"Experiment: env.num_envs must be whole games of {len(names)} seats with policies; "
            f"got {cfg.num_envs}."
        )
    seats = _seats(experiment.policies, names)
    games = cfg.num_envs // len(names)
    members = {}
    for number, (name, member) in enumerate(experiment.policies.items()):
        kind = _kind(experiment, name)
        own = _own_experiment(experiment, name, kind)
        # The first policy has the seed of the run, so that a set of one policy is the run of one.
        seed = experiment.seed if number == 0 else role_seed(experiment.seed, "policy", number)
        rows = games * len(seats[name])
        env = dataclasses.replace(cfg, num_envs=rows)
        own = dataclasses.replace(own, env=env, seed=seed)
        if kind == "learning" and experiment.layout.is_compiled:
            own = _in_fused(own, name)
        members[name] = Member(name, kind, member, seats[name], own)
    division = Division(names, members)
    if not division.learning:
        raise ValueError("Experiment: at least one of the policies must learn; none does.")
    return division


def resolved(experiment: Experiment) -> Experiment:
    """Returns the experiment with each policy's run replaced by its newest checkpoint.

    Raises:
      ValueError: a policy names a directory that is not a run, or a run without a checkpoint.
    """

    def found(name: str, member: MemberConfig) -> MemberConfig:
        if not member.run:
            return member
        path = opponents.checkpoint_of(member.run, f"policies.{name}.run")
        return dataclasses.replace(member, run=str(path))

    policies = {name: found(name, member) for name, member in experiment.policies.items()}
    return dataclasses.replace(experiment, policies=policies)


def make_games(cfg: EnvConfig, num_seats: int, seed: int, **more: Any) -> Pool:
    """Makes a pool of whole games; arguments and errors are those of `make_env`."""
    games = cfg.num_envs // num_seats
    workers = joint.workers_of_games(cfg.type, cfg.num_workers, games)
    return make_env(dataclasses.replace(cfg, num_workers=workers), seed, **more)


def share_games(
    experiment: Experiment, division: Division, cfg: EnvConfig, seed: int, seating_seed: int
) -> SharedPool:
    """Makes a pool of games and divides it among the policies.

    Args:
      experiment: the experiment of all policies.
      division: the experiment's policies and their seats.
      cfg: the config of the environments.
      seed: seed of the environments.
      seating_seed: seed of the seat assignment, if seats are drawn at random.

    Raises:
      ValueError: see `make_env`.
    """
    infos = bool(experiment.step_processor)
    pool = make_games(cfg, division.num_seats, seed, step_info=infos)
    assert isinstance(pool, SyncEnv)
    rows = {
        name: member.rows(cfg.num_envs, division.num_seats)
        for name, member in division.members.items()
    }
    drawn = experiment.seating == "drawn"
    rng = np.random.default_rng(seating_seed) if drawn else None
    return SharedPool(pool, rows, division.num_seats, rng)


def frozen_experiment(member: MemberConfig) -> tuple[Experiment, RunCounts]:
    """Returns the experiment of a frozen policy's agent, and the counts of its run.

    Raises:
      ValueError: the run trained several policies and none is named, or it has none of this name.
    """
    path = Path(member.run)
    directory = RunDir.open(opponents.run_of(path))
    experiment = read_config(directory, several=True)
    own = of_one(experiment, member.run_policy, directory.path)
    return own, counts_of(path, experiment)


def of_one(experiment: Experiment, name: str, where: object) -> Experiment:
    """Returns the experiment of the named policy of a run, or the run's own for one policy.

    Raises:
      ValueError: there is no such policy, it does not learn, or none of several is named.
    """
    if not name and not experiment.policies:
        return experiment
    if name not in experiment.policies:
        raise ValueError(
            f"{where} must have a policy of the name that is given; it has "
            f"{', '.join(experiment.policies) or 'one without a name, so leave it out'}; "
            f"got {name!r}{nearest(name, experiment.policies)}"
        )
    member = divide(experiment).members[name]
    if member.kind != "learning":
        raise ValueError(f"{where}: {name} has no params of its own, because it does not learn.")
    return member.experiment


def counts_of(path: Path, experiment: Experiment) -> RunCounts:
    """Returns the steps and episodes per environment at a checkpoint, averaged over its policies.

    Args:
      path: path of the checkpoint.
      experiment: the run's experiment, with all policies.
    """
    if not experiment.policies:
        return counts_at(path, experiment)
    rows = sum(member.experiment.total_envs for member in divide(experiment).learning)
    return counts_at(path, experiment, rows)


def _own_experiment(experiment: Experiment, name: str, kind: Kind) -> Experiment:
    """Returns the experiment of one policy, with all rows and the seed of the set."""
    member = experiment.policies[name]
    if kind == "history":
        return experiment.of_policy(member.history.of)
    own = experiment.of_policy(name)
    if kind == "fixed":  # a rule sees what the environment gives, and has no statistics
        own = dataclasses.replace(own, normalisation=NormalisationConfig())
    return own


def _in_fused(own: Experiment, name: str) -> Experiment:
    """Returns the experiment of a policy in the topology fused.

    Raises:
      ValueError: the policy's replay does not fit the number of rows that it plays.
    """
    try:
        return dataclasses.replace(own, topology="fused")
    except ValueError as error:
        raise ValueError(f"policies.{name}: {error}") from error


def _kind(experiment: Experiment, name: str) -> Kind:
    member = experiment.policies[name]
    if member.run:
        return "frozen"
    if member.history.of:
        of = member.history.of
        if of not in experiment.policies or _kind(experiment, of) != "learning":
            raise ValueError(
                f"policies.{name}: history.of must be a policy that learns; got {of!r}"
                f"{nearest(of, experiment.policies)}"
            )
        return "history"
    entry = AGENTS.get(type(member.agent or experiment.agent))
    if entry is not None and entry.offline:
        raise ValueError(
            f"policies.{name}: agent must learn from acting; {entry.agent.__name__} learns from "
            "recorded data only."
        )
    return "fixed" if is_fixed(member.agent or experiment.agent) else "learning"


def seat_names(cfg: EnvConfig) -> tuple[str, ...]:
    """Returns the name of each seat of one game, or its number if the game names none.

    An environment of one agent has one seat, and so has a game whose rows are joint.

    Raises:
      ValueError: there is no such game, or its option ``agents`` is no number of seats.
    """
    if cfg.options.get(JOINT):
        return ("0",)
    if cfg.type == "jax":
        from rlstack.jax_envs.factory import make_jax_env
        from rlstack.jax_envs.showing import SHOWN

        shown = (*SHOWN, JOINT)
        options = {name: value for name, value in cfg.options.items() if name not in shown}
        return tuple(getattr(make_jax_env(cfg.name, options), "seats", ("0",)))
    return factory.seat_names(cfg.name, cfg.type, cfg.options)


def _seats(
    policies: Mapping[str, MemberConfig], names: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Returns the seats of each policy."""
    found: dict[str, tuple[int, ...]] = {}
    for policy, member in policies.items():
        own: list[int] = []
        for seat in member.seats:
            matching = [i for i, name in enumerate(names) if seat in (i, name)]
            if not matching:
                raise ValueError(
                    f"policies.{policy}: seats must be among 0 to {len(names) - 1}, or names of "
                    f"seats: {', '.join(dict.fromkeys(names))}; got {seat!r}."
                )
            own += matching
        found[policy] = tuple(sorted(set(own)))
    taken = [seat for own in found.values() for seat in own]
    left = tuple(seat for seat in range(len(names)) if seat not in taken)
    for policy, member in policies.items():
        if not member.seats:
            found[policy], left = left, ()
        if not found[policy]:
            raise ValueError(
                f"policies.{policy}: seats must be given, because no seat is left; a game has "
                f"{len(names)}."
            )
    double = sorted({seat for seat in taken if taken.count(seat) > 1})
    if double or left:
        raise ValueError(
            f"policies: each of the {len(names)} seats must have one policy; "
            + (f"{double} have several." if double else f"{list(left)} have none.")
        )
    return found
