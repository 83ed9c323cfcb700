"""How nodes that act get the learner's params."""

from __future__ import annotations

import copy
from collections.abc import Callable

from programs import timing
from programs.experiment import ProgramConfig
from rlstack.acting.params import ParamsPuller, ParamsSource, RemoteParams
from rlstack.rpc import RemoteObject, codec


def pull_params(
    cfg: ProgramConfig, learner: RemoteObject
) -> tuple[ParamsSource, Callable[[], None]]:
    """Returns a source of the learner's params and a function that closes it.

    Asynchronous programs pull in the background. In lock-step every request goes to the learner,
    which is idle while actors act, so actors use the params that a single process would use.

    Args:
      cfg: sets the pacing and the period of pulls.
      learner: a client of the learner's node.
    """
    client = copy.copy(learner)  # its own client: closing it cancels only the pull in progress
    source = RemoteParams(client.get_params, codec.decode)
    if cfg.pacing == "lock_step":
        return source, client.close
    background = ParamsPuller(source, cfg.params_interval, patience=timing.PARAMS_PULL)

    def close() -> None:
        client.close()  # first; otherwise closing would wait for a learner that has ended
        background.close()

    return background, close
