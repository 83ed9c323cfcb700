"""The environments of bsuite in JAX (Osband et al. 2020, https://arxiv.org/abs/1908.03568).

Each makes the steps of its namesake in the package bsuite 0.3.6, but for its random draws and for
rounding to 32 bits: https://github.com/google-deepmind/bsuite. Rewards with noise or of another
scale are the options ``reward_noise`` and ``reward_scale`` of every environment in JAX.

gymnax has some of them with other rules: its bandit and its discounting chain draw the rewards of
their actions anew in each episode, its Deep Sea has the same actions in each state, and its memory
chain can show one bit only. It has no cartpole and no mountain car of bsuite.

An episode's ``regret`` is what bsuite's score sums, without noise and scale; ``solved`` is 1 if the
return is above the threshold of bsuite's analysis.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs import toy
from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey

MAPPINGS = 20  # of actions to rewards, which the settings of the bandit have
_STEP, _MOST_STEPS = 0.01, 1_000  # of the cartpoles: seconds of a step, and 10 seconds


def _row(size: int) -> specs.Array:
    return specs.Array((1, size), np.float32, "observation")


def _shown(*entries: Array | float) -> Array:
    return jnp.stack([jnp.asarray(entry, jnp.float32) for entry in entries])[None]


class Bandit:
    """One action in an episode; the 11 actions have the rewards 0, 0.1, ... 1 in a random order."""

    def __init__(self, mapping_seed: int = 0):
        """Draws the orders of all settings.

        Args:
          mapping_seed: which order, 0 to 19.
        """
        if isinstance(mapping_seed, int) and not 0 <= mapping_seed < MAPPINGS:
            raise ValueError(
                f"Bandit: mapping_seed must be in 0..{MAPPINGS - 1}; got {mapping_seed}."
            )
        orders = [
            np.random.RandomState(seed).choice(range(11), size=11, replace=False)
            for seed in range(MAPPINGS)
        ]
        self._rewards = jnp.asarray(np.linspace(0, 1, 11)[np.array(orders)], jnp.float32)
        self._mapping_seed = mapping_seed

    def observation_spec(self) -> specs.Array:
        """Returns the spec of one number, always 1."""
        return _row(1)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the choice."""
        return specs.DiscreteArray(11, np.int32, "arm")

    def reset(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Starts an episode; the state is its reward."""
        del rng_key
        return jnp.zeros((), jnp.float32), jnp.ones((1, 1), jnp.float32)

    def step(self, rng_key: PRNGKey, state: Array, action: Array) -> Outcome:
        """Gives the reward of the action."""
        del rng_key, state
        reward = self._rewards[self._mapping_seed, action]
        return Outcome(reward, jnp.ones((1, 1), jnp.float32), reward, True, False)

    def episode_metrics(self, state: Array) -> dict[str, Array]:
        """Returns the regret."""
        return {"regret": 1 - state}


class Catch(toy.Catch):
    """Catch of 10 rows and 5 columns."""

    def episode_metrics(self, state: toy.CatchState) -> dict[str, Array]:
        """Returns the regret, 2 for a miss."""
        return {"regret": 2.0 * (state.column != state.paddle)}


class DeepSeaState(NamedTuple):
    """The place of the diver, and whether it has left the best way."""

    row: Array  # [] int32
    column: Array  # [] int32
    bad: Array  # [] bool


class DeepSea:
    """Deep Sea, in which each place has its own action for the right.

    Not deterministic, a move to the right fails with probability 1 / size, and the rewards at both
    ends of the last row have noise of a standard normal distribution.
    """

    def __init__(self, size: int = 10, mapping_seed: int = 42, deterministic: bool = True):
        if size < 2:
            raise ValueError(f"DeepSea: size must be at least 2; got {size}.")
        mapping = np.random.RandomState(mapping_seed).binomial(1, 0.5, [size, size])
        self._right = jnp.asarray(mapping, jnp.int32)
        self._size, self._deterministic = size, deterministic

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the board, which is empty when an episode has ended."""
        return specs.Array((self._size, self._size), np.float32, "board")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the two moves."""
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[DeepSeaState, Array]:
        """Puts the diver at the top left."""
        del rng_key
        state = DeepSeaState(jnp.int32(0), jnp.int32(0), jnp.zeros((), bool))
        return state, self._board(state)

    def step(self, rng_key: PRNGKey, state: DeepSeaState, action: Array) -> Outcome:
        """Moves the diver one row down and, unless a move to the right fails, one column aside."""
        row, column, bad = state
        size = self._size
        right = action == self._right[row, column]
        reward = jnp.where(right & (column == size - 1), 1.0, 0.0)
        reward -= jnp.where(right, 0.01 / size, 0.0)
        moves: Array | bool = True
        if not self._deterministic:
            noise_key, move_key = jax.random.split(rng_key)
            at_end = (row == size - 1) & ((column == 0) | (column == size - 1))
            reward += jnp.where(at_end, jax.random.normal(noise_key), 0.0)
            moves = ~right | (jax.random.uniform(move_key) > 1 / size)
        aside = jnp.where(moves, jnp.where(right, 1, -1), 0)
        bad |= ~right & (row == column)
        state = DeepSeaState(row + 1, jnp.clip(column + aside, 0, size - 1), bad)
        return Outcome(state, self._board(state), reward, state.row == size, False)

    def episode_metrics(self, state: DeepSeaState) -> dict[str, Array]:
        """Returns the regret: 1 if the diver went to the left while it was on the best way."""
        return {"regret": state.bad}

    def _board(self, state: DeepSeaState) -> Array:
        board = jnp.zeros((self._size, self._size), jnp.float32)
        return board.at[state.row, state.column].set(1.0, mode="drop")


class ChainState(NamedTuple):
    """The chain that the first action chose, -1 before."""

    chain: Array  # [] int32
    time: Array  # [] int32


class DiscountingChain:
    """The first action chooses among rewards after 1, 3, 10, 30 and 100 steps; one is 10 % more."""

    def __init__(self, mapping_seed: int = 0):
        """Stores the rewards.

        Args:
          mapping_seed: the chain with 1.1, modulo 5; the others have 1.
        """
        self._rewards = 1 + 0.1 * (jnp.arange(5) == mapping_seed % 5)

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the chain and the time."""
        return _row(2)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the choice."""
        return specs.DiscreteArray(5, np.int32, "chain")

    def reset(self, rng_key: PRNGKey) -> tuple[ChainState, Array]:
        """Starts an episode."""
        del rng_key
        state = ChainState(jnp.int32(-1), jnp.int32(0))
        return state, _shown(state.chain, 0.0)

    def step(self, rng_key: PRNGKey, state: ChainState, action: Array) -> Outcome:
        """Goes one step along the chain."""
        del rng_key
        chain, time = jnp.where(state.time == 0, action, state.chain), state.time + 1
        due = time == jnp.array([1, 3, 10, 30, 100])[chain]
        reward = jnp.where(due, self._rewards[chain], 0.0)
        state = ChainState(chain, time)
        return Outcome(state, _shown(chain, time / 100), reward, time == 100, False)

    def episode_metrics(self, state: ChainState) -> dict[str, Array]:
        """Returns the regret."""
        return {"regret": 1.1 - self._rewards[state.chain]}


class MemoryState(NamedTuple):
    """The bits to remember, the number of the one that counts, and whether the answer was wrong."""

    bits: Array  # [num_bits] int32
    query: Array  # [] int32
    time: Array  # [] int32
    wrong: Array  # [] bool


class MemoryChain:
    """Shows bits at first, and later which of them the last action must repeat.

    An observation has the time that is left, the number of the bit in the last step but one, and
    the bits, as 1 and -1, in the first two. The last of memory_length + 1 actions is rewarded by 1
    or -1.
    """

    def __init__(self, memory_length: int = 1, num_bits: int = 1):
        self._length, self._num_bits = memory_length, num_bits

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the time, the number of the bit, and the bits."""
        return _row(self._num_bits + 2)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of a bit."""
        return specs.DiscreteArray(2, np.int32, "bit")

    def reset(self, rng_key: PRNGKey) -> tuple[MemoryState, Array]:
        """Draws the bits, and which of them counts."""
        bits_key, query_key = jax.random.split(rng_key)
        bits = jax.random.bernoulli(bits_key, shape=(self._num_bits,)).astype(jnp.int32)
        query = jax.random.randint(query_key, (), 0, self._num_bits)
        state = MemoryState(bits, query, jnp.int32(0), jnp.zeros((), bool))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: MemoryState, action: Array) -> Outcome:
        """Waits, or judges the answer; the observation is that of the time before the step."""
        del rng_key
        over, wrong = state.time == self._length, action != state.bits[state.query]
        reward = jnp.where(over, jnp.where(wrong, -1.0, 1.0), 0.0)
        after = state._replace(time=state.time + 1, wrong=wrong)
        return Outcome(after, self._observe(state), reward, over, False)

    def episode_metrics(self, state: MemoryState) -> dict[str, Array]:
        """Returns the regret, 2 for a wrong answer."""
        return {"regret": 2.0 * state.wrong}

    def _observe(self, state: MemoryState) -> Array:
        query = jnp.where(state.time == self._length - 1, state.query, 0)
        bits = jnp.where(state.time == 0, 2 * state.bits - 1, 0)
        return jnp.concatenate([_shown(1 - state.time / self._length, query), bits[None]], axis=1)


class UmbrellaState(NamedTuple):
    """Whether an umbrella is needed, and whether there is one."""

    need: Array  # [] int32
    has: Array  # [] int32
    time: Array  # [] int32


class UmbrellaChain:
    """The first action decides about the umbrella that the last step may need.

    The last reward is 1 if umbrella and need agree, else -1. The others are 1 or -1 by chance, and
    so are the distractors of each observation, 0 or 1.
    """

    def __init__(self, chain_length: int = 20, n_distractor: int = 0):
        self._length, self._distractors = chain_length, n_distractor

    def observation_spec(self) -> specs.Array:
        """Returns the spec of need, umbrella, time that is left, and distractors."""
        return _row(3 + self._distractors)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the choice: no umbrella, an umbrella."""
        return specs.DiscreteArray(2, np.int32, "umbrella")

    def reset(self, rng_key: PRNGKey) -> tuple[UmbrellaState, Array]:
        """Draws the need, and whether there is an umbrella before the first action."""
        key, draw = jax.random.split(rng_key)
        need, has = jax.random.bernoulli(draw, shape=(2,)).astype(jnp.int32)
        state = UmbrellaState(need, has, jnp.int32(0))
        return state, self._observe(key, state)

    def step(self, rng_key: PRNGKey, state: UmbrellaState, action: Array) -> Outcome:
        """Goes one step, and judges at the end."""
        key, draw = jax.random.split(rng_key)
        has = jnp.where(state.time == 0, action, state.has)
        after = UmbrellaState(state.need, has, state.time + 1)
        over = after.time == self._length
        good = jnp.where(over, has == state.need, jax.random.bernoulli(draw))
        return Outcome(after, self._observe(key, after), jnp.where(good, 1.0, -1.0), over, False)

    def episode_metrics(self, state: UmbrellaState) -> dict[str, Array]:
        """Returns the regret, 2 if umbrella and need do not agree."""
        return {"regret": 2.0 * (state.has != state.need)}

    def _observe(self, rng_key: PRNGKey, state: UmbrellaState) -> Array:
        signs = jax.random.bernoulli(rng_key, shape=(1, self._distractors)).astype(jnp.float32)
        left = 1 - state.time / self._length
        return jnp.concatenate([_shown(state.need, state.has, left), signs], axis=1)


class CarState(NamedTuple):
    """The place of the car."""

    position: Array  # [] float32
    velocity: Array  # [] float32
    time: Array  # [] int32


class MountainCar:
    """Mountain car with a reward of -1 in each of at most 1,000 steps."""

    def observation_spec(self) -> specs.Array:
        """Returns the spec of position, velocity and time."""
        return _row(3)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the force: left, none, right."""
        return specs.DiscreteArray(3, np.int32, "force")

    def reset(self, rng_key: PRNGKey) -> tuple[CarState, Array]:
        """Puts the car near the bottom, at rest."""
        position = jax.random.uniform(rng_key, minval=-0.6, maxval=-0.4)
        state = CarState(position, jnp.float32(0), jnp.int32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: CarState, action: Array) -> Outcome:
        """Drives; the episode ends, as terminated, at the goal or after 1,000 steps."""
        del rng_key
        velocity = state.velocity + 0.001 * (action - 1) - 0.0025 * jnp.cos(3 * state.position)
        velocity = jnp.clip(velocity, -0.07, 0.07)
        position = jnp.clip(state.position + velocity, -1.2, 0.6)
        velocity = jnp.where(position == -1.2, jnp.maximum(velocity, 0), velocity)
        after = CarState(position, velocity, state.time + 1)
        over = (position >= 0.5) | (after.time >= _MOST_STEPS)
        return Outcome(after, self._observe(after), -1.0, over, False)

    def episode_metrics(self, state: CarState) -> dict[str, Array]:
        """Returns the regret: the steps above 100."""
        return {"regret": state.time - 100}

    def _observe(self, state: CarState) -> Array:
        return _shown(state.position, state.velocity, state.time / _MOST_STEPS)


class CartpoleState(NamedTuple):
    """The place of cart and pole, and what the episode has given so far."""

    x: Array  # [] float32
    speed: Array  # [] float32
    angle: Array  # [] float32
    spin: Array  # [] float32
    time: Array  # [] int32, in steps
    total: Array  # [] float32, the return


class Cartpole:
    """A pole to balance for 10 seconds of 100 steps each, with a reward of 1 while it is up."""

    _angle, _entries = 0.0, 6
    _best, _good = 1_000.0, 500.0  # the return without regret, and the one that solves

    def observation_spec(self) -> specs.Array:
        """Returns the spec of place, speed, sine and cosine of the angle, spin, and time."""
        return _row(self._entries)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the force: left, none, right."""
        return specs.DiscreteArray(3, np.int32, "force")

    def reset(self, rng_key: PRNGKey) -> tuple[CartpoleState, Array]:
        """Starts near the middle, and at rest but for small numbers."""
        x, speed, angle, spin = jax.random.uniform(rng_key, (4,), minval=-0.05, maxval=0.05)
        state = CartpoleState(x, speed, angle + self._angle, spin, jnp.int32(0), jnp.float32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: CartpoleState, action: Array) -> Outcome:
        """Pushes the cart; the episode ends, as terminated, with the pole's fall or the time."""
        del rng_key
        after = self._pushed(state, action)
        up = (jnp.cos(after.angle) > 0.8) & (jnp.abs(after.x) < 3)
        return self._outcome(after, jnp.where(up, 1.0, 0.0), ~up)

    def episode_metrics(self, state: CartpoleState) -> dict[str, Array]:
        """Returns the regret, and whether the episode was a good one."""
        return {"regret": self._best - state.total, "solved": state.total > self._good}

    def _outcome(self, after: CartpoleState, reward: Array, ends: Array) -> Outcome:
        after = after._replace(total=after.total + reward)
        # The sum of 1,000 times 0.01 is less than 10 in 64 bits, so bsuite ends one step later.
        over = ends | (after.time > _MOST_STEPS)
        return Outcome(after, self._observe(after), reward, over, False)

    def _pushed(self, state: CartpoleState, action: Array) -> CartpoleState:
        """Returns the state after a step, with the equations of Barto et al. (1983)."""
        x, speed, angle, spin, time, total = state
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        pole, mass = 0.1 * 0.5, 1.1  # mass of the pole times its half length, and mass of both
        push = (10.0 * (action - 1) + pole * spin**2 * sin) / mass
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / mass))
        gain = push - pole * turn * cos / mass
        angle = jnp.remainder(angle + _STEP * spin, 2 * jnp.pi)
        state = CartpoleState(x + _STEP * speed, speed + _STEP * gain, angle, spin, time, total)
        return state._replace(spin=spin + _STEP * turn, time=time + 1)

    def _observe(self, state: CartpoleState) -> Array:
        x, speed, angle, spin, time, _ = state
        return _shown(x / 3, speed / 3, jnp.sin(angle), jnp.cos(angle), spin, time / _MOST_STEPS)


