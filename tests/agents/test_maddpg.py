"""MADDPG: losses in numpy, what each policy maximises, seats that are out of the game."""

import dataclasses

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.maddpg import MADDPG, MADDPGConfig
from rlstack.exploration import Greedy, initial_counts
from rlstack.families.off_policy import DeterministicOutput
from rlstack.networks import PolicyAndCritic
from rlstack.networks.base import Network
from rlstack.types import Batch, StepType, TimeStep, Transition
from tests.agent_cases import FAST, SMALL, Setting, quick_jit

FIRST, MID, LAST = map(int, StepType)
SEATS = 2
_LATER = [pytest.mark.slow, pytest.mark.chosen]
JOINT = specs.Array((SEATS, 3), np.float32)
MOVES = specs.BoundedArray((SEATS, 2), np.float32, -1.0, 1.0)
UNEVEN = specs.BoundedArray((SEATS, 2), np.float32, [0.0, -2.0], [4.0, 2.0])
EXTRAS = {
    "alive": specs.BoundedArray((SEATS,), np.int8, 0, 1),
    "rewards": specs.Array((SEATS,), np.float32),
}
CFG = MADDPGConfig(random_frames=0, optimizer=FAST, max_grad_norm=0.0)
SETTINGS = {
    "maddpg": Setting(CFG, JOINT, MOVES, SMALL, extras_spec=EXTRAS),
    "maddpg-shared": Setting(
        dataclasses.replace(CFG, critics="shared", policies="shared", num_critics=2),
        {"critic_state": specs.Array((4,), np.float32), "observation": JOINT},
        MOVES,
        dataclasses.replace(SMALL, critic_observation="critic_state"),
        extras_spec=EXTRAS,
    ),
}
DISCOUNT = 0.9


def linear():
    """Policies are tanh(observation @ w); a critic is v . all observations + u . (actions ** 2)."""

    def policy(key, params, timestep, state):
        return timestep.observation["observation"] @ params["w"], state

    def critic(key, params, timestep, state):
        seen = timestep.observation.observation.reshape((len(timestep.step_type), -1))
        return seen @ params["v"] + timestep.observation.action**2 @ params["u"], state

    def init_policy(key):
        return {"w": jax.random.normal(key, (3, 2))}

    def init_critic(key):
        one, two = jax.random.split(key)
        return {
            "v": jax.random.normal(one, (SEATS * 3,)),
            "u": jax.random.normal(two, (SEATS * 2,)),
        }

    def none(size):
        return ()

    return PolicyAndCritic(
        Network(init_policy, policy, policy, none), Network(init_critic, critic, critic, none)
    )


def make(action_spec=UNEVEN, **changes):
    cfg = dataclasses.replace(CFG, discount=DISCOUNT, **changes)
    return MADDPG(cfg, JOINT, action_spec, lambda *_: linear(), Greedy)


def batch(seed=0):
    """Items of two transitions: in a game; seat 0 leaves in the first; at LAST; a time limit."""
    rng = np.random.default_rng(seed)
    columns = [[MID, MID, MID], [MID, MID, MID], [LAST, FIRST, MID], [FIRST, LAST, FIRST]]
    kinds = np.array(columns, np.int32).T
    alive = np.ones((3, 4, SEATS), np.int8)
    alive[1:, 1, 0] = 0
    rewards = rng.normal(size=(3, 4, SEATS)).astype(np.float32)
    rewards[2, 1, 0] = 0
    seen = rng.normal(size=(3, 4, SEATS, 3)).astype(np.float32)
    timestep = TimeStep(
        kinds,
        rewards.mean(-1),
        np.ones((3, 4), np.float32),
        seen,
        {"alive": alive, "rewards": rewards},
    )
    action = rng.uniform([0, -2], [4, 2], (3, 4, SEATS, 2)).astype(np.float32)
    counts = jax.tree.map(lambda x: np.broadcast_to(x, (3, 4)), initial_counts(4))
    weights = np.array([1.0, 0.5, 2.0, 1.5], np.float32)
    output = DeterministicOutput(action)
    return Batch(Transition(timestep, output, counts, np.zeros_like(kinds)), weights)


