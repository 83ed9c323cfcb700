"""A table of items over a ring of steps, in arrays; the off-policy part of a compiled loop.

`rlstack.learning.device_replay` has the same table for environments on the host. The rules are
those of `rlstack.replay` for uniform and prioritized samplers: which items exist, how many are
held, when a batch may be drawn, and with which probabilities and weights. The random numbers
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.configs.replay import ReplayConfig
from rlstack.fused.acting import Acting, Actors, EpisodeStats
from rlstack.fused.learning import Learning, Updater, Updates
from rlstack.fused.packed import PackedSteps
from rlstack.fused.sum_tree import SumTree, scaled
from rlstack.replay.memory import ring_shape
from rlstack.replay.prioritized import PRIORITY_FLOOR
from rlstack.types import Array, Batch, PRNGKey, PyTree, StepType, TimeStep, Transition

if TYPE_CHECKING:  # imported by replays with an item processor
    from rlstack.replay.episodes import Processor

_FEW = 1 << 22  # for at most this number of cells, 32 bits give probabilities equal to 0.1 %
_FINEST = 1000  # samples_per_insert and its tolerance are taken as fractions of at most this
_PROCESSING = 1 << 16  # folded into the key of an item processor; `split` has smaller numbers


class RingState(NamedTuple):
    """The content of a replay."""

    steps: PackedSteps  # [rows, B, ...], without what is in `first_states`
    first_states: PackedSteps  # [start rows, B, ...], what `Agent.read_once` names
    steps_added: Array  # [] int32, steps added per environment
    unbroken: Array  # [] int32, the first step after the last break of the streams
    valid: Array  # [items, B] bool, where a cell has an item
    held: Array  # [] int32, items in the table
    inserts: Array  # [] int32, items inserted, ever; stays at the largest int32
    credit: Array  # [] int32, items that may be sampled now, in units of 1 / `Ring.unit`
    drawn: Array  # [] int32, items drawn, ever; stays at the largest int32
    rng_key: PRNGKey
    masses: tuple[Array, ...]  # masses of the items, levels of a `SumTree`; () if uniform
    largest: Array  # [] float32, the largest priority so far
    # [rows, B] int32, the first step of each step's episode; () without an item processor.
    begins: Any = ()


class Ring:
    """A table of items in arrays; the methods are pure.

    Attributes:
      steps: environment steps, per environment, in one iteration.
      most_updates: the largest number of updates in one iteration.
      rate: items that may be sampled for each item inserted, in units of 1 / `unit`.
      unit: the number of these units in one item.
      first_credit: `RingState.credit` at the start.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        actors: Actors,
        updater: Updater,
        steps_per_update: int,
        *,
        first_step: int = 0,
        joined: Callable[[Transition], Transition] | None = None,
    ) -> None:
        """Stores the parts.

        Args:
          cfg: the rules of the replay.
          actors: acts, and knows the number of environments and the agent.
          updater: makes the updates.
          steps_per_update: environment steps, per environment, in one iteration.
          first_step: the step of an item at which an update reads what `Agent.read_once` names.
          joined: returns an item as an update reads it, from an item as it is stored; None if they
            are the same.

        Raises:
          ValueError: there is no samples_per_insert, or it is too large to count with.
        """
        self._cfg, self._actors, self._updater = cfg, actors, updater
        self._first_step, self._joined = first_step, joined
        self.steps = steps_per_update
        shape = ring_shape(cfg, actors.num_envs)
        self._rows, self._items = shape.rows, shape.items
        # A step overwrites the first state that its row held as soon as the start before it has
        # passed, so with longer periods one more is held than there are starts in all rows.
        self._start_rows = -(-shape.rows // cfg.step_period) + (cfg.step_period > 1)
        if cfg.samples_per_insert is None:
            raise ValueError(
                "Ring: samples_per_insert must be given, because it says how many updates follow a "
                "step; got None. Add --replay.samples-per-insert."
            )
        rate = Fraction(cfg.samples_per_insert).limit_denominator(_FINEST)
        if abs(float(rate) / cfg.samples_per_insert - 1) > 0.01:
            raise ValueError(
                f"Ring: samples_per_insert must be within 1 % of a fraction of at most {_FINEST}; "
                f"got {cfg.samples_per_insert}. Choose a larger --replay.samples-per-insert."
            )
        self.rate, self.unit = rate.numerator, rate.denominator
        self.first_credit = int(cfg.tolerance * self.unit) - self.rate * cfg.min_size
        if max(abs(self.first_credit), self.rate * actors.num_envs) > 2**30:
            raise ValueError(
                "Ring: samples_per_insert * min_size must be at most 2^30 / denominator; got "
                f"{rate} * {cfg.min_size}. Choose rounder numbers."
            )
        # After an iteration less than a batch is allowed, or less than before the first sample.
        inserted = self.rate * actors.num_envs * steps_per_update
        first = self.first_credit + self.rate * cfg.min_size
        batch = self.unit * cfg.batch_size
        self.most_updates = max(1, (max(first, batch) + inserted) // batch)
        self._processor: Processor | None = None
        if cfg.item_processor:
            from rlstack.replay.episodes import make_processor

            self._processor = make_processor(cfg)
        self._tree = None
        if cfg.sampler == "prioritized":
            self._tree = SumTree(self._items * actors.num_envs)

    def start(
        self, learning: Learning, acting: Acting, rng_key: PRNGKey
    ) -> tuple[Acting, RingState]:
        """Returns an empty replay, which draws with this key."""
        actors = self._actors
        step = jax.eval_shape(
            lambda: actors.step(learning.params, learning.version, acting, actors.tally())[2]
        )
        return acting, self.empty(step, rng_key)

    def empty(self, step: Transition, rng_key: PRNGKey) -> RingState:
        """Returns an empty replay.

        Args:
          step: shapes and dtypes of the steps, ``[B, ...]``.
          rng_key: the key for the replay's draws.
        """
        none, (every, first) = jnp.zeros((), jnp.int32), self._parted(step)
        begins: Any = ()
        if self._processor is not None:
            begins = jnp.zeros((self._rows, self._actors.num_envs), jnp.int32)
        return RingState(
            steps=PackedSteps.zeros(self._rows, every),
            first_states=PackedSteps.zeros(self._start_rows, first),
            steps_added=none,
            unbroken=none,
            valid=jnp.zeros((self._items, self._actors.num_envs), bool),
            held=none,
            inserts=none,
            credit=jnp.asarray(self.first_credit, jnp.int32),
            drawn=none,
            rng_key=rng_key,
            masses=() if self._tree is None else self._tree.empty(),
            largest=jnp.ones(()),
            begins=begins,
        )

    def restart(
        self, learning: Learning, acting: Acting, ring: RingState
    ) -> tuple[Acting, RingState]:
        """Marks a break of all streams: no item spans it."""
        del learning
        return acting, self.broken(ring)

    def broken(self, ring: RingState) -> RingState:
        """Marks a break of all streams: no item spans it."""
        return ring._replace(unbroken=ring.steps_added)

    def env_axes(self, ring: RingState) -> RingState:
        """Returns the axis of environments of each array of a state that is not ``WHOLE``."""
        return ring._replace(**jax.tree.map(lambda _: 1, _arrays(ring)))

    def batch_spec(self, ring: RingState) -> Batch:
        """Returns shapes and dtypes of the batches."""
        size = self._cfg.batch_size
        cells = jax.ShapeDtypeStruct((size,), jnp.int32)
        trajectory = jax.eval_shape(self.items, ring, cells)
        weights: Any = jax.ShapeDtypeStruct((size,), jnp.float32)
        return Batch(trajectory, weights)

    def iterate(
        self,
        learning: Learning,
        acting: Acting,
        ring: RingState,
        tally: EpisodeStats,
        updates: Updates,
        most: Array,
    ) -> tuple[Learning, Acting, RingState, EpisodeStats, Updates]:
        """Acts, then learns as often as the rules allow; see `rlstack.fused.queue.Queue`."""

        def act(_: Any, carry: Any) -> Any:
            acting, ring, tally = carry
            good = ~tally.bad.any()
            acting, tally, step = self._actors.step(
                learning.params, learning.version, acting, tally
            )
            return acting, self.add(ring, step, good), tally

        acting, ring, tally = jax.lax.fori_loop(0, self.steps, act, (acting, ring, tally))
        good = ~jnp.any(tally.bad)
        learning, ring, updates = self.learn(learning, ring, updates, good, most)
        return learning, acting, ring, tally, updates

    def learn(
        self, learning: Learning, ring: RingState, updates: Updates, good: Array, most: Array
    ) -> tuple[Learning, RingState, Updates]:
        """Learns as often as the rules allow; see `rlstack.fused.queue.StepQueue.learn`."""
        arrays, writes = _arrays(ring), self._updater.writes_back
        if writes:
            del arrays["steps"]

        def whole(ring: RingState) -> RingState:
            return ring._replace(**arrays)

        def changing(ring: RingState) -> RingState:
            # Under vmap a loop copies its whole carry in each iteration. Learning changes neither
            # which cells have an item nor, for most agents, the steps.
            none: dict[str, Any] = dict.fromkeys(arrays)
            return ring._replace(**none)

        def may_learn(carry: Any) -> Array:
            learning, part, updates = carry
            allowed = self.can_sample(whole(part))
            return allowed & (learning.version < most) & ~updates.failed & good

        def learn(carry: Any) -> Any:
            learning, part, updates = carry
            learning, ring, updates = self.learn_once(learning, whole(part), updates)
            return learning, changing(ring), updates

        learning, part, updates = jax.lax.while_loop(
            may_learn, learn, (learning, changing(ring), updates)
        )
        return learning, whole(part), updates

    def learn_once(
        self,
        learning: Learning,
        ring: RingState,
        updates: Updates,
        active: Array | None = None,
    ) -> tuple[Learning, RingState, Updates]:
        """Draws a batch and learns from it, whatever the rules allow; see `Updater.update`."""
        ring, cells, weights = self.draw(ring)

        def make_batch() -> Batch:
            return Batch(self.items(ring, cells), weights)

        made = self._updater.update(learning, updates, make_batch, active, cells)
        learning, updates, feedback = made
        if self._updater.writes_back:
            ring = self.write_back(ring, cells, feedback.updates, ~updates.failed)
        if self._tree is not None and feedback.priorities is not None:
            ring = self.update_priorities(ring, cells, feedback.priorities)
        return learning, ring, updates

    def add(self, ring: RingState, step: Transition, active: Array | bool = True) -> RingState:
        """Appends one step of every environment, and inserts the items that it completes.

        Args:
          ring: the content.
          step: ``[B, ...]``.
          active: whether to add it, [] bool.
        """
        cfg, num_envs = self._cfg, self._actors.num_envs
        row, (every, first) = ring.steps_added % self._rows, self._parted(step)
        steps = ring.steps.with_row(row, every)
        # The row of the next start: the last step that is written there is that start.
        start_row = -(-(ring.steps_added - self._first_step) // cfg.step_period) % self._start_rows
        first_states = ring.first_states.with_row(start_row, first)
        start = ring.steps_added - cfg.unroll_length
        due = (start >= 0) & (start % cfg.step_period == 0) & active
        cell = jnp.maximum(start, 0) // cfg.step_period % self._items
        valid = jnp.full(num_envs, start >= ring.unbroken)
        if cfg.starts == "not_last":
            begins = steps[(start + cfg.context) % self._rows]
            valid &= begins.timestep.step_type != StepType.LAST
        inserted = jnp.where(due, valid.sum(dtype=jnp.int32), 0)
        # Read before the row is written, because XLA would copy the whole array to read it later.
        replaced = jax.lax.optimization_barrier(jnp.asarray(ring.valid)[cell])
        masses = ring.masses
        if self._tree is not None:
            mass = valid * ring.largest**cfg.priority_exponent
            cells = cell * num_envs + jnp.arange(num_envs)
            old = self._tree.leaves(masses, cells)
            masses = self._tree.write(masses, cells, jnp.where(due, mass, old))
        return ring._replace(
            steps=steps,
            first_states=first_states,
            steps_added=ring.steps_added + jnp.asarray(active, jnp.int32),
            valid=jnp.asarray(ring.valid).at[cell].set(jnp.where(due, valid, replaced)),
            held=ring.held + inserted - jnp.where(due, replaced.sum(dtype=jnp.int32), 0),
            inserts=_added(ring.inserts, inserted),
            credit=ring.credit + self.rate * inserted,
            masses=masses,
            begins=self._with_begins(ring, row, step),
        )

    def _with_begins(self, ring: RingState, row: Array, step: Transition) -> Any:
        """Returns the first steps of episodes, with those of the step that is added in this row."""
        if self._processor is None:
            return ()
        begins, number = jnp.asarray(ring.begins), ring.steps_added
        before = jax.lax.optimization_barrier(begins[(number - 1) % self._rows])
        begin = (step.timestep.step_type == StepType.FIRST) | (number <= ring.unbroken)
        return begins.at[row].set(jnp.where(begin, number, before))

    def take(self, ring: RingState, step: Transition, good: Array, spent: Array) -> RingState:
        """Appends one step for a policy of a set.

        Args:
          ring: the content.
          step: ``[B, ...]``.
          good: whether to add it, [] bool.
          spent: whether the policy has made all its updates, [] bool. The step is then dropped, and
            no item spans it, so that what may be sampled does not grow without end.
        """
        broken = jnp.where(spent, ring.steps_added, ring.unbroken)
        return self.add(ring._replace(unbroken=broken), step, good & ~spent)

    def can_sample(self, ring: RingState) -> Array:
        """Returns whether the rules allow a batch now, [] bool."""
        cfg = self._cfg
        allowed = ring.credit >= self.unit * cfg.batch_size
        return allowed & (ring.inserts >= cfg.min_size) & (ring.held > 0)

    def draw(self, ring: RingState) -> tuple[RingState, Array, Array]:
        """Draws the items of a batch with replacement.

        Returns:
          The new state, the cells of the items, ``[B]`` int32, and their weights, ``[B]``.
        """
        cfg, num_envs = self._cfg, self._actors.num_envs
        next_key, key, other_key = jax.random.split(ring.rng_key, 3)
        if self._tree is None:
            newest = self._newest(ring)
            filled = jnp.minimum(newest + 1, self._items) * num_envs
            cells = self._with_newest(
                ring, self._uniform(key, other_key, ring.valid.reshape(-1), filled)
            )
            weights: Array = jnp.ones(cfg.batch_size, jnp.float32)
        else:
            cells = self._with_newest(ring, self._tree.draw(ring.masses, key, cfg.batch_size))
            weights = self._weights(ring, cells)
        ring = ring._replace(
            rng_key=next_key,
            credit=ring.credit - self.unit * cfg.batch_size,
            drawn=_added(ring.drawn, cfg.batch_size),
        )
        return ring, cells, weights

    def gather(self, ring: RingState, cells: Array) -> Transition:
        """Returns the items in cells ``[B]``: their steps, ``[T+1, B, ...]``.

        What `Agent.read_once` names is at their first step, ``[1, B, ...]``.
        """
        starts, env_ids = self._locate(ring, cells)
        rows = (starts + jnp.arange(self._cfg.unroll_length + 1)[:, None]) % self._rows
        steps = ring.steps[rows, env_ids]
        row = starts[None] // self._cfg.step_period % self._start_rows
        first = ring.first_states[row, env_ids]
        states = jax.tree.map(
            lambda x, y: y if x is None else x,
            steps.agent_state,
            first,
            is_leaf=lambda x: x is None,
        )
        return steps._replace(agent_state=states)

    def _locate(self, ring: RingState, cells: Array) -> tuple[Array, Array]:
        """Returns the first steps and the environments of the items in cells ``[B]``."""
        num_envs = self._actors.num_envs
        index, env_ids = cells // num_envs, cells % num_envs
        newest = self._newest(ring)
        return (newest - (newest - index) % self._items) * self._cfg.step_period, env_ids

    def items(self, ring: RingState, cells: Array) -> Transition:
        """Returns the items that were drawn last as an update reads them.

        They are those of `gather`, joined, with what a processor changes.
        """
        item = self.gather(ring, cells)
        if self._joined is not None:
            item = self._joined(item)
        if self._processor is None:
            return item
        from rlstack.replay.episodes import Episode, checked_item, last_steps

        starts, env_ids = self._locate(ring, cells)
        begins, newest = jnp.asarray(ring.begins), ring.steps_added - 1

        def begin_of(steps: Array) -> Array:
            return begins[steps % self._rows, env_ids]

        def read(offset: Array) -> TimeStep:
            return ring.steps[(starts + offset) % self._rows, env_ids].timestep

        last = last_steps(jnp, begin_of, starts, newest, self._rows)
        before = starts - jnp.maximum(begin_of(starts), newest + 1 - self._rows)
        draws = _Draws(jax.random.fold_in(ring.rng_key, _PROCESSING))
        made = self._processor(draws, item, Episode(jnp, before, last - starts, read))
        old, structure = jax.tree.flatten(item)
        leaves = [
            jnp.asarray(new, x.dtype)
            for x, new in zip(old, checked_item(self._cfg, item, made), strict=True)
        ]
        return structure.unflatten(leaves)

    def _with_newest(self, ring: RingState, cells: Array) -> Array:
        """Returns cells that were drawn, the first ones replaced by those of the newest items."""
        count, num_envs = round(self._cfg.newest_share * len(cells)), self._actors.num_envs
        if not count:
            return cells
        # If items may not start at LAST, at most every second start is lost.
        most = min(2 * -(-count // num_envs) + 1, self._items)
        index = self._newest(ring) - jnp.arange(most)[:, None]
        found = index % self._items * num_envs + jnp.arange(num_envs)
        held = (index >= 0) & ring.valid.reshape(-1)[found]
        order = jnp.argsort(~held.reshape(-1), stable=True)[:count]
        chosen = jnp.where(held.reshape(-1)[order], found.reshape(-1)[order], cells[: len(order)])
        return jnp.concatenate([chosen, cells[len(order) :]])

    def _parted(self, step: Transition) -> tuple[Transition, PyTree]:
        """Returns a step without what `Agent.read_once` names, and that alone; None elsewhere."""
        states = step.agent_state
        once = self._actors.agent.read_once(states)
        others = jax.tree.map(lambda x, first: None if first else x, states, once)
        first = jax.tree.map(lambda x, first: x if first else None, states, once)
        return step._replace(agent_state=others), first

    def older_leaves(self, ring: RingState, step: Transition) -> list[Any]:
        """Returns what earlier versions saved of a replay: they stored the state at every step.

        Args:
          ring: the content.
          step: shapes and dtypes of one environment's step.
        """
        return [*jax.tree.leaves(self._older_steps(step)), *jax.tree.leaves(_counters(ring))]

    def from_older(self, ring: RingState, step: Transition, leaves: Sequence[Any]) -> RingState:
        """Returns the content that an earlier version saved.

        Args:
          ring: a content of the same shapes.
          step: shapes and dtypes of one environment's step.
          leaves: what was saved, in the form of `older_leaves`.
        """
        older = jax.tree.structure(self._older_steps(step))
        count = older.num_leaves
        every, states = self._parted(older.unflatten(leaves[:count])[:])
        ring = jax.tree.unflatten(jax.tree.structure(_counters(ring)), leaves[count:])
        newest = (ring.steps_added - 1) // self._cfg.step_period
        starts = newest - (newest - jnp.arange(self._start_rows)) % self._start_rows
        first = jax.tree.map(lambda x: x[starts * self._cfg.step_period % self._rows], states)
        return ring._replace(steps=PackedSteps.of(every), first_states=PackedSteps.of(first))

    def _older_steps(self, step: Transition) -> PackedSteps:
        num_envs = self._actors.num_envs
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape), x.dtype), step)
        return jax.eval_shape(lambda: PackedSteps.zeros(self._rows, rows))

    def _newest(self, ring: RingState) -> Array:
        """Returns the number of the newest item of each environment, [] int32."""
        return (ring.steps_added - 1 - self._cfg.unroll_length) // self._cfg.step_period

    def update_priorities(self, ring: RingState, cells: Array, priorities: Array) -> RingState:
        """Sets the priorities of the items that were drawn last."""
        assert self._tree is not None
        priorities = jnp.maximum(priorities, PRIORITY_FLOOR)
        masses = self._tree.write(ring.masses, cells, priorities**self._cfg.priority_exponent)
        largest = jnp.maximum(ring.largest, priorities.max())
        return ring._replace(masses=masses, largest=largest)

    def write_back(self, ring: RingState, cells: Array, updates: Any, active: Array) -> RingState:
        """Replaces the stored agent outputs of the items in cells ``[B]``, where active.

        Args:
          ring: the content.
          cells: the items.
          updates: `rlstack.types.LearnerOutput.updates`, ``[T+1, B, ...]``.
          active: whether to write, [] bool.
        """
        starts, env_ids = self._locate(ring, cells)
        offsets = jnp.arange(self._cfg.context, self._cfg.unroll_length + 1)[:, None]
        rows = jnp.where(active, (starts + offsets) % self._rows, self._rows)
        step = ring.steps[0]
        before, structure, *after = (jax.tree.structure(part) for part in step)
        leaves = [None] * before.num_leaves + structure.flatten_up_to(updates)
        leaves += [None] * sum(part.num_leaves for part in after)
        index = rows, jnp.broadcast_to(env_ids, rows.shape)
        return ring._replace(steps=ring.steps.replaced(index, leaves))

    def _uniform(self, rng_key: PRNGKey, other_key: PRNGKey, valid: Array, filled: Array) -> Array:
        """Draws cells with items: two for each place of the batch, then others as needed.

        The probabilities of n cells differ by a factor of at most 1 + n / 2^32, and by less if n
        may be above 2^22.
        """
        size, end = self._cfg.batch_size, filled.astype(jnp.uint32)

        def draw(key: PRNGKey, *shape: int) -> Array:
            # jax.random.randint calls the generator three times, which takes some us more.
            if valid.size <= _FEW:
                return (jax.random.bits(key, shape, jnp.uint32) % end).astype(jnp.int32)
            bits, more_bits = jax.random.bits(key, (2, *shape), jnp.uint32)
            return scaled(bits, end, more_bits).astype(jnp.int32)

        def missing(carry: Any) -> Any:
            return ~valid[carry[1]].all()

        def again(carry: Any) -> Any:
            next_key, key = jax.random.split(carry[0])
            others = draw(key, size)
            return next_key, jnp.where(valid[carry[1]], carry[1], others)

        # An iteration of a loop costs more than twice as many numbers, and one in 20 to 200 cells
        # has no item, so a batch rarely needs a third draw.
        first, second = draw(rng_key, 2, size)
        cells = jnp.where(valid[first], first, second)
        return jax.lax.while_loop(missing, again, (other_key, cells))[1]

    def _weights(self, ring: RingState, cells: Array) -> Array:
        """Returns importance weights; `rlstack.replay.prioritized` explains them."""
        assert self._tree is not None
        cfg = self._cfg
        beta: Array | float = cfg.importance_exponent
        if cfg.importance_anneal_samples:
            done = jnp.minimum(1.0, ring.drawn / cfg.importance_anneal_samples)
            beta = beta + done * (cfg.importance_exponent_final - beta)
        mass, total = self._tree.leaves(ring.masses, cells), self._tree.total(ring.masses)
        weights = (mass * (ring.held / total)) ** -beta
        return (weights / weights.max()).astype(jnp.float32)


class _Draws:
    """Draws random numbers with a key, in the form of numpy's generators."""

    def __init__(self, rng_key: PRNGKey) -> None:
        self._key = rng_key

    def random(self, size: tuple[int, ...]) -> Array:
        """Returns numbers in [0, 1), of this shape."""
        self._key, key = jax.random.split(self._key)
        return jax.random.uniform(key, size)


def _arrays(ring: RingState) -> dict[str, Any]:
    """Returns the parts of a content that have an axis of environments, by their names."""
    return {name: getattr(ring, name) for name in ("steps", "first_states", "valid", "begins")}


def _counters(ring: RingState) -> Any:
    """Returns a content without its steps."""
    return ring._replace(steps=None, first_states=None)  # type: ignore[arg-type]


def _added(count: Array, more: Array | int) -> Array:
    """Returns a sum of counts, at most the largest int32."""
    return jnp.minimum(count, jnp.iinfo(jnp.int32).max - more) + more
