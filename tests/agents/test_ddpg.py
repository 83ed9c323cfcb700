"""DDPG: its loss by hand and against rlax, targets step by step."""

import jax
import numpy as np
import pytest

from rlstack.agents.ddpg import DDPG, DDPGConfig
from rlstack.exploration import GaussianNoise, Greedy, Sample, UniformNoise, WarmUp
from rlstack.families.off_policy import DeterministicOutput, behaviour_policy
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MID,
    NESTED,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
)
from tests.agents.linear_control import (
    DISCOUNT,
    SGD,
    make_batch,
    moved,
    networks,
    scaled,
    unit,
    values_of,
)

SETTINGS = {"ddpg": Setting(DDPGConfig(optimizer=FAST), NESTED, UNEVEN)}

KEY = jax.random.PRNGKey(7)


def make(policy=Greedy, **config):
    cfg = DDPGConfig(**{"discount": DISCOUNT, "optimizer": SGD, **config})
    return DDPG(cfg, VECTOR, UNEVEN, lambda *_: networks(2), policy)


def test_the_loss_by_hand():
    agent = make()
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    batch = make_batch(
        [[MID, MID, MID], [MID, MID, LAST], [MID, LAST, FIRST], [LAST, FIRST, MID]],
        DeterministicOutput,
        weights=[1, 2, 0.5, 1],
        discounts=np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], np.float32),
    )
    loss, (logs, priorities) = quick_jit(agent.loss)(params, target, batch)
    steps = batch.trajectory.timestep
    ends = steps.observation[[2, 2, 1, 1], range(4)]
    value = values_of(target.critics, ends, np.tanh(ends @ target.policy))[:, 0]
    reward = steps.reward
    two = reward[1] + DISCOUNT * reward[2]
    goals = np.array([two[0] + DISCOUNT**2 * value[0], two[1], reward[1, 2] + DISCOUNT * value[2]])
    first = steps.observation[0]
    taken = values_of(params.critics, first, unit(batch.trajectory.agent_output.action[0]))[:3, 0]
    critic_loss = (np.array([1, 2, 0.5]) * 0.5 * (goals - taken) ** 2).sum() / 4
    opinion = values_of(params.critics, first, np.tanh(first @ params.policy))[:3, 0]
    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], -opinion.sum() / 4, rtol=1e-4)
    np.testing.assert_allclose(loss, critic_loss - opinion.sum() / 4, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*np.abs(goals - taken), 0], rtol=1e-4)


def test_params_and_targets_follow_their_formulas_for_three_steps():
    agent = make(target_rate=0.25, optimizer=SGD)
    params = scaled(agent.initial_params(KEY), 0.3)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, DeterministicOutput)
    steps = batch.trajectory.timestep
    action = unit(batch.trajectory.agent_output.action[0])
    learn = quick_jit(agent.learner_step)
    w, v, policy = (np.asarray(x) for x in (*map(params.critics.get, "wv"), params.policy))
    target = (w, v, policy)
    for _ in range(3):
        goal = steps.reward[1] + DISCOUNT * (
            steps.observation[1] @ target[0][0]
            + np.tanh(steps.observation[1] @ target[2]) @ target[1][0]
        )
        error = goal - steps.observation[0] @ w[0] - action @ v[0]
        chosen = np.tanh(steps.observation[0] @ policy)
        policy = policy + 0.5 * steps.observation[0].T @ ((1 - chosen**2) * v[0]) / 5
        w = w + 0.5 * error @ steps.observation[0] / 5
        v = v + 0.5 * error @ action / 5
        target = moved(target, (w, v, policy), 0.25)
        params, state, output = learn(params, state, batch)
        assert_close((params.critics["w"], params.critics["v"], params.policy), (w, v, policy))
        held = state.target_params
        assert_close((held.critics["w"], held.critics["v"], held.policy), target)
        np.testing.assert_allclose(output.priorities, np.abs(error), rtol=1e-4, atol=1e-5)


@pytest.mark.launchpad
def test_the_policys_gradient_is_rlaxs():
    rlax = pytest.importorskip("rlax")
    agent = make()
    params = agent.initial_params(KEY)
    batch = make_batch([[MID, MID]] * 5, DeterministicOutput)
    observation = batch.trajectory.timestep.observation[0]
    state = agent.initial_learner_state(KEY, params)
    grads, _ = quick_jit(agent.compute_gradients)(params, state, batch)

    def reference(policy):
        slope = np.broadcast_to(np.asarray(params.critics["v"][0]), (5, 2))
        losses = jax.vmap(rlax.dpg_loss)(jax.numpy.tanh(observation @ policy), slope)
        return losses.sum(-1).mean()

    np.testing.assert_allclose(grads.policy, jax.grad(reference)(params.policy), rtol=1e-4)


def test_it_explores_by_the_configured_noise():
    for kind, expected in (("gaussian", GaussianNoise), ("uniform", UniformNoise)):
        cfg = DDPGConfig(noise=kind, noise_scale=0.3, random_frames=9)
        noise = expected(0.3, minimum=-1.0, maximum=1.0)
        assert behaviour_policy(cfg, 3) == WarmUp(noise, 9, 3)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(TypeError, match="DDPG: the action must be one float array"):
        DDPG(DDPGConfig(), VECTOR, ONE_OF_4, lambda *_: networks(2), Sample)
    for changes in (
        {"discount": -0.1},
        {"num_critics": 0},
        {"target_rate": 1.5},
        {"noise": "pink"},
        {"noise_scale": -1.0},
        {"random_frames": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            DDPGConfig(**changes)
