"""What the frames of the game protocol say, for both sides of the socket.

On the wire an entity is its *index*: types in the order of the space, `GLOBAL` last. So games in
other languages keep names to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstack.entity.environment import (
    ActionMask,
    CategoricalAction,
    CategoricalMask,
    EntityID,
    GlobalCategoricalMask,
    SelectEntityAction,
    SelectEntityMask,
)
from rlstack.entity.inverted.agents import Actions, ScoredObservation
from rlstack.entity.inverted.wire import MAGIC, VERSION, Kind, Reader, WireError, Writer
from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    Categorical,
    EntityType,
    GlobalCategorical,
    ObsSpace,
    SelectEntity,
    Slots,
)

_KINDS: tuple[type, ...] = (Categorical, GlobalCategorical, SelectEntity)
_MAX_CAPACITY = 1 << 16


class Hello(NamedTuple):
    """How a game introduces itself."""

    token: str  # what it was started with, which shows that it is the one
    name: str
    num_agents: int
    obs_space: ObsSpace
    action_space: ActionSpace


def write_hello(hello: Hello) -> Writer:
    """Returns the frame of an introduction."""
    out = Writer(Kind.HELLO)
    out.array(np.frombuffer(MAGIC, np.uint8), "u1")
    out.u32(VERSION)
    out.text(hello.token)
    out.text(hello.name)
    out.u32(hello.num_agents)
    out.u32(len(hello.obs_space.entities))
    for name, kind in hello.obs_space.entities.items():
        out.text(name)
        out.u32(kind.capacity)
        out.texts(kind.features)
    out.texts(hello.obs_space.global_features)
    out.u32(len(hello.action_space))
    for name, action in hello.action_space.items():
        out.text(name)
        out.u8(_KINDS.index(type(action)))
        out.u32(action.capacity)
        out.texts(() if isinstance(action, SelectEntity) else action.choices)
    return out


def read_hello(data: Reader) -> Hello:
    """Returns what an introduction says.

    Raises:
      WireError: it is none, of another version, or its spaces are none.
    """
    if data.kind is not Kind.HELLO:
        raise WireError(f"a game must begin with HELLO; got {data.kind.name}")
    magic = data.array(len(MAGIC), "u1").tobytes()
    if magic != MAGIC:
        raise WireError(f"HELLO: must begin with {MAGIC!r}; got {magic!r}")
    version = data.u32()
    if version != VERSION:
        raise WireError(
            f"HELLO: the protocol's version must be {VERSION}; the game speaks {version}. Build "
            "it with the client of this release"
        )
    token, name, num_agents = data.text(), data.text(), data.u32()
    try:
        entities = {}
        for _ in range(data.u32()):
            kind, capacity = data.text(), data.count("a capacity", _MAX_CAPACITY)
            entities[kind] = EntityType(data.texts(), capacity)
        obs_space = ObsSpace(entities, data.texts())
        actions: dict[str, Any] = {}
        for _ in range(data.u32()):
            action, number = data.text(), data.u8()
            capacity, choices = data.count("a capacity", _MAX_CAPACITY), data.texts()
            if number >= len(_KINDS):
                raise WireError(f"HELLO: a kind of action must be 0, 1 or 2; got {number}")
            which = _KINDS[number]
            if which is SelectEntity:
                actions[action] = SelectEntity(capacity)
            elif which is GlobalCategorical:
                actions[action] = GlobalCategorical(choices)
            else:
                actions[action] = Categorical(choices, capacity)
    except WireError:
        raise
    except ValueError as error:  # what the spaces themselves refuse
        raise WireError(f"HELLO: {error}") from None
    data.end()
    return Hello(token, name, num_agents, obs_space, actions)


class Messages:
    """Observations and actions of one pair of spaces."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        self._obs_space, self._actions = obs_space, list(action_space.items())
        self._has_global = Slots(obs_space, action_space).has_global

    # Observations.

    def write_observation(self, out: Writer, observation: ScoredObservation) -> list[EntityID]:
        """Appends an observation, which has been checked; returns its entities' ids by index."""
        out.f64(observation.score)
        names: list[EntityID] = []
        of_type: dict[str, range] = {}
        for name, kind in self._obs_space.entities.items():
            rows = observation.features.get(name, 0)
            count = int(rows) if isinstance(rows, int | np.integer) else len(rows)
            out.u32(count)
            if kind.features and count:
                out.array(rows, "<f4")
            of_type[name] = range(len(names), len(names) + count)
            names += observation.ids.get(name) or [(name, row) for row in range(count)]
        if self._obs_space.global_features:
            out.array(observation.global_features, "<f4")
        for name in self._obs_space.entities:
            visible = observation.visible.get(name)
            out.u8(visible is not None)
            if visible is not None:
                out.array(visible, "u1")
        index_of = {name: index for index, name in enumerate(names)}
        out.u32(len(observation.actions))
        for number, (name, _) in enumerate(self._actions):
            if name in observation.actions:
                out.u32(number)
                _write_offer(out, observation.actions[name], of_type, index_of)
        out.u32(len(observation.metrics))
        for name, value in observation.metrics.items():
            out.text(name)
            out.f64(value)
        return [*names, GLOBAL] if self._has_global else names

    def read_observation(self, data: Reader, truncated: bool = False) -> ScoredObservation:
        """Takes an observation; its entities' ids are their indices.

        Raises:
          WireError: it does not fit the spaces. What it says is not checked.
        """
        score = data.f64()
        features: dict[str, Any] = {}
        ids: dict[str, list[int]] = {}
        total = 0
        for name, kind in self._obs_space.entities.items():
            count = data.count(f"the number of {name!r}", kind.capacity)
            width = len(kind.features)
            features[name] = data.array(count * width, "<f4").reshape(count, width)
            ids[name] = list(range(total, total + count))
            total += count
        global_features = data.array(len(self._obs_space.global_features), "<f4")
        visible = {name: data.flags(len(rows)) for name, rows in features.items() if data.flag()}
        offers: dict[str, ActionMask] = {}
        for _ in range(data.count("the number of actions", len(self._actions))):
            number = data.count("an action's number", len(self._actions) - 1)
            name, action = self._actions[number]
            offers[name] = _read_offer(data, action, total)
        metrics = {}
        for _ in range(data.u32()):
            key = data.text()
            metrics[key] = data.f64()
        return ScoredObservation(
            features, offers, global_features, ids, visible,
            truncated=truncated, metrics=metrics, score=score,
        )  # fmt: skip

    # Actions.

    def write_actions(self, out: Writer, actions: Actions) -> None:
        """Appends actions of actors whose ids are their indices; `GLOBAL` has none and is 0."""
        for name, _ in self._actions:
            action = actions[name]
            chosen = (
                action.actees if isinstance(action, SelectEntityAction) else action.indices.tolist()
            )
            actors = [0 if actor == GLOBAL else actor for actor in action.actors]
            out.u32s(actors)  # type: ignore[arg-type]  # these ids are indices
            out.array(chosen, "<u4")

    def read_actions(self, data: Reader, names: Sequence[EntityID]) -> Actions:
        """Takes actions of actors that are called ``names``, by index.

        Raises:
          WireError: there are no such entities or choices.
        """
        actions: dict[str, CategoricalAction | SelectEntityAction] = {}
        for name, kind in self._actions:
            actors = data.u32s("the number of actors", kind.capacity)
            chosen = data.array(len(actors), "<u4").astype(np.int64)
            room = len(names) if isinstance(kind, SelectEntity) else len(kind.choices)
            if any(actor >= len(names) for actor in actors) or (chosen >= room).any():
                raise WireError(f"ACT: {name!r} must name what is there; got {actors}, {chosen}")
            who = [names[actor] for actor in actors]
            if isinstance(kind, SelectEntity):
                actions[name] = SelectEntityAction(who, [names[i] for i in chosen.tolist()])
                continue
            if isinstance(kind, GlobalCategorical):
                who = [GLOBAL] * len(who)
            labels = [kind.choices[i] for i in chosen.tolist()]
            actions[name] = CategoricalAction(who, chosen, labels)
        return actions


