"""Policies written by hand, one a game: what a good player gets, to compare learners with.

Each is a function of the observation alone, a `rlstack.entity.games.playing.Rule`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from rlstack.entity.environment import Observation
from rlstack.entity.games.floor_is_lava import DIRECTIONS
from rlstack.entity.games.minefield import TOUCH, TURN
from rlstack.entity.games.multi_snake import STEPS
from rlstack.entity.games.playing import Choices, Rule
from rlstack.entity.games.treasure_hunt import BOUND

Cell = tuple[int, int]

_NUM_HEADINGS = 16
_CLEARANCE = TOUCH + 1.5  # between a mine and the way ahead
_OUTLOOK = 40.0


def pull_arm_a(observation: Observation) -> Choices:
    """Best for MultiArmedBandit."""
    del observation
    return {"pull": [0]}


def brake_in_time(observation: Observation) -> Choices:
    """Flies MoveToOrigin at the speed from which thrust can still stop at the origin."""
    ((x, y, dx, dy, _),) = observation.features["Spaceship"]
    return {"horizontal_thruster": [_thrust(x, dx)], "vertical_thruster": [_thrust(y, dy)]}


def _thrust(position: float, velocity: float) -> int:
    wanted = -math.copysign(min(abs(position), 0.13 * math.sqrt(abs(position))), position)
    thrusts = (0.01, 0.001, 0.0, -0.001, -0.01)
    return min(range(5), key=lambda i: abs(velocity + thrusts[i] - wanted))


def say_what_it_is(observation: Observation) -> Choices:
    """Best for NotHotdog."""
    things = observation.features.get("Object", ())
    return {"classify": [int(things[0][0]) if len(things) else 1]}


def count_beans(observation: Observation) -> Choices:
    """Best for Count."""
    return {"count": [observation.features["Bean"]]}


def exclusive_or(observation: Observation) -> Choices:
    """Best for Xor."""
    bits = [bit for (bit,) in observation.features["Input"]]
    return {"output": [int(sum(bits) + observation.global_features[0]) % 2]}


def jump_to_high_ground(observation: Observation) -> Choices:
    """Best for FloorIsLava."""
    ((x, y),) = observation.features["Player"]
    ((a, b),) = observation.features["HighGround"]
    return {"move": [list(DIRECTIONS.values()).index((a - x, b - y))]}


def pick_best_cherry(observation: Observation) -> Choices:
    """Best for CherryPick."""
    qualities = [quality for (quality,) in observation.features["Cherry"]]
    return {"pick": [("Cherry", qualities.index(max(qualities)))]}


def pick_commonest_colour(observation: Observation) -> Choices:
    """Best for PickMatchingBalls."""
    colours = [tuple(ball[:-1]) for ball in observation.features["Ball"]]
    return {"pick": [_pick(observation, max(colours, key=colours.count))]}


def stay_with_first_colour(observation: Observation) -> Choices:
    """PickMatchingBalls' local optimum: the colour of the first ball, which is random."""
    balls = observation.features["Ball"]
    first = next((ball for ball in balls if ball[-1]), balls[0])
    return {"pick": [_pick(observation, tuple(first[:-1]))]}


def _pick(observation: Observation, colour: tuple[float, ...]) -> tuple[str, int]:
    free = [(row, ball) for row, ball in enumerate(observation.features["Ball"]) if not ball[-1]]
    matching = [row for row, ball in free if tuple(ball[:-1]) == colour]
    return "Ball", matching[0] if matching else free[0][0]


def steer_around_mines(observation: Observation) -> Choices:
    """Drives Minefield in the free direction nearest the target's."""
    return {"steer": [_steer(observation, observation.features["Mine"])]}


def drive_straight(observation: Observation) -> Choices:
    """Drives Minefield at the target, whatever lies between."""
    return {"steer": [_steer(observation, ())]}


def _steer(observation: Observation, mines: Iterable[tuple[float, float]]) -> int:
    ((x, y, heading, _),) = observation.features["Vehicle"]
    ((a, b),) = observation.features["Target"]
    reach = min(math.hypot(a - x, b - y), _OUTLOOK)
    bearing = math.atan2(b - y, a - x)
    near = [(m - x, n - y) for m, n in mines if math.hypot(m - x, n - y) < reach + _CLEARANCE]

    def cost(turns: int) -> float:
        angle = heading + turns * TURN
        off = abs(math.remainder(angle - bearing, 2 * math.pi))
        return 10.0 + off if _is_blocked(angle, reach, near) else off + 0.02 * abs(turns)

    half = _NUM_HEADINGS // 2
    turns = min(range(-half, half + 1), key=cost)
    return 1 if turns == 0 else 2 if turns > 0 else 0


def _is_blocked(angle: float, reach: float, near: Iterable[tuple[float, float]]) -> bool:
    cos, sin = math.cos(angle), math.sin(angle)
    for x, y in near:
        ahead = min(x * cos + y * sin, reach)
        if ahead > 0 and math.hypot(x - ahead * cos, y - ahead * sin) < _CLEARANCE:
            return True
    return False


def go_for_food(observation: Observation) -> Choices:
    """Moves each snake of MultiSnake nearer to its food, unless that ends the game at once.

    It looks one step ahead only; the board's side is guessed from no more than 10 cells.
    """
    return {"move": _snakes(observation, size=10)}


def _snakes(observation: Observation, size: int) -> list[int]:
    features = observation.features
    taken = {(x, y) for kind in ("SnakeHead", "SnakeBody") for x, y, _ in features[kind]}
    food = {colour: (x, y) for x, y, colour in features["Food"]}
    moves = []
    for x, y, colour in features["SnakeHead"]:
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
    """Walks each Robot of MineSweeper to the nearest Mine; the cannon fires at the first Mine."""
    mines = [tuple(mine) for mine in observation.features["Mine"]]

    def move(x: int, y: int) -> int:
        a, b = min(mines, key=lambda mine: abs(mine[0] - x) + abs(mine[1] - y))
        if abs(a - x) + abs(b - y) <= 1:
            return 4
        if abs(a - x) >= abs(b - y):
            return 3 if a > x else 2
        return 0 if b > y else 1

    # Whoever has a mine beside it defuses it, so no step leads onto one.
    choices = {"Move": [move(x, y) for x, y in observation.features["Robot"]]}
    if "Fire Orbital Cannon" in observation.actions:
        return {**choices, "Fire Orbital Cannon": [("Mine", 0)]}
    return choices


def throw_paper(observation: Observation) -> Choices:
    """Best for RockPaperScissors where the opponent is hidden."""
    del observation
    return {"throw": [1]}


def beat_opponent(observation: Observation) -> Choices:
    """Best for RockPaperScissors where the opponent is seen."""
    (one_hot,) = observation.features["Opponent"]
    return {"throw": [(list(one_hot).index(True) + 1) % 3]}


def go_for_treasure(observation: Observation) -> Choices:
    """Walks TreasureHunt's shortest way around traps to the nearest treasure."""
    x, y = observation.global_features
    traps = {(int(a), int(b)) for a, b in observation.features["Trap"]}
    treasures = {(int(a), int(b)) for a, b in observation.features["Treasure"]}
    return {"move": [_first_step((int(x), int(y)), treasures, traps)]}


def _first_step(start: Cell, goals: Collection[Cell], walls: Collection[Cell]) -> int:
    """The first move of a shortest way to a goal; 0 if there is none."""
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


RULES: Mapping[str, Rule] = {
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
"""By game, the best of these with the game's default options."""
