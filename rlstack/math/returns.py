"""Returns, advantages and targets over unrolls, with episode boundaries.

Everything is time-major. Transition t (0 <= t < T) goes from step t to step t + 1 of the unroll:

- ``rewards[t]``, ``discounts[t]`` [T, B] answer the action of step t. They are the reward and the
  agent's discount times the discount of TimeStep t + 1: 0 after a termination, else positive.
- ``values`` [T + 1, B] belong to the steps; ``values[T]`` is where the unroll bootstraps.
- ``mask`` [T, B] is False (0) where t goes from LAST to FIRST and is not a transition, that is
  ``trajectory.timestep.step_type[1:] != FIRST``. There every function drops the TD error *and*
  stops the trace, so that no episode affects the results of the previous episode. At such a t the
  rewards, discounts and values of the next episode are not read.

A truncated episode (time limit) needs no special case: its last step is in the unroll, so its last
transition bootstraps from ``values`` there, and the masked transition after it ends the sum.

Where ``mask`` is False the results are defined: advantages and TD errors are 0 and a target is the
value itself (``values[t]``, or ``q_taken[t]`` for ``retrace``), so an unmasked squared loss is 0.

``gae``, ``vtrace`` and ``retrace`` stop gradients: their papers treat the results as constants.
The plain returns (``discounted_returns``, ``n_step_returns``, ``lambda_returns``) are
differentiable in all their array arguments; a critic that regresses on them stops the gradient
itself. Computation is in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.types import Array, PyTree


class GAE(NamedTuple):
    """The result of ``gae``."""

    advantages: Array  # [T, B] float32, 0 where masked
    targets: Array  # [T, B] float32, advantages + values, for the critic


class VTrace(NamedTuple):
    """The result of ``vtrace``."""

    vs: Array  # [T, B] float32, targets for the critic
    pg_advantages: Array  # [T, B] float32, weights of grad log pi, 0 where masked


def gae(
    rewards: Array, discounts: Array, values: Array, gae_lambda: float | Array, mask: Array
) -> GAE:
    """Computes generalised advantage estimates.

    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", eq. 16: A_t = delta_t + discount_t lambda A_{t+1},
    delta_t = r_t + discount_t V_{t+1} - V_t. Gradients are stopped.

    Args:
      rewards: [T, B].
      discounts: [T, B].
      values: [T + 1, B].
      gae_lambda: scalar or [T, B], in [0, 1].
      mask: [T, B], False where there is no transition.

    Returns:
      Advantages and targets.

    Raises:
      ValueError: the shapes do not match.
    """
    rewards, discounts, values, valid = _check("gae", rewards, discounts, values, mask)
    deltas = _td_errors(rewards, discounts, values, valid)
    trace = jnp.where(valid, discounts * gae_lambda, 0.0)
    advantages = _accumulate(deltas, trace)
    return GAE(*jax.lax.stop_gradient((advantages, advantages + values[:-1])))


def vtrace(
    log_rhos: Array,
    rewards: Array,
    discounts: Array,
    values: Array,
    mask: Array,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
    vtrace_lambda: float = 1.0,
) -> VTrace:
    """Computes V-trace targets and policy-gradient advantages.

    Espeholt et al. 2018, "IMPALA", section 4.1 (eq. 1) and remark 2 for lambda: vs_t - V_t =
    rho_t delta_t + discount_t c_t (vs_{t+1} - V_{t+1}), with c_t = lambda min(clip_c, ratio). The
    advantage is min(clip_pg_rho, ratio) (r_t + discount_t q_{t+1} - V_t) with q the mixture
    lambda vs + (1 - lambda) V, which for lambda = 1 is the paper's vs and on-policy gives GAE.
    Gradients are stopped.

    Args:
      log_rhos: [T, B], log target over behaviour probability of the action taken.
      rewards: [T, B].
      discounts: [T, B].
      values: [T + 1, B], of the target network's critic.
      mask: [T, B], False where there is no transition.
      clip_rho: rho-bar, caps the weight of the TD error (the paper's 1).
      clip_c: c-bar, caps the trace (the paper's 1).
      clip_pg_rho: caps the weight of the advantage (the paper's 1).
      vtrace_lambda: lambda, in [0, 1].

    Raises:
      ValueError: the shapes do not match.
    """
    _same_shape("vtrace", "log_rhos", log_rhos, rewards)
    rewards, discounts, values, valid = _check("vtrace", rewards, discounts, values, mask)
    ratios = jnp.exp(jnp.asarray(log_rhos, jnp.float32))
    deltas = jnp.minimum(clip_rho, ratios) * _td_errors(rewards, discounts, values, valid)
    trace = jnp.where(valid, discounts * vtrace_lambda * jnp.minimum(clip_c, ratios), 0.0)
    # A masked ratio may be infinite, and inf * 0 is NaN.
    errors = _accumulate(jnp.where(valid, deltas, 0.0), trace)
    vs = errors + values[:-1]
    mixed = vtrace_lambda * vs[1:] + (1.0 - vtrace_lambda) * values[1:-1]
    q_next = jnp.concatenate([mixed, values[-1:]])
    advantages = jnp.minimum(clip_pg_rho, ratios) * (rewards + discounts * q_next - values[:-1])
    return VTrace(*jax.lax.stop_gradient((vs, jnp.where(valid, advantages, 0.0))))


def discounted_returns(rewards: Array, discounts: Array, values: Array, mask: Array) -> Array:
    """Computes G_t = r_t + discount_t G_{t+1} from G_T = values[T], [T, B].

    At the last step of a truncated episode, and at the end of the unroll, it bootstraps from
    ``values``; other values are not used. Shapes as in ``gae``.
    """
    rewards, discounts, values, valid = _check(
        "discounted_returns", rewards, discounts, values, mask
    )
    return _lambda_returns(rewards, discounts, values, 1.0, valid)


def lambda_returns(
    rewards: Array, discounts: Array, values: Array, lambda_: float | Array, mask: Array
) -> Array:
    """Computes G_t = r_t + discount_t ((1 - lambda) V_{t+1} + lambda G_{t+1}), [T, B].

    Sutton and Barto 2018, "Reinforcement learning", eq. 12.18 (TD(lambda) targets). ``lambda_`` is
    a scalar or [T, B]; the other shapes are as in ``gae``, and the targets of ``gae`` are the same
    numbers.
    """
    rewards, discounts, values, valid = _check("lambda_returns", rewards, discounts, values, mask)
    return _lambda_returns(rewards, discounts, values, lambda_, valid)


def n_step_returns(
    rewards: Array, discounts: Array, bootstrap_values: Array, n: int, mask: Array
) -> Array:
    """Computes r_t + discount_t (r_{t+1} + ... discount_{t+n-1} V_{t+n}), [T, B].

    Sutton and Barto 2018, eq. 7.1. Where the episode or the unroll ends within n transitions, the
    sum ends there and bootstraps from the last step's value; it never crosses a boundary.

    Args:
      rewards: [T, B].
      discounts: [T, B].
      bootstrap_values: [T + 1, B], the value of every step, for example max Q of a target network.
      n: number of transitions, at least 1.
      mask: [T, B], False where there is no transition.

    Raises:
      ValueError: the shapes do not match, or n < 1.
    """
    if n < 1:
        raise ValueError(f"n_step_returns: n must be at least 1; got {n}.")
    rewards, discounts, values, valid = _check(
        "n_step_returns", rewards, discounts, bootstrap_values, mask
    )
    length = min(n, rewards.shape[0])

    def extend(returns: Array, _: None) -> tuple[Array, None]:
        longer = jnp.where(valid, rewards + discounts * returns[1:], values[:-1])
        return jnp.concatenate([longer, values[-1:]]), None

    returns, _ = jax.lax.scan(extend, values, None, length=length, unroll=min(length, 8))
    return returns[:-1]


def retrace(
    log_rhos: Array,
    rewards: Array,
    discounts: Array,
    q_taken: Array,
    values: Array,
    retrace_lambda: float | Array,
    mask: Array,
) -> Array:
    """Computes Retrace targets for the Q-values of the actions taken, [T, B].

    Munos et al. 2016, "Safe and efficient off-policy reinforcement learning", eq. 3 and 4:
    Q^ret_t = r_t + discount_t (V_{t+1} + c_{t+1} (Q^ret_{t+1} - Q_{t+1})) with
    c_t = lambda min(1, ratio_t). Gradients are stopped.

    Args:
      log_rhos: [T, B], log target over behaviour probability of the action taken at step t.
      rewards: [T, B].
      discounts: [T, B].
      q_taken: [T, B], Q(s_t, a_t).
      values: [T + 1, B], the expectation of Q(s_t, .) under the target policy.
      retrace_lambda: scalar or [T, B], in [0, 1].
      mask: [T, B], False where there is no transition.

    Raises:
      ValueError: the shapes do not match.
    """
    _same_shape("retrace", "log_rhos", log_rhos, rewards)
    _same_shape("retrace", "q_taken", q_taken, rewards)
    rewards, discounts, values, valid = _check("retrace", rewards, discounts, values, mask)
    q_taken = jnp.asarray(q_taken, jnp.float32)
    ratios = jnp.exp(jnp.minimum(0.0, jnp.asarray(log_rhos, jnp.float32)))
    traces = jnp.where(valid, retrace_lambda * ratios, 0.0)
    # Transition t has the trace of the action taken after it; the last transition has none.
    following = jnp.concatenate([traces[1:], jnp.zeros_like(traces[:1])])
    deltas = jnp.where(valid, rewards + discounts * values[1:] - q_taken, 0.0)
    errors = _accumulate(deltas, jnp.where(valid, discounts * following, 0.0))
    return jax.lax.stop_gradient(q_taken + errors)


def signed_hyperbolic(x: Array, eps: float = 1e-3) -> Array:
    """Rescales values: h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x.

    Pohlen et al. 2018, "Observe and look further", proposition A.2; eps as in R2D2.
    """
    x = jnp.asarray(x, jnp.float32)
    # |x| / (sqrt(|x| + 1) + 1) equals sqrt(|x| + 1) - 1, without cancellation near 0.
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + eps * x


def signed_parabolic(x: Array, eps: float = 1e-3) -> Array:
    """The inverse of ``signed_hyperbolic`` with the same eps.

    With s = sqrt(|h^-1(x)| + 1) the definition is eps s^2 + s - (1 + eps + |x|) = 0; its root minus
    1 (here with x's sign) is written without cancellation, because float32 loses most digits in the
    textbook form.
    """
    x = jnp.asarray(x, jnp.float32)
    root = jnp.sqrt((1.0 + 2.0 * eps) ** 2 + 4.0 * eps * jnp.abs(x))
    s_minus_1 = 2.0 * x / (root + 1.0 + 2.0 * eps)
    return s_minus_1 * (jnp.abs(s_minus_1) + 2.0)


def symlog(x: Array) -> jax.Array:
    """Rescales values: sign(x) log(1 + |x|), Hafner et al. 2023, arXiv:2301.04104, equation 9."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Array) -> jax.Array:
    """The inverse of ``symlog``: sign(x) (exp(|x|) - 1)."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def _accumulate(deltas: Array, trace: Array) -> Array:
    """Solves x_t = delta_t + trace_t x_{t+1} with x_T = 0, over [T, B]."""

    def body(following: jax.Array, now: PyTree) -> tuple[jax.Array, jax.Array]:
        current = now[0] + now[1] * following
        return current, current

    _, result = jax.lax.scan(
        body, jnp.zeros_like(deltas[0]), (deltas, trace), reverse=True, unroll=8
    )
    return result


def _lambda_returns(
    rewards: Array, discounts: Array, values: Array, lambda_: float | Array, valid: Array
) -> Array:
    step = jnp.where(valid, rewards + discounts * (1.0 - lambda_) * values[1:], values[:-1])
    trace = jnp.where(valid, discounts * lambda_, 0.0)
    # The bootstrap enters as one more row of the recursion.
    steps = jnp.concatenate([step, values[-1:]])
    return _accumulate(steps, jnp.concatenate([trace, jnp.zeros_like(trace[:1])]))[:-1]


def _td_errors(rewards: Array, discounts: Array, values: Array, valid: Array) -> Array:
    """Returns one-step TD errors, 0 where there is no transition."""
    return jnp.where(valid, rewards + discounts * values[1:] - values[:-1], 0.0)


def _check(
    where: str, rewards: Array, discounts: Array, values: Array, mask: Array
) -> tuple[Array, Array, Array, Array]:
    """Checks shapes; returns float32 arrays and the mask as bool."""
    shape = jnp.shape(rewards)
    if len(shape) != 2 or shape[0] < 1:
        raise ValueError(f"{where}: rewards must be [T, B] with T >= 1; got shape {shape}.")
    _same_shape(where, "discounts", discounts, rewards)
    _same_shape(where, "mask", mask, rewards)
    if jnp.shape(values) != (shape[0] + 1, shape[1]):
        raise ValueError(
            f"{where}: values must be [T + 1, B] = {(shape[0] + 1, shape[1])}, one row more than "
            f"rewards; got shape {jnp.shape(values)}. Append the value of the last step."
        )
    as_float = (jnp.asarray(x, jnp.float32) for x in (rewards, discounts, values))
    return (*as_float, jnp.asarray(mask) != 0)  # type: ignore[return-value]


def _same_shape(where: str, name: str, array: Array, rewards: Array) -> None:
    if jnp.shape(array) != jnp.shape(rewards):
        raise ValueError(
            f"{where}: {name} must have the shape of rewards, {jnp.shape(rewards)}; got shape "
            f"{jnp.shape(array)}."
        )