def _write_offer(
    out: Writer, offer: Any, of_type: Mapping[str, range], index_of: Mapping[EntityID, int]
) -> None:
    if not isinstance(offer, GlobalCategoricalMask):
        out.u32s(_who(offer.actor_ids, offer.actor_types, of_type, index_of))
    if isinstance(offer, SelectEntityMask):
        out.u32s(_who(offer.actee_ids, offer.actee_types, of_type, index_of))
    out.u8(offer.mask is not None)
    if offer.mask is not None:
        out.array(offer.mask, "u1")


def _who(
    ids: Sequence[EntityID] | None,
    types: Sequence[str] | None,
    of_type: Mapping[str, range],
    index_of: Mapping[EntityID, int],
) -> list[int]:
    if ids is not None:
        return [index_of[entity] for entity in ids]
    return [index for name in (of_type if types is None else types) for index in of_type[name]]


def _read_offer(data: Reader, action: Any, total: int) -> ActionMask:
    if isinstance(action, GlobalCategorical):
        return GlobalCategoricalMask(data.flags(len(action.choices)) if data.flag() else None)
    actors = data.u32s("the number of actors", total)
    if isinstance(action, Categorical):
        shape = (len(actors), len(action.choices))
        return CategoricalMask(actors, None, _read_mask(data, shape))
    actees = data.u32s("the number of actees", total)
    mask = _read_mask(data, (len(actors), len(actees)))
    return SelectEntityMask(actors, None, actees, None, mask)


def _read_mask(data: Reader, shape: tuple[int, int]) -> np.ndarray | None:
    return data.flags(shape[0] * shape[1]).reshape(shape) if data.flag() else None
