"""Stop rules that end training some updates after a learner has been restarted."""


class _AfterRestart:
    def __init__(self, policy, updates=40):
        self._name, self._updates = f"{policy}/learner/steps", updates
        self._before = None  # steps at the restart

    def __call__(self, step, logs):
        steps = logs.get(self._name)
        if steps is None or not logs.get("program/restarts"):
            return False
        if self._before is None:
            self._before = steps
        return steps >= self._before + self._updates


def of_retailer():
    """For the retailer's learner."""
    return _AfterRestart("retailer")


def of_distributor():
    """For the distributor's learner."""
    return _AfterRestart("distributor")
