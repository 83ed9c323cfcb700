"""Hindsight experience replay by hand, and by a second implementation, one item at a time."""

import numpy as np
import pytest

from rlstack.checks import WrongKindError
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.episodes import Episode
from rlstack.replay.hindsight import Hindsight
from rlstack.types import TimeStep, Transition

FIRST, MID, LAST = 0, 1, 2


def reward(achieved, desired, info):
    return -abs(achieved - desired).sum(-1)


def arrived(achieved, desired, info):
    return (achieved == desired).all(-1)


def costly(achieved, desired, info):
    return reward(achieved, desired, info) - 100 * info["cost"]


class Fixed:
    """Random numbers by hand."""

    def __init__(self, *values):
        self._values = list(values)

    def random(self, size):
        value = np.asarray(self._values.pop(0), float)
        assert value.shape == tuple(size)
        return value


def steps(places, goal, types, rewards, discounts, extras=()):
    """A stream of one environment, [n, ...]."""
    places = np.asarray(places, np.float32)[:, None]
    goals = np.broadcast_to(np.float32(goal), places.shape)
    return TimeStep(
        np.asarray(types, np.int32),
        np.asarray(rewards, np.float32),
        np.asarray(discounts, np.float32),
        {"observation": places, "achieved_goal": places, "desired_goal": goals},
        extras,
    )


def item_of(stream, starts, length, before, after):
    """Items of a stream, and their episodes."""
    starts, rows = np.asarray(starts), np.arange(length + 1)[:, None]

    def take(at):
        cut = {k: v[at] for k, v in stream.observation.items()}
        extras = {k: v[at] for k, v in stream.extras.items()} if stream.extras else ()
        scalars = (x[at] for x in stream[:3])
        return TimeStep(*scalars, cut, extras)

    sizes = np.asarray(before), np.asarray(after)
    episode = Episode(np, *sizes, lambda offset: take(starts + offset))
    return Transition(take(starts + rows), (), (), np.zeros((length + 1, len(starts)))), episode


# An episode from 0 to 4 whose goal is 4, and the first two steps of the next one, whose goal is 9.
STREAM = steps(
    [0, 1, 2, 3, 4, 7, 8],
    4,
    [FIRST, MID, MID, MID, LAST, FIRST, MID],
    [0, -3, -2, -1, 0, 0, -1],
    [1, 1, 1, 1, 0, 1, 1],
)
STREAM.observation["desired_goal"] = np.float32([4, 4, 4, 4, 4, 9, 9])[:, None]


def test_later_places_become_goals_with_their_rewards_and_ends():
    """Items of one transition from the steps 0, 1, 3, 2 and 0; the last one is not chosen."""
    item, episode = item_of(STREAM, [0, 1, 3, 2, 0], 1, [0, 1, 3, 2, 0], [4, 3, 1, 2, 4])
    # Offsets 1 + floor(u * after): 1, 3, 1, 1; the goals are the places 1, 4, 4 and 3.
    rng = Fixed([0.0, 0.5, 0.79, 0.3, 0.8], [0.2, 0.7, 0.99, 0.49, 0.0])
    made = Hindsight(reward, arrived)(rng, item, episode).timestep
    goals = made.observation["desired_goal"][..., 0]
    assert goals.tolist() == [[1, 4, 4, 3, 4], [1, 4, 4, 3, 4]]
    assert made.reward.tolist() == [[0, -3, -1, -1, 0], [0, -2, 0, 0, -3]]
    assert made.step_type.tolist() == [[FIRST, MID, MID, MID, FIRST], [LAST, MID, LAST, LAST, MID]]
    assert made.discount.tolist() == [[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]]
    for name in ("observation", "achieved_goal"):
        np.testing.assert_array_equal(made.observation[name], item.timestep.observation[name])


def test_an_end_for_the_first_goals_sake_is_none_for_another_goal():
    """In `episode` the goal may be earlier: place 1 for the transition from 3 to 4."""
    item, episode = item_of(STREAM, [3], 1, [3], [1])
    rng = Fixed([0.0], [0.39])  # -3 + floor(0.39 * 5) = -2
    made = Hindsight(reward, arrived, strategy="episode")(rng, item, episode).timestep
    assert made.observation["desired_goal"].ravel().tolist() == [1, 1]
    assert made.reward.ravel().tolist() == [-2, -3]
    assert made.step_type.ravel().tolist() == [MID, LAST]  # no step of the episode follows
    assert made.discount.ravel().tolist() == [1, 1]  # but what follows has a value


