"""Policies for games: hand-written ones for each game in `rlstack.entity.games`, and random ones.

`play` plays an episode with one. The hand-written ones are there to compare learners with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from rlstack.entity.environment import (
    Action,
    ActionMask,
    CategoricalAction,
    EntityID,
    Environment,
    GlobalCategoricalMask,
    Observation,
    SelectEntityAction,
    SelectEntityMask,
    num_entities,
)
from rlstack.entity.games.floor_is_lava import DIRECTIONS
from rlstack.entity.games.minefield import TOUCH, TURN
from rlstack.entity.games.multi_snake import STEPS
from rlstack.entity.games.treasure_hunt import BOUND
from rlstack.entity.spaces import GLOBAL, ObsSpace, SelectEntity

Choices = Mapping[str, Sequence[EntityID]]
"""By action type, one entry per actor in order: the position of its choice (an int), or the id of
its actee."""

Policy = Callable[[Observation], Choices]
"""A function of the observation alone."""

Rows = Sequence[Sequence[float]]
Cell = tuple[int, int]

_NUM_HEADINGS = 16
_CLEARANCE = TOUCH + 1.5  # least distance of a mine from the path ahead
_LOOK_AHEAD = 40.0


class Episode(NamedTuple):
    """The result of one episode."""

    total: float  # undiscounted return
    length: int
    truncated: bool


def play(environment: Environment, policy: Policy) -> Episode:
    """Plays one episode. An episode that is over at its first observation has length 0."""
    observation = environment.reset()
    total, length = observation.reward, 0
    while not observation.over:
        observation = environment.act(as_actions(environment, observation, policy(observation)))
        total += observation.reward
        length += 1
    return Episode(total, length, observation.cut)


def as_actions(
    environment: Environment, observation: Observation, choices: Choices
) -> dict[str, Action]:
    """Returns choices as `Environment.act` takes them, with the action types that have no actors.

    Raises:
      ValueError: an action type does not have one choice for each actor.
    """
    actions: dict[str, Action] = {}
    for name, kind in environment.action_space.items():
        mask = observation.actions.get(name)
        actors = _actors(environment.obs_space, observation, mask) if mask is not None else []
        chosen = choices.get(name, ()) if actors else ()
        if len(chosen) != len(actors):
            raise ValueError(
                f"as_actions: {name!r} needs a choice for each of its {len(actors)} actors; "
                f"got {len(chosen)}."
            )
        if isinstance(kind, SelectEntity):
            actions[name] = SelectEntityAction(actors, list(chosen))
        else:
            indices = np.array(chosen, np.int64)
            labels = [kind.choices[i] for i in indices.tolist()]
            actions[name] = CategoricalAction(actors, indices, labels)
    return actions


class RandomPolicy:
    """Each actor chooses uniformly among its legal choices."""

    def __init__(self, environment: Environment, seed: int = 0):
        self._environment = environment
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Observation) -> Choices:
        """Draws a choice for every actor."""
        return {
            name: [
                legal[int(self._rng.random() * len(legal))]
                for legal in legal_choices(self._environment, observation, name)
            ]
            for name in observation.actions
        }


def legal_choices(
    environment: Environment, observation: Observation, name: str
) -> list[Sequence[EntityID]]:
    """Returns the legal choices of each actor of an action type, in the order of the actors."""
    space, kind = environment.obs_space, environment.action_space[name]
    mask = observation.actions.get(name)
    if mask is None:
        return []
    count = len(_actors(space, observation, mask))
    if isinstance(mask, SelectEntityMask):
        options: Sequence[EntityID] = _named(space, observation, mask.actee_ids, mask.actee_types)
    else:
        assert not isinstance(kind, SelectEntity)
        options = range(len(kind.choices))
    if mask.mask is None:
        return [options] * count
    legal = np.asarray(mask.mask, np.bool_).reshape(count, len(options)).tolist()
    return [[option for option, ok in zip(options, row, strict=True) if ok] for row in legal]


def _actors(space: ObsSpace, observation: Observation, mask: ActionMask) -> list[EntityID]:
    if isinstance(mask, GlobalCategoricalMask):
        return [GLOBAL]
    return _named(space, observation, mask.actor_ids, mask.actor_types)


def _named(
    space: ObsSpace,
    observation: Observation,
    ids: Sequence[EntityID] | None,
    types: Sequence[str] | None,
) -> list[EntityID]:
    """Returns the ids of the entities that a mask refers to."""
    if ids is not None:
        return list(ids)
    found: list[EntityID] = []
    for kind in space.entities if types is None else types:
        named = observation.ids.get(kind)
        if named is None:
            count = num_entities(observation.features.get(kind))
            found += [(kind, row) for row in range(count)]
        else:
            found += named
    return found


def _rows(observation: Observation, kind: str) -> Rows:
    """Returns the features of a type's entities; the games give them as lists of tuples."""
    return cast(Rows, observation.features.get(kind, ()))


