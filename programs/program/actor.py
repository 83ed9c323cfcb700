"""The actor's node: one pool of environments, with inference here or in services."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rlstack.acting.actor import Actor
from rlstack.acting.inference import InferencerLike
from rlstack.acting.inference_client import InferenceClient
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import ParamsPuller
from rlstack.acting.round_gate import RoundGate
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import actor_device
from rlstack.programs.build.environments import Pool
from rlstack.programs.build.hooks import make_step_processor
from rlstack.programs.build.player import Shared, make_shared
from rlstack.programs.build.policies.history import HistoryPlayer, versions_player
from rlstack.programs.build.policies.members import Member, divide
from rlstack.programs.build.policies.player import fixed_inferencer
from rlstack.programs.build.seeds import acting_key, role_seed
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.program.base import LEARNER, RUNNING, CoordinatorClient, Setup
from rlstack.programs.program.data_parallel import shards
from rlstack.programs.program.lock_step import ACT, STOP, WAIT
from rlstack.programs.program.multi_policy.clients import learner_of
from rlstack.programs.program.multi_policy.policies import FRAMES
from rlstack.programs.program.multi_policy.versions import CopiedVersions, copied_versions
from rlstack.programs.program.multi_policy.writer import RenewedWriter
from rlstack.programs.program.params import pull_params
from rlstack.programs.program.replay import program_replay
from rlstack.programs.program.replay_sides import ProgramReplay, ReplayWriter
from rlstack.programs.session import timing
from rlstack.programs.session.profile import Profile
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.rounds import Reports
from rlstack.rpc import RemoteObject, StoppedError, UnavailableError
from rlstack.specs.masks import COUNTER
from rlstack.types import Array, Transition

_HasNewer = Callable[[int, float], bool]


class ActorNode:
    """Acts with all policies in one pool of environments until the coordinator ends the program.

    Policies that learn have replays, learners and perhaps inference services in other nodes. The
    others act here. Mappings are by policy name; the only policy without a name is "".
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
        """Makes the agents; `run` makes the environments.

        Args:
          setup: the program's setup.
          rank: rank of this actor.
          replays: the replay to write to for each policy that learns, or a client of its node.
          learners: a client of each policy's learner, which publishes params and has the lock-step
            barrier.
          services: a client of each policy's inference service; empty to infer here.
          coordinator: a client of the coordinator, which counts frames and logs episodes.
          stop: set by the launcher to end this node.
        """
        self._setup, self._rank = setup, rank
        self._program = CoordinatorClient(coordinator, f"actor/{rank}", stop)
        setup.configure_jax(single_thread=True)
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
        self._division = divide(setup.experiment) if setup.experiment.policies else None
        self._histories: dict[str, HistoryPlayer] = {}
        self._fixed: dict[str, Inferencer] = {}
        for member in self._division.members.values() if self._division else ():
            if member.kind == "history":
                self._histories[member.name] = self._history(member, learners)
            elif member.kind != "learning":
                key = acting_key(self._of(member).acting_seed, rank, self._program.incarnation)
                self._fixed[member.name] = fixed_inferencer(member, setup.spec, key)
        self._profile = Profile(setup.profiled, setup.directory, f"actor/{rank}")

    def _of(self, member: Member) -> Setup:
        return dataclasses.replace(self._setup, experiment=member.experiment)

    def _history(self, member: Member, learners: Mapping[str, RemoteObject]) -> HistoryPlayer:
        setup, program = self._setup, self._setup.experiment.program
        versions = copied_versions(setup, member, learners)
        number = self._rank + program.num_actors * self._program.incarnation
        return versions_player(member, versions, setup.spec, number)

    def run(self) -> None:
        """Acts until the program ends training."""
        experiment, program = self._setup.experiment, self._program
        number = f"{experiment.env.num_envs:,} environments"
        with program.phase(f"making {number}"):
            self._shared = self._make_shared()
        with contextlib.closing(self._shared):
            for part in self._parts.values():
                part.wait()  # the environments were made while the learner compiles
            with program.phase("waiting for the updates from data"):
                while (state := program.answered()).phase == RUNNING and state.learns_from_data:
                    time.sleep(timing.PHASE_POLL)
            for player in self._histories.values():
                program.wait_for(functools.partial(exchange, player))
            with contextlib.ExitStack() as closing:
                self._replays = {name: part.begin() for name, part in self._parts.items()}
                for part in self._parts.values():
                    closing.callback(part.close)
                program.gauges = EnvGauges(program, self._gauges, self._shared.pool, experiment)
                self._measure()
                try:
                    with program.phase(f"resetting {number}"):
                        self._actors = self._make_actors()
                    if experiment.program.pacing == "lock_step":
                        self._act_in_lock_step()
                    else:
                        self._act()
                except (StoppedError, ReplayClosedError):
                    pass  # a learner closes its replay when it ends
                finally:
                    self._profile.close()
                    program.gauges = self._gauges  # the last report comes after the pool is closed
        program.report_end()

    def _make_shared(self) -> Shared:
        experiment, seed = self._setup.experiment, self._setup.acting_seed
        at = self._rank, self._program.incarnation
        seeds = env_seed(seed, *at), env_seed(seed, *at, role="seating")
        return make_shared(experiment, self._division, env_config(experiment), *seeds)

    def _gauges(self) -> dict[str, float]:
        found = {
            f"{name}/{key}".lstrip("/"): value
            for name, replay in self._replays.items()
            for key, value in replay.gauges().items()
        }
        for name, player in self._histories.items():
            found |= {f"{name}/{key}": value for key, value in player.versions.stats().items()}
        return found

    def _measure(self) -> None:
        for name, replay in self._replays.items():
            self._profile.time_acting(self._shared.pool, self._parts[name].inferencer, replay)
            replay.on_step = self._profile.observe

    def _make_actors(self) -> dict[str, Actor]:
        made = {}
        for name, view in self._shared.views.items():
            if name in self._parts:
                part = self._parts[name]
                processor = make_step_processor(part.experiment)
                made[name] = Actor(
                    view, part.inferencer, self._replays[name], step_processor=processor
                )
            elif name in self._histories:
                self._histories[name].begin(view)
                made[name] = self._histories[name].actor
            else:
                made[name] = Actor(view, self._fixed[name], None)
        return made

    def _step(self) -> int:
        """Acts once with every policy; returns the frames of those that learn."""
        for name, actor in self._actors.items():
            logs = actor.act()
            if name:
                self._program.log(logs, f"{name}/")
            if name in self._parts:
                self._program.log(logs)
        for actor in self._actors.values():
            actor.receive()
        for player in self._histories.values():
            player.watch(self._shared)
        frames = 0
        for name in self._parts:
            own = self._actors[name].env_frames
            frames += own
            if name:
                self._program.count(**{f"{name}/{FRAMES}": own})
        return frames

    def _act(self) -> None:
        # The first step compiles, here or in the service.
        with self._program.phase("compiling the agent's step, and acting"):
            frames = self._step() if may_act(self._program, 0) else 0
        due = time.monotonic()
        while may_act(self._program, frames):
            frames = self._step()
            if self._histories and time.monotonic() >= due:
                answered = self._exchange()
                pause = timing.EXCHANGE_PERIOD if answered else timing.LEARNER_ABSENT
                due = time.monotonic() + pause

    def _exchange(self) -> bool:
        """Exchanges the results of games for new versions; returns whether all learners answer."""
        answered = True
        for name, player in self._histories.items():
            assert self._division is not None
            of = self._division.members[name].cfg.history.of
            if self._parts[of].has_learner:
                try:
                    exchange(player)
                except UnavailableError:
                    answered = False
        return answered

    def _act_in_lock_step(self) -> None:
        """Acts, and waits at the barriers of the learners, which learn at the same time."""
        due: set[str] = set()  # policies that have reported since their learners learned
        go_on = True
        with ThreadPoolExecutor(len(self._parts), "barrier") as pool:
            while go_on and self._program.poll().phase == RUNNING:
                for _ in range(self._setup.experiment.steps_per_update):
                    frames = self._step()
                due |= {name for name, replay in self._replays.items() if replay.has_reported()}
                if not due:
                    continue
                for name in due:
                    self._replays[name].flush()
                answers = self._wait_for_learners(pool, due, frames)
                if answers == {STOP}:
                    self._program.dismiss()
                # A learner whose updates are spent says STOP; the others may go on.
                go_on = ACT in answers
                if go_on:
                    self._exchange()
                # Reported after the learners have used them, because the last frames end training.
                self._program.count(env_frames=frames)

    def _wait_for_learners(self, pool: ThreadPoolExecutor, due: set[str], frames: int) -> set[str]:
        """Waits at the barriers of these policies and removes them; returns the answers."""
        answers: set[str] = set()
        while due and self._program.poll().phase == RUNNING:
            names = list(due)
            arrivals = [functools.partial(self._parts[name].arrive, frames) for name in names]
            several = len(arrivals) > 1
            found = pool.map(_call, arrivals) if several else map(_call, arrivals)
            for name, answer in zip(names, found, strict=True):
                if answer != WAIT:
                    answers.add(answer)
                    due.remove(name)
        return answers


