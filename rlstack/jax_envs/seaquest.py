"""Seaquest of MinAtar in JAX (Young and Tian 2019, https://arxiv.org/abs/1903.03176).

gymnax 0.0.9 has the other four games of MinAtar. The rules are those of the package MinAtar 1.0.15;
with its random numbers the game makes the package's steps.

A row of the board is an integer: its bit x is the cell in column x. So enemy bullets, which are
all alike, fly by a shift of bits. Enemies have a timer each and keep their order: they are slots,
and what is new pushes out the oldest, which has left the board by then.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.libraries.from_gymnax import grid
from rlstack.types import Array, PRNGKey

_SIZE = 10  # rows and columns of the board; the last row has the gauges
_FULL = (1 << _SIZE) - 1  # a row with all cells
_OXYGEN, _SEATS = 200, 6  # steps under water, divers on board
_SPAWN, _DIVER_SPAWN = 20, 30  # steps between enemies, at first, and between divers
_MOVE, _DIVER_MOVE = 5, 5  # waiting steps between moves, of enemies at first
_FASTEST = 2  # the fewest waiting steps of enemies
_RELOAD, _ENEMY_RELOAD = 5, 10  # steps
_SHOTS, _DIVERS = 2, 2  # that there can be at once
_ENEMIES = 30  # at once: one appears in each step, and stays for 10 columns of 3 steps
_LEFT, _UP, _RIGHT, _DOWN, _FIRE = range(1, 6)


class Swimmers(NamedTuple):
    """Things of one kind, the oldest first."""

    x: Array  # [N] int32, column
    y: Array  # [N] int32, row; -1 in an empty slot
    right: Array  # [N] bool, whether it swims to the right
    timer: Array  # [N] int32, steps that it waits before it moves
    sub: Array  # [N] bool, whether an enemy is a submarine, and no fish
    reload: Array  # [N] int32, steps until an enemy submarine fires


class SeaquestState(NamedTuple):
    """The state of one game; everything is int32 or bool."""

    x: Array  # [] of the player
    y: Array  # []
    right: Array  # [] whether the player looks to the right
    shots: Swimmers  # [2] the player's
    bullets: Array  # [2, 10] the enemies', in rows, those that fly to the right first
    enemies: Swimmers  # [30]
    divers: Swimmers  # [2] in the water
    rescued: Array  # [] divers on board
    oxygen: Array  # []
    surfaced: Array  # [] whether the player was at the surface before
    reload: Array  # [] steps until the player can fire
    enemy_timer: Array  # [] steps until an enemy appears
    diver_timer: Array  # []
    enemy_period: Array  # [] steps between enemies
    move_period: Array  # [] waiting steps of enemies
    ramp: Array  # [] how often the game became harder
    time: Array  # [] steps so far


class Seaquest:
    """A submarine shoots fish and submarines, and brings divers to the surface before its air ends.

    The observation is ``[10, 10, 10]`` float32 of 0 and 1: rows, columns, and the channels player,
    its rear, its bullets, trails, enemy bullets, fish, enemy submarines, oxygen, divers on board,
    divers. The six actions are nothing, left, up, right, down, fire. The reward is 1 for each enemy
    that is hit. At the surface one diver leaves, the oxygen is full again, and the game becomes
    harder. With six divers all leave, and the reward is the oxygen in tenths of a full tank,
    rounded down. The game ends when an enemy or a bullet hits the player, without oxygen, and at
    the surface without divers.

    As in the package, one diver leaves also after all six have left. The number is then -1, and as
    long as it is not 0 the player can come to the surface.
    """

    def __init__(self, ramping: bool = True, max_steps_in_episode: int = 1000) -> None:
        """Stores the settings.

        Args:
          ramping: whether the game becomes harder.
          max_steps_in_episode: steps after which a game is truncated, by default as many as in
            gymnax's games. The package has no limit.

        Raises:
          ValueError: the limit is no positive number.
        """
        if max_steps_in_episode < 1:
            raise ValueError(
                f"Seaquest: max_steps_in_episode must be at least 1; got {max_steps_in_episode}."
            )
        self._ramping, self._limit = ramping, max_steps_in_episode

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the board."""
        return specs.BoundedArray((_SIZE, _SIZE, 10), np.float32, 0.0, 1.0, "board")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the six actions."""
        return specs.DiscreteArray(6, np.int32, "action")

    def reset(self, rng_key: PRNGKey) -> tuple[SeaquestState, Array]:
        """Puts the player at the surface of an empty sea; the key is not used."""
        del rng_key
        state = SeaquestState(
            x=jnp.int32(5),
            y=jnp.int32(0),
            right=jnp.bool_(False),
            shots=_none(_SHOTS),
            bullets=jnp.zeros((2, _SIZE), jnp.int32),
            enemies=_none(_ENEMIES),
            divers=_none(_DIVERS),
            rescued=jnp.int32(0),
            oxygen=jnp.int32(_OXYGEN),
            surfaced=jnp.bool_(True),
            reload=jnp.int32(0),
            enemy_timer=jnp.int32(_SPAWN),
            diver_timer=jnp.int32(_DIVER_SPAWN),
            enemy_period=jnp.int32(_SPAWN),
            move_period=jnp.int32(_MOVE),
            ramp=jnp.int32(0),
            time=jnp.int32(0),
        )
        return state, _seen(state)

    def step(self, rng_key: PRNGKey, state: SeaquestState, action: Array) -> Outcome:
        """Lets things appear, acts, and moves bullets, divers and enemies.

        Five uniform numbers are drawn in each step: the direction, kind and row of an enemy, and
        the direction and row of a diver.
        """
        state = _appeared(state, jax.random.uniform(rng_key, (5,)))
        state = _acted(state, action)
        state, hits = _fired(state)
        state = _divers_moved(state)
        state, rammed, caught = _enemies_moved(state)
        state, shot = _bullets_flown(state)
        state = state._replace(
            enemy_timer=jnp.maximum(state.enemy_timer - 1, 0),
            diver_timer=jnp.maximum(state.diver_timer - 1, 0),
            reload=jnp.maximum(state.reload - 1, 0),
            time=state.time + 1,
        )
        state, bonus, drowned = self._breathed(state)
        over, late = caught | shot | drowned, state.time >= self._limit
        reward = (hits + rammed + bonus).astype(jnp.float32)
        return Outcome(state, _seen(state), reward, over, late & ~over)

    def render(self, state: SeaquestState) -> np.ndarray:
        """Returns a picture in which each channel has a colour, uint8 [10, 10, 3]."""
        return grid(np.asarray(_seen(state)))

    def _breathed(self, state: SeaquestState) -> tuple[SeaquestState, Array, Array]:
        """Uses oxygen or comes to the surface; returns the reward, and whether the game is over."""
        under = state.y > 0
        arrived = ~under & ~state.surfaced
        lost = arrived & (state.rescued == 0)
        up = arrived & ~lost
        full = state.rescued == _SEATS
        bonus = jnp.where(up & full, state.oxygen * 10 // _OXYGEN, 0)
        slow, rare = state.move_period > _FASTEST, state.enemy_period > 1
        harder = up & self._ramping & (slow | rare)
        after = state._replace(
            rescued=state.rescued - jnp.where(up, jnp.where(full, _SEATS + 1, 1), 0),
            oxygen=jnp.where(up, _OXYGEN, state.oxygen - under),
            surfaced=~under & (state.surfaced | up),
            enemy_period=state.enemy_period - (harder & rare),
            move_period=state.move_period - (harder & slow & (state.ramp % 2 == 1)),
            ramp=state.ramp + harder,
        )
        return after, bonus, lost | (state.oxygen <= 0)


def _none(number: int) -> Swimmers:
    """Returns so many slots without anything in them."""
    zero, no = jnp.zeros(number, jnp.int32), jnp.zeros(number, bool)
    return Swimmers(zero, zero - 1, no, zero, no, zero)


def _appeared(state: SeaquestState, draws: Array) -> SeaquestState:
    """Adds an enemy and a diver where it is time, unless an enemy would meet others in its row."""
    due, diver_due = state.enemy_timer == 0, state.diver_timer == 0
    enemies = state.enemies
    right, row = draws[0] < 1 / 2, _row(draws[2])
    meets = ((enemies.y == row) & (enemies.right != right)).any()
    enemy = _new(right, row, state.move_period)._replace(
        sub=draws[1] < 1 / 3, reload=jnp.int32(_ENEMY_RELOAD)
    )
    diver = _new(draws[3] < 1 / 2, _row(draws[4]), jnp.int32(_DIVER_MOVE))
    return state._replace(
        enemies=_pushed(enemies, enemy, due & ~meets),
        divers=_pushed(state.divers, diver, diver_due),
        enemy_timer=jnp.where(due, state.enemy_period, state.enemy_timer),
        diver_timer=jnp.where(diver_due, _DIVER_SPAWN, state.diver_timer),
    )


def _acted(state: SeaquestState, action: Array) -> SeaquestState:
    """Moves the player, or fires from where it is."""
    left, right, fires = action == _LEFT, action == _RIGHT, action == _FIRE
    fires &= state.reload == 0
    shot = _new(state.right, state.y, jnp.int32(0))._replace(x=state.x)
    return state._replace(
        x=jnp.clip(state.x - left + right, 0, _SIZE - 1),
        y=jnp.clip(state.y - (action == _UP) + (action == _DOWN), 0, _SIZE - 2),
        right=(state.right & ~left) | right,
        shots=_pushed(state.shots, shot, fires),
        reload=jnp.where(fires, _RELOAD, state.reload),
    )


def _fired(state: SeaquestState) -> tuple[SeaquestState, Array]:
    """Moves the player's bullets, the newest first; returns the number of hits.

    A bullet hits one enemy of its cell: the oldest fish, or else the oldest submarine.
    """
    shots, enemies = state.shots, state.enemies
    x = _ahead(shots)
    y = jnp.where(_outside(x), -1, shots.y)
    rank = jnp.arange(_ENEMIES)[::-1] + jnp.where(enemies.sub, 0, _ENEMIES)
    rows, hits = [y[i] for i in range(_SHOTS)], jnp.int32(0)
    for i in reversed(range(_SHOTS)):
        hit = _greatest(rank, _at(enemies, x[i], rows[i]))
        enemies = _without(enemies, hit)
        rows[i] = jnp.where(hit.any(), -1, rows[i])
        hits += hit.any()
    return state._replace(shots=shots._replace(x=x, y=jnp.stack(rows)), enemies=enemies), hits


def _divers_moved(state: SeaquestState) -> SeaquestState:
    """Takes divers on board where the player is, and moves the others, the newest first."""
    divers, rescued = state.divers, state.rescued
    moves = divers.timer == 0
    x = jnp.where(moves, _ahead(divers), divers.x)
    here = _at(divers, state.x, state.y)
    there = moves & _at(divers._replace(x=x), state.x, state.y)
    gone: list[Array] = []
    for i in reversed(range(_DIVERS)):
        boards = (here[i] | there[i]) & (rescued < _SEATS)
        rescued += boards
        gone.insert(0, boards | _outside(x[i]))
    timer = jnp.where(moves, _DIVER_MOVE, divers.timer - 1)
    divers = _without(divers._replace(x=x, timer=timer), jnp.stack(gone))
    return state._replace(divers=divers, rescued=rescued)


def _enemies_moved(state: SeaquestState) -> tuple[SeaquestState, Array, Array]:
    """Moves enemies; returns how many swam into a bullet, and whether one meets the player.

    A bullet, the oldest first, takes one enemy that comes into its cell: the newest submarine, or
    else the newest fish. A submarine that is hit or leaves in the step in which it fires, fires.
    """
    enemies, shots = state.enemies, state.shots
    moves = (enemies.timer == 0) & (enemies.y >= 0)
    moved = enemies._replace(
        x=jnp.where(moves, _ahead(enemies), enemies.x),
        timer=jnp.where(moves, state.move_period, enemies.timer - 1),
    )
    there = _at(moved, state.x, state.y)
    caught = jnp.any(_at(enemies, state.x, state.y) | there)
    fires = enemies.sub & (enemies.reload == 0) & (enemies.y >= 0)
    cell = jnp.where(fires, _bit(moved.x), 0)
    flying = _rows(enemies.y, cell << jnp.where(enemies.right, 0, _SIZE))
    reload = jnp.where(enemies.reload == 0, _ENEMY_RELOAD, enemies.reload - 1)

    rank = jnp.arange(_ENEMIES) + jnp.where(enemies.sub, _ENEMIES, 0)
    rows, rammed = [shots.y[i] for i in range(_SHOTS)], jnp.int32(0)
    comes = moves & ~there
    for i in range(_SHOTS):
        hit = _greatest(rank, comes & _at(moved, shots.x[i], rows[i]))
        comes &= ~hit
        rows[i] = jnp.where(hit.any(), -1, rows[i])
        rammed += hit.any()
    stays = (comes | ~moves | there) & ~_outside(moved.x)
    state = state._replace(
        enemies=_without(moved._replace(reload=reload), ~stays),
        shots=shots._replace(y=jnp.stack(rows)),
        bullets=state.bullets | jnp.stack([flying & _FULL, flying >> _SIZE]),
    )
    return state, rammed, caught


def _bullets_flown(state: SeaquestState) -> tuple[SeaquestState, Array]:
    """Moves the enemies' bullets; returns whether one was or is where the player is."""
    right, left = state.bullets
    flown = jnp.stack([(right << 1) & _FULL, left >> 1])
    near = (state.bullets | flown)[:, state.y] >> state.x
    return state._replace(bullets=flown), jnp.any(near & 1)


