"""AlphaZero with Gumbel's search: planning in the true model of a game of two seats in turn.

Silver et al. (2018), https://doi.org/10.1126/science.aar6404, with the search and the policy's loss
of Danihelka et al. (2022), https://openreview.net/forum?id=bERaNdoegnO; `rlstack.families.planning`
has the search. A zero-sum game in JAX is the model; its state comes from the observation, so that
the agent acts wherever it sees one. A step of the model is a move of either seat, so values change
their sign with the turn. Values learn the n-step return of their seat: with ``n_step`` and the
replay's unroll as long as a game, its result, as in the paper.

Both seats see every step. Where a seat waits there is no search, and the value is the opposite of
the network's for the other seat. Nothing is learned from such a step, but n-step returns may
bootstrap from it; with an even ``n_step`` they end at moves of their seat, if moves alternate.

Deviations: games are not augmented by symmetries; values are not bounded by a tanh.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.checks import WrongKindError
from rlstack.families.planning import (
    Edge,
    Node,
    PlanningAgent,
    PlanningConfig,
    PlanOutput,
    key_of,
)
from rlstack.math import returns
from rlstack.networks import ActorCriticOutput, actor_critic
from rlstack.networks.base import dummy_timestep
from rlstack.networks.torsos import action_mask
from rlstack.references import Hook, call_factory
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, PyTree, TimeStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlphaZeroConfig(PlanningConfig):
    """Hyperparameters of AlphaZero."""

    model: Hook
    """The game, as "module:callable" of a function () -> game, such as
    "rlstack.jax_envs.board_games:TicTacToe"; `GameModel` says what it must have."""
    discount: float = 1.0
    """Discount of future rewards, per step."""
    value_cost: float = 1.0
    """Weight of the loss of values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = '"module:callable", or a callable'
        self.require("model", callable(self.model) or ":" in self.model, rule)


class GameModel(Protocol):
    """A game in JAX as a model: a `rlstack.jax_envs.game.JaxGame` with three more methods.

    What a seat sees must not depend on its number: if the seats change places, they see the same.
    The reward of one seat is minus that of the other.
    """

    def step(self, rng_key: PRNGKey, state: PyTree, action: Array) -> Any:
        """Takes the actions ``[2]`` of both seats; returns a `rlstack.jax_envs.game.GameOutcome`.

        Both are the action of the seat whose turn it is.
        """

    def turn(self, state: PyTree) -> Array:
        """Returns the seat whose turn it is, [] int32."""

    def observe(self, state: PyTree) -> PyTree:
        """Returns what each seat sees, ``[2, ...]``."""

    def state_of(self, observation: PyTree) -> PyTree:
        """Returns a state in which the first seat sees this observation."""


