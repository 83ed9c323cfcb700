"""The node of an actor whose games several policies play."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rlstack.acting.actor import Actor
from rlstack.acting.inference import InferencerLike
from rlstack.envs.seats.views import SharedPool
from rlstack.programs.build.hooks import make_step_processor
from rlstack.programs.build.policies.history import HistoryPlayer, versions_player
from rlstack.programs.build.policies.members import Member, divide, share_games
from rlstack.programs.build.policies.player import fixed_inferencer
from rlstack.programs.build.seeds import acting_key
from rlstack.programs.program.actor import (
    EnvGauges,
    LearningPart,
    WaitingReplay,
    env_config,
    env_seed,
    may_act,
)
from rlstack.programs.program.base import RUNNING, CoordinatorClient, Setup
from rlstack.programs.program.lock_step import ACT, STOP, WAIT
from rlstack.programs.program.multi_policy.clients import learner_of
from rlstack.programs.program.multi_policy.policies import FRAMES
from rlstack.programs.program.multi_policy.versions import CopiedVersions, copied_versions
from rlstack.programs.program.replay_sides import ProgramReplay
from rlstack.programs.session import timing
from rlstack.replay import ReplayClosedError
from rlstack.rpc import RemoteObject, StoppedError, UnavailableError


class SeveralActorNode:
    """Acts with all policies in one pool of games until the coordinator ends the program.

    Policies that learn have replays, learners and perhaps inference services in other nodes. The
    others act here.
    """

    def __init__(
        self,
        setup: Setup,
        rank: int,
        replays: Mapping[str, ProgramReplay | RemoteObject],
        learners: Mapping[str, RemoteObject],
        services: Mapping[str, RemoteObject],
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Makes the agents; `run` makes the games.

        Args:
          setup: the program's setup.
          rank: rank of this actor.
          replays: the replay to write to for each learning policy; see `ActorNode`.
          learners: a client of each policy's learner.
          services: a client of each policy's inference service; empty to infer here.
          coordinator: a client of the coordinator.
          stop: set by the launcher to end this node.
        """
        self._setup, self._rank = setup, rank
        self._program = CoordinatorClient(coordinator, f"actor/{rank}", stop)
        setup.configure_jax(single_thread=True)
        self._division = divide(setup.experiment)
        self._parts = {
            own.policy: LearningPart(
                own,
                rank,
                replays[own.policy],
                learner_of(own, learners[own.policy]),
                services.get(own.policy),
                self._program,
            )
            for own in setup.learning
        }
        self._totals = {name: f"{name}/{FRAMES}" for name in self._parts}  # as they are reported
        self._histories: dict[str, HistoryPlayer] = {}
        self._fixed: dict[str, InferencerLike] = {}
        for member in self._division.members.values():
            if member.kind == "history":
                self._histories[member.name] = self._history(member, learners)
            elif member.kind != "learning":
                own = dataclasses.replace(setup, experiment=member.experiment)
                key = acting_key(own.acting_seed, rank, self._program.incarnation)
                self._fixed[member.name] = fixed_inferencer(member, setup.spec, key)

    def _history(self, member: Member, learners: Mapping[str, RemoteObject]) -> HistoryPlayer:
        setup, program = self._setup, self._setup.experiment.program
        versions = copied_versions(setup, member, learners)
        number = self._rank + program.num_actors * self._program.incarnation
        return versions_player(member, versions, setup.spec, number)

    def run(self) -> None:
        """Acts until the program ends training."""
        experiment, program = self._setup.experiment, self._program
        for part in self._parts.values():
            part.wait()
        for player in self._histories.values():
            program.wait_for(functools.partial(exchange, player))
        number = f"{experiment.env.num_envs:,} environments"
        with program.phase(f"making {number}"):
            shared = self._share_games()
        replays: dict[str, WaitingReplay] = {}

        def gauges() -> dict[str, float]:
            found = {
                f"{policy}/{name}": value
                for policy, replay in replays.items()
                for name, value in replay.gauges().items()
            }
            for name, player in self._histories.items():
                found |= {f"{name}/{key}": x for key, x in player.versions.stats().items()}
            return found

        self._shared = shared
        with shared, contextlib.ExitStack() as closing:
            for name, part in self._parts.items():
                replays[name] = part.begin()
                closing.callback(part.close)
            program.gauges = EnvGauges(program, gauges, shared.pool, experiment)
            try:
                with program.phase(f"resetting {number}"):
                    actors = self._make_actors(shared, replays)
                if experiment.program.pacing == "lock_step":
                    self._act_in_lock_step(actors, replays)
                else:
                    self._act(actors)
            except (StoppedError, ReplayClosedError):
                pass  # a learner closes its replay when it ends
            finally:
                program.gauges = gauges  # the last report comes after the pool is closed
        program.report_end()

    def _share_games(self) -> SharedPool:
        experiment, seed = self._setup.experiment, self._setup.acting_seed
        at = self._rank, self._program.incarnation
        return share_games(
            experiment,
            self._division,
            env_config(experiment),
            env_seed(seed, *at),
            env_seed(seed, *at, role="seating"),
        )

    def _make_actors(
        self, shared: SharedPool, replays: Mapping[str, WaitingReplay]
    ) -> dict[str, Actor]:
        made = {}
        for name, member in self._division.members.items():
            view = shared.views[name]
            if name in replays:
                processor = make_step_processor(member.experiment)
                inferencer = self._parts[name].inferencer
                made[name] = Actor(view, inferencer, replays[name], step_processor=processor)
            elif name in self._histories:
                self._histories[name].begin(view)
                made[name] = self._histories[name].actor
            else:
                made[name] = Actor(view, self._fixed[name], None)
        return made

    def _step(self, actors: Mapping[str, Actor]) -> int:
        """Acts once with every policy; returns the frames of those that learn."""
        for name, actor in actors.items():
            logs = actor.act()
            self._program.log(logs, f"{name}/")
            if name in self._parts:
                self._program.log(logs)
        for actor in actors.values():
            actor.receive()
        for player in self._histories.values():
            player.watch(self._shared)
        made = {total: actors[name].env_frames for name, total in self._totals.items()}
        self._program.count(**made)
        return sum(made.values())

    def _act(self, actors: Mapping[str, Actor]) -> None:
        with self._program.phase("compiling the agents' steps, and acting"):
            frames = self._step(actors)
        due = time.monotonic()
        while may_act(self._program, frames):
            frames = self._step(actors)
            if self._histories and time.monotonic() >= due:
                answered = self._exchange()
                pause = timing.EXCHANGE_PERIOD if answered else timing.LEARNER_ABSENT
                due = time.monotonic() + pause

    def _exchange(self) -> bool:
        """Exchanges the results of games for new versions; returns whether all learners answer."""
        answered = True
        for name, player in self._histories.items():
            of = self._division.members[name].cfg.history.of
            if self._parts[of].has_learner:
                try:
                    exchange(player)
                except UnavailableError:
                    answered = False
        return answered

    def _act_in_lock_step(
        self, actors: Mapping[str, Actor], replays: Mapping[str, WaitingReplay]
    ) -> None:
        """Acts, and waits at the barriers of the learners, which learn at the same time."""
        due: set[str] = set()  # policies that have reported since their learners learned
        go_on = True
        with ThreadPoolExecutor(len(self._parts), "barrier") as pool:
            while go_on and self._program.poll().phase == RUNNING:
                for _ in range(self._setup.experiment.steps_per_update):
                    frames = self._step(actors)
                due |= {name for name, replay in replays.items() if replay.has_reported()}
                if not due:
                    continue
                for name in due:
                    replays[name].flush()
                answers = self._wait_for_learners(pool, due, frames)
                if answers == {STOP}:
                    self._program.dismiss()
                # A learner whose updates are spent says STOP; the others may go on.
                go_on = ACT in answers
                if go_on:
                    self._exchange()
                self._program.count(env_frames=frames)

    def _wait_for_learners(self, pool: ThreadPoolExecutor, due: set[str], frames: int) -> set[str]:
        """Waits at the barriers of these policies and removes them; returns the answers."""
        answers: set[str] = set()
        while due and self._program.poll().phase == RUNNING:
            waits = {name: pool.submit(self._parts[name].arrive, frames) for name in due}
            for name, wait in waits.items():
                if (answer := wait.result()) != WAIT:
                    answers.add(answer)
                    due.remove(name)
        return answers


def exchange(player: HistoryPlayer) -> None:
    """Exchanges results for versions, for a player of `CopiedVersions`; raises what these do."""
    assert isinstance(player.versions, CopiedVersions)
    for slot in player.versions.exchange().tolist():
        player.forget(slot)
