"""Earlier versions of a policy in the topology fused: which one plays, and which games count."""

import io
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs.seats.rock_paper_scissors import payoffs
from rlstack.fused.history import HistoryActors, HistoryState, VersionTable
from rlstack.jax_envs.factory import make_batch
from rlstack.programs.run import train
from rlstack.programs.run.fused import Fused
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.tools.tournament import tournament
from tests.fused.cases import called, counted, throws
from tests.programs.multi_policy.cases import trained

pytestmark = pytest.mark.timeout(180)


def test_the_game_pays_what_the_game_in_python_pays():
    env = make_batch("rlstack.jax_envs.rock_paper_scissors:RockPaperScissors", {"rock": 2.0})
    throws = np.array([[one, other] for one in range(3) for other in range(3)], np.int32)
    state, first = env.reset(env.keys(range(18)))
    assert np.asarray(first.first()).all()
    _, timestep = env.step(state, jnp.asarray(throws.reshape(-1)))
    assert np.asarray(timestep.last()).all()
    np.testing.assert_array_equal(timestep.discount, 0.0)
    paid = payoffs(2.0)[throws[:, 0], throws[:, 1]]
    np.testing.assert_array_equal(timestep.reward.reshape(-1, 2), np.stack([paid, -paid], 1))


@pytest.mark.slow
@pytest.mark.chosen
def test_earlier_versions_play_as_in_a_single_process(tmp_path):
    single = SingleProcessRun(throws(topology="single_process"))
    try:
        trained(single, 41)
        fused = called(Fused(throws()), 5)
        assert counted(fused) == (single.env_frames, single.learner.version)
        versions = fused._versions["past"]
        np.testing.assert_array_equal(versions.frames, single.players["past"].versions.frames)
        # They explore as the learner did then, which has four rows.
        steps = fused.state.acting.given["past"].params.env_steps
        np.testing.assert_array_equal(steps[versions.slots], versions.frames // 4)
    finally:
        single.close()
    state = fused.state.acting.agent["past"]
    assert float(state.games.sum()) > 10
    assert not np.allclose(versions.win_rates, 0.5)
    assert fused.stats()["past/versions"] == 3
    experiment = throws("prioritised", frames=150)
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert set(result.policies) == {"learner"}
    played = tournament(tmp_path / "run", games=4, versions=2)
    assert played.names[0] == "learner@0"


@pytest.mark.slow
@pytest.mark.chosen
def test_each_place_plays_the_params_of_its_version():
    loop = called(Fused(throws()), 3)
    player = loop._parts.loop._actors._players["past"]
    acting = loop.state.acting
    table, state = acting.given["past"], acting.agent["past"]
    # Versions that throw one thing each.
    head = [x for x in jax.tree.leaves(table.params) if x.shape[1:] == (3,)]
    assert len(head) == 1
    params = jax.tree.map(
        lambda x: jnp.zeros_like(x) + (1e3 * jnp.eye(3) if x.shape[1:] == (3,) else 0.0),
        table.params,
    )
    table = table._replace(params=params, numbers=jnp.array([3, 1, 2]))
    timestep = jax.tree.map(lambda x: x[loop._parts.loop._actors.places["past"]], acting.timestep)
    first = timestep._replace(step_type=0 * timestep.step_type)
    thrown = set()
    for seed in range(5):
        acted = player.act(table, first, state, jax.random.PRNGKey(seed))
        np.testing.assert_array_equal(acted.output.action, acted.next_state.slots)
        thrown |= set(acted.next_state.slots.tolist())
        later = first._replace(step_type=1 + first.step_type)
        again = player.act(table, later, acted.next_state, jax.random.PRNGKey(seed + 9))
        np.testing.assert_array_equal(again.output.action, acted.output.action)
    assert thrown == {0, 1, 2}


def test_the_probabilities_of_versions_follow_the_rule():
    table = VersionTable((), jnp.array([4, 0, 2, 3]))
    games, wins = jnp.array([1.0, 0.0, 3.0, 0.0]), jnp.array([1.0, 0.0, 0.0, 0.0])
    state = HistoryState((), None, None, games, wins)
    wanted = {
        "latest": [1, 0, 0, 0],
        "uniform": [1 / 3, 0, 1 / 3, 1 / 3],
        # Win rates of 1.5 / 2, 0.5 / 4 and 0.5 / 1.
        "prioritised": np.array([1 / 16, 0, 49 / 64, 1 / 4]) / (1 / 16 + 49 / 64 + 1 / 4),
    }
    actors = SimpleNamespace(num_envs=2)
    for draw, probabilities in wanted.items():
        player = HistoryActors(actors, "other", draw, 4, forgetting=0.5, prior=1.0)
        found = player._probabilities(table.numbers, state)
        np.testing.assert_allclose(found, probabilities, rtol=1e-6)


def test_results_of_games_are_counted_one_after_the_other():
    player = HistoryActors(
        SimpleNamespace(num_envs=4), "other", "uniform", 2, forgetting=0.5, prior=1.0
    )
    slots = jnp.array([0, 0, 1, 0])
    state = HistoryState(
        (), slots, jnp.array([True, True, True, False]), jnp.zeros(2), jnp.zeros(2)
    )
    first, last = jnp.zeros(4, bool), jnp.array([True, True, False, True])
    state = player.judged(state, first, last, jnp.array([1.0, -1.0, 1.0, 1.0]))
    np.testing.assert_allclose(state.games, [1.5, 0.0])
    np.testing.assert_allclose(state.wins, [0.5, 0.0])
    state = player.judged(state, ~first, first, jnp.zeros(4))
    assert state.counts.all()