def test_an_end_for_another_reason_stays():
    """At place 3 an episode ends that was to go to 9."""
    stream = steps([0, 1, 2, 3], 9, [FIRST, MID, MID, LAST], [0, -8, -7, -6], [1, 1, 1, 0])
    item, episode = item_of(stream, [2], 1, [2], [1])
    made = Hindsight(reward, arrived, strategy="episode")(Fixed([0.0], [0.3]), item, episode)
    assert made.timestep.observation["desired_goal"].ravel().tolist() == [1, 1]
    assert made.timestep.discount.ravel().tolist() == [1, 0]


def test_the_last_place_is_the_goal_in_final_and_ends_stay_without_a_function():
    item, episode = item_of(STREAM, [1], 2, [1], [2])
    made = Hindsight(reward, strategy="final", share=1.0)(Fixed([0.999]), item, episode).timestep
    assert made.observation["desired_goal"].ravel().tolist() == [3, 3, 3]
    assert made.reward.ravel().tolist() == [-2, -1, 0]
    assert made.step_type.ravel().tolist() == [MID, MID, MID]


def test_a_later_episode_in_an_item_keeps_its_goal():
    """Four transitions from step 2: 2, 3, 4 and then 7, 8 of the next episode."""
    item, episode = item_of(STREAM, [2], 4, [2], [2])
    made = Hindsight(reward, arrived)(Fixed([0.0], [0.0]), item, episode).timestep
    assert made.observation["desired_goal"].ravel().tolist() == [3, 3, 3, 9, 9]
    assert made.reward.ravel().tolist() == [-1, 0, -1, 0, -1]
    assert made.step_type.ravel().tolist() == [MID, LAST, LAST, FIRST, MID]
    assert made.discount.ravel().tolist() == [1, 0, 1, 1, 1]


def test_the_functions_get_extras_as_info():
    stream = STREAM._replace(extras={"cost": np.arange(7.0)})
    item, episode = item_of(stream, [0], 1, [0], [4])
    made = Hindsight(costly)(Fixed([0.0], [0.0]), item, episode).timestep
    assert made.reward.ravel().tolist() == [0, -100]


def second(item, starts, choose):
    """Hindsight, item by item and step by step: what each item becomes."""
    for b, (env, start) in enumerate(starts):
        goal = choose(b, env, start)
        if goal is None:
            continue
        step = item.timestep
        for row in range(len(step.reward)):
            if row and step.step_type[row, b] == FIRST:
                break
            old = step.observation["desired_goal"][row, b].copy()
            step.observation["desired_goal"][row, b] = goal
            place = step.observation["achieved_goal"][row, b]
            if step.step_type[row, b] != FIRST:
                step.reward[row, b] = -abs(float(place[0]) - goal)
            if row:
                if place[0] == goal:
                    step.step_type[row, b], step.discount[row, b] = LAST, 0
                elif place[0] == old[0]:
                    step.discount[row, b] = 1
    return item


