"""The ragged transformer: inputs that must not change outputs, and hidden entities."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack import distributions
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.entity.spaces import GLOBAL
from rlstack.exploration import Sample
from rlstack.networks import NetworkConfig, RaggedTransformerConfig, actor_critic
from rlstack.networks.ragged import entity_layout, packed_rows
from rlstack.networks.ragged.entity_layout import read_layout
from tests.agent_cases import quick_jit
from tests.networks.ragged_cases import (
    ACTION_SPACE,
    CODEC,
    CONFIGS,
    OBS_SPACE,
    SLOTS,
    network,
    observations,
    timestep_of,
)


@functools.cache
def case(name):
    """A network of `CONFIGS`, as a jitted function of observations."""
    made, params = network(CONFIGS[name])
    return made, params, quick_jit(lambda x: made.apply(None, params, timestep_of(x), ())[0])


def _policy(output, observation):
    return distributions.from_parameters(
        CODEC.action_spec, output.policy, observation["action_mask"]
    )


def _assert_same(ours, theirs, observation, other=None, atol=1e-5):
    """Compares values and policies; ignores the logits of absent actors."""
    np.testing.assert_allclose(ours.value, theirs.value, atol=atol)
    pairs = zip(
        jax.tree.leaves(_policy(ours, observation)),
        jax.tree.leaves(_policy(theirs, other or observation)),
        strict=True,
    )
    for a, b in pairs:
        log_probs = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_allclose(*log_probs, atol=atol)


def test_the_layout_is_read_off_the_specs():
    found = read_layout(CODEC.observation_spec, CODEC.action_spec)
    assert [kind.name for kind in found.types] == ["Ship", "Rock", "Ghost", GLOBAL]
    assert [kind.offset for kind in found.types] == list(SLOTS.offsets.values())
    assert found.num_slots == found.num_tokens == SLOTS.total
    assert entity_layout.GLOBAL == GLOBAL
    assert found.types[1].features == OBS_SPACE.entities["Rock"].features
    kinds = {action.name: (action.kind, action.num_choices) for action in found.actions}
    assert kinds == {
        "aim": ("select_entity", SLOTS.total),
        "mode": ("global_categorical", 2),
        "move": ("categorical", 3),
    }
    assert list(kinds) == sorted(ACTION_SPACE)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", CONFIGS)
def test_batch_mates_and_padding_do_not_matter(name):
    apply = case(name)[2]
    batch = observations(4)
    together = apply(batch)
    assert np.isfinite(together.value).all() and np.isfinite(together.policy).all()
    assert together.policy.shape == (4, sum(x.shape[1] for x in batch["action_mask"].values()))
    rng = np.random.default_rng(5)
    for i in range(4):
        alone = jax.tree.map(lambda x, i=i: np.repeat(x[i : i + 1], 4, axis=0), batch)
        dirty = dict(alone, features=dict(alone["features"]))
        for kind in ("Ship", "Rock"):  # values beyond the count are never read
            rows = alone["features"][kind].copy()
            beyond = np.arange(rows.shape[1]) >= alone["count"][kind][:, None]
            rows[beyond] = rng.normal(size=(beyond.sum(), rows.shape[2]))
            dirty["features"][kind] = rows
        one = jax.tree.map(lambda x, i=i: np.repeat(x[i : i + 1], 4, axis=0), together)
        _assert_same(apply(dirty), one, alone)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_give_what_padded_ones_give(name):
    made, params, apply = case(name)
    cfg = dataclasses.replace(CONFIGS[name], packing="always")
    found = read_layout(CODEC.observation_spec, CODEC.action_spec)
    # Small environments share rows; hidden entities stay in their own environment.
    batch = observations(8, seed=3, counts={"Ship": 1, "Rock": 2, "Ghost": 0})
    few = observations(8, seed=4)
    batch = jax.tree.map(lambda x, y: np.concatenate([x[:5], y[:1], y[-1:], x[:1]]), batch, few)
    packed = packed_rows.with_packing(found, cfg.packing, batch)
    rows, _ = packed["packing"]["source"].shape
    assert rows < 8
    _assert_same(apply(packed), apply(batch), batch)

    def loss(params, observation):
        output = made.apply(None, params, timestep_of(observation), ())[0]
        return _policy(output, observation).entropy().sum() + (output.value**2).sum()

    grads = [quick_jit(jax.grad(loss))(params, x) for x in (packed, batch)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * (1 + np.abs(b).max()))


def test_plans_are_made_where_they_pay_and_say_where_everybody_stands():
    found = read_layout(CODEC.observation_spec, CODEC.action_spec)
    small = observations(16, counts={"Ship": 1, "Rock": 1, "Ghost": 0})
    assert "packing" not in packed_rows.with_packing(found, "auto", small)  # packing does not pay
    small, full = (
        jax.tree.map(lambda x: np.repeat(x, 32, axis=0), x)
        for x in (small, observations(16, counts={"Ship": 2, "Rock": 6, "Ghost": 3}))
    )
    assert "packing" not in packed_rows.with_packing(found, "auto", full)
    assert "packing" not in packed_rows.with_packing(found, "never", small)
    packing = packed_rows.with_packing(found, "auto", small)["packing"]
    assert packing["source"].size < 512 * SLOTS.total / 2
    slots = [SLOTS.offsets["Ship"], SLOTS.offsets["Rock"], SLOTS.offsets[GLOBAL]]
    flat = packing["source"].reshape(-1)
    for environment in range(512):
        for slot in slots:
            at = packing["place"][environment, slot]
            assert flat[at] == environment * SLOTS.total + slot
    assert (flat < 512 * SLOTS.total).sum() == 512 * len(slots)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_entities_does_not_matter(name):
    apply = case(name)[2]
    batch = observations(4, seed=1, counts={"Ship": 2, "Rock": 5, "Ghost": 2})
    order = np.array([3, 0, 4, 2, 1, 5])
    moved = jax.tree.map(np.copy, batch)
    moved["features"]["Rock"] = batch["features"]["Rock"][:, order]
    moved["visible"]["Rock"] = batch["visible"]["Rock"][:, order]
    slots = np.arange(SLOTS.total)
    first = SLOTS.offsets["Rock"]
    slots[first : first + 6] = first + order
    aims = batch["action_mask"]["aim"].reshape(4, 2, -1)[:, :, slots]
    moved["action_mask"]["aim"] = aims.reshape(4, -1)
    ours, theirs = apply(moved), apply(batch)
    np.testing.assert_allclose(ours.value, theirs.value, atol=1e-5)
    there, here = _policy(theirs, batch).components, _policy(ours, moved).components
    for action in ("move", "mode"):
        np.testing.assert_allclose(here[action].logits, there[action].logits, atol=1e-5)
    legal = moved["action_mask"]["aim"].reshape(4, 2, -1)
    aim = np.where(legal, there["aim"].logits[..., slots], -1e9)
    np.testing.assert_allclose(here["aim"].logits, aim, atol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_entities_reach_the_value_and_never_the_policy(name):
    apply = case(name)[2]
    batch = observations(4, seed=2, counts={"Ship": 2, "Rock": 4, "Ghost": 1})
    batch["visible"]["Rock"][:, 2] = False
    batch["visible"]["Rock"][:, 0] = True

    def changed(row):
        other = jax.tree.map(np.copy, batch)
        other["features"]["Rock"][:, row] += 1.0
        return apply(other)

    base = apply(batch)
    hidden, seen = changed(2), changed(0)
    # No actor may aim at hidden entities, so those logits do not count.
    found = read_layout(CODEC.observation_spec, CODEC.action_spec)
    aims = batch["action_mask"]["aim"].reshape(4, 2, -1)
    aims &= np.asarray(entity_layout.visible(found, batch))[:, None]
    batch["action_mask"]["aim"] = aims.reshape(4, -1)
    for a, b in zip(*(jax.tree.leaves(_policy(x, batch)) for x in (hidden, base)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.abs(hidden.value - base.value) > 1e-4).all()
    move = [_policy(x, batch).components["move"].logits for x in (seen, base)]
    assert np.abs(move[0] - move[1]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.chosen
def test_absent_types_and_zero_actors_give_finite_gradients():
    made, params, _ = case("grid")
    nobody = observations(3, counts={"Ship": 0, "Rock": 0, "Ghost": 0})

    def loss(params):
        output = made.apply(None, params, timestep_of(nobody), ())[0]
        return _policy(output, nobody).entropy().sum() + output.value.sum()

    value, grads = quick_jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    # Only the global entity is present; its action has two choices.
    assert not np.asarray(grads["policy_head_move"]["w"]).any()
    assert np.asarray(grads["policy_head_mode"]["w"]).any()


@pytest.mark.slow
@pytest.mark.chosen
def test_the_first_policy_is_near_uniform_and_the_first_value_is_0():
    made, params = network(CONFIGS["plain"], perturbed=False)
    batch = observations(4)
    output, _ = made.apply(None, params, timestep_of(batch), ())
    assert not np.asarray(output.value).any()
    move = _policy(output, batch).components["move"]
    legal = move.legal().sum(-1)
    np.testing.assert_allclose(move.categorical().entropy(), np.log(legal), atol=1e-2)


@pytest.mark.slow
@pytest.mark.chosen
def test_any_actor_critic_agent_takes_entities_and_pickles():
    cfg = NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=1))
    factory = functools.partial(actor_critic, cfg=cfg)
    agent = PPO(PPOConfig(), CODEC.observation_spec, CODEC.action_spec, factory, Sample)
    copy = pickle.loads(pickle.dumps(agent))
    params = copy.initial_params(jax.random.PRNGKey(0))
    timestep = agent.lay_out(timestep_of(observations(4)))
    outputs = [
        quick_jit(a.actor_step)(jax.random.PRNGKey(1), params, timestep, ())[0]
        for a in (agent, copy)
    ]
    for a, b in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="core must be none"):
        actor_critic(
            CODEC.observation_spec, CODEC.action_spec, dataclasses.replace(cfg, core="gru")
        )
