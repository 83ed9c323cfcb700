"""The inference service's node."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np

from programs.build.components import make_agent
from programs.build.seeds import acting_key
from programs.nodes.coordination import OVER, RUNNING
from programs.nodes.line import Coordinates, Line, Setup
from programs.nodes.params import know_records, pull_params
from rlstack.acting.inference_service import InferenceService
from rlstack.acting.inferencer import Inference
from rlstack.rpc import remote
from rlstack.types import TimeStep


class InferenceNode:
    """An InferenceService for its share of the actors."""

    def __init__(
        self,
        setup: Setup,
        index: int,
        learner: Any,
        coordinator: Coordinates,
        stop: threading.Event,
    ) -> None:
        """Waits for the learner's first params.

        Args:
          setup: of the program.
          index: of this service; it serves the actors whose rank leaves this remainder.
          learner: who publishes params.
          coordinator: told how full batches are and how long requests wait.
          stop: set by the launcher to end this node.
        """
        setup.configure_jax(single_thread=True)
        experiment, self._stop = setup.experiment, stop
        self._line = Line(coordinator, f"inferencer/{index}", stop)
        agent = make_agent(experiment, setup.spec)
        know_records(agent, setup.step)
        program = experiment.program
        ranks = range(index, program.num_actors, program.num_inferencers)
        ids = np.concatenate([experiment.env_ids(rank) for rank in ranks])
        params, self._close_params = pull_params(program, learner)
        key = acting_key(experiment.seed, index, self._line.incarnation)
        cfg = experiment.service
        if program.pacing == "lock_step" and not experiment.env.wait_num:
            # Who asks first must change nothing, or a run could not be repeated.
            cfg = dataclasses.replace(cfg, lock_step=True)
        self._service = InferenceService(cfg, agent, params, len(ids), key, ids)
        self._line.gauges = self._service.stats

    @remote()
    def inference(
        self, rank: int, incarnation: int, env_ids: np.ndarray, timestep: TimeStep
    ) -> Inference:
        """Acts on some of an actor's environments; see `InferenceService.inference`."""
        return self._service.inference(rank, incarnation, env_ids, timestep)

    def run(self) -> None:
        """Serves until all is over."""
        try:
            while self._line.ask().phase == RUNNING:
                self._stop.wait(0.1)
            self._service.close()  # who waits here for an actor that has ended need not
            while self._line.ask().phase != OVER:
                self._stop.wait(0.1)
        finally:
            self._service.close()
            self._close_params()
