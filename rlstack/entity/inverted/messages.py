"""Messages of the game protocol, encoded and decoded, for both sides of the socket.

In messages an entity is its *index*: types in the order of the space, `GLOBAL` last. Ids stay in
the game.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlstack.entity.environment import (
    ActionMask,
    Actions,
    CategoricalAction,
    CategoricalMask,
    EntityID,
    GlobalCategoricalMask,
    SelectEntityAction,
    SelectEntityMask,
    num_entities,
)
from rlstack.entity.inverted.game import ScoredObservation
from rlstack.entity.inverted.wire import (
    MAGIC,
    VERSION,
    Kind,
    Reader,
    WireError,
    Writer,
    printable,
)
from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    ActionType,
    Categorical,
    EntityType,
    GlobalCategorical,
    ObsSpace,
    SelectEntity,
    Slots,
)

_KINDS: tuple[type, ...] = (Categorical, GlobalCategorical, SelectEntity)
_MAX_CAPACITY = 1 << 16
_MAX_METRICS = 1000  # maximum number of metrics in one observation
HELLO_HEAD = 1 + len(MAGIC) + 4  # bytes: the kind of frame, and the same in every version


class Hello(NamedTuple):
    """The first message of a game."""

    token: str  # identifies the game; it receives the token when it is started
    name: str
    num_agents: int
    obs_space: ObsSpace
    action_space: ActionSpace


def write_hello(hello: Hello) -> Writer:
    """Returns the frame of a HELLO."""
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


def check_version(data: Reader) -> None:
    """Reads how a HELLO or MANY_HELLO of this version begins, which are `HELLO_HEAD` bytes.

    Raises:
      WireError: the frame does not begin so.
    """
    if data.kind not in (Kind.HELLO, Kind.MANY_HELLO):
        raise WireError(f"a game must begin with HELLO; got {data.kind.name}")
    magic = data.array(len(MAGIC), "u1").tobytes()
    if magic != MAGIC:
        raise WireError(f"HELLO: must begin with {MAGIC!r}; got {magic!r}")
    version = data.u32()
    if version != VERSION:
        raise WireError(
            f"HELLO: the protocol's version must be {VERSION}; the game has version {version}. "
            "Build it with the client of this release"
        )


def read_token(data: Reader) -> str:
    """Returns the token of a HELLO or MANY_HELLO, which shows that the sender is a game, or "".

    Raises:
      WireError: the frame does not begin like a HELLO of this version.
    """
    check_version(data)
    return data.text()


def read_hello(data: Reader) -> Hello:
    """Returns the contents of a HELLO.

    Raises:
      WireError: the message is not a HELLO, has another version, or its spaces are not valid.
    """
    if data.kind is Kind.MANY_HELLO:
        raise WireError("the program has many environments; it must play one game here")
    token, name, num_agents = read_token(data), data.text(), data.u32()
    obs_space, action_space = read_spaces(data)
    data.end()
    return Hello(token, name, num_agents, obs_space, action_space)


def read_spaces(data: Reader) -> tuple[ObsSpace, ActionSpace]:
    """Returns the spaces in a HELLO or MANY_HELLO.

    Raises:
      WireError: the spaces are not valid.
    """
    try:
        entities = {}
        for _ in range(data.u32()):
            kind, capacity = data.text(), data.count("a capacity", _MAX_CAPACITY)
            entities[kind] = EntityType(data.texts(), capacity)
        obs_space = ObsSpace(entities, data.texts())
        actions: dict[str, ActionType] = {}
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
    except ValueError as error:  # from the spaces themselves
        raise WireError(f"HELLO: {printable(str(error), 400)}") from None
    return obs_space, actions


class MessageCodec:
    """Encodes and decodes observations and actions of one pair of spaces."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        self._obs_space, self._actions = obs_space, list(action_space.items())
        self._has_global = Slots(obs_space, action_space).has_global

    def write_observation(self, out: Writer, observation: ScoredObservation) -> list[EntityID]:
        """Appends a valid observation; returns the ids of its entities by index."""
        out.f64(observation.score)
        names: list[EntityID] = []
        of_type: dict[str, range] = {}
        for name, kind in self._obs_space.entities.items():
            rows = observation.features.get(name, 0)
            count = num_entities(rows)
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
                _write_mask(out, observation.actions[name], of_type, index_of)
        out.u32(len(observation.metrics))
        for name, value in observation.metrics.items():
            out.text(name)
            out.f64(value)
        return [*names, GLOBAL] if self._has_global else names

    def read_observation(self, data: Reader, truncated: bool = False) -> ScoredObservation:
        """Reads an observation; the ids of its entities are their indices.

        The caller must still validate it.

        Raises:
          WireError: the message's layout does not fit the spaces.
        """
        score = data.f64()
        features: dict[str, np.ndarray] = {}
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
        masks: dict[str, ActionMask] = {}
        for _ in range(data.count("the number of actions", len(self._actions))):
            number = data.count("an action's number", len(self._actions) - 1)
            name, action = self._actions[number]
            masks[name] = _read_mask(data, action, total)
        metrics = {}
        for _ in range(data.count("the number of metrics", _MAX_METRICS)):
            key = data.text()
            metrics[key] = data.f64()
        return ScoredObservation(
            features, masks, global_features, ids, visible,
            truncated=truncated, metrics=metrics, score=score,
        )  # fmt: skip

    def write_actions(self, out: Writer, actions: Actions) -> None:
        """Appends actions; the actors' ids are their indices. `GLOBAL` is written as 0."""
        for name, _ in self._actions:
            action = actions[name]
            chosen = (
                action.actees if isinstance(action, SelectEntityAction) else action.indices.tolist()
            )
            out.u32s([0 if actor == GLOBAL else actor for actor in action.actors])
            out.array(chosen, "<u4")  # type: ignore[arg-type]  # ids of actees are indices here

    def read_actions(self, data: Reader, ids: Sequence[EntityID]) -> Actions:
        """Reads actions.

        Args:
          data: the frame.
          ids: ids of the entities by index.

        Raises:
          WireError: there is no such entity or choice.
        """
        actions: dict[str, CategoricalAction | SelectEntityAction] = {}
        for name, kind in self._actions:
            actors = data.u32s("the number of actors", kind.capacity)
            chosen = data.array(len(actors), "<u4").astype(np.int64)
            limit = len(ids) if isinstance(kind, SelectEntity) else len(kind.choices)
            if any(actor >= len(ids) for actor in actors) or (chosen >= limit).any():
                raise WireError(
                    f"ACT: {name!r}: actors must be less than {len(ids)} and choices less than "
                    f"{limit}; got actors {actors}, choices {chosen}"
                )
            acting = [ids[actor] for actor in actors]
            if isinstance(kind, SelectEntity):
                actions[name] = SelectEntityAction(acting, [ids[i] for i in chosen.tolist()])
                continue
            if isinstance(kind, GlobalCategorical):
                acting = [GLOBAL] * len(acting)
            labels = [kind.choices[i] for i in chosen.tolist()]
            actions[name] = CategoricalAction(acting, chosen, labels)
        return actions


