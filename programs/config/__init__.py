"""The config of an experiment: its dataclasses, its JSON form, and the presets.

Options or a file come in, an `experiment.Experiment` that was checked goes out. Open
`experiment.py` first; each group of options has a file of its own. `presets` are ready experiments.

May import: rlstack, rlstack.agents, rlstack.configs.
"""
