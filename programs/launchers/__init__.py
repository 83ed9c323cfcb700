"""Ways to run a program's nodes, a module each; `programs.run.launch` chooses one.

Each has a function of the setup and a display, which returns when all nodes have ended: SIGINT or
SIGTERM if one came, else 0.

May import: programs, programs.nodes, programs.topologies, programs.tracking, rlstack.replay,
rlstack.rpc, rlstack.storage.
"""
