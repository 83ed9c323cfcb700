"""The inference service's node: acts for its share of the actors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.batches import padded_sizes
from rlstack.acting.inference import Inference
from rlstack.acting.inference_service import InferenceService
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import ParamsPuller
from rlstack.configs.acting import ServiceConfig
from rlstack.exploration import RunCounts
from rlstack.learning.update import in_thread
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import acting_of, actor_device, num_services, service_device
from rlstack.programs.build.seeds import acting_key
from rlstack.programs.program.base import OVER, RUNNING, CoordinatorClient, Setup
from rlstack.programs.program.multi_policy.clients import learner_of
from rlstack.programs.program.params import pull_params
from rlstack.programs.session import timing
from rlstack.programs.session.profile import ACTING, SERVING, Profile
from rlstack.rpc import RemoteObject, remote
from rlstack.types import Params, PRNGKey, TimeStep


class _LaterParams:
    """A source of params whose `get_params` is set after the inferencer was made."""

    get_params: Callable[..., tuple[int, Params] | None]


def _first_sizes(cfg: ServiceConfig, env_ids: np.ndarray) -> list[int]:
    """Returns the sizes of the first batches, in their order.

    Args:
      cfg: the config of the service.
      env_ids: ``[actors, environments]``, the service's number of each environment.
    """
    one, of_all = env_ids.shape[1], env_ids.size
    if cfg.lock_step:
        return [of_all]
    # The first actor that is ready does not wait for the others.
    sizes = padded_sizes(cfg.batch_sizes, cfg.max_batch, of_all)
    return list(dict.fromkeys([next(size for size in sizes if size >= one), of_all]))


def _compile(inferencer: Inferencer, timesteps: Sequence[TimeStep]) -> None:
    for timestep in timesteps:
        inferencer.compile(timestep)


def _any_timestep(setup: Setup, num_envs: int) -> TimeStep:
    return jax.tree.map(
        lambda leaf: np.zeros((num_envs, *leaf.shape), leaf.dtype), setup.step.timestep
    )


class InferenceNode:
    """An InferenceService; of N services, the one with index i serves actors i, i + N, and so on.

    Attributes:
      address: where other nodes reach this one; "" until it serves.
    """

    address = ""

    def __init__(
        self,
        setup: Setup,
        index: int,
        learner: RemoteObject,
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Waits for the learner's first params.

        Args:
          setup: the program's setup.
          index: index of this service.
          learner: a client of the learner, which publishes params.
          coordinator: a client of the coordinator.
          stop: set by the launcher to end this node.
        """
        learner = learner_of(setup, learner)
        setup.configure_jax(single_thread=True)
        experiment, self._stop = setup.experiment, stop
        self._setup, self._run_counts = setup, RunCounts()
        name = f"{setup.node('inferencer')}/{index}"
        self._program = CoordinatorClient(coordinator, name, stop, setup.prefix)
        agent = make_agent(experiment, setup.spec)
        setup.register_records(agent)
        program = experiment.program
        ranks = range(index, program.num_actors, num_services(experiment))
        ids = np.concatenate([experiment.env_ids(rank) for rank in ranks])
        # The numbers of each actor's environments within this service.
        here = np.arange(len(ids), dtype=np.int32).reshape(len(ranks), -1)
        self._env_ids = dict(zip(ranks, here, strict=True))
        cfg, key, device = self._acting(index, ranks)
        waits_for_all = experiment.replay.min_actors in (0, program.num_actors)
        if program.pacing == "lock_step" and not experiment.env.wait_num and waits_for_all:
            # The order of requests must not matter, or a run could not be repeated.
            cfg = dataclasses.replace(cfg, lock_step=True)
        source = _LaterParams()
        inferencer = Inferencer(
            cfg, agent, source, len(ids), key, ids, device, self._begun, setup.spec.extras
        )
        compiling: Future[None] | None = None
        if not experiment.env.wait_num:  # else batches vary
            sizes = _first_sizes(cfg, here)
            compiling = in_thread(_compile, inferencer, [_any_timestep(setup, n) for n in sizes])
        with self._program.phase("waiting for the learner"):
            self._program.wait_for(learner.replay_name)
        self._pulled = pull_params(setup, learner, lambda: self.address)
        source.get_params = self._pulled.source.get_params
        self._take_counts()
        # It was made, to compile, before the coordinator had told the frames of the run.
        inferencer.reset(np.ones(len(ids), bool))
        if compiling is not None:
            compiling.result()
        self._service = InferenceService(cfg, inferencer, one_thread=acting_of(experiment)[0])
        name = f"inferencer/{index}"
        self._profile = Profile(setup.profiled, setup.directory, name, other=SERVING)
        self._profile.time(inferencer, inference=ACTING)
        self._program.gauges = self._service.stats

    def _acting(self, index: int, ranks: range) -> tuple[ServiceConfig, PRNGKey, jax.Device | None]:
        """Returns the service's config, the acting key or one for each actor, and the device."""
        experiment, seed = self._setup.experiment, self._setup.acting_seed
        incarnation, cfg = self._program.incarnation, experiment.service
        if not acting_of(experiment)[0]:
            return cfg, acting_key(seed, index, incarnation), service_device(experiment, index)
        one = experiment.env.num_envs
        cfg = dataclasses.replace(
            cfg,
            sync_interval=experiment.inferencer.sync_interval,
            max_batch=one * len(ranks),
            batch_sizes=(one,),
        )
        keys = [acting_key(seed, rank, incarnation) for rank in ranks]
        return cfg, jnp.stack(keys), actor_device(experiment, index)

    def _begun(self) -> RunCounts:
        """Returns the counts with which new agent state begins."""
        return self._run_counts

    def _take_counts(self) -> None:
        """Stores the progress of the run, from which restarted actors continue their counts."""
        self._run_counts = self._setup.run_counts(self._program.answered())

    @remote(idempotent=True)
    def is_ready(self) -> bool:
        """Returns True; actors wait for this answer before they act."""
        return True

    @remote(prompt=True)
    def inference(
        self, rank: int, incarnation: int, env_ids: np.ndarray | None, timestep: TimeStep
    ) -> Future[Inference]:
        """Acts in some of an actor's environments; see `InferenceService.submit`.

        Args:
          rank: rank of the actor.
          incarnation: number of restarts of the actor.
          env_ids: int ``[B]``, the actor's numbers of the environments; None for all in order.
          timestep: ``[B, ...]``, the steps of these environments.
        """
        own = self._env_ids[rank]
        ids = own if env_ids is None else own[env_ids]
        answer = self._service.submit(rank, incarnation, ids, timestep)
        answer.add_done_callback(self._observe)
        return answer

    def _observe(self, answer: Future[Inference]) -> None:
        if answer.exception() is None:
            self._profile.observe(int(answer.result().params_version[0]))

    @remote(idempotent=True)
    def has_newer_params(self, version: int, seconds: float) -> bool:
        """Waits until the next batch would use params newer than a version; see `ParamsPuller`."""
        params = self._pulled.source
        return isinstance(params, ParamsPuller) and params.has_newer(version, seconds)

    @remote(idempotent=True)
    def share_params(self, newer_than: int, seconds: float) -> tuple[int, bytes] | None:
        """Waits until this host has params newer than a version; returns them, or None.

        Other hosts call it if the learner says so; see `ParamsTree`.
        """
        shared = self._pulled.shared
        return None if shared is None else shared.wait(newer_than, seconds)

    def run(self) -> None:
        """Serves until the program is over."""
        try:
            while self._program.poll().phase == RUNNING:
                self._take_counts()
                self._stop.wait(timing.PHASE_POLL)
            self._service.close()  # releases requests that wait for actors that have ended
            while self._program.poll().phase != OVER:
                self._stop.wait(timing.PHASE_POLL)
        finally:
            self._profile.close()
            self._service.close()
            self._pulled.close()
