"""MultiSnake: each snake eats the food of its own colour and grows."""

from __future__ import annotations

from collections import deque

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation, grid
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

Cell = tuple[int, int]

STEPS = ((0, 1), (0, -1), (-1, 0), (1, 0))
_MOVE = {"move": CategoricalMask(actor_types=("SnakeHead",))}
_DRAWS = 256  # cells drawn at a time, because one draw costs nearly as much as many
FREE, BODY = -1, -2  # contents of a cell; a number from 0 is food of that colour


class MultiSnake:
    """``num_snakes`` snakes and the same number of Foods on a square board, one of each colour.

    Observation: SnakeHead, SnakeBody (the other cells of a snake) and Food (x, y, colour), and the
    global feature ``step``. A snake starts with one cell. Action: each SnakeHead's ``move`` up,
    down, left or right; snakes move one after the other. A snake that eats the Food of its colour
    grows, up to ``max_snake_length``; the Food reappears on a free cell after all snakes have
    moved. Reward: 1 / (number of snakes * possible growths of each) for each growth. End: when a
    snake leaves the board or enters the Food of another colour or a cell of a snake (even its own
    tail, which is about to move), after the other snakes have moved too; when all snakes have full
    length; after ``num_steps``. Best return: about 1. A scripted policy that approaches the food
    and avoids collisions in the next step: 0.993 with one snake, 0.78 with two; random policy:
    0.011 and 0.004.

    The snakes are divided equally among ``num_players`` players, the first snakes to the first
    player. The reward is the sum over players; the metrics ``reward_0``, ... are the rewards of
    each player.
    """

    def __init__(
        self,
        board_size: int = 10,
        num_snakes: int = 1,
        num_players: int = 1,
        max_snake_length: int = 11,
        num_steps: int = 180,
        seed: int = 0,
    ):
        require_in_range(
            "MultiSnake",
            board_size=(board_size, 2),
            num_players=(num_players, 1),
            num_snakes=(num_snakes, num_players),
            max_snake_length=(max_snake_length, 2),
            num_steps=(num_steps, 1),
        )
        if num_snakes % num_players:
            raise ValueError(
                f"MultiSnake: num_snakes must be a multiple of num_players, {num_players}; "
                f"got {num_snakes}."
            )
        if num_snakes * (max_snake_length + 1) > board_size**2:
            raise ValueError(
                f"MultiSnake: board_size must leave room for {num_snakes} snakes of "
                f"{max_snake_length} cells and their food; got {board_size}."
            )
        features = ("x", "y", "colour")
        self.obs_space = ObsSpace(
            {
                "SnakeHead": EntityType(features, num_snakes),
                "SnakeBody": EntityType(features, num_snakes * (max_snake_length - 1)),
                "Food": EntityType(features, num_snakes),
            },
            global_features=("step",),
        )
        self.action_space: ActionSpace = {
            "move": Categorical(("up", "down", "left", "right"), num_snakes)
        }
        self._size, self._num_snakes, self._num_players = board_size, num_snakes, num_players
        self._length, self._num_steps, self._step = max_snake_length, num_steps, 0
        self._growth = 1.0 / ((max_snake_length - 1) * num_snakes)
        self._rng = np.random.default_rng(seed)
        self._drawn: list[int] = []
        self._cells: dict[Cell, int] = {}  # cells that are occupied
        self._snakes: list[deque[Cell]] = []  # heads last
        self._food: list[Cell] = []

    def __str__(self) -> str:
        marks = {}
        for colour, (snake, food) in enumerate(zip(self._snakes, self._food, strict=True)):
            letter = chr(ord("a") + colour % 26)
            marks.update(dict.fromkeys(snake, letter))
            marks[snake[-1]] = letter.upper()
            marks[food] = str(colour % 10)
        return grid(self._size, self._size, marks)

    def reset(self) -> Observation:
        """Places the snakes and the food."""
        self._cells = {}
        self._step = 0
        self._snakes = [deque([self._place(BODY)]) for _ in range(self._num_snakes)]
        self._food = [self._place(colour) for colour in range(self._num_snakes)]
        return self._observe([0.0] * self._num_players, over=False)

    def act(self, actions: Actions) -> Observation:
        """Moves the snakes one after the other."""
        rewards, eaten, over = [0.0] * self._num_players, [], False
        share = self._num_snakes // self._num_players
        for colour, choice in enumerate(actions["move"].indices.tolist()):
            snake = self._snakes[colour]
            dx, dy = STEPS[choice]
            x, y = snake[-1]
            cell = (x + dx, y + dy)
            content = self._cells.get(cell, FREE)
            if not (0 <= cell[0] < self._size and 0 <= cell[1] < self._size) or content not in (
                FREE,
                colour,
            ):
                over = True
                continue
            self._cells[cell] = BODY
            snake.append(cell)
            if content == colour:
                eaten.append(colour)
            if content == colour and len(snake) <= self._length:
                rewards[colour // share] += self._growth
            else:
                del self._cells[snake.popleft()]
        for colour in eaten:
            self._food[colour] = self._place(colour)
        self._step += 1
        return self._observe(rewards, over)

    def _place(self, content: int) -> Cell:
        """Puts something on a random free cell and returns the cell."""
        size, cells = self._size, self._cells
        while True:
            if not self._drawn:
                self._drawn = self._rng.integers(0, size * size, _DRAWS).tolist()
            drawn = self._drawn.pop()
            cell = (drawn % size, drawn // size)
            if cell not in cells:
                cells[cell] = content
                return cell

    def _observe(self, rewards: list[float], over: bool) -> Observation:
        heads, bodies, full = [], [], True
        for colour, snake in enumerate(self._snakes):
            rows = [(x, y, colour) for x, y in snake]
            heads.append(rows.pop())
            bodies += rows
            full = full and len(snake) >= self._length
        metrics = {}
        if self._num_players > 1:
            metrics = {f"reward_{player}": reward for player, reward in enumerate(rewards)}
        return Observation(
            features={
                "SnakeHead": heads,
                "SnakeBody": bodies,
                "Food": [(x, y, colour) for colour, (x, y) in enumerate(self._food)],
            },
            actions=_MOVE,
            global_features=(self._step,),
            reward=sum(rewards),
            done=over or full or self._step >= self._num_steps,
            metrics=metrics,
        )