def pull_arm_a(observation: Observation) -> Choices:
    """MultiArmedBandit: optimal."""
    del observation
    return {"pull": [0]}


def brake_in_time(observation: Observation) -> Choices:
    """MoveToOrigin: flies at the highest speed from which thrust can still stop at the origin."""
    ((x, y, dx, dy, _),) = _rows(observation, "Spaceship")
    return {"horizontal_thruster": [_thrust(x, dx)], "vertical_thruster": [_thrust(y, dy)]}


def _thrust(position: float, velocity: float) -> int:
    wanted = -math.copysign(min(abs(position), 0.13 * math.sqrt(abs(position))), position)
    thrusts = (0.01, 0.001, 0.0, -0.001, -0.01)
    return min(range(5), key=lambda i: abs(velocity + thrusts[i] - wanted))


def say_what_it_is(observation: Observation) -> Choices:
    """NotHotdog: optimal."""
    things = _rows(observation, "Object")
    return {"classify": [int(things[0][0]) if len(things) else 1]}


def count_beans(observation: Observation) -> Choices:
    """Count: optimal."""
    return {"count": [num_entities(observation.features["Bean"])]}


def exclusive_or(observation: Observation) -> Choices:
    """Xor: optimal."""
    bits = [bit for (bit,) in _rows(observation, "Input")]
    (negate,) = cast(Sequence[float], observation.global_features)
    return {"output": [int(sum(bits) + negate) % 2]}


def jump_to_high_ground(observation: Observation) -> Choices:
    """FloorIsLava: optimal."""
    ((x, y),) = _rows(observation, "Player")
    ((a, b),) = _rows(observation, "HighGround")
    return {"move": [list(DIRECTIONS.values()).index((int(a - x), int(b - y)))]}


def pick_best_cherry(observation: Observation) -> Choices:
    """CherryPick: optimal."""
    qualities = [quality for (quality,) in _rows(observation, "Cherry")]
    return {"pick": [("Cherry", qualities.index(max(qualities)))]}


def pick_commonest_colour(observation: Observation) -> Choices:
    """PickMatchingBalls: optimal."""
    colours = [tuple(ball[:-1]) for ball in _rows(observation, "Ball")]
    return {"pick": [_pick(observation, max(colours, key=colours.count))]}


def stay_with_first_colour(observation: Observation) -> Choices:
    """PickMatchingBalls: keeps to the colour of a random first ball, a local optimum."""
    balls = _rows(observation, "Ball")
    first = next((ball for ball in balls if ball[-1]), balls[0])
    return {"pick": [_pick(observation, tuple(first[:-1]))]}


def _pick(observation: Observation, colour: tuple[float, ...]) -> tuple[str, int]:
    free = [(row, ball) for row, ball in enumerate(_rows(observation, "Ball")) if not ball[-1]]
    matching = [row for row, ball in free if tuple(ball[:-1]) == colour]
    return "Ball", matching[0] if matching else free[0][0]


def steer_around_mines(observation: Observation) -> Choices:
    """Minefield: drives in the free direction nearest to that of the target."""
    return {"steer": [_steer(observation, _rows(observation, "Mine"))]}


def drive_straight(observation: Observation) -> Choices:
    """Minefield: drives straight at the target and ignores mines."""
    return {"steer": [_steer(observation, ())]}


def _steer(observation: Observation, mines: Rows) -> int:
    ((x, y, heading, _),) = _rows(observation, "Vehicle")
    ((a, b),) = _rows(observation, "Target")
    reach = min(math.hypot(a - x, b - y), _LOOK_AHEAD)
    bearing = math.atan2(b - y, a - x)
    near = [(m - x, n - y) for m, n in mines if math.hypot(m - x, n - y) < reach + _CLEARANCE]

    def cost(turns: int) -> float:
        angle = heading + turns * TURN
        off = abs(math.remainder(angle - bearing, 2 * math.pi))
        return 10.0 + off if _is_blocked(angle, reach, near) else off + 0.02 * abs(turns)

    half = _NUM_HEADINGS // 2
    turns = min(range(-half, half + 1), key=cost)
    return 1 if turns == 0 else 2 if turns > 0 else 0


