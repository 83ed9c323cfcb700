"""Connect Four: two seats drop stones in turn, and four in a row win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.envs.seats.game import GameStep

ROWS, COLUMNS = 6, 7
WAIT = COLUMNS  # the only action of a seat that waits for its turn
_HEIGHT = ROWS + 1  # bits of a column of a bitboard; the highest one stays empty
_DIRECTIONS = (1, _HEIGHT - 1, _HEIGHT, _HEIGHT + 1)  # up, the two diagonals, across

Observation = dict[str, Any]


class ConnectFour:
    """Two seats drop stones into 7 columns of 6 cells, in turn; four in a row win.

    Both seats take every step, so the one whose turn it is not has one legal action, to wait. What
    it chooses changes nothing.

    Observation: ``board`` float32 ``[6, 7, 2]``, the lowest row first: 1 where the seat has a stone
    and, in the second plane, where the other seat has one; ``turn`` float32 ``[1]``, 1 if it is the
    seat's turn; ``action_mask`` int8 ``[8]``, 1 for a legal action. Action: 0 to 6 a column, 7 to
    wait. Reward: 1 for the winner and -1 for the loser, in the step of the last stone, which ends
    the game for both seats. A full board is a draw. An illegal action loses the game.
    """

    seats = ("first", "second")
    action_names = (*"abcdefg", "wait")

    def __init__(self) -> None:
        self.observation_spec = {
            "board": specs.BoundedArray((ROWS, COLUMNS, 2), np.float32, 0.0, 1.0, "board"),
            "turn": specs.BoundedArray((1,), np.float32, 0.0, 1.0, "turn"),
            "action_mask": specs.BoundedArray((COLUMNS + 1,), np.int8, 0, 1, "action_mask"),
        }
        self.action_spec = specs.DiscreteArray(COLUMNS + 1, np.int32, "column")
        self.reset()

    def __str__(self) -> str:
        """Returns the board: X has the first seat, O the second."""
        first, second = self._boards[0, ::-1, :, 0], self._boards[0, ::-1, :, 1]
        marks = np.where(first > 0, "X", np.where(second > 0, "O", "."))
        return "\n".join(" ".join(row) for row in [*marks, self.action_names[:COLUMNS]])

    def reset(self) -> list[Observation]:
        """Empties the board; the first seat begins."""
        self._boards = np.zeros((2, ROWS, COLUMNS, 2), np.float32)  # as each seat sees it
        self._stones = [0, 0]  # the stones of each seat, one bit per cell
        self._heights = [0] * COLUMNS
        self._turn = 0
        return self._observations()

    def step(self, actions: Sequence[np.ndarray]) -> GameStep:
        """Drops a stone of the seat whose turn it is."""
        mover, column = self._turn, int(actions[self._turn])
        if not 0 <= column < COLUMNS or self._heights[column] == ROWS:
            return self._over(loser=mover)
        row = self._heights[column]
        self._heights[column] += 1
        self._boards[mover, row, column, 0] = self._boards[1 - mover, row, column, 1] = 1.0
        self._stones[mover] |= 1 << (column * _HEIGHT + row)
        self._turn = 1 - mover
        if has_four(self._stones[mover]):
            return self._over(loser=1 - mover)
        if sum(self._heights) == ROWS * COLUMNS:
            return self._over(loser=None)
        return GameStep(self._observations(), [0.0, 0.0], [1.0, 1.0])

    def _over(self, loser: int | None) -> GameStep:
        rewards = [0.0, 0.0]
        if loser is not None:
            rewards = [-1.0, 1.0] if loser == 0 else [1.0, -1.0]
        return GameStep(self._observations(), rewards, [0.0, 0.0], last=True)

    def _observations(self) -> list[Observation]:
        found = []
        for seat in range(2):
            turn = seat == self._turn
            mask = np.zeros(COLUMNS + 1, np.int8)
            if turn:
                mask[:COLUMNS] = [height < ROWS for height in self._heights]
            else:
                mask[WAIT] = 1
            found.append(
                {
                    "board": self._boards[seat].copy(),
                    "turn": np.full(1, turn, np.float32),
                    "action_mask": mask,
                }
            )
        return found


def has_four(stones: int) -> bool:
    """Whether four stones of a bitboard are in a row.

    Bit ``7 * column + row`` is a cell, and bit ``7 * column + 6`` is never set, so that no row of
    four goes on in the next column.
    """
    for shift in _DIRECTIONS:
        pairs = stones & (stones >> shift)
        if pairs & (pairs >> 2 * shift):
            return True
    return False
