"""QMIX and VDN: targets and losses in numpy, masks, seats that are out of the game, acting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.qmix import QMIX, QMIXConfig, behaviour_policy
from rlstack.exploration import Greedy, initial_counts
from rlstack.families.q_learning import QOutput, SequenceState
from rlstack.networks import NetworkConfig
from rlstack.networks.base import Network
from rlstack.types import Batch, StepType, TimeStep, Transition
from tests.agent_cases import FAST, GRU, SMALL, Case, Setting, quick_jit

FIRST, MID, LAST = map(int, StepType)
SEATS, ACTIONS = 2, 3
JOINT = {
    "action_mask": specs.BoundedArray((SEATS, ACTIONS), np.int8, 0, 1),
    "critic_state": specs.Array((4,), np.float32),
    "observation": specs.Array((SEATS, 3), np.float32),
}
CHOICES = specs.BoundedArray((SEATS,), np.int32, 0, ACTIONS - 1)
EXTRAS = {
    "alive": specs.BoundedArray((SEATS,), np.int8, 0, 1),
    "rewards": specs.Array((SEATS,), np.float32),
}
CFG = QMIXConfig(target_period=10, optimizer=FAST, epsilon_frames=100, mixer_size=4, hyper_size=0)
SETTINGS = {
    "qmix": Setting(CFG, JOINT, CHOICES, SMALL, extras_spec=EXTRAS),
    "qmix-gru": Setting(
        dataclasses.replace(CFG, burn_in=2, n_step=2, hyper_size=5),
        specs.Array((SEATS, 3), np.float32),  # the state is what all see
        CHOICES,
        GRU,
        extras_spec=EXTRAS,
    ),
    "vdn": Setting(
        dataclasses.replace(CFG, mixer="sum", double=False),
        JOINT,
        CHOICES,
        SMALL,
        extras_spec=EXTRAS,
    ),
}
DISCOUNT = 0.9


def table():
    """A network whose params are the values of seats: [S, 3, N] times the observation [S, 3]."""

    def unroll(rng_key, params, timestep, state):
        seen = timestep.observation["observation"]
        return jnp.einsum("...sd,sdn->...sn", seen, params), state

    return Network(
        lambda key: jax.random.normal(key, (SEATS, 3, ACTIONS)), unroll, unroll, lambda size: ()
    )


def make(**changes):
    cfg = dataclasses.replace(CFG, discount=DISCOUNT, **changes)
    return QMIX(cfg, JOINT, CHOICES, lambda *_: table(), Greedy)


def batch(seed=0):
    """Three items of 4 transitions: nothing special; a seat leaves; a game ends and one begins."""
    rng = np.random.default_rng(seed)
    kinds = np.array(
        [[MID] * 5, [FIRST, MID, MID, MID, LAST], [MID, LAST, FIRST, MID, MID]], np.int32
    ).T
    alive = np.ones((5, 3, SEATS), np.int8)
    alive[2:, 1, 0] = 0
    alive[1, 2] = 0  # a termination
    discount = np.ones((5, 3), np.float32)
    discount[1, 2] = 0
    mask = rng.integers(0, 2, (5, 3, SEATS, ACTIONS)).astype(np.int8)
    mask[..., 1] = 1
    observation = {
        "action_mask": mask,
        "critic_state": rng.normal(size=(5, 3, 4)).astype(np.float32),
        "observation": rng.normal(size=(5, 3, SEATS, 3)).astype(np.float32),
    }
    reward = np.where(kinds == FIRST, 0, rng.normal(size=kinds.shape)).astype(np.float32)
    rewards = np.zeros((5, 3, SEATS), np.float32)
    timestep = TimeStep(kinds, reward, discount, observation, {"alive": alive, "rewards": rewards})
    action = rng.integers(0, ACTIONS, (5, 3, SEATS)).astype(np.int32)
    counts = jax.tree.map(lambda x: np.broadcast_to(x, kinds.shape), initial_counts(3))
    state = SequenceState(counts, ())
    weights = np.array([1.0, 0.5, 2.0], np.float32)
    return Batch(Transition(timestep, QOutput(action), state, np.zeros_like(kinds)), weights)


def mixed_in_numpy(params, values, state):
    """QMIX's network with linear functions of the state; a sum without params."""
    if not params:
        return values.sum(-1)
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def layer(name, x):
        return x @ found[name]["w"] + found[name]["b"]

    first = np.abs(layer("mixer_first", state)).reshape((*state.shape[:-1], SEATS, 4))
    x = (values[..., None] * first).sum(-2) + layer("mixer_bias", state)
    hidden = np.where(x > 0, x, np.expm1(x))
    value = layer("mixer_value", np.maximum(layer("mixer_value_hidden", state), 0))[..., 0]
    return (hidden * np.abs(layer("mixer_last", state))).sum(-1) + value


