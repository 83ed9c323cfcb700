"""CartPole, slower in the first thread that steps it than in all others."""

import threading
import time

import gymnasium

_claims = {}  # the thread of this process that made each file; idents of threads are used again


class Slow(gymnasium.Wrapper):
    """Pauses in each step: `pause` seconds, `factor` times as long in the thread that is first.

    The first step decides, since environments are also made to read their specs, and not stepped.
    """

    def __init__(self, env, claim, pause, factor):
        super().__init__(env)
        self._claim, self._pause, self._factor = claim, pause, factor

    def step(self, action):
        if self._claim:
            self._pause *= self._factor if _is_first(self._claim) else 1.0
            self._claim = ""
        time.sleep(self._pause)
        return super().step(action)


def cartpole(claim="", pause=0.0, factor=1.0):
    """Makes CartPole with a pause in each step, longer in the thread that makes `claim`, a file."""
    env = gymnasium.make("CartPole-v1")
    return Slow(env, claim, pause, factor) if pause else env


def _is_first(claim):
    try:
        open(claim, "x").close()
        _claims[claim] = threading.current_thread()
    except FileExistsError:
        pass
    return _claims.get(claim) is threading.current_thread()
