"""The protocol of an environment in JAX, and batches of environments that follow the time rules.

An environment is one environment: no batch axis, no automatic reset. `BatchedEnv` adds both, with
the time rules of `rlstack.types`. `ChangedRewards` gives any environment or game rewards with
noise, or of another scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.checks import EnvError
from rlstack.envs.values import is_limited
from rlstack.specs import LEVEL, own_action, with_level, with_open_bounds
from rlstack.types import Array, EnvSpec, PRNGKey, PyTree, StepType, TimeStep


class Outcome(NamedTuple):
    """The result of one step of one environment."""

    state: PyTree
    observation: PyTree
    reward: Array | float  # [] float32
    terminated: Array | bool  # [] bool, whether the episode ends and no reward can follow
    truncated: Array | bool  # [] bool, whether it ends for another reason, such as a time limit


@runtime_checkable
class JaxEnv(Protocol):
    """One environment, as pure functions that JAX can compile.

    An object holds only settings. States and observations are pytrees of arrays, whose shapes and
    dtypes never change.

    Optional methods ``extras_spec()`` and ``extras(state)`` show further signals of the step that
    led to a state, such as a cost: a pytree of ``dm_env.specs``, and arrays of these specs.

    An optional method ``episode_metrics(state)`` returns numbers to log of the episode that ended
    in a state, ``[]`` by name; games have none.

    An optional method ``reset_with_index(rng_key, index)`` starts the episode, or the level, of a
    number. Without it, that is the episode of ``reset(jax.random.PRNGKey(index))``.

    Optional members, for people who watch: ``render(state)`` returns a picture of a state, uint8
    ``[H, W, 3]``, or text, or None if it cannot be drawn here; it is not compiled, and gets numpy
    arrays. ``render_fps`` is the number of steps in a second.
    """

    def observation_spec(self) -> PyTree:
        """Returns a pytree of ``dm_env.specs``, as `EnvSpec` has it."""

    def action_spec(self) -> PyTree:
        """Returns a pytree of ``dm_env.specs``, as `EnvSpec` has it."""

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts an episode; returns its state and its first observation."""

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> Outcome:
        """Takes an action.

        The result has the state and observation of the episode that the action belongs to, also
        where the episode ends: do not start the next one here. Where it ends, the next call for
        this environment is `reset`. A step that is both terminated and truncated is a termination.
        """


class BatchState(NamedTuple):
    """The state of a batch of environments."""

    env: PyTree  # [B, ...]
    rng_key: PRNGKey  # [B, ...] each environment's own
    over: Array  # [B] bool, whether the next step begins an episode
    level: Any = ()  # [B] int32, of the episode, where actions choose levels


class Numbered(NamedTuple):
    """Keys of environments, and the numbers of the episodes that `BatchedEnv.reset` begins."""

    rng_key: PRNGKey  # [B, ...]
    number: Array  # [B] int32