def _write_mask(
    out: Writer, given: ActionMask, of_type: Mapping[str, range], index_of: Mapping[EntityID, int]
) -> None:
    if not isinstance(given, GlobalCategoricalMask):
        out.u32s(_indices(given.actor_ids, given.actor_types, of_type, index_of))
    if isinstance(given, SelectEntityMask):
        out.u32s(_indices(given.actee_ids, given.actee_types, of_type, index_of))
    out.u8(given.mask is not None)
    if given.mask is not None:
        out.array(given.mask, "u1")


def _indices(
    ids: Sequence[EntityID] | None,
    types: Sequence[str] | None,
    of_type: Mapping[str, range],
    index_of: Mapping[EntityID, int],
) -> list[int]:
    if ids is not None:
        return [index_of[entity] for entity in ids]
    return [index for name in (of_type if types is None else types) for index in of_type[name]]


def _read_mask(data: Reader, action: ActionType, total: int) -> ActionMask:
    if isinstance(action, GlobalCategorical):
        return GlobalCategoricalMask(data.flags(len(action.choices)) if data.flag() else None)
    actors = data.u32s("the number of actors", total)
    if isinstance(action, Categorical):
        shape = (len(actors), len(action.choices))
        return CategoricalMask(actors, None, _read_flags(data, shape))
    actees = data.u32s("the number of actees", total)
    mask = _read_flags(data, (len(actors), len(actees)))
    return SelectEntityMask(actors, None, actees, None, mask)


def _read_flags(data: Reader, shape: tuple[int, int]) -> np.ndarray | None:
    return data.flags(shape[0] * shape[1]).reshape(shape) if data.flag() else None