class CartpoleSwingup(Cartpole):
    """A pole that hangs at first, must be swung up, and be held almost still near the middle.

    A push costs 0.1. The last two entries of an observation say whether place and spin are within
    what is rewarded, 1 or -1.
    """

    _angle, _entries = np.pi, 8
    _best, _good = 700.0, 100.0

    def __init__(self, height_threshold: float = 0.5):
        """Stores the thresholds.

        Args:
          height_threshold: the least height of the pole's end that is rewarded, as a cosine. The
            cart must be nearer to the middle than 1 minus this, as in all settings of bsuite.
        """
        self._height, self._near = height_threshold, 1 - height_threshold

    def step(self, rng_key: PRNGKey, state: CartpoleState, action: Array) -> Outcome:
        """Pushes the cart; the episode ends, as terminated, with the table or the time."""
        del rng_key
        after = self._pushed(state, action)
        up = jnp.cos(after.angle) > self._height
        up &= (jnp.abs(after.spin) < 1) & (jnp.abs(after.x) < self._near)
        reward = jnp.where(up, 1.0, 0.0) - 0.1 * jnp.abs(action - 1)
        return self._outcome(after, reward, jnp.abs(after.x) > 3)

    def _observe(self, state: CartpoleState) -> Array:
        within = jnp.abs(state.x) < self._near, jnp.abs(state.spin) < 1
        signs = _shown(*(jnp.where(one, 1.0, -1.0) for one in within))
        return jnp.concatenate([super()._observe(state), signs], axis=1)