@pytest.mark.parametrize(
    "changes",
    [{}, {"mixer": "sum"}, {"double": False}],
    ids=["qmix", "vdn", "single"],
)
def test_the_loss_is_that_of_a_second_implementation(changes):
    agent, data = make(**changes), batch()
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    loss, (logs, priorities) = quick_jit(agent.loss)(params, target, data)

    step = data.trajectory.timestep
    alive, state = step.extras["alive"], step.observation["critic_state"].astype(np.float64)
    seen, mask = step.observation["observation"], step.observation["action_mask"]
    values, later = (
        np.einsum("tbsd,sdn->tbsn", seen, np.asarray(p.seats, np.float64)) for p in (params, target)
    )
    errors, valid = np.zeros((4, 3)), np.zeros((4, 3), bool)
    for t in range(4):
        for b in range(3):
            valid[t, b] = step.step_type[t + 1, b] != FIRST
            if not valid[t, b]:
                continue
            taken, best = np.zeros(SEATS), np.zeros(SEATS)
            for s in range(SEATS):
                taken[s] = values[t, b, s, data.trajectory.agent_output.action[t, b, s]]
                chooser = later if changes.get("double") is False else values
                legal = [n for n in range(ACTIONS) if mask[t + 1, b, s, n]]
                best[s] = later[t + 1, b, s, max(legal, key=lambda n: chooser[t + 1, b, s, n])]
            total = mixed_in_numpy(params.mixer, taken * alive[t, b], state[t, b])
            bootstrap = mixed_in_numpy(target.mixer, best * alive[t + 1, b], state[t + 1, b])
            goal = step.reward[t + 1, b] + DISCOUNT * step.discount[t + 1, b] * bootstrap
            errors[t, b] = goal - total
    assert valid.sum() == 11
    np.testing.assert_allclose(loss, (data.weights * errors**2).sum() / 11, rtol=1e-4)
    np.testing.assert_allclose(priorities, np.abs(errors).sum(0) / valid.sum(0), rtol=1e-4)
    np.testing.assert_allclose(logs["td_error"], np.abs(errors).sum() / 11, rtol=1e-4)


def test_the_value_of_a_team_by_hand():
    """Two seats, values 1 and 2 for their actions: VDN has 3; a seat that is out counts nothing."""
    agent = make(mixer="sum")
    timestep = TimeStep((), (), (), {"critic_state": jnp.zeros((1, 1, 4))}, {})
    timestep = timestep._replace(step_type=jnp.ones((1, 1), jnp.int32))
    values = jnp.array([[[1.0, 2.0]]])
    params = agent.initial_params(jax.random.PRNGKey(0))
    for alive, total in (([1, 1], 3), ([1, 0], 1), ([0, 0], 0)):
        one = timestep._replace(extras={"alive": jnp.array([[alive]], jnp.int8)})
        np.testing.assert_allclose(agent.mixed(params, values, one), [[total]])


def test_a_seat_that_is_out_of_the_game_gets_no_gradient():
    agent, data = make(), batch()
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    data.trajectory.timestep.extras["alive"][..., 1] = 0
    grads = quick_jit(jax.grad(lambda p: agent.loss(p, target, data)[0]))(params)
    assert not np.any(grads.seats[1])
    assert np.any(grads.seats[0])


def test_illegal_actions_are_never_taken_and_seats_explore_by_themselves():
    rows, mask = 400, np.zeros((400, SEATS, ACTIONS), np.int8)
    mask[..., 0], mask[..., 2] = 1, 1
    seen = np.random.default_rng(0).normal(size=(rows, SEATS, 3)).astype(np.float32)
    ones = np.ones(rows, np.float32)
    step = TimeStep(np.ones(rows, np.int32), ones, ones, {"action_mask": mask, "observation": seen})
    agent = make()
    params = agent.initial_params(jax.random.PRNGKey(1))

    def act(policy):
        acting = QMIX(agent.cfg, JOINT, CHOICES, lambda *_: table(), policy)
        state = acting.initial_state(rows)
        output, _ = quick_jit(acting.actor_step)(jax.random.PRNGKey(2), params, step, state)
        return np.asarray(output.action)

    drawn = act(lambda: behaviour_policy(agent.cfg, rows))  # epsilon is 1
    assert set(drawn.ravel().tolist()) == {0, 2}
    assert abs(np.mean(drawn[:, 0] == drawn[:, 1]) - 0.5) < 0.1
    values = np.einsum("bsd,sdn->bsn", seen, np.asarray(params.seats))
    np.testing.assert_array_equal(act(Greedy), np.where(values[..., 2] > values[..., 0], 2, 0))


def test_what_does_not_fit_is_told():
    agent = make()
    with pytest.raises(ValueError, match="QMIX: the environment must have joint rows"):
        agent.check_extras(())
    agent.check_extras(EXTRAS)
    with pytest.raises(ValueError, match="mixer_size"):
        QMIXConfig(mixer_size=0)
    with pytest.raises(ValueError, match="no state and no dropout"):
        Case(SETTINGS["qmix"]._replace(network=NetworkConfig(hidden_sizes=(8,), dropout=0.1)))
