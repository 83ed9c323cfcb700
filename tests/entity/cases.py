"""Games for tests: three states of MineSweeper, and a game that uses every space feature."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rlstack.entity import (
    GLOBAL,
    Categorical,
    CategoricalMask,
    EntityType,
    GlobalCategorical,
    GlobalCategoricalMask,
    Observation,
    ObsSpace,
    SelectEntity,
    SelectEntityMask,
    as_dm_env,
)
from rlstack.entity.vec_obs import Ragged

MOVES = ("Up", "Down", "Left", "Right", "Defuse")
SWEEPER_OBS = ObsSpace(
    {
        "Mine": EntityType(("x", "y"), 5),
        "Robot": EntityType(("x", "y"), 2),
        "Orbital Cannon": EntityType(("cooldown",), 1),
    }
)
SWEEPER_ACTIONS = {"Move": Categorical(MOVES, 2), "Fire Orbital Cannon": SelectEntity(1)}


def _sweeper(mines, robots, cannon, mask):
    counts = {"Mine": len(mines), "Robot": len(robots)}
    features = {"Mine": mines, "Robot": robots}
    if cannon is not None:
        counts["Orbital Cannon"], features["Orbital Cannon"] = 1, [[cannon]]
    return Observation(
        features=features,
        ids={name: [(name, i) for i in range(count)] for name, count in counts.items()},
        actions={
            "Move": CategoricalMask(actor_types=["Robot"], mask=mask),
            "Fire Orbital Cannon": SelectEntityMask(
                actor_types=[] if cannon is None else ["Orbital Cannon"],
                actee_types=["Mine", "Robot"],
            ),
        },
    )


SWEEPER = (
    _sweeper([[0, 2], [0, 1], [2, 2], [0, 0], [1, 0]], [[1, 1]], None, [[True] * 5]),
    _sweeper([[2, 1]], [[2, 0]], 0, [[False, True, True, False, True]]),
    _sweeper(
        [[1, 0], [0, 1], [2, 2]],
        [[0, 0], [2, 0]],
        None,
        [[True, False, True, False, True], [False, True, True, False, True]],
    ),
)


class Scripted:
    """Repeats the same observations and records its actions."""

    def __init__(self, observations, obs_space=SWEEPER_OBS, action_space=SWEEPER_ACTIONS):
        self.observations, self.told = observations, []
        self.obs_space, self.action_space = obs_space, action_space
        self._at = -1

    def reset(self):
        self._at += 1
        return self.observations[self._at % len(self.observations)]

    def act(self, actions):
        self.told.append(actions)
        return self.reset()


class Skirmish:
    """Gives random observations: late types, absent actions, masks at some steps.

    Scouts have ids, rocks do not; flags have no ids or features. One episode in four ends at once.
    """

    obs_space = ObsSpace(
        {
            "Rock": EntityType(("size",), 4),
            "Flag": EntityType((), 3),
            "Scout": EntityType(("x", "y"), 3),
        },
        ("hour",),
    )
    action_space: ClassVar = {
        "Move": Categorical(("stay", "go", "run"), 10),
        "Shout": GlobalCategorical(("a", "b")),
        "Aim": SelectEntity(3),
    }

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.time = self.length = 0

    def reset(self):
        self.time, self.length = 0, int(self.rng.integers(1, 6))
        return self.show(done=self.rng.random() < 0.25)

    def act(self, actions):
        assert set(actions) == set(self.action_space)
        self.time += 1
        over = self.time == self.length
        truncated = over and self.length % 2 == 0
        chosen = sum(float(a.indices.sum()) for n, a in actions.items() if n != "Aim")
        return self.show(
            done=over and not truncated,
            truncated=truncated,
            reward=chosen + len(actions["Aim"].actees),
        )

    def show(self, **outcome):
        rng = self.rng
        rocks, scouts = int(rng.integers(0, 5)), int(rng.integers(0, 4))
        flags = int(rng.integers(0, 4)) if self.time >= 2 else 0
        ids = [f"scout {i}" for i in rng.permutation(10)[:scouts]]
        features = {
            "Scout": rng.normal(size=(scouts, 2)).astype(np.float32),
            "Rock": rng.normal(size=(rocks, 1)),
        }
        if flags:  # otherwise the type is missing
            features["Flag"] = flags
        return Observation(
            features=features,
            global_features=[float(self.time)],
            ids={"Scout": ids},
            visible={"Rock": rng.random(rocks) < 0.5} if rng.random() < 0.5 else {},
            actions=self.offers(ids, rocks + flags + scouts, flags),
            metrics={"scouts": scouts},
            **outcome,
        )

    def offers(self, ids, everybody, flags):
        rng, offers = self.rng, {}
        who = int(rng.integers(0, 4))
        if who:
            actors = {1: everybody, 2: len(ids), 3: flags + len(ids)}[who]
            mask = rng.random((actors, 3)) < 0.5
            mask[:, 1] = True
            offers["Move"] = CategoricalMask(
                actor_ids=list(reversed(ids)) if who == 2 else None,
                actor_types=["Scout", "Flag"] if who == 3 else None,
                mask=mask if rng.random() < 0.5 else None,
            )
        if rng.random() < 0.5:
            offers["Shout"] = GlobalCategoricalMask([True, False] if rng.random() < 0.5 else None)
        if ids:
            mask = rng.random((len(ids), len(ids))) < 0.5
            mask[np.arange(len(ids)), np.arange(len(ids))] = True
            by_id = rng.random() < 0.5
            offers["Aim"] = SelectEntityMask(
                actor_types=["Scout"],
                actee_ids=ids[::-1] if by_id else None,
                mask=mask if by_id else None,
            )
        return offers


def build_skirmish(seed: int):
    return as_dm_env(Skirmish(seed))


def legal_actions(observation, action_spec, rng):
    """One legal choice for every actor of a batch ``[B, ...]``, choice 0 if no choice is legal."""
    actions = {}
    for name, spec in sorted(action_spec.items()):
        mask = observation["action_mask"][name].reshape(-1, spec.shape[0], spec.maximum + 1)
        actions[name] = np.argmax(mask * rng.random(mask.shape), axis=-1).astype(np.int32)
    return actions


def stacked(rows):
    """A batch ``[B, ...]`` of padded observations."""
    return {
        part: {name: np.stack([row[part][name] for row in rows]) for name in rows[0][part]}
        for part in rows[0]
    }


def entities(observation):
    """The (type, row) of each entity by index, computed one by one."""
    listed = []
    for name in Skirmish.obs_space.entities:
        rows = observation.features.get(name, 0)
        listed += [(name, i) for i in range(rows if isinstance(rows, int) else len(rows))]
    return [*listed, (GLOBAL, 0)]


def ragged(rows):
    """Rows of int32 values as a ragged record."""
    lengths = np.array([len(values) for values in rows], np.int32)
    row_ids = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    return Ragged(np.array([v for row in rows for v in row], np.int32), row_ids, lengths)


def split(record):
    """The values of each row of a ragged record, without padding."""
    size = int(record.lengths.sum())
    return np.split(record.values[:size], np.cumsum(record.lengths)[:-1])
