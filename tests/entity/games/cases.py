"""Helpers for the tests of the games' rules."""

from rlstack.entity.games import GAMES
from rlstack.entity.scripted import as_actions


def make(name, **options):
    return GAMES[name].game(**options)


def act(game, observation, **choices):
    return game.act(as_actions(game, observation, choices))
