"""What plays the seats of a game for a run: its policies, or one of them, at a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlstack.programs.build import opponents
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import (
    Division,
    Member,
    counts_of,
    divide,
    frozen_experiment,
    seat_names,
)
from rlstack.programs.build.policies.policy import Policy
from rlstack.programs.build.restored import Which, chosen_checkpoint, read_params
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.pictures.stage import shapes_of
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.references import nearest
from rlstack.storage import checkpoint, files
from rlstack.types import EnvSpec


class Entry(NamedTuple):
    """A run that takes part in a game."""

    text: str  # the run as the user named it
    path: Path  # path of the checkpoint
    policy: str  # the policy that plays all seats; empty if each seat has its own policy
    experiment: Experiment
    run: str  # name of the run's directory

    @property
    def env_frames(self) -> int:
        """The environment steps that the params have learned from."""
        return _frames_of(self.path)


class Side(NamedTuple):
    """The policies that play for one run."""

    name: str
    policies: tuple[Policy, ...]  # one for each seat, each with its own recurrent state


def find(command: str, text: str | os.PathLike[str], params: Which = "last") -> Entry:
    """Returns the run that a text names.

    Args:
      command: begins the messages.
      text: the directory of a run, or of one of its checkpoints; a run of several policies may be
        followed by ``:NAME`` of the policy that plays all seats.
      params: the checkpoint of a run to use, "last" or "best".

    Raises:
      ValueError: there is no such run, checkpoint or policy.
    """
    text = os.fspath(text)
    where, policy = _local(text), ""
    if not Path(where).exists() and ":" in text:
        where, _, policy = text.rpartition(":")
        where = _local(where)
    if not Path(where).exists():
        RunDir.open(where)  # says that there is no such directory
    path = opponents.checkpoint_of(where, command)
    directory = RunDir.open(opponents.run_of(path))
    experiment = read_config(directory, several=True)
    if params == "best" and Path(where).absolute() == directory.path:
        path = chosen_checkpoint(directory, experiment, params)
    if policy and policy not in experiment.policies:
        raise ValueError(
            f"{where} must have a policy of the name that is given; it has "
            f"{', '.join(experiment.policies) or 'one without a name, so leave it out'}; "
            f"got {policy!r}{nearest(policy, experiment.policies)}"
        )
    return Entry(text, path, policy, experiment, directory.path.name)


def _local(text: str) -> str:
    """Returns a path; that of a URL is a copy, which is up to date."""
    directory = RunDir(files.local(text))
    directory.fetch()
    return str(directory.path)


def check_same_game(entries: Sequence[Entry], spec: EnvSpec) -> None:
    """Checks that the policies of all runs can play in the game of the first one.

    Args:
      entries: the runs.
      spec: the spec of the first run's game.

    Raises:
      ValueError: a run has learned another game, or has other observations or actions.
    """
    first = entries[0]
    wanted = _game(first.experiment)
    for entry in entries[1:]:
        if (found := _game(entry.experiment)) != wanted:
            raise ValueError(
                f"watch: all runs must be of one game; {first.text} is of {wanted}, and "
                f"{entry.text} of {found}."
            )
        if shapes_of(own := environment_spec(entry.experiment)) != shapes_of(spec):
            raise ValueError(
                f"watch: all runs must have the same observations and actions; {first.text} has "
                f"{spec}, and {entry.text} {own}. Compare their env.options with rlstack diff."
            )


def sides_of(
    entries: Sequence[Entry], spec: EnvSpec, num_seats: int, *, greedy: bool, seed: int
) -> list[Side]:
    """Makes the policies of some runs.

    Args:
      entries: the runs.
      spec: the spec of the game.
      num_seats: number of the game's seats.
      greedy: True if policies that have learned take their best action.
      seed: seed of the random actions.

    Raises:
      ValueError: a checkpoint cannot be read, or a policy does not fit the game.
    """
    sides = []
    for number, (entry, name) in enumerate(zip(entries, _names(entries), strict=True)):
        loaded: dict[str, Policy] = {}
        chosen = _policies_of_seats(entry, num_seats)
        for policy in chosen:
            if policy not in loaded:
                loaded[policy] = _load(entry, policy, spec, greedy)
        own = [
            loaded[policy].twin(role_seed(seed, "seat", number * num_seats + seat))
            for seat, policy in enumerate(chosen)
        ]
        sides.append(Side(name, tuple(own)))
    return sides


def _policies_of_seats(entry: Entry, num_seats: int) -> list[str]:
    """Returns the name of the policy that plays each seat for a run; "" for a run of one policy.

    Where earlier versions of a policy played in training, its newest params play.
    """
    if not entry.experiment.policies:
        return [""] * num_seats
    members = divide(entry.experiment).members
    if entry.policy:
        return [_newest(members[entry.policy])] * num_seats
    found = {seat: _newest(member) for member in members.values() for seat in member.seats}
    return [found[seat] for seat in range(num_seats)]


def _newest(member: Member) -> str:
    return member.cfg.history.of if member.kind == "history" else member.name


def _load(entry: Entry, name: str, spec: EnvSpec, greedy: bool) -> Policy:
    """Returns a policy of a run, or of the run that it is frozen from."""
    experiment, path, frames = entry.experiment, entry.path, entry.env_frames
    after = counts_of(path, experiment)
    policy = name
    if name:
        division: Division = divide(entry.experiment)
        member = division.members[name]
        experiment = member.experiment
        if member.kind == "fixed":  # it has no params, and acts without exploration
            return Policy(experiment, spec, (), greedy=True)
        if member.kind == "frozen":
            (experiment, after), path = frozen_experiment(member.cfg), Path(member.cfg.run)
            policy, frames = member.cfg.run_policy, _frames_of(path)
    params = read_params(path, experiment, spec, policy=policy)
    return Policy(experiment, spec, params, greedy=greedy, env_frames=frames, after=after)


def _frames_of(path: Path) -> int:
    metadata = checkpoint.read_metadata(path)
    return int(metadata.get("env_frames", metadata["step"]))


def _names(entries: Sequence[Entry]) -> list[str]:
    """Returns NAME for each, NAME@FRAMES where names are equal, or with numbers."""
    plain = [":".join(filter(None, (entry.run, entry.policy))) for entry in entries]
    full = [f"{name}@{entry.env_frames}" for name, entry in zip(plain, entries, strict=True)]
    return [
        name
        if plain.count(name) == 1
        else longer
        if full.count(longer) == 1
        else f"{longer} ({number})"
        for number, (name, longer) in enumerate(zip(plain, full, strict=True), 1)
    ]


def _game(experiment: Experiment) -> str:
    """Returns the name of a game, with that of the environment that it adapts."""
    cfg = experiment.evaluation_env
    game = cfg.options.get("game", cfg.options.get("command"))
    seats = len(seat_names(cfg))
    return f"{cfg.name}{'' if game is None else f' {game}'} with {seats} seats"