class BatchedEnv:
    """Many copies of one environment, which reset themselves on the step after LAST.

    The methods are pure, and row i depends only on row i of the arguments. So an environment makes
    the same steps in a batch of any size. `rlstack.jax_envs.game.BatchedGame` has games of several
    seats, whose rows are seats.

    Attributes:
      spec: the specs of one observation, one action and the extras, without a batch axis.
      metric_names: the names of `episode_metrics`.
    """

    metric_names: tuple[str, ...] = ()

    def __init__(self, env: JaxEnv, seats: tuple[int, ...] = (), levels: int = 0) -> None:
        """Stores the environment, and compares its functions with its specs.

        Args:
          env: the environment.
          seats: sizes of the leading axes that the environment's observations, actions and rewards
              have in addition to the specs. A game has one such axis, of its seats.
          levels: number of levels that actions choose among, see `rlstack.specs`; 0 for an
            environment that draws its episodes by itself.

        Raises:
          EnvError: an observation does not have the structure, shape or dtype of its spec, or a
            step changes the structure or a shape of the state.
        """
        self._env, self._seats, self._levels = env, seats, levels
        extras_spec: PyTree = getattr(env, "extras_spec", tuple)()
        spec = EnvSpec(env.observation_spec(), env.action_spec(), extras_spec)
        self._check_specs(spec)
        self.spec = own = jax.tree.map(with_open_bounds, spec)
        self._extras_spec = own.extras
        if levels:
            where = f"JAX environment {type(env).__name__}"
            action, shown = with_level(own.action, own.extras, levels, where)
            self.spec = EnvSpec(own.observation, action, shown)
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        action = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct((*seats, *spec.shape), spec.dtype), own.action
        )
        state, observation = jax.eval_shape(env.reset, key)
        outcome = jax.eval_shape(env.step, key, state, action)
        self._check("reset: the observation", observation)
        self._check("step: the observation", outcome.observation)
        if jax.tree.leaves(spec.extras):
            extras = jax.eval_shape(cast(Any, env).extras, state)
            self._check("extras", extras, own.extras)
        self._dtypes = self._common_dtypes(state, outcome.state)
        if hasattr(env, "episode_metrics") and not seats:
            self.metric_names = tuple(jax.eval_shape(env.episode_metrics, outcome.state))

    def keys(self, seeds: Sequence[int] | Array) -> PRNGKey:
        """Returns the keys ``[B, ...]`` of environments with these seeds."""
        return jax.vmap(jax.random.PRNGKey)(jnp.asarray(seeds, jnp.uint32))

    def reset(self, rng_key: PRNGKey) -> tuple[BatchState, TimeStep]:
        """Starts an episode in every environment.

        Args:
          rng_key: ``[B, ...]`` of `keys`, or of an earlier `BatchState`; or `Numbered`.

        Returns:
          The state, and FIRST steps ``[B, ...]``.
        """
        index: Any = ()
        if isinstance(rng_key, Numbered):
            rng_key, index = rng_key
        elif self._levels:
            rng_key, draw = jnp.moveaxis(jax.vmap(jax.random.split)(rng_key), 1, 0)
            index = jax.vmap(lambda key: jax.random.randint(key, (), 0, self._levels))(draw)
        over = jnp.ones(rng_key.shape[0], bool)
        rng_key, env, observation = jax.vmap(self._first)(rng_key, index)
        level = index if self._levels else ()
        timestep = TimeStep(
            jnp.full(over.shape, StepType.FIRST, jnp.int32),
            jnp.zeros(over.shape, jnp.float32),
            jnp.ones(over.shape, jnp.float32),
            observation,
            self._extras(env, level),
        )
        return BatchState(env, rng_key, ~over, level), timestep

    def step(self, state: BatchState, action: PyTree) -> tuple[BatchState, TimeStep]:
        """Steps every environment; those at LAST ignore their action and start an episode.

        Args:
          state: the state of the environments.
          action: ``[B, ...]`` in the structure of ``spec.action``.
        """
        level: Any = ()
        if self._levels:
            level = jnp.where(state.over, action[LEVEL], state.level)
            action = own_action(action)
        next_key, outcome, env, observation = self._advance(
            state.rng_key, state.over, state.env, action, level
        )
        terminated = jnp.asarray(outcome.terminated, bool)
        ends = (terminated | jnp.asarray(outcome.truncated, bool)) & ~state.over
        reward = jnp.asarray(outcome.reward, jnp.float32)
        timestep = TimeStep(
            step_types(state.over, ends),
            jnp.where(state.over, 0.0, reward),
            jnp.where(terminated & ~state.over, 0.0, 1.0).astype(jnp.float32),
            observation,
            self._extras(env, level),
        )
        return BatchState(env, next_key, ends, level), timestep

    def outside(self, timestep: TimeStep) -> Array:
        """Returns where integers of steps ``[B, ...]`` leave their spec, ``[B]`` bool."""
        shown = self.spec.observation, self.spec.extras
        leaves = jax.tree.leaves((timestep.observation, timestep.extras))
        found = jnp.zeros(leaves[0].shape[0], bool)
        for spec, x in zip(jax.tree.leaves(shown), leaves, strict=True):
            if is_limited(spec):
                bad = (x < spec.minimum) | (x > spec.maximum)
                found |= bad.reshape((len(found), -1)).any(axis=1)
        return found

    def episode_metrics(self, state: BatchState) -> dict[str, Array]:
        """Returns numbers of the episodes that ended in a state, ``[B]`` float32, by name.

        Rows whose episode goes on have no meaning.
        """
        if not self.metric_names:
            return {}
        found = jax.vmap(cast(Any, self._env).episode_metrics)(state.env)
        return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}

    @property
    def has_index(self) -> bool:
        """Whether the environment has ``reset_with_index``."""
        return hasattr(self._env, "reset_with_index")

    @property
    def render_fps(self) -> float | None:
        """The environment's steps per second when it is shown to people; None if unknown."""
        return getattr(self._env, "render_fps", None)

    def render(self, state: BatchState, row: int) -> np.ndarray | str | None:
        """Returns a picture of a row, uint8 [H, W, 3], or text; None if it cannot be drawn."""
        draw = getattr(self._env, "render", None)
        return None if draw is None else draw(self._one(state.env, row))

    def _one(self, env: PyTree, row: int) -> PyTree:
        """Returns the state of the environment that a row belongs to, in numpy."""
        return jax.tree.map(lambda x: np.asarray(x[row]), env)

    def _first(self, rng_key: PRNGKey, index: Any = ()) -> tuple[PRNGKey, PyTree, PyTree]:
        next_key, key = jax.random.split(rng_key)
        env, observation = self._started(key, index)
        return next_key, self._typed(env), self._seen(observation)

    def _started(self, rng_key: PRNGKey, index: Any) -> tuple[PyTree, PyTree]:
        """Starts one episode, that of a number unless it is ()."""
        if isinstance(index, tuple):
            return self._env.reset(rng_key)
        if self.has_index:
            return cast(Any, self._env).reset_with_index(rng_key, index)
        return self._env.reset(jax.random.PRNGKey(index))

    def _advance(
        self, rng_key: PRNGKey, over: Array, env: PyTree, action: PyTree, level: Any = ()
    ) -> tuple[PRNGKey, Any, PyTree, PyTree]:
        """Steps every environment, and starts an episode where over.

        Returns:
          The next keys, the outcome of the step, and the states and observations after both.
        """
        keys = jax.vmap(jax.random.split)(rng_key)
        # Each uses its key once, either to continue an episode or to start one.
        next_key, key = keys[:, 0], keys[:, 1]
        outcome: Any = jax.vmap(self._env.step)(key, env, action)
        return next_key, outcome, *self._begin(key, over, outcome, level)

    def _begin(self, key: PRNGKey, over: Array, outcome: Any, level: Any) -> tuple[PyTree, PyTree]:
        """Returns the states and observations of an outcome, and of new episodes where over."""
        later = self._typed(outcome.state), self._seen(outcome.observation)

        def begin() -> tuple[PyTree, PyTree]:
            env, observation = jax.vmap(self._started)(key, level)
            first = self._typed(env), self._seen(observation)
            choose = jax.vmap(jnp.where)
            return jax.tree.map(lambda x, y: choose(over, x, y), first, later)

        def begin_some() -> tuple[PyTree, PyTree]:
            # Most steps of a few environments begin no episode, and a reset may cost as much as a
            # step.
            return jax.lax.cond(over.any(), begin, lambda: later)

        # An accelerator's branch would wait for its condition on the host.
        return jax.lax.platform_dependent(cpu=begin_some, default=begin)

    def _extras(self, env: PyTree, level: Any = ()) -> PyTree:
        """Returns the extras of states ``[B, ...]``, in the dtypes of their spec."""
        spec, own = self._extras_spec, ()
        if jax.tree.leaves(spec):
            shown = jax.vmap(cast(Any, self._env).extras)(env)
            own = jax.tree.map(lambda leaf, x: jnp.asarray(x, leaf.dtype), spec, shown)
        return {**(own or {}), LEVEL: level} if self._levels else own

    def _typed(self, env: PyTree) -> PyTree:
        return jax.tree.map(lambda x, dtype: jnp.asarray(x, dtype), env, self._dtypes)

    def _seen(self, observation: PyTree) -> PyTree:
        return jax.tree.map(
            lambda spec, x: jnp.asarray(x, spec.dtype), self.spec.observation, observation
        )

    def _common_dtypes(self, first: PyTree, later: PyTree) -> PyTree:
        """Returns the dtypes of a state: some libraries give it Python numbers at first."""
        if jax.tree.structure(first) != jax.tree.structure(later):
            raise self._error(
                "step: the state must keep its structure",
                f"{jax.tree.structure(later)} after {jax.tree.structure(first)}",
            )
        for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(later), strict=True):
            if one.shape != other.shape:
                raise self._error(
                    "step: the arrays of the state must keep their shapes",
                    f"{other.shape} after {one.shape}",
                )
        return jax.tree.map(lambda x, y: jnp.promote_types(x.dtype, y.dtype), first, later)

    def _check_specs(self, specs: EnvSpec) -> None:
        for name, tree in specs._asdict().items():
            for spec in jax.tree.leaves(tree):
                if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
                    raise self._error(f"{name}_spec must be a pytree of dm_env.specs", repr(spec))
                if jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
                    raise self._error(f"{name}_spec must have dtypes that JAX has", str(spec.dtype))

    def _check(self, what: str, observation: PyTree, wanted: PyTree = None) -> None:
        wanted = self.spec.observation if wanted is None else wanted
        if jax.tree.structure(observation) != jax.tree.structure(wanted):
            structure = jax.tree.structure(observation)
            raise self._error(f"{what} must have the structure of its spec", structure)
        for spec, x in zip(jax.tree.leaves(wanted), jax.tree.leaves(observation), strict=True):
            kinds = jnp.issubdtype(x.dtype, jnp.floating), jnp.issubdtype(spec.dtype, jnp.floating)
            shape = (*self._seats, *spec.shape)
            if x.shape != shape or kinds == (True, False):
                came = f"{x.dtype}{x.shape}"
                raise self._error(f"{what} must be {spec.dtype}{shape}", came)

    def _error(self, rule: str, came: Any) -> EnvError:
        return EnvError(f"JAX environment {type(self._env).__name__}: {rule}; got {came}.")