@register(AlphaZeroConfig, network=actor_critic)
class AlphaZero(PlanningAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a feed-forward network."""

    cfg: AlphaZeroConfig
    reads_first_state = True

    def __init__(self, cfg: AlphaZeroConfig, *args: Any, **kwargs: Any) -> None:
        """Makes the model.

        Raises:
          ValueError: there is no such model, or the network is recurrent.
          WrongKindError: it is no model.
        """
        super().__init__(cfg, *args, **kwargs)
        if jax.tree.leaves(self.network.initial_state(1)):
            raise ValueError(
                "AlphaZero: the network must be feed-forward, since the nodes of a search carry no "
                "recurrent state. Use --network.core none."
            )
        wanted = "() -> game with step, turn, observe and state_of"
        model = call_factory("AlphaZeroConfig: model", cfg.model, wanted)
        missing = [x for x in ("step", "turn", "observe", "state_of") if not hasattr(model, x)]
        if missing:
            raise WrongKindError(
                f"AlphaZeroConfig: model must be a function {wanted}; {type(model).__name__} has "
                f"no {', '.join(missing)}. See rlstack.agents.alphazero.GameModel."
            )
        self.model: GameModel = model

    def root(self, rng_key: PRNGKey, params: Params, timestep: TimeStep) -> tuple[Node, Array]:
        """Returns the observations of the seats to move, and their legal actions ``[B, A]``."""
        del rng_key
        state = jax.vmap(self.model.state_of)(timestep.observation)
        return self.node(params, state)

    def node(self, params: Params, state: PyTree) -> tuple[Node, Array]:
        """Returns what the network predicts for the seats to move, and the legal actions."""
        seat = jax.vmap(self.model.turn)(state)
        seen = of_seat(jax.vmap(self.model.observe)(state), seat)
        predicted = self.predicted(params, seen)
        policy = distributions.categorical(predicted.policy, action_mask(seen))
        return Node(policy.logits, predicted.value, state), policy.legal()

    def predicted(self, params: Params, observation: PyTree) -> ActorCriticOutput:
        """Returns the network's output for observations ``[B, ...]``."""
        size = jax.tree.leaves(observation)[0].shape[0]
        timestep = dummy_timestep((), size)._replace(observation=observation)
        output: ActorCriticOutput = self.network.apply(None, params, timestep, ())[0]
        return output

    def expand(
        self, rng_key: PRNGKey, params: Params, state: PyTree, action: Array
    ) -> tuple[Edge, Node]:
        """Takes actions ``[B]`` of the seats to move."""
        seat = jax.vmap(self.model.turn)(state)
        keys = jax.random.split(rng_key, len(action))
        outcome = jax.vmap(self.model.step)(keys, state, jnp.stack([action, action], axis=1))
        node, _ = self.node(params, outcome.state)
        over = outcome.over | outcome.terminated.all(axis=1)
        # The value of the next state is that of the seat to move there.
        sign = jnp.where(jax.vmap(self.model.turn)(outcome.state) == seat, 1.0, -1.0)
        discount = jnp.where(over, 0.0, self.cfg.discount * sign)
        return Edge(of_seat(outcome.reward, seat), discount), node

    def search(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noise: bool
    ) -> tuple[PlanOutput, Array]:
        """Searches where the seat moves, and nowhere else."""
        root, legal = self.root(rng_key, params, timestep)
        moves = jax.vmap(self.model.turn)(root.state) == 0
        own = action_mask(timestep.observation)
        waits = distributions.categorical(jnp.zeros(legal.shape), own)
        waiting = PlanOutput(waits.mode(), waits.probs(), -root.value)
        legal_now = jnp.where(moves[:, None], legal, waits.legal())
        # Where both seats of each game are in the batch, half of its rows move.
        size = len(moves)
        half = -(-size // 2)
        order = jnp.resize(jnp.argsort(~moves), (2 * half,))
        keys = jax.random.split(key_of(rng_key, noise), size)

        def of_row(key: PRNGKey, root: Node, legal: Array) -> PlanOutput:
            one = jax.tree.map(lambda x: x[None], (root, legal))
            return jax.tree.map(lambda x: x[0], self.searched(key, params, *one, noise=noise))

        def add(part: Array, found: PlanOutput) -> PlanOutput:
            rows = jax.lax.dynamic_slice_in_dim(order, part * half, half)
            new = jax.vmap(of_row)(
                *jax.tree.map(lambda x: jnp.asarray(x)[rows], (keys, root, legal))
            )
            places = jnp.where(moves[rows], rows, size)  # the last one is none
            return jax.tree.map(lambda x, y: x.at[places].set(y, mode="drop"), found, new)

        parts = (moves.sum() + half - 1) // half
        return jax.lax.fori_loop(0, parts, add, waiting), legal_now

    def moves(self, observation: PyTree) -> Array:
        """Returns whether it is the turn of the seats with observations ``[B, ...]``, ``[B]``."""
        state = jax.vmap(self.model.state_of)(observation)
        return jax.vmap(self.model.turn)(state) == 0

    def loss(
        self, rng_key: PRNGKey, params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``); it concerns the items' first steps.

        The loss is the weighted mean of the KL divergence from the search's policy to the network's
        and of the squared error of the value. The logged parts are without weights.
        """
        del rng_key
        trajectory = batch.trajectory
        timestep, stored = trajectory.timestep, trajectory.agent_output
        after = jax.tree.map(lambda x: x[1:], timestep)
        targets = returns.n_step_returns(
            after.reward,
            after.discount * self.cfg.discount,
            stored.value,
            self.cfg.n_step,
            ~after.first(),
        )
        observation = jax.tree.map(lambda x: x[0], timestep.observation)
        learned = self.moves(observation) & ~after.first()[0]
        predicted = self.predicted(params, observation)
        policy = distributions.categorical(predicted.policy, action_mask(observation))
        target = stored.policy[0]
        divergence = jax.scipy.special.xlogy(target, target) - target * policy.log_probs()
        policy_loss = jnp.where(learned, divergence.sum(axis=-1), 0.0)
        error = jnp.where(learned, targets[0] - predicted.value, 0.0)
        value_loss = jnp.square(error)
        loss = jnp.mean(batch.weights * (policy_loss + self.cfg.value_cost * value_loss))
        logs: Logs = {
            "loss": loss,
            "policy_loss": policy_loss.mean(),
            "value_loss": value_loss.mean(),
            "value": predicted.value.mean(),
            "priority": jnp.abs(error).mean(),
        }
        return loss, (logs, jax.lax.stop_gradient(jnp.abs(error)))


def of_seat(tree: PyTree, seat: Array) -> PyTree:
    """Returns the rows ``[B, ...]`` of one seat each, from ``[B, 2, ...]``."""
    return jax.tree.map(lambda x: x[jnp.arange(len(seat)), seat], tree)