def _seen(state: SeaquestState) -> Array:
    """Returns the observation."""
    enemies, divers, shots = state.enemies, state.divers, state.shots
    of_enemies = _bit(enemies.x) << jnp.where(enemies.sub, _SIZE, 0) | _trail(enemies)
    swimming = _rows(enemies.y, of_enemies)
    rescued = _rows(divers.y, _bit(divers.x) | _trail(divers))
    player, last = (jnp.arange(_SIZE) == row for row in (state.y, _SIZE - 1))
    oxygen = (1 << jnp.maximum(state.oxygen, 0) * 10 // _OXYGEN) - 1
    seats = jnp.maximum(state.rescued, 0)
    channels = [
        jnp.where(player, _bit(state.x), 0),
        jnp.where(player, _bit(state.x + jnp.where(state.right, -1, 1)), 0),
        _rows(shots.y, _bit(shots.x)),
        (swimming | rescued) >> 2 * _SIZE,
        state.bullets[0] | state.bullets[1],
        swimming & _FULL,
        swimming >> _SIZE & _FULL,
        jnp.where(last, oxygen, 0),
        jnp.where(last, ((1 << seats) - 1) << (_SIZE - 1 - seats), 0),
        rescued & _FULL,
    ]
    rows = jnp.stack(channels, axis=-1)
    cells = rows[:, None] >> jnp.arange(_SIZE)[:, None]
    return (cells & 1).astype(jnp.float32)


def _row(draw: Array) -> Array:
    """Returns one of the eight rows between the surface and the gauges."""
    return 1 + (draw * (_SIZE - 2)).astype(jnp.int32)


def _new(right: Array, y: Array, timer: Array) -> Swimmers:
    """Returns one thing at the side of the board from which it comes."""
    x = jnp.where(right, 0, _SIZE - 1)
    return Swimmers(x, y, right, timer, jnp.bool_(False), jnp.int32(0))


def _pushed(old: Swimmers, new: Swimmers, due: Array) -> Swimmers:
    """Returns the things with a new one in the place of the oldest, if it is due."""
    return jax.tree.map(lambda x, y: jnp.where(due, jnp.append(x[1:], y), x), old, new)


def _without(things: Swimmers, gone: Array) -> Swimmers:
    return things._replace(y=jnp.where(gone, -1, things.y))


def _ahead(things: Swimmers) -> Array:
    return things.x + jnp.where(things.right, 1, -1)


def _outside(x: Array) -> Array:
    return (x < 0) | (x >= _SIZE)


def _at(things: Swimmers, x: Array, y: Array) -> Array:
    """Returns which things are in a cell; in a row below 0 nothing is."""
    return (things.x == x) & (things.y == y) & (things.y >= 0)


def _greatest(rank: Array, among: Array) -> Array:
    """Returns a mask of the one thing with the highest rank; ranks are unique."""
    return among & (rank == jnp.where(among, rank, -1).max())


def _bit(x: Array) -> Array:
    """Returns a row with one cell; without any where x is outside of the board."""
    return jnp.where(_outside(x), 0, 1 << jnp.clip(x, 0, _SIZE - 1))


def _trail(things: Swimmers) -> Array:
    """Returns the cells behind things, above the bits of two rows."""
    return _bit(things.x - jnp.where(things.right, 1, -1)) << 2 * _SIZE


def _rows(y: Array, bits: Array) -> Array:
    """Returns the rows ``[10]`` that have the bits of all things in them."""
    found = jnp.where(y == jnp.arange(_SIZE)[:, None], bits, 0)
    return jax.lax.reduce(found, np.int32(0), jax.lax.bitwise_or, (1,))
