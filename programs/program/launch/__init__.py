"""Ways to run a program's nodes, one module for each; `rlstack.programs.run.launch` chooses one.

Each module has a function that takes the setup and a display. It returns when all nodes have ended:
SIGINT or SIGTERM if one was received, else 0.
"""
