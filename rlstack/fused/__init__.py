"""Acting, environments in JAX, replay and learning as one function that XLA compiles.

The agents and their contract are those of every other driver. `loop` is the function; `acting`,
`queue` and `ring` are its parts. They do what `rlstack.acting`, a fifo replay, and a uniform or
prioritized one do elsewhere, by the same rules and in the same order. `several` is the function for
a policy set, with `seats` and `history` for acting in it.

Pure.

May import: rlstack, rlstack.configs, rlstack.exploration, rlstack.jax_envs, rlstack.networks,
rlstack.replay, rlstack.specs.
"""
