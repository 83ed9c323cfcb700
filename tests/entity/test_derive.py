"""Features and choices are derived from dataclasses and enums."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import pytest

from rlstack.entity import Categorical, EntityType, GlobalCategorical, derive


class Heading(enum.Enum):
    NORTH = "n"
    EAST = "e"
    SOUTH = "s"


class Fire(enum.IntEnum):
    NO = 0
    YES = 7


@dataclasses.dataclass(frozen=True)
class Place:
    x: float
    y: np.float32


@dataclasses.dataclass
class Robot:
    place: Place
    heading: Heading
    charged: bool
    cargo: tuple[int, Fire]
    age: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
    heading: Heading
    fire: Fire


@dataclasses.dataclass
class Flag:
    pass


@dataclasses.dataclass
class Chain:
    value: int
    rest: Chain


@dataclasses.dataclass
class Named:
    name: str


@dataclasses.dataclass
class Listed:
    values: tuple[int, ...]


NAMES = (
    "place.x",
    "place.y",
    "heading=NORTH",
    "heading=EAST",
    "heading=SOUTH",
    "charged",
    "cargo.0",
    "cargo.1=NO",
    "cargo.1=YES",
    "age",
)


def test_features():
    assert derive.entity_type(Robot, 4) == EntityType(NAMES, 4)
    robots = [
        Robot(Place(1.5, np.float32(2)), Heading.EAST, True, (3, Fire.YES), 9),
        Robot(Place(-1, np.float32(0)), Heading.NORTH, False, (0, Fire.NO)),
    ]
    found = derive.features(Robot, robots)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(
        found, [[1.5, 2, 0, 1, 0, 1, 3, 0, 1, 9], [-1, 0, 1, 0, 0, 0, 0, 1, 0, 0]]
    )
    assert derive.features(Robot, []).shape == (0, len(NAMES))
    assert derive.entity_type(Flag) == EntityType()
    assert derive.features(Flag, [Flag(), Flag()]).shape == (2, 0)


def test_choices():
    assert derive.categorical(Heading, 3) == Categorical(("NORTH", "EAST", "SOUTH"), 3)
    assert derive.choices(Heading) == tuple(Heading)
    labels = ("NORTH NO", "NORTH YES", "EAST NO", "EAST YES", "SOUTH NO", "SOUTH YES")
    for of in (Turn, (Heading, Fire)):
        assert derive.global_categorical(of) == GlobalCategorical(labels)
        assert len(derive.choices(of)) == 6
    assert derive.choices(Turn)[3] == Turn(Heading.EAST, Fire.YES)
    assert derive.choices((Heading, Fire))[4] == (Heading.SOUTH, Fire.NO)


def test_types_without_features_are_refused():
    with pytest.raises(TypeError, match=r"Named\.name: must be a number.*got <class 'str'>. Leave"):
        derive.entity_type(Named)
    with pytest.raises(TypeError, match=r"Listed\.values: must be .* tuple of fixed length"):
        derive.entity_type(Listed)
    with pytest.raises(TypeError, match="Chain: must not contain itself; got rest"):
        derive.entity_type(Chain)
    with pytest.raises(TypeError, match="must be given a dataclass; got <enum 'Heading'>"):
        derive.entity_type(Heading)
    for of in (Robot, (), int, (Heading, 3)):
        with pytest.raises(TypeError, match="categorical: must be given an enum"):
            derive.categorical(of)


def test_values_of_other_types_are_refused():
    def robot(**changes):
        return dataclasses.replace(
            Robot(Place(0, np.float32(0)), Heading.EAST, True, (0, Fire.NO)), **changes
        )

    with pytest.raises(TypeError, match=r"Robot\.age: must be a number; got None in instance 1"):
        derive.features(Robot, [robot(), robot(age=None)])
    with pytest.raises(TypeError, match="heading: must be a member of Heading; got 'n'"):
        derive.features(Robot, [robot(heading="n")])
    with pytest.raises(ValueError, match=r"Robot\.cargo: must have 2 parts; got \(1,\)"):
        derive.features(Robot, [robot(cargo=(1,))])
