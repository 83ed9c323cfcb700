"""Updates that several devices make together: what they learn, and by how many collectives.

Two of four devices of a CPU, in a child process; `test_group` has processes.
"""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks.learner_group import collectives
from rlstack.configs.learner import LearnerConfig
from rlstack.learning import by_minibatch, sharded
from rlstack.learning.learner import Learner
from rlstack.learning.update import OneCall
from rlstack.replay import Sample
from tests.agent_cases import Case, assert_close, case
from tests.devices.test_devices import KEYS, in_child, make, sample

# Uneven minibatches, masks, states, gradients of inputs, draws for each row, burn-in, noise.
OTHERS = [
    "ppo-entities",
    "ppo-gru-normalised",
    "sac",
    "td3",
    "impala-lstm",
    "gail",
    "iqn",
    "r2d2",
    "rainbow",
]
OTHERS += ["bc-structured", "dqn-normalised", "pqn-lstm"]
# Convolutions on CPUs are learned by calls unless told otherwise.
BY_CALLS = {"ppo-image": "auto", "ppo-gru-normalised": "calls"}


def test_collectives_are_counted_in_loops_too():
    program = """HloModule jit_f

%body.1 (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %all-gather.1 = f32[4]{0} all-gather(f32[2]{0} %x), dimensions={0}
  ROOT %t = (s32[], f32[2]) tuple(%a, %b)
}

%add.2 (x: f32[], y: f32[]) -> f32[] {
  ROOT %add = f32[] add(f32[] %x, f32[] %y)
}

ENTRY %main.3 (p: f32[2]) -> f32[2] {
  %all-reduce.4 = (f32[2]{0}, f32[]) all-reduce(f32[2]{0} %p, f32[] %q), to_apply=%add.2
  %while.5 = (s32[]) while(%t), body=%body.1, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %get-tuple-element.6 = f32[2]{0} get-tuple-element(%all-reduce.4), index=0
}
"""
    found = collectives(program)
    assert found.numbers == {"all-gather": 6, "all-reduce": 1}
    assert found.bytes == 6 * 16 + 2 * (8 + 4)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_an_update_makes_few_collectives():
    assert in_child(few_collectives) == ["dqn", "ppo-separate", "ppo-image", "impala-lstm", "xla"]


def few_collectives():
    """Runs in the process of the test above."""

    def found(name, **config):
        return made_by(make(name, devices=(0, 1), **config), name)

    def made_by(learner, name):
        numbers = Counter()
        for program, calls in learner.compiled_update(sample(name)).items():
            for kind, number in collectives(program).numbers.items():
                numbers[kind] += number * calls
        return numbers

    # Gradients, logs and votes together.
    assert found("dqn") == {"all-reduce": 1}
    print("dqn")
    # Networks so small that each device runs them on all rows: only the batch is carried.
    assert found("ppo-separate")["all-gather"] == 1
    # The batch, in each minibatch the outputs and the gradients.
    sharded._LEAST_WORK = 0
    cfg = case("ppo-separate").setting.cfg
    minibatches = cfg.num_epochs * cfg.num_minibatches
    # JAX 0.5 also divides the draws of two shuffled epochs over two devices.
    more = 2 if jax.__version_info__ < (0, 6) else 0
    expected = {"all-gather": 1 + minibatches, "all-reduce": minibatches + more}
    assert found("ppo-separate") == expected
    # A call for each minibatch makes as many; JAX 0.5 does not divide the draws of its shuffles.
    expected["all-reduce"] = minibatches
    assert found("ppo-separate", minibatches="calls") == expected
    print("ppo-separate")
    learner = make("ppo-image", devices=(0, 1), minibatches="scan")
    assert isinstance(learner._update, sharded.ShardedUpdate)
    if jax.__version_info__ >= (0, 6):  # in a loop, XLA's own convolutions take 10 times as long
        (program,) = learner.compiled_update(sample("ppo-image"))
        assert " convolution(" not in program
    print("ppo-image")
    assert found("impala-lstm") == {"all-gather": 2, "all-reduce": 1}
    print("impala-lstm")
    # What XLA adds if it divides the update.
    by_xla = make("dqn", devices=(0, 1))
    by_xla._update = OneCall(case("dqn").agent, by_xla._placement, check_finite=True)
    assert sum(made_by(by_xla, "dqn").values()) > 3
    print("xla")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_other_agents_learn_the_same_on_two_devices():
    assert in_child(others) == [*OTHERS, "large"]


def others():
    """Runs in the process of the test above."""
    sharded._LEAST_WORK = 0
    for name in OTHERS:
        check_equal(name, isinstance_of=sharded.ShardedUpdate)
        print(name)
    # XLA divides a batch that is larger than the params.
    sharded._SMALL_BATCH = -(10**9)
    learner = check_equal("impala-lstm", isinstance_of=sharded.ShardedUpdate)
    assert not learner.carries_votes
    placed = learner._update.place(sample("impala-lstm").batch)
    assert isinstance(placed, type(sample("impala-lstm").batch))
    print("large")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_agents_with_epochs_learn_the_same_by_a_call_for_each_minibatch():
    assert in_child(by_calls) == [*BY_CALLS, "stops"]


def by_calls():
    """Runs in the process of the test above."""
    sharded._LEAST_WORK = 0
    for name, choice in BY_CALLS.items():
        check_equal(name, isinstance_of=by_minibatch.ShardedCalls, minibatches=choice)
        print(name)
    setting = case("ppo-separate").setting
    limited = Case(setting._replace(cfg=dataclasses.replace(setting.cfg, target_kl=1e-4)))
    logs, _ = check_learns_the_same(limited, by_minibatch.ShardedCalls, minibatches="calls")
    assert 1 <= logs["minibatches"] < setting.cfg.num_epochs * setting.cfg.num_minibatches
    print("stops")


def check_equal(name, isinstance_of, **config):
    _, learner = check_learns_the_same(case(name), isinstance_of, **config)
    return learner


def check_learns_the_same(chosen, isinstance_of, **config):
    """Returns the logs and the learner that has two devices."""
    one, two = (
        Learner(LearnerConfig(devices=devices, **config), chosen.agent, None, jax.random.PRNGKey(0))
        for devices in ((), (2, 0))
    )
    assert isinstance(two._update, isinstance_of)
    weights = np.linspace(0.5, 2.0, len(chosen.batch.weights), dtype=np.float32)
    weighted = Sample(chosen.batch._replace(weights=weights), KEYS)
    for _ in range(2):
        logs = [learner.step(weighted) for learner in (one, two)]
        assert_close(*logs, atol=2e-5, rtol=2e-4)
    # Up to the order of sums; the tolerance is that of learning in parts.
    assert_close(one.params, two.params, atol=2e-5, rtol=2e-4)
    assert_close(one.learner_state, two.learner_state, atol=2e-5, rtol=2e-4)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(two.params))
    return logs[1], two