class DigitState(NamedTuple):
    """The digit in the image, and whether the answer was wrong."""

    label: Array  # [] int32
    wrong: Array  # [] bool


class Mnist:
    """One image of MNIST in an episode, whose digit is the action with reward 1; others have -1.

    The pixels are those of bsuite, which reads the bytes as signed: 0 to 0.5 for dark ones, and
    -0.5 to 0 for bright ones.
    """

    FILES = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"

    def __init__(self, path: str = "~/.cache/rlstack/mnist"):
        """Reads the images.

        Args:
          path: the folder with the two files of MNIST's training set.

        Raises:
          ValueError: a file is missing; nothing is fetched.
        """
        folder = Path(path).expanduser()
        if missing := [name for name in self.FILES if not (folder / name).is_file()]:
            raise ValueError(
                f"Mnist: {folder} must have {' and '.join(missing)}. Fetch them as bsuite does, "
                "from https://storage.googleapis.com/cvdf-datasets/mnist/, or name their folder "
                "with the option path."
            )
        images, labels = (gzip.decompress((folder / name).read_bytes()) for name in self.FILES)
        self._labels = jnp.asarray(np.frombuffer(labels, np.uint8, offset=8), jnp.int32)
        pixels = np.frombuffer(images, np.int8, offset=16)
        self._images = jnp.asarray(pixels.reshape((len(self._labels), 28, 28)))

    def observation_spec(self) -> specs.Array:
        """Returns the spec of an image."""
        return specs.Array((28, 28), np.float32, "image")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of a digit."""
        return specs.DiscreteArray(10, np.int32, "digit")

    def reset(self, rng_key: PRNGKey) -> tuple[DigitState, Array]:
        """Draws an image."""
        number = jax.random.randint(rng_key, (), 0, len(self._labels))
        image = self._images[number].astype(jnp.float32) / 255
        return DigitState(self._labels[number], jnp.zeros((), bool)), image

    def step(self, rng_key: PRNGKey, state: DigitState, action: Array) -> Outcome:
        """Judges the answer."""
        del rng_key
        wrong = action != state.label
        blank = jnp.zeros((28, 28), jnp.float32)
        return Outcome(
            DigitState(state.label, wrong), blank, jnp.where(wrong, -1.0, 1.0), True, False
        )

    def episode_metrics(self, state: DigitState) -> dict[str, Array]:
        """Returns the regret, 2 for a wrong answer."""
        return {"regret": 2.0 * state.wrong}
