"""Stop rules that end training some updates after a learner has been restarted."""


class _AfterRestart:
    def __init__(self, policy, updates=40):
        self._policy, self._updates = policy, updates
        self._learned = 0  # lines since the restart with a loss
        self._before = None  # steps after the restart, which go on above those that were lost

    def __call__(self, step, logs):
        steps = logs.get(f"{self._policy}/learner/steps")
        if steps is None or not logs.get("program/restarts"):
            return False
        self._learned += f"{self._policy}/learner/loss" in logs
        if self._before is None and self._learned >= 2:  # the first may be from before the restart
            self._before = steps
        return self._before is not None and steps >= self._before + self._updates


def of_retailer():
    """For the retailer's learner."""
    return _AfterRestart("retailer")


def of_distributor():
    """For the distributor's learner."""
    return _AfterRestart("distributor")
