"""rlstack: stateless agents, and the drivers that run them in any topology.

The modules beside this file are the ground floor: the records that travel, the Agent contract,
optimizers, and the checks of configs. Pure.

May import: nothing.
"""