class ChangedRewards:
    """Wraps an environment or game: scales its rewards and adds noise to them.

    The wrappers RewardScale and RewardNoise of bsuite (Osband et al. 2020,
    https://arxiv.org/abs/1908.03568) in one.
    """

    def __init__(
        self, env: Any, reward_noise: Array | float = 0.0, reward_scale: Array | float = 1.0
    ) -> None:
        """Stores the environment.

        Args:
          env: the environment.
          reward_noise: the standard deviation of normal noise, drawn for each reward.
          reward_scale: the factor of rewards, before noise is added.
        """
        self._env, self._noise, self._scale = env, reward_noise, reward_scale

    def __getattr__(self, name: str) -> Any:
        if "_env" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(self._env, name)

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> Any:
        """Takes an action, or in a game those of all seats."""
        key, noise_key = jax.random.split(rng_key)
        outcome = self._env.step(key, state, action)
        reward = jnp.asarray(outcome.reward, jnp.float32)
        noise = self._noise * jax.random.normal(noise_key, reward.shape)
        return outcome._replace(reward=self._scale * reward + noise)


def step_types(over: Array, ends: Array) -> Array:
    """Returns FIRST where an episode was over, LAST where one ends, else MID; int32."""
    later = jnp.where(ends, StepType.LAST, StepType.MID)
    return jnp.where(over, StepType.FIRST, later).astype(jnp.int32)
