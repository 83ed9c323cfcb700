"""Which environments the actors of a program play."""

from __future__ import annotations

import dataclasses

import pytest

from programs.nodes.actor import EnvGauges, env_seed
from programs.presets import preset

EXPERIMENT = dataclasses.replace(preset("cartpole-ppo"), seed=7)


@pytest.mark.parametrize(
    ("rank", "incarnation", "role", "seed"),
    [
        (0, 0, "env", 195554056),
        (0, 3, "env", 166079163),
        (1, 0, "env", 415318468),
        (2, 0, "env", 345793112),
        (2, 3, "env", 305303309),
        (0, 0, "seating", 1023575629),
        (2, 0, "seating", 492071239),
    ],
)
def test_seeds_of_an_actor_are_these_numbers(rank, incarnation, role, seed):
    """The numbers are ``SeedSequence([7, crc32(b"env/2") % 2**31, incarnation])``, of 30 bits."""
    assert env_seed(EXPERIMENT, rank, incarnation, role) == seed


def test_no_two_actors_play_the_same_environments():
    """Environment i of a pool has the pool's seed plus i."""
    played = [
        env_seed(EXPERIMENT, rank, incarnation, role) + i
        for rank in range(8)
        for incarnation in range(3)
        for role in ("env", "seating")
        for i in range(64)
    ]
    assert len(set(played)) == len(played)


class Reporting:
    """A coordinator's client, and a pool, whose counters are set by the test."""

    last_restart = "it hung"

    def __init__(self):
        self.counters, self.counted, self.notes = {}, [], []

    def stats(self):
        return self.counters

    def count(self, **totals):
        self.counted.append(totals)

    def note(self, text):
        self.notes.append(text)


def test_an_actor_reports_the_counters_of_its_pool():
    pool = Reporting()
    gauges = EnvGauges(pool, lambda: {"replay/size": 8.0}, pool, EXPERIMENT)
    assert gauges() == {"replay/size": 8.0} and not pool.counted
    pool.counters = {"restarts": 2, "masks_without_choice": 5}
    gauges()
    assert pool.counted == [{"env_masks_without_choice": 5}, {"env_restarts": 2}]
    assert len(pool.notes) == 1 and "(2 so far)" in pool.notes[0]
