"""The shapes of the padded arrays, as specs that pools, replay and networks are built from.

What a network must know beside shapes stands behind a colon in a spec's name: the features of a
type, comma-separated, at ``features``; the first slot of a type at ``visible``; the kind of an
action in the action spec. `rlstack.networks.ragged` reads it there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    Categorical,
    GlobalCategorical,
    ObsSpace,
    SelectEntity,
    Slots,
)

_KINDS = {
    Categorical: "categorical",
    GlobalCategorical: "global_categorical",
    SelectEntity: "select_entity",
}


def num_choices(kind: Any, slots: Slots) -> int:
    """Returns among how many one actor of an action type chooses: choices, or slots."""
    return slots.total if isinstance(kind, SelectEntity) else len(kind.choices)


def observation_spec(
    obs_space: ObsSpace, action_space: ActionSpace, slots: Slots
) -> dict[str, dict[str, specs.Array]]:
    """Returns the specs of ``Table.observe``'s arrays, which it documents."""
    kinds = obs_space.entities
    features = {t: (k.capacity, k.features) for t, k in kinds.items() if k.features}
    if obs_space.global_features:
        features[GLOBAL] = (1, obs_space.global_features)
    return {
        "features": {
            t: specs.Array((rows, len(names)), np.float32, f"features.{t}: {','.join(names)}")
            for t, (rows, names) in features.items()
        },
        "count": {
            t: specs.BoundedArray((), np.int32, 0, kind.capacity, f"count.{t}")
            for t, kind in kinds.items()
        },
        "visible": {
            t: specs.Array((kind.capacity,), np.bool_, f"visible.{t}: {slots.offsets[t]}")
            for t, kind in kinds.items()
        },
        "actors": {
            a: specs.BoundedArray((kind.capacity,), np.int32, -1, slots.total - 1, f"actors.{a}")
            for a, kind in action_space.items()
        },
        "action_mask": {
            a: specs.Array(
                (kind.capacity * num_choices(kind, slots),), np.bool_, f"action_mask.{a}"
            )
            for a, kind in action_space.items()
        },
    }


def action_spec(action_space: ActionSpace, slots: Slots) -> dict[str, specs.BoundedArray]:
    """Returns the specs of the choices that ``Table.act`` takes."""
    return {
        a: specs.BoundedArray(
            (kind.capacity,),
            np.int32,
            0,
            num_choices(kind, slots) - 1,
            f"actions.{a}: {_KINDS[type(kind)]}",
        )
        for a, kind in action_space.items()
    }


def require_use(obs_space: ObsSpace, action_space: ActionSpace, name: str) -> None:
    """Refuses spaces in which nobody can act.

    Raises:
      ValueError: there are no actions, or one that needs entities where there are none.
    """
    if not action_space:
        raise ValueError(f"{name}: action_space: must have an action; got none. Add one.")
    for action, kind in action_space.items():
        if isinstance(kind, SelectEntity | Categorical) and not obs_space.entities:
            raise ValueError(
                f"{name}: action {action!r}: must have entities to act; got an obs_space without "
                "types. Declare entity types, or make it a GlobalCategorical."
            )
