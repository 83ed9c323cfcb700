"""CartPole, slower in the first thread that makes it than in all others."""

import os
import threading
import time

import gymnasium


class Slow(gymnasium.Wrapper):
    def __init__(self, env, pause):
        super().__init__(env)
        self._pause = pause

    def step(self, action):
        time.sleep(self._pause)
        return super().step(action)


def cartpole(claim="", pause=0.0, factor=1.0):
    """Makes CartPole with a pause in each step, longer in the thread that claims the file first."""
    env = gymnasium.make("CartPole-v1")
    if claim:
        me = f"{os.getpid()} {threading.get_ident()}"
        try:
            with open(claim, "x") as file:
                file.write(me)
            first = True
        except FileExistsError:
            with open(claim) as file:
                first = file.read() == me
        pause *= factor if first else 1.0
    return Slow(env, pause) if pause else env
