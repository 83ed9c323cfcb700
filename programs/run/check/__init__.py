"""Checks of a user's own agents and environments, as the project's contract tests check its own.

An experiment or an environment comes in; a `report.Report` of what holds goes out. Open `agent.py`
or `env.py` first.
"""
