"""How nodes get the learner's params, and which records travel between nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax

from programs.experiment import ProgramConfig
from rlstack.acting.inferencer import Inference, ParamsSource
from rlstack.acting.params import BackgroundParams, EncodedParams
from rlstack.agent import Agent
from rlstack.rpc import codec
from rlstack.types import PyTree, Transition

_PATIENCE = 30.0  # seconds for which pulls may fail: the program ends sooner when its learner died


def know_records(agent: Agent, step: Transition) -> None:
    """Lets this process read the agent's own records, of this `transition_spec`, from messages."""
    params = jax.eval_shape(agent.initial_params, jax.eval_shape(jax.random.PRNGKey, 0))
    codec.register(Inference, *_records(params), *_records(step))


def pull_params(cfg: ProgramConfig, learner: Any) -> tuple[ParamsSource, Callable[[], None]]:
    """Returns a source of the learner's params, and what ends it.

    Asynchronous programs pull in the background. In lock-step every look goes to the learner, which
    rests while actors act, so that its newest params are those that a single process would use.

    Args:
      cfg: says which.
      learner: its client.
    """
    client = copy.copy(learner)  # of its own, so that its end is that of a pull under way
    source = EncodedParams(client.get_params, codec.decode)
    if cfg.pacing == "lock_step":
        return source, client.close
    background = BackgroundParams(source, cfg.params_interval, patience=_PATIENCE)

    def close() -> None:
        client.close()  # a learner that has ended would be waited for
        background.close()

    return background, close


def _records(tree: PyTree) -> Iterator[type]:
    """The classes of the NamedTuples in a tree."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        if hasattr(tree, "_fields"):
            yield type(tree)
        for child in tree:
            yield from _records(child)
