"""What the messages about wrong observations look like."""

from __future__ import annotations

from typing import Any, NoReturn

from rlstack.envs.adapters import EnvError


def refuse(where: str, what: str, rule: str, came: Any, way: str) -> NoReturn:
    """Raises the error for an observation that breaks a rule.

    Args:
      where: the environment.
      what: the type or action, and the entity where one is to blame.
      rule: that it breaks.
      came: instead.
      way: out of it.

    Raises:
      EnvError: a ValueError; pools do not try again.
    """
    came = str(came)
    raise EnvError(f"{where}: {what}: {rule}; got {came:.200}{'...' * (len(came) > 200)}. {way}")


def no_room(where: str, what: str, of: str, capacity: int, came: int) -> NoReturn:
    """Raises the error for more entities or actors than the space declares.

    Raises:
      EnvError: always.
    """
    refuse(
        where,
        what,
        f"must have at most {capacity} {of}, its capacity",
        came,
        "Declare a larger capacity in the space.",
    )
