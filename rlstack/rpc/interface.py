"""What other nodes may call: a class marks its remote methods, or a mapping names them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

REMOTE_MARK = "_remote_method"  # the attribute of a method that `remote` has marked
Function = TypeVar("Function", bound=Callable[..., Any])


class Remote(NamedTuple):
    """The rules of a remote method."""

    idempotent: bool = False  # running it twice has the effect of running it once
    prompt: bool = False  # it does not block, so that other calls can wait until it returns


Interface = Mapping[str, Remote] | type


def remote(*, idempotent: bool = False, prompt: bool = False) -> Callable[[Function], Function]:
    """Marks a method as one that other nodes may call.

    Args:
      idempotent: whether running the method twice has the effect of running it once. Then its
          answers are not kept.
      prompt: whether the method does not block, for example because it returns a future. Then
          requests that come together may be served by one thread, one after the other, which is
          cheaper than waking a thread for each.
    """

    def mark(function: Function) -> Function:
        setattr(function, REMOTE_MARK, Remote(idempotent, prompt))
        return function

    return mark


def is_client(x: object) -> bool:
    """Whether `x` is a ``courier.Client``; imports nothing."""
    courier = sys.modules.get("courier")
    return courier is not None and isinstance(x, courier.Client)