def walk(rng, count):
    """Walks on a line towards goals 0 to 3, which end at the goal or after eight steps."""
    place, goal, time, over = 0, 0, 0, True
    for _ in range(count):
        if over:
            place, goal, time = int(rng.integers(4)), int(rng.integers(4)), 0
            kind, paid, discount = FIRST, 0.0, 1.0
        else:
            place, time = place + int(rng.integers(-1, 2)), time + 1
            there = place == goal
            kind = LAST if there or time == 8 else MID
            paid, discount = -abs(place - goal), float(not there)
        over = kind == LAST
        yield place, goal, kind, paid, discount


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("length", [1, 3])
def test_it_does_what_a_second_implementation_does(strategy, length):
    cfg = ReplayConfig(
        sampler="uniform",
        batch_size=64,
        unroll_length=length,
        starts="not_last",
        max_size=120,
        item_processor=Hindsight,
        item_processor_options={
            "reward": reward,
            "terminated": arrived,
            "strategy": strategy,
            "share": 0.7,
        },
    )
    replay = InProcessReplay(cfg, 2, seed=1)
    plain = InProcessReplay(
        ReplayConfig(**{**vars(cfg), "item_processor": "", "item_processor_options": {}}), 2, seed=1
    )
    walks = [list(walk(np.random.default_rng(env), 200)) for env in range(2)]
    relabelled = moved = 0
    for now in range(200):
        rows = [steps([p], g, [k], [r], [d]) for p, g, k, r, d in (one[now] for one in walks)]
        number = np.full(1, now, np.float32)[:, None]
        rows = [
            row._replace(observation={**row.observation, "observation": number}) for row in rows
        ]
        joined = TimeStep(
            *(np.concatenate(x) for x in list(zip(*rows, strict=True))[:3]),
            {k: np.concatenate([r.observation[k] for r in rows]) for k in rows[0].observation},
        )
        env = np.arange(2, dtype=np.int32)
        for buffer in (replay, plain):
            buffer.add(None, Transition(joined, (), env, np.zeros(2, np.int32)))
        if now < 20 or now % 7:
            continue
        found = replay.sample().batch.trajectory
        wanted = plain.sample().batch.trajectory
        plain._table.sampler.rng.bit_generator.state = replay._table.sampler.rng.bit_generator.state
        starts = list(
            zip(
                wanted.agent_state[0].tolist(),
                wanted.timestep.observation["observation"][0, :, 0].astype(int).tolist(),
                strict=True,
            )
        )

        def choose(b, env, start, found=found, wanted=wanted, now=now):
            """The goal that it took, after a look that it could."""
            goal = float(found.timestep.observation["desired_goal"][0, b, 0])
            one = walks[env]
            last = start
            while last < now and one[last][2] != LAST:
                last += 1
            first = start
            while first > max(0, now + 1 - len(replay._ring.step_type)) and one[first][2] != FIRST:
                first -= 1
            may = {
                "future": range(start + 1, last + 1),
                "final": [last],
                "episode": range(first, last + 1),
            }[strategy]
            own = float(wanted.timestep.observation["desired_goal"][0, b, 0])
            assert goal == own or goal in [one[step][0] for step in may]
            return None if goal == own else goal

        before = wanted.timestep.observation["desired_goal"].copy()
        made = second(wanted, starts, choose)
        for name, x in found.timestep._asdict().items():
            if name == "observation":
                for entry, values in x.items():
                    np.testing.assert_array_equal(values, made.timestep.observation[entry])
            elif name != "extras":
                # The same goal by chance: nothing changes.
                np.testing.assert_array_equal(x, getattr(made.timestep, name), err_msg=name)
        relabelled += (found.timestep.observation["desired_goal"][0] != before[0]).sum()
        moved += before[0].size
    assert 0.3 < relabelled / moved < 0.7


def test_a_share_of_the_items_is_chosen_and_goals_are_uniform():
    count = 40_000
    after = np.full(count, 4)
    item, episode = item_of(STREAM, np.zeros(count, int), 1, np.zeros(count, int), after)
    made = Hindsight(reward, share=0.8)(np.random.default_rng(0), item, episode).timestep
    goals = made.observation["desired_goal"][0, :, 0]
    shares = [(goals == place).mean() for place in (1, 2, 3)]
    np.testing.assert_allclose(shares, 0.2, atol=0.01)  # 5 standard errors
    assert abs((goals == 4).mean() - 0.4) < 0.01  # the own goal of the others, and the last place


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"strategy": "random"}, ValueError, "Hindsight: strategy must be one of future, final"),
        ({"share": 1.5}, ValueError, r"Hindsight: share must be in \[0, 1\]; got 1.5"),
        ({"reward": "math:sqrt5"}, ValueError, "Hindsight: reward .*no 'sqrt5'"),
        ({"terminated": lambda x: x}, WrongKindError, "Hindsight: terminated .*must be a function"),
    ],
)
def test_mistakes_are_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        Hindsight(**{"reward": reward, **arguments})


def test_observations_without_goals_are_named():
    item, episode = item_of(STREAM, [0], 1, [0], [4])
    bare = item._replace(timestep=item.timestep._replace(observation=np.zeros((2, 1, 1))))
    with pytest.raises(WrongKindError, match=r"must be dicts with the entries .*got no dict"):
        Hindsight(reward)(Fixed([0.0]), bare, episode)
    del item.timestep.observation["desired_goal"]
    with pytest.raises(WrongKindError, match="got achieved_goal, observation"):
        Hindsight(reward)(Fixed([0.0]), item, episode)