def _is_blocked(angle: float, reach: float, near: Rows) -> bool:
    cos, sin = math.cos(angle), math.sin(angle)
    for x, y in near:
        ahead = min(x * cos + y * sin, reach)
        if ahead > 0 and math.hypot(x - ahead * cos, y - ahead * sin) < _CLEARANCE:
            return True
    return False


def go_for_food(observation: Observation) -> Choices:
    """MultiSnake: moves each snake nearer to its food, unless that move ends the game.

    It looks only one step ahead, and assumes a board of 10 by 10 cells.
    """
    return {"move": _snakes(observation, size=10)}


def _snakes(observation: Observation, size: int) -> list[int]:
    heads = _rows(observation, "SnakeHead")
    taken = {(x, y) for x, y, _ in (*heads, *_rows(observation, "SnakeBody"))}
    food = {colour: (x, y) for x, y, colour in _rows(observation, "Food")}
    moves = []
    for x, y, colour in heads:
        others = {cell for owner, cell in food.items() if owner != colour}
        options = {
            move: (x + dx, y + dy)
            for move, (dx, dy) in enumerate(STEPS)
            if 0 <= x + dx < size
            and 0 <= y + dy < size
            and (x + dx, y + dy) not in taken
            and (x + dx, y + dy) not in others
        }
        a, b = food[colour]
        move = min(
            options, key=lambda i: abs(options[i][0] - a) + abs(options[i][1] - b), default=0
        )
        taken.add(options.get(move, (x, y)))
        moves.append(move)
    return moves


def defuse_nearest(observation: Observation) -> Choices:
    """MineSweeper: Robots walk to the nearest Mine and defuse it; the cannon fires at the first."""
    mines = [tuple(mine) for mine in _rows(observation, "Mine")]

    def move(x: float, y: float) -> int:
        a, b = min(mines, key=lambda mine: abs(mine[0] - x) + abs(mine[1] - y))
        if abs(a - x) + abs(b - y) <= 1:
            return 4
        if abs(a - x) >= abs(b - y):
            return 3 if a > x else 2
        return 0 if b > y else 1

    # A robot next to a mine defuses it, so no move leads onto a mine.
    choices = {"Move": [move(x, y) for x, y in _rows(observation, "Robot")]}
    if "Fire Orbital Cannon" in observation.actions:
        return {**choices, "Fire Orbital Cannon": [("Mine", 0)]}
    return choices


def throw_paper(observation: Observation) -> Choices:
    """RockPaperScissors with a hidden opponent: optimal."""
    del observation
    return {"throw": [1]}


def beat_opponent(observation: Observation) -> Choices:
    """RockPaperScissors with ``cheat``, where the opponent is visible: optimal."""
    (one_hot,) = _rows(observation, "Opponent")
    return {"throw": [(list(one_hot).index(True) + 1) % 3]}


def go_for_treasure(observation: Observation) -> Choices:
    """TreasureHunt: walks the shortest path around traps to the nearest treasure."""
    x, y = cast(Sequence[float], observation.global_features)
    traps = {(int(a), int(b)) for a, b in _rows(observation, "Trap")}
    treasures = {(int(a), int(b)) for a, b in _rows(observation, "Treasure")}
    return {"move": [_first_step((int(x), int(y)), treasures, traps)]}


def _first_step(start: Cell, goals: Collection[Cell], walls: Collection[Cell]) -> int:
    """Returns the first move of a shortest path to a goal, or 0 if no path exists."""
    first: dict[Cell, int] = {start: 0}
    queue = deque([start])
    while queue:
        x, y = queue.popleft()
        for move, (dx, dy) in enumerate(STEPS):
            cell = (x + dx, y + dy)
            if cell in first or cell in walls or max(map(abs, cell)) > BOUND:
                continue
            first[cell] = move if (x, y) == start else first[x, y]
            if cell in goals:
                return first[cell]
            queue.append(cell)
    return 0


SCRIPTED_POLICIES: Mapping[str, Policy] = {
    "MultiArmedBandit": pull_arm_a,
    "MoveToOrigin": brake_in_time,
    "NotHotdog": say_what_it_is,
    "Count": count_beans,
    "Xor": exclusive_or,
    "FloorIsLava": jump_to_high_ground,
    "CherryPick": pick_best_cherry,
    "PickMatchingBalls": pick_commonest_colour,
    "Minefield": steer_around_mines,
    "MultiSnake": go_for_food,
    "MineSweeper": defuse_nearest,
    "RockPaperScissors": throw_paper,
    "TreasureHunt": go_for_treasure,
}
"""By game: the best of these policies for the game's default options."""
