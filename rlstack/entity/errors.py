"""The wording of errors about observations and about options of games."""

from __future__ import annotations

from typing import NoReturn

from rlstack.checks import EnvError


def refuse(where: str, what: str, rule: str, got: object, fix: str) -> NoReturn:
    """Raises the error for an observation or action that breaks a rule.

    Args:
      where: name of the environment.
      what: the entity type or action type, and the entity if a single one is wrong.
      rule: the condition that must hold.
      got: the given value.
      fix: advice for the author of the game.

    Raises:
      EnvError: always. It is a ValueError that pools do not retry.
    """
    text = str(got)
    raise EnvError(f"{where}: {what}: {rule}; got {text:.200}{'...' * (len(text) > 200)}. {fix}")


def refuse_too_many(where: str, what: str, of: str, capacity: int, got: int) -> NoReturn:
    """Raises the error for more entities or actors than the space declares.

    Raises:
      EnvError: always.
    """
    rule = f"must have at most {capacity} {of}, its capacity"
    refuse(where, what, rule, got, "Declare a larger capacity in the space.")


def require_in_range(game: str, **options: tuple[int, int] | tuple[int, int, int]) -> None:
    """Checks options of a game, each given as (value, minimum) or (value, minimum, maximum).

    Raises:
      ValueError: an option is out of range.
    """
    for name, (value, minimum, *maximum) in options.items():
        if value < minimum or (maximum and value > maximum[0]):
            rule = f"in {minimum}..{maximum[0]}" if maximum else f"at least {minimum}"
            raise ValueError(f"{game}: {name} must be {rule}; got {value}.")