@pytest.mark.parametrize(
    ("critics", "policies"),
    [
        ("own", "own"),
        ("shared", "shared"),
        pytest.param("own", "shared", marks=_LATER),
        pytest.param("shared", "own", marks=_LATER),
    ],
)
def test_the_losses_are_those_of_a_second_implementation(critics, policies):
    agent, data = make(critics=critics, policies=policies), batch()
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    _, (logs, priorities) = quick_jit(agent.loss)(params, target, data)
    step = data.trajectory.timestep
    alive, groups = step.extras["alive"], SEATS if critics == "own" else 1
    p, q = (jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in (params, target))

    def acts(params, seen):
        weights = params.policy["w"]
        own = [weights[s] if policies == "own" else weights for s in range(SEATS)]
        return np.stack([np.tanh(seen[s] @ own[s]) for s in range(SEATS)])

    def value(params, group, seen, action):
        critic = {name: x[group, 0] for name, x in params.critics.items()}
        return seen.ravel() @ critic["v"] + (action.ravel() ** 2) @ critic["u"]

    taken = (data.trajectory.agent_output.action - [2, 0]) / 2  # in [-1, 1]
    errors, gains = np.zeros((4, groups)), np.zeros((4, SEATS))
    for b in range(4):
        if step.step_type[0, b] == LAST:
            continue
        seen, action = step.observation[0, b], taken[0, b]
        length = 1 if step.step_type[1, b] == LAST else 2
        for g in range(groups):
            rewards = step.extras["rewards"][:, b, g] if critics == "own" else step.reward[:, b]
            goes_on = alive[:, b, g] if critics == "own" else np.ones(3)
            end = value(q, g, step.observation[length, b], acts(q, step.observation[length, b]))
            worth = DISCOUNT * goes_on[1]
            goal = rewards[1] + (worth * end if length == 1 else 0)
            if length == 2:
                goal += worth * (rewards[2] + DISCOUNT * goes_on[2] * end)
            errors[b, g] = goal - value(p, g, seen, action)
        for s in range(SEATS):
            mine = action.copy()
            mine[s] = acts(p, seen)[s]
            gains[b, s] = value(p, s if critics == "own" else 0, seen, mine)
    np.testing.assert_allclose(priorities, np.abs(errors).mean(1), rtol=1e-4, atol=1e-5)
    expected = (data.weights * 0.5 * (errors**2).sum(1)).mean()
    np.testing.assert_allclose(logs["critic_loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], -gains.sum(1).mean(), rtol=1e-4)


def test_a_policy_moves_only_its_own_seat_and_a_loss_only_its_own_part():
    agent, data = make(), batch()
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))

    def gain(policy, data, seat):
        learned = agent.transitions(data)
        return agent.values_of_policies(policy, params.critics, learned)[:, seat].sum()

    for seat in range(SEATS):
        grads = quick_jit(jax.grad(gain))(params.policy, data, seat)
        assert np.any(grads["w"][seat])
        assert not np.any(grads["w"][1 - seat])
    state = agent.initial_learner_state(jax.random.PRNGKey(0), target)
    grads, _ = quick_jit(agent.compute_gradients)(params, state, data)
    assert all(np.any(x) for x in jax.tree.leaves(grads))


def test_a_seat_that_is_out_of_the_game_is_in_no_loss():
    agent, data = make(), batch()
    data.trajectory.timestep.extras["alive"][:, :, 1] = 0
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    state = agent.initial_learner_state(jax.random.PRNGKey(0), target)
    grads, _ = quick_jit(agent.compute_gradients)(params, state, data)
    assert not np.any(grads.policy["w"][1])
    assert not np.any(grads.critics["u"][1])
    assert np.any(grads.policy["w"][0])
    assert np.any(grads.critics["u"][0])


def test_actions_are_within_the_bounds_of_each_seat():
    agent = make()
    params = agent.initial_params(jax.random.PRNGKey(1))
    seen = 9.0 * np.random.default_rng(0).normal(size=(50, SEATS, 3)).astype(np.float32)
    ones = np.ones(50, np.float32)
    step = TimeStep(ones.astype(np.int32), 0 * ones, ones, seen)
    act = quick_jit(agent.actor_step)
    action = np.asarray(act(jax.random.PRNGKey(2), params, step, initial_counts(50))[0].action)
    assert action.shape == (50, SEATS, 2)
    assert action[..., 0].min() >= 0 and action[..., 0].max() > 3.9
    assert action[..., 1].min() < -1.9 and action[..., 1].max() <= 2


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="MADDPG: the environment must have joint rows"):
        make().check_extras({"alive": ()})
    make().check_extras(EXTRAS)
    with pytest.raises(ValueError, match="MADDPG: the action must be that of all seats"):
        make(specs.BoundedArray((2,), np.float32, -1.0, 1.0))
    open_bounds = specs.BoundedArray((SEATS, 2), np.float32, -np.inf, 1.0)
    with pytest.raises(ValueError, match="finite bounds"):
        make(open_bounds)
