"""Datasets of Minari (https://minari.farama.org), read and written by its library.

A Minari dataset is copied once into a dataset of rlstack, in the user's cache, so that its steps
are checked, mapped into memory and drawn as those of any other. An episode of Minari that ends
without a termination is truncated. Extras are Minari's infos, and an entry of the metadata has
their spec; infos of datasets without that entry are not read. Nothing is downloaded here.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dm_env import specs

from rlstack.envs.adapters import FromZero, leaf_spaces, specs_of
from rlstack.envs.nest import Nest
from rlstack.envs.values import own, own_spec, start_of
from rlstack.storage.datasets import header as headers
from rlstack.storage.datasets.header import DatasetError
from rlstack.storage.datasets.reader import Dataset
from rlstack.storage.datasets.writer import DatasetWriter
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep, Transition

if TYPE_CHECKING:
    from gymnasium import spaces

PREFIX = "minari:"
_EXTRAS = "rlstack_extras"  # key in Minari's metadata: the spec of the infos that are extras, JSON


class _Acted(NamedTuple):
    action: PyTree


def located(name: str) -> Path:
    """Returns the absolute path of a dataset, given as a directory or as ``minari:NAME``.

    Raises:
      DatasetError: Minari is not installed, or has no such dataset on this machine.
    """
    return _copied(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else Path(name).absolute()


def check_name(name: str) -> None:
    """Checks that `export` may make a dataset of this name.

    Raises:
      DatasetError: Minari is not installed, the name has not its form, or there is such a dataset.
    """
    _library()
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage.datasets_root_dir import get_dataset_path

    try:
        parse_dataset_id(name)
        why = "there is one" if get_dataset_path(name).exists() else ""
    except ValueError as error:
        why = str(error)
    if why:
        raise _refused(name, why)


def _refused(name: str, why: object) -> DatasetError:
    return DatasetError(
        f"Dataset: Minari must take the name {name}; it refuses: {why} Give a new name such as "
        "hopper/mine-v0 with --out."
    )


def export(dataset: Dataset, name: str) -> Path:
    """Writes a dataset as one of Minari; returns its directory.

    Args:
      dataset: the dataset.
      name: a new name, such as ``hopper/mine-v0``.

    Raises:
      DatasetError: Minari is not installed or refuses the name, or the extras are no dict.
    """
    library, spec = _library(), dataset.header.spec
    import gymnasium

    shows = bool(Nest(spec.extras).leaves)
    if shows and not isinstance(spec.extras, Mapping):
        raise DatasetError(
            "Dataset: extras must be a dict, as Minari's infos are; got "
            f"{type(spec.extras).__name__}. Give the environment's extras names."
        )
    buffers = _buffers(dataset)
    env = str(dataset.header.env["name"])
    both = _space(spec.observation), _space(spec.action)
    described = None
    if env in gymnasium.registry:
        described = gymnasium.Env()  # Minari would make the environment, which may need MuJoCo
        described.spec = gymnasium.spec(env)
    try:
        with warnings.catch_warnings():  # of what it would like to know besides
            warnings.simplefilter("ignore", UserWarning)
            library.create_dataset_from_buffers(
                name,
                buffers,
                env=described,
                observation_space=both[0],
                action_space=both[1],
                algorithm_name=str(dataset.header.source.get("agent", "")),
                description=f"Recorded by rlstack in {env}.",
            )
    except ValueError as error:
        raise _refused(name, error) from error
    storage = library.load_dataset(name).storage
    if shows:
        storage.update_metadata({_EXTRAS: json.dumps(headers.spec_to_json(spec.extras))})
    return Path(storage.data_path).parent


def _buffers(dataset: Dataset) -> list[Any]:
    """Returns the episodes of a dataset as Minari's buffers."""
    from minari.data_collector import EpisodeBuffer

    spec = dataset.header.spec
    timestep, action = dataset.read(np.arange(dataset.header.steps))
    observation, action = _own(spec.observation, timestep.observation), _own(spec.action, action)
    extras = _own(spec.extras, timestep.extras)
    last = np.flatnonzero(dataset.step_type == StepType.LAST)
    buffers = []
    for number, (begin, end) in enumerate(zip([0, *(last[:-1] + 1)], last, strict=True)):
        ends = np.arange(end - begin) == end - begin - 1
        terminal = timestep.discount[end] == 0
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=_sliced(observation, slice(begin, end + 1)),
                actions=_sliced(action, slice(begin, end)),
                rewards=timestep.reward[begin + 1 : end + 1],
                terminations=ends & terminal,
                truncations=ends & ~terminal,
                infos=_sliced(extras, slice(begin, end + 1)) if Nest(extras).leaves else None,
            )
        )
    return buffers


