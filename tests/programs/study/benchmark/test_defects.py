"""Planted defects that slow learning are outside of the bands of `rlstack benchmark smoke`."""

import io

import jax
import jax.numpy as jnp
import pytest

from rlstack.agent import Agent, EpochAgent
from rlstack.math import returns
from rlstack.programs.study.benchmark import records, runs, suites, watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def lose_a_third_of_the_updates(monkeypatch):
    """An update whose loss has certain digits changes nothing."""
    for kind in (Agent, EpochAgent):

        def losing(agent, params, state, batch, step=kind.learner_step):
            *after, output = step(agent, params, state, batch)
            loss = jnp.mean(next(iter(output.logs.values())))
            lost = jnp.floor(jnp.abs(loss) * 1e6) % 3 == 0
            before = (params, state)
            kept = jax.tree.map(lambda new, old: jnp.where(lost, old, new), tuple(after), before)
            return *kept, output

        monkeypatch.setattr(kind, "learner_step", losing)


def forget_lambda(monkeypatch):
    """Advantages are errors of one step."""
    whole = returns.gae

    def gae(rewards, discounts, values, gae_lambda, mask):
        return whole(rewards, discounts, values, 0.0 * gae_lambda, mask)

    monkeypatch.setattr(returns, "gae", gae)


@pytest.mark.parametrize(
    ("task", "defect"),
    [
        ("cartpole-ppo", lose_a_third_of_the_updates),  # a single process
        ("cartpole-ppo", forget_lambda),
        ("catch-a2c", lose_a_third_of_the_updates),  # one compiled program
        ("pendulum-sac", lose_a_third_of_the_updates),  # a single process, with replay
    ],
)
def test_a_defect_that_slows_learning_by_a_third_is_caught(task, defect, tmp_path, monkeypatch):
    defect(monkeypatch)
    suite = suites.read("smoke")
    jobs = runs.jobs_of(suite, "own", tmp_path, tasks=[task])
    runs.train(jobs, stream=io.StringIO())
    record = records.collect(suite, "own", jobs)
    (found,) = watch.compare(suite, [record])
    print(found)
    assert found.area < found.band.area[0]
    with pytest.raises(watch.OutsideError, match=task):
        watch.check(suite, record)
