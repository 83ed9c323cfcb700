"""Helpers for the tests of the inference service: agents, sources of params, callers."""

import threading
import time

import jax
import numpy as np

from rlstack.acting.inference_service import InferenceService
from rlstack.acting.inferencer import Inferencer
from rlstack.configs.acting import ServiceConfig
from rlstack.types import TimeStep
from tests.agent_cases import MID, CountingAgent

KEY = jax.random.PRNGKey(5)
PATIENT = ServiceConfig(max_wait_ms=20_000, live_s=1000, timeout_s=30)


class Echo(CountingAgent):
    """Outputs its observation and the number of steps that it counted in the episode."""

    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        seen = timestep.observation["seen"]
        mixed = seen[:, 0] * 1000 + state["count"]
        return output | {"seen": seen, "mixed": mixed}, state


class Fragile(Echo):
    """Fails at run time if an observation is negative."""

    def actor_step(self, rng_key, params, timestep, state):
        def check(seen):
            if (seen < 0).any():
                raise ValueError("poisoned observation")
            return seen

        seen = timestep.observation["seen"]
        seen = jax.pure_callback(check, jax.ShapeDtypeStruct(seen.shape, seen.dtype), seen)
        observation = {"seen": seen}
        return super().actor_step(
            rng_key, params, timestep._replace(observation=observation), state
        )


class Source:
    """Returns the params set by the test; waits while the gate is closed."""

    def __init__(self, version=0, params=0):
        self.published = (version, params)
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def get_params(self, newer_than=-1):
        self.calls += 1
        assert self.gate.wait(20)
        return self.published if self.published[0] > newer_than else None


def started(cfg, source, agent=None, num_envs=8, **options):
    inferencer = Inferencer(cfg, agent or Echo(), source, num_envs, KEY)
    return InferenceService(cfg, inferencer, **options)


def steps(step_types, seen=None):
    step_type = np.array(step_types, np.int32)
    zeros = np.zeros(len(step_type), np.float32)
    seen = np.zeros((len(step_type), 3), np.int32) if seen is None else seen
    return TimeStep(step_type, zeros, zeros + 1, {"seen": seen})


def ask(service, client, ids, step_type=MID, incarnation=0):
    return service.inference(client, incarnation, np.array(ids), steps([step_type] * len(ids)))


class Call(threading.Thread):
    """A call in a separate thread."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.call = lambda: function(*args, **kwargs)
        self.answer = self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self.call()
        except Exception as error:
            self.error = error

    def result(self):
        self.join(20)
        assert not self.is_alive(), "the caller hangs"
        if self.error is not None:
            raise self.error
        return self.answer


def queued(service, number):
    """Waits until ``number`` requests are queued."""
    end = time.monotonic() + 10
    while service.stats()["service/queued"] != number:
        assert time.monotonic() < end, service.stats()
        time.sleep(0.001)


def counts(answer):
    return answer.agent_output["action"].tolist()


def rows(tree, ids):
    return jax.tree.map(lambda x: x[ids], tree)
