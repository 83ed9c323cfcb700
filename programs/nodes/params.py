"""How nodes that act get the learner's params."""

from __future__ import annotations

import copy
from collections.abc import Callable

from programs import timing
from programs.experiment import ProgramConfig
from rlstack.acting.params import ParamsPuller, ParamsSource, RemoteParams
from rlstack.rpc import RemoteObject, codec


def pull_params(
    cfg: ProgramConfig, learner: RemoteObject, *, in_rounds: bool
) -> tuple[ParamsSource, Callable[[], None]]:
    """Returns a source of the learner's params and a function that closes it.

    Asynchronous programs pull in the background. In lock-step every request goes to the learner,
    which is idle while actors act, so actors use the params that a single process would use. In
    rounds actors wait for newer params, so each pull in the background waits for them too.

    Args:
      cfg: sets the pacing and the period of pulls.
      learner: a client of the learner's node.
      in_rounds: whether the learner learns in rounds.
    """
    client = copy.copy(learner)  # its own client: closing it cancels only the pull in progress
    source = RemoteParams(client.get_params, codec.decode)
    if cfg.pacing == "lock_step":
        return source, client.close
    interval = cfg.params_interval
    if in_rounds:
        source = RemoteParams(
            lambda held: client.next_params(held, timing.NEXT_PARAMS), codec.decode
        )
        interval = 0.0
    background = ParamsPuller(source, interval, patience=timing.PARAMS_PULL)

    def close() -> None:
        client.close()  # first; otherwise closing would wait for a learner that has ended
        background.close()

    return background, close
