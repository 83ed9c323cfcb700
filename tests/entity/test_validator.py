"""Errors name the environment, type or action, entity, rule, the value given, and a fix."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from rlstack.entity import (
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
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.validator import Validator
from tests.entity.cases import Scripted

OBS = ObsSpace({"Mine": EntityType(("x", "y"), 3), "Flag": EntityType((), 2)}, ("hour",))
ACTIONS = {
    "Move": Categorical(("a", "b"), 2),
    "Wait": GlobalCategorical(("a", "b")),
    "Aim": SelectEntity(2),
}
GOOD = Observation(
    features={"Mine": [[0.0, 1.0], [2.0, 3.0]], "Flag": 1},
    ids={"Mine": ["m0", "m1"]},
    global_features=[1.0],
    visible={"Mine": [True, False]},
    actions={
        "Move": CategoricalMask(actor_types=["Mine"], mask=[[True, False], [True, True]]),
        "Wait": GlobalCategoricalMask([False, True]),
        "Aim": SelectEntityMask(actor_ids=["m1"], actee_ids=["m0"], mask=[[True]]),
    },
    metrics={"n": np.int64(3)},
)


def but(**changes):
    return dataclasses.replace(GOOD, **changes)


def offering(**actions):
    return but(actions=actions)


def move(**offer):
    return offering(Move=CategoricalMask(**offer))


def aim(**offer):
    return offering(Aim=SelectEntityMask(**offer))


RAGGED = [[0.0, 1.0], [2.0]]
OVERFLOW = np.array([[0.0, 1e39], [0.0, 0.0]])
MANY = but(features={"Mine": np.zeros((4, 2))}, ids={}, visible={})
WRONG = {
    "another record": ((1, 2), "observation: .* must return an Observation; got tuple"),
    "unknown type": (
        but(features={"Tree": [[1.0]]}, ids={}, visible={}, actions={}),
        r"entity type 'Tree': must be one of \['Mine', 'Flag'\]; got Tree. Declare it in obs_space",
    ),
    "dtype": (
        but(features={"Mine": [["a", "b"], ["c", "d"]]}),
        "entity type 'Mine': features must be numbers.*; got list of dtype <U1. Encode",
    ),
    "rows of two lengths": (but(features={"Mine": RAGGED}), "in rows of equal length; got list"),
    "width": (
        but(features={"Mine": [[1.0], [2.0]]}),
        r"'Mine': features must be \[count, 2\], x, y; got shape \(2, 1\). Give one row per entity",
    ),
    "a count for features": (but(features={"Mine": 2}), r"'Mine': must give features \[count, 2\]"),
    "a negative count": (but(features={"Flag": -1}), "'Flag': must give .* got -1"),
    "NaN": (
        but(features={"Mine": [[0.0, 1.0], [2.0, np.nan]]}),
        "'Mine', entity 'm1': features must be finite float32; got y = nan. Find where",
    ),
    "infinity": (but(features={"Mine": [[-np.inf, np.inf], [0, 0]]}), "entity 'm0': .* x = -inf"),
    "too large": (but(features={"Mine": OVERFLOW}), r"entity 'm0': .* y = 1e\+39"),
    "NaN among many": (
        but(features={"Mine": np.full((50, 2), np.nan)}, ids={}),
        "entity 'row 0': .* x = nan",
    ),
    "too many": (
        MANY,
        "entity type 'Mine': must have at most 3 entities, its capacity; got 4. Declare a larger",
    ),
    "ids of an unknown type": (but(ids={"Tree": ["t"]}), "ids of entity type 'Tree': .* drop its"),
    "too few ids": (
        but(ids={"Mine": ["m0"]}),
        r"ids of entity type 'Mine': .* one for each of its 2 entities; got 1, \['m0'\]. Give an",
    ),
    "an id twice": (
        but(ids={"Mine": ["m0", "m1"], "Flag": ["m1"]}),
        r"ids of entity types \['Mine', 'Flag'\]: must be unique over all types; got 'm1' again",
    ),
    "the id of GLOBAL": (but(ids={"Flag": ["__global__"]}), "must be unique .* got '__global__'"),
    "an id that is a list": (but(ids={"Flag": [[1]]}), r"ids: an id must be hashable; got \[1\]"),
    "visible of an unknown type": (but(visible={"Tree": [True]}), "visible of entity type 'Tree'"),
    "visible as numbers": (
        but(visible={"Mine": [1, 0]}),
        r"visible of entity type 'Mine': must be bool \[2\], .*; got int64 of shape \(2,\). Leave",
    ),
    "no global features": (
        but(global_features=()),
        r"global_features: must be \[1\], hour; got shape \(0,\). Give those of",
    ),
    "global NaN": (but(global_features=[np.nan]), "must be finite float32; got hour = nan"),
    "reward": (but(reward=np.inf), "reward: must be a finite number; got inf"),
    "reward of an array": (but(reward=np.zeros(2)), "reward: must be a finite number; got array"),
    "done": (but(done=1), "done: must be a bool; got 1. Use bool"),
    "truncated": (but(truncated=None), "truncated: must be a bool; got None"),
    "metric": (but(metrics={"n": "many"}), "metric 'n': must be a number; got 'many'"),
    "unknown action": (
        offering(Jump=CategoricalMask()),
        r"action 'Jump': must be one of \['Move', 'Wait', 'Aim'\]; got Jump. Declare it",
    ),
    "another kind of action": (
        offering(Move=SelectEntityMask()),
        "action 'Move': a Categorical action needs a CategoricalMask; got SelectEntityMask",
    ),
    "ids and types": (
        move(actor_ids=["m0"], actor_types=["Flag"]),
        "action 'Move': actors must be named by actor_ids or by actor_types, not by both; got ids",
    ),
    "actors of an unknown type": (
        move(actor_types=["Tree"]),
        r"'Move': actor_types must be among \['Mine', 'Flag'\]; got 'Tree'. Declare",
    ),
    "a type twice": (move(actor_types=["Flag", "Flag"]), "actor_types must be unique"),
    "unknown actor": (
        move(actor_ids=["m0", "m7"]),
        r"action 'Move', actor 'm7': must be among the ids of the observation; got ids \['m0', 'm1",
    ),
    "an actor without an id": (move(actor_ids=[("Flag", 0)]), r"actor \('Flag', 0\): must be amo"),
    "an actor twice": (
        move(actor_ids=["m0", "m0"]),
        r"actor_ids must be unique; got \['m0', 'm0'\]",
    ),
    "too many actors": (move(), "action 'Move': must have at most 2 actors, its capacity; got 3"),
    "mask of another shape": (
        move(actor_types=["Mine"], mask=[[True, True]]),
        r"action 'Move': its mask must be bool \[2, 2\].*; got bool of shape \(1, 2\). Rows are",
    ),
    "mask of numbers": (
        move(actor_ids=["m0"], mask=[[1, 0]]),
        r"its mask must be bool \[1, 2\].*; got int64 of shape \(1, 2\)",
    ),
    "nothing legal": (
        move(actor_types=["Mine"], mask=[[True, True], [False, False]]),
        r"action 'Move', actor 'm1': at least one choice must be legal; got mask \[False, False\].*"
        "leave the actor out",
    ),
    "nothing legal without ids": (
        move(actor_types=["Flag"], mask=[[False, False]]),
        r"action 'Move', actor \('Flag', 0\): at least one",
    ),
    "nothing legal for all": (
        offering(Wait=GlobalCategoricalMask([False, False])),
        "action 'Wait', actor '__global__': at least one choice",
    ),
    "global mask": (offering(Wait=GlobalCategoricalMask([[True]])), r"'Wait': .* bool \[2\]"),
    "no actees": (
        aim(actor_ids=["m0"], actee_types=[]),
        "action 'Aim', actor 'm0': at least one choice must be legal; got mask",
    ),
    "unknown actee": (aim(actor_ids=["m0"], actee_ids=["m9"]), "action 'Aim', actee 'm9': must be"),
    "mask of pairs": (
        aim(actor_types=["Mine"], actee_types=["Flag"], mask=[[True, True]]),
        r"action 'Aim': its mask must be bool \[2, 1\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_named(case):
    observation, message = WRONG[case]
    with pytest.raises(ValueError, match=f"^Game: .*{message}") as caught:
        Validator(OBS, ACTIONS, "Game").check(observation)
    rule, fix = str(caught.value).rsplit("; got ", 1)
    assert re.search(r"\. [A-Z].+\.$", fix), fix
    assert rule


@pytest.mark.parametrize(
    "observation",
    [
        GOOD,
        Observation({}, global_features=np.array([1])),
        but(features={"Mine": np.zeros((2, 2), np.float64), "Flag": np.zeros((1, 0))}),
        but(features={"Mine": [], "Flag": np.int64(2)}, ids={}, visible={}, actions={}),
        but(features={"Mine": np.zeros((2, 2), np.uint8)}, actions={}),
        move(actor_types=[]),
        move(actor_types=[], mask=[]),
        move(actor_types=[], mask=np.zeros((0, 2), bool)),
        move(actor_ids=[]),
        aim(actor_types=[]),
        aim(actor_types=[], actee_types=[], mask=[]),
        aim(actor_ids=["m0"], mask=np.array([[True, False, True]])),
        but(reward=np.float32(1), done=np.True_, metrics={"a": True}),
    ],
)
def test_valid_observations_pass_and_can_be_padded(observation):
    Validator(OBS, ACTIONS, "Game").check(observation)
    padded, _ = PaddedCodec(OBS, ACTIONS, "Game").encode(observation)
    assert padded["count"]["Mine"] <= 3


def test_without_validation_capacities_and_ids_are_still_checked():
    def reset(observation):
        as_dm_env(Scripted([observation], OBS, ACTIONS), "Game", validate=False).reset()

    with pytest.raises(ValueError, match="Game: entity type 'Mine': must have at most 3"):
        reset(MANY)
    with pytest.raises(ValueError, match="Game: action 'Move': must have at most 2 actors"):
        reset(move())
    with pytest.raises(ValueError, match="Game: actor or actee 'm7': must be among the ids"):
        reset(move(actor_ids=["m7"]))
    reset(but(features={"Mine": [[0.0, 1.0], [2.0, np.nan]]}))