def _library() -> Any:
    try:
        import minari
    except ImportError as error:
        raise DatasetError(
            "Dataset: Minari must be installed for its datasets; it cannot be imported. "
            'Install it with pip install "rlstack[minari]".'
        ) from error
    return minari


def _copied(name: str) -> Path:
    """Returns the directory of a copy of a Minari dataset, which is made if there is none."""
    library = _library()
    try:
        dataset = library.load_dataset(name)
    except (FileNotFoundError, ValueError) as error:
        raise DatasetError(
            f"Dataset: Minari must have the dataset {name} on this machine; it has none. Download "
            f"it with: minari download {name}"
        ) from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Another dataset of this name, made later, may have the same metadata.
    files = sorted(path for path in Path(dataset.storage.data_path).rglob("*") if path.is_file())
    marks = [(str(path), stat.st_size, stat.st_mtime_ns) for path in files if (stat := path.stat())]
    identity = zlib.crc32(repr(marks).encode())
    path = cache / "rlstack" / "minari" / f"{name.replace('/', '-')}-{identity:08x}"
    if (path / headers.NAME).exists():
        return path
    where = f"Dataset {PREFIX}{name}"
    told = dataset.storage.metadata.get(_EXTRAS)
    shown = None if told is None else _space(headers.spec_from_json(json.loads(told)))
    spec = EnvSpec(
        specs_of(dataset.observation_space, f"{where}: observation_space", acting=False),
        specs_of(dataset.action_space, f"{where}: action_space", acting=True),
        () if shown is None else specs_of(shown, f"{where}: infos", acting=False),
    )
    env = {"name": "", "type": "auto", "options": {}}
    if dataset.env_spec is not None:
        env["name"] = dataset.env_spec.id
    source = {"minari": name, "agent": str(dataset.storage.metadata.get("algorithm_name", ""))}
    writer = DatasetWriter(path, spec, 1, int(dataset.total_steps), env=env, source=source)
    with writer:
        for step in _steps(dataset, where, shown):
            writer.add(None, step)
        try:
            writer.finish()
        except DatasetError:
            if not (path / headers.NAME).exists():  # else another process has made the same copy
                raise
    return path


def _steps(dataset: Any, where: str, shown: spaces.Space | None) -> Iterator[Transition]:
    """Yields the steps of all episodes, ``[1, ...]``, with discrete values that count from 0.

    Args:
      dataset: the dataset of Minari.
      where: its name, for errors.
      shown: the space of the infos that are extras; None for none.
    """
    observed = FromZero(Nest(leaf_spaces(dataset.observation_space, where)), where)
    acted = FromZero(Nest(leaf_spaces(dataset.action_space, where)), where)
    extras = None if shown is None else FromZero(Nest(leaf_spaces(shown, where)), where)
    for episode in dataset.iterate_episodes():
        length = len(episode.rewards)
        for i in range(length + 1):
            ends = i == length
            kind = StepType.FIRST if i == 0 else StepType.LAST if ends else StepType.MID
            timestep = TimeStep(
                np.array([kind], np.int32),
                np.array([episode.rewards[i - 1] if i else 0], np.float32),
                np.array([not (ends and episode.terminations[-1])], np.float32),
                _sliced(observed(_sliced(episode.observations, i)), None),
                _sliced(extras(_sliced(episode.infos, i)), None) if extras is not None else (),
            )
            # The action at the end is ignored; it must be one.
            action = _sliced(acted(_sliced(episode.actions, min(i, length - 1))), None)
            yield Transition(timestep, _Acted(action), (), np.zeros(1, np.int32))


def _sliced(tree: PyTree, index: Any) -> PyTree:
    nest = Nest(tree)
    return nest.unflatten([np.asarray(x)[index] for x in nest.leaves])


def _own(spec: PyTree, tree: PyTree) -> PyTree:
    """Returns arrays that count from 0 as the environment's own."""
    nest = Nest(spec)
    leaves = nest.flatten(tree, "Dataset")
    return nest.unflatten([own(x, leaf) for x, leaf in zip(leaves, nest.leaves, strict=True)])


def _space(spec: PyTree) -> spaces.Space:
    """Returns the environment's own space of a spec."""
    from gymnasium import spaces

    if isinstance(spec, dict):
        return spaces.Dict({name: _space(part) for name, part in spec.items()})
    if isinstance(spec, tuple | list):
        return spaces.Tuple([_space(part) for part in spec])
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(int(spec.num_values), start=int(start_of(spec)))
    theirs = own_spec(spec)
    low, high = getattr(theirs, "minimum", -np.inf), getattr(theirs, "maximum", np.inf)
    low, high = (np.broadcast_to(x, spec.shape).astype(theirs.dtype) for x in (low, high))
    return spaces.Box(low, high, spec.shape, theirs.dtype.type)