def _call(function: Callable[[], str]) -> str:
    return function()


def exchange(player: HistoryPlayer) -> None:
    """Exchanges results for versions, for a player of `CopiedVersions`; raises what these do."""
    assert isinstance(player.versions, CopiedVersions)
    for slot in player.versions.exchange().tolist():
        player.forget(slot)


def may_act(program: CoordinatorClient, frames: int) -> bool:
    """Reports the frames of an actor; waits while others may still make the last frames.

    Returns:
      Whether the actor may go on.
    """
    program.count(env_frames=frames)
    state = program.poll()
    while state.phase == RUNNING and frames >= state.granted:
        state = program.poll(waits=True)
        if frames >= state.granted:  # others may use up the budget
            time.sleep(timing.BUDGET_POLL)
    return state.phase == RUNNING


def env_config(experiment: Experiment) -> EnvConfig:
    """Returns the config of an actor's pool; actors share the cores, unless num_workers is set."""
    cfg, program = experiment.env, experiment.program
    share = max(1, (os.cpu_count() or 1) // program.num_actors)
    if program.on_several_hosts:
        share = max(1, int(program.ray.cpus_of("actor")))
    return dataclasses.replace(cfg, num_workers=cfg.num_workers or min(cfg.num_envs, share))


def env_seed(seed: int, rank: int, incarnation: int, role: str = "env") -> int:
    """Returns the seed of an actor's environments; actor 0 has the seed of a single process."""
    return role_seed(seed, f"{role}/{rank}" if rank else role, incarnation)


class LearningPart:
    """What an actor has for a policy that learns: its replay, and what chooses its actions.

    Attributes:
      experiment: the policy's experiment.
      inferencer: the inferencer, or the service's client; made by `begin`.
    """

    inferencer: InferencerLike

    def __init__(
        self,
        setup: Setup,
        rank: int,
        replay: ProgramReplay | RemoteObject,
        learner: RemoteObject,
        service: RemoteObject | None,
        program: CoordinatorClient,
    ) -> None:
        """Makes the agent.

        Args:
          setup: the policy's setup.
          rank: rank of the actor.
          replay: the replay to write to, or a client of the node that holds it.
          learner: a client of the policy's learner.
          service: a client of the policy's inference service; None to infer here.
          program: a client of the coordinator.
        """
        self._setup, self._rank, self._program = setup, rank, program
        self.experiment = setup.experiment
        self._share, self._rank_there = shards.of_actor(setup, rank)
        self._replay = replay
        self._learner, self._service = learner, service
        has_params = service is None or setup.histories  # else no message has some
        self._agent = make_agent(setup.experiment, setup.spec) if has_params else None
        setup.register_records(self._agent)
        self._round = -1  # the learner's number of the current lock-step round

    def wait(self) -> None:
        """Waits for the learner and the inference service, and connects to the replay."""
        program = self._program
        with program.phase("waiting for the learner"):
            memory = program.wait_for(self._learner.replay_name)
        if self._service is not None:
            with program.phase("waiting for the inference service"):
                program.wait_for(self._service.is_ready)
        self._writer: ReplayWriter
        if self._setup.learner_restarts:
            self._writer = program.wait_for(self._renewed_writer)
        else:
            self._writer = self._open_writer(lambda: memory)

    def _open_writer(self, find_memory: Callable[[], str]) -> ReplayWriter:
        replay = copy.copy(self._replay)  # a client of its own, which a writer closes
        return program_replay(self._share, replay).writer(self._rank_there, find_memory)

    def _renewed_writer(self) -> RenewedWriter:
        open_writer = functools.partial(self._open_writer, self._learner.replay_name)
        return RenewedWriter(open_writer, self._setup.node(LEARNER), self._program)

    @property
    def has_learner(self) -> bool:
        """Whether the learner is running, as far as the actor knows."""
        return not isinstance(self._writer, RenewedWriter) or self._writer.has_learner

    def begin(self) -> WaitingReplay:
        """Makes the inferencer; returns the writer to which the actor adds its steps."""
        experiment, program = self._setup.experiment, self._program
        self.inferencer, has_newer, self._close = self._inferencer()
        ids, cfg = self._share.experiment.env_ids(self._rank_there), experiment.replay
        replay = WaitingReplay(self._writer, ids, program, cfg.timeout_seconds)
        if experiment.program.pacing == "lock_step":
            replay.reports = Reports(cfg, len(ids)) if cfg.min_actors else None
        elif has_newer is not None:

            def has_ended() -> bool:
                return program.poll().phase != RUNNING

            replay.gate = RoundGate(cfg, len(ids), has_newer, has_ended, timing.ROUND_WAIT)
        return replay

    def close(self) -> None:
        """Closes the inferencer and the connection to the replay."""
        self._close()
        self._writer.close()

    def arrive(self, env_frames: int) -> str:
        """Waits for some seconds at the learner's barrier of lock-step.

        Returns:
          ACT or STOP; or WAIT: call again.
        """
        rank, incarnation = self._rank, self._program.incarnation
        with contextlib.suppress(UnavailableError):
            answer, self._round = self._learner.arrive(rank, incarnation, env_frames, self._round)
            return str(answer)
        return WAIT

    def _inferencer(self) -> tuple[InferencerLike, _HasNewer | None, Callable[[], None]]:
        """Returns the inferencer or the service's client, and a function that closes it.

        The second value waits for newer params, in rounds; see `RoundGate`.
        """
        experiment, program = self._setup.experiment, self._program
        in_rounds = experiment.replay.min_actors > 0
        if self._service is not None:
            client = InferenceClient(
                self._service,
                self._rank,
                program.incarnation,
                should_stop=lambda: program.poll().phase != RUNNING,
                timeout=experiment.service.timeout_s,
            )
            return client, self._service_has_newer if in_rounds else None, lambda: None
        assert self._agent is not None
        params, close, _ = pull_params(self._setup, self._learner)
        has_newer = params.has_newer if in_rounds and isinstance(params, ParamsPuller) else None
        key = acting_key(self._setup.acting_seed, self._rank, program.incarnation)
        ids_here = np.asarray(experiment.env_ids(self._rank))
        cfg, num_envs = experiment.inferencer, len(ids_here)
        device = actor_device(experiment, self._rank)
        run_counts = self._setup.run_counts(program.answered())
        inferencer = Inferencer(
            cfg, self._agent, params, num_envs, key, ids_here, device, run_counts
        )
        return inferencer, has_newer, close

    def _service_has_newer(self, version: int, seconds: float) -> bool:
        assert self._service is not None
        try:
            return bool(self._service.has_newer_params(version, seconds))
        except UnavailableError:  # it is restarted
            return False


class EnvGauges:
    """The values that reports contain; also counts what the pool counts, and shows restarts."""

    def __init__(
        self,
        program: CoordinatorClient,
        gauges: Callable[[], Mapping[str, float]],
        env: Pool,
        experiment: Experiment,
    ) -> None:
        self._program, self._gauges, self._env = program, gauges, env
        # In threads, the pool's own warning is on the terminal already.
        self._shows = experiment.program.launch != "threads"
        self._restarts = 0

    def __call__(self) -> Mapping[str, float]:
        """Returns the values, and reports the pool's counters."""
        counters = self._env.stats()
        if masks := counters.get(COUNTER, 0):
            self._program.count(**{f"env_{COUNTER}": masks})
        restarts = counters.get("restarts", 0)
        if restarts > self._restarts:
            self._restarts = restarts
            self._program.count(env_restarts=restarts)
            if self._shows:
                self._program.note(
                    f"env worker restarted ({restarts} so far), its episodes are truncated: "
                    f"{self._env.last_restart}"
                )
        return self._gauges()


class WaitingReplay:
    """Adds to the program's replay; waits while the replay is full and the program runs.

    It translates the actor's environment ids to those of the whole program, and measures the time
    it waits.

    Attributes:
      gate: in rounds, stops the actor once it has reported.
      reports: in rounds with lock-step, tells when the actor has reported; the barrier then stops
        it.
    """

    def __init__(
        self, writer: ReplayWriter, env_ids: range, program: CoordinatorClient, timeout: float
    ) -> None:
        self._writer, self._program, self._timeout = writer, program, timeout
        self._all = np.arange(env_ids.start, env_ids.stop, dtype=np.int32)
        self._waited = 0.0
        self._versions: Array | None = None  # versions of the params that acted last
        self.on_step: Callable[[int], None] | None = None  # called with this version
        self.gate: RoundGate | None = None
        self.reports: Reports | None = None
        self._reported = False

    def gauges(self) -> dict[str, float]:
        """Returns the values on writing that reports contain."""
        gauges = {"actor/add_wait_seconds": self._waited}
        if self.gate is not None:
            gauges["actor/round_wait_seconds"] = self.gate.waited
        if isinstance(self._writer, RenewedWriter):
            gauges["actor/discarded_steps"] = self._writer.discarded
        if self._versions is not None:
            gauges["params/version"] = float(self._versions[0])
        return gauges

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Adds one step of some environments, numbered as in this actor."""
        del timeout  # `Actor.run` passes one to wait in pieces; this method does that itself
        ids = self._all if env_ids is None else self._all[env_ids]
        self._versions = transition.params_version
        started = time.monotonic()
        while True:
            try:
                self._writer.add(ids, transition, timeout=timing.ACTOR_ADD)
                self._waited += time.monotonic() - started
                break
            except ReplayTimeoutError:
                if self._program.poll().phase != RUNNING:
                    raise StoppedError from None
                if time.monotonic() > started + self._timeout:
                    raise
        if self.on_step is not None:
            self.on_step(int(transition.params_version[0]))
        if self.gate is not None:
            self.gate.added(env_ids, transition)
        elif self.reports is not None:
            self._reported |= self.reports.add(env_ids, transition)

    def has_reported(self) -> bool:
        """Whether the actor has reported since the last call; True if `reports` is None."""
        reported, self._reported = self._reported, False
        return reported or self.reports is None

    def flush(self) -> None:
        """Waits until everything added can be sampled."""
        self._writer.flush()
