"""dataset.json: the description of a dataset, and the check that it fits an environment."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dm_env import specs

from rlstack.envs.adapters import narrow
from rlstack.envs.nest import Nest
from rlstack.envs.values import (
    Range,
    brief,
    from_zero,
    is_limited,
    own_spec,
    start_of,
    with_start,
)
from rlstack.storage.loggers import to_json
from rlstack.types import EnvSpec, PyTree

NAME = "dataset.json"
_FORMAT = 2
_WITH_STARTS = 3  # if a space does not start at 0, which earlier versions would not see
_WITH_EXTRAS = 4  # if steps have extras
_KNOWN = (1, _FORMAT, _WITH_STARTS, _WITH_EXTRAS)  # format 1 has no checksums
_MOST = 1 << 48  # upper limit of all counts
_MOST_STEP_BYTES = 1 << 30
_MOST_DIMENSIONS = 32
_NUMBERS = "biuf"  # kinds of dtypes; an object would be a pointer, read from the file


class DatasetError(ValueError):
    """A directory is not a readable dataset, or the dataset does not fit its use."""


class Shard(NamedTuple):
    """One file of steps."""

    file: str
    steps: int  # rows
    episodes: int
    crc32: int | None = None  # CRC-32 of the columns (`shards.crc32_of`); None in format 1


class Header(NamedTuple):
    """The description of a dataset."""

    env: Mapping[str, Any]  # name, type and options of the environments
    spec: EnvSpec
    frames: int  # environment steps; an episode of n steps has n + 1 rows
    steps: int  # rows
    episodes: int
    return_mean: float
    return_std: float
    shards: tuple[Shard, ...]
    source: Mapping[str, Any]  # the recorded agent: run, preset, policy, ...
    checked: bool = True  # whether it has a checksum; False in format 1


def encode(header: Header) -> str:
    """Returns the text of ``dataset.json``."""
    fields = header._asdict()
    spec = fields.pop("spec")
    del fields["checked"]
    fields |= {"observation": spec_to_json(spec.observation), "action": spec_to_json(spec.action)}
    fields["shards"] = [shard._asdict() for shard in header.shards]
    leaves = Nest(spec).leaves
    version = _WITH_STARTS if any(np.any(start_of(leaf)) for leaf in leaves) else _FORMAT
    if Nest(spec.extras).leaves:
        fields["extras"], version = spec_to_json(spec.extras), _WITH_EXTRAS
    tree = to_json({"format": version, **fields})
    return json.dumps({**tree, "crc32": _crc32(tree)}, indent=2, allow_nan=False) + "\n"


def _crc32(fields: Mapping[str, Any]) -> int:
    """Returns a checksum of fields that does not depend on their order or on white space."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def fingerprint(directory: Path) -> str:
    """Returns eight hexadecimal digits that differ if the steps or the header of a dataset do.

    They are the checksum in the header, which has the checksums of the shards.

    Raises:
      ValueError: the header is no JSON.
      OSError: it cannot be read.
    """
    text = (directory / NAME).read_text(encoding="utf-8")
    told = json.loads(text).get("crc32")
    return f"{told if isinstance(told, int) else zlib.crc32(text.encode()):08x}"


def decode(text: str, where: Path) -> Header:
    """Returns the header of a text, which may come from anywhere.

    Raises:
      DatasetError: the text is not a header of a known format, or is damaged.
    """
    try:
        fields = json.loads(text)
        crc32 = fields.pop("crc32", None)
        if crc32 not in (None, _crc32(fields)):
            raise ValueError(
                "it must have the checksum crc32 with which it was written; it differs (if you "
                "have edited it yourself, remove crc32)"
            )
        if fields.pop("format") not in _KNOWN:
            raise DatasetError(
                f"Dataset: the format of {where} must be one of {', '.join(map(str, _KNOWN))}. "
                "Read it with the version of rlstack that wrote it."
            )
        spec = EnvSpec(
            spec_from_json(fields.pop("observation")),
            spec_from_json(fields.pop("action")),
            spec_from_json(fields.pop("extras")) if "extras" in fields else (),
        )
        shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
        for name in ("return_mean", "return_std"):
            fields[name] = float(fields[name])
        header = Header(spec=spec, shards=shards, checked=crc32 is not None, **fields)
        _check(header)
        return header
    except DatasetError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DatasetError(
            f"Dataset: {where} must be the header of a dataset; {type(error).__name__}: {error}. "
            "Copy the dataset again, or record it again with rlstack record."
        ) from error


def _check(header: Header) -> None:
    """Checks that a header's counts, names and sizes are possible.

    Raises:
      ValueError: a count, name or size is impossible.
    """
    for shard in header.shards:
        if not isinstance(shard.file, str) or Path(shard.file).name != shard.file:
            raise ValueError(f"a shard must be named by a file name alone; got {shard.file!r}")
    shards = header.shards
    counts = [header.frames, *(n for shard in shards for n in (shard.steps, shard.episodes))]
    if not shards or not all(type(n) is int and 0 < n < _MOST for n in counts):
        raise ValueError(f"there must be shards, and counts must be in 1..{_MOST:,}; got {counts}")
    steps, episodes = sum(s.steps for s in shards), sum(s.episodes for s in shards)
    held = (header.steps, header.episodes, header.frames)
    if held != (steps, episodes, steps - episodes):
        raise ValueError(
            f"steps, episodes and frames must be those of the shards "
            f"{(steps, episodes, steps - episodes)}; got {held}"
        )
    size = sum(
        math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in columns(header.spec).values()
    )
    if size > _MOST_STEP_BYTES:
        raise ValueError(f"a step must have at most {_MOST_STEP_BYTES:,} bytes; got {size:,}")
    env, kinds = header.env, {"name": str, "type": str, "options": dict}
    if not isinstance(env, dict) or {k: type(v) for k, v in env.items()} != kinds:
        raise ValueError(f"env must be a name, a type and options; got {env!r}")


def columns(spec: EnvSpec) -> dict[str, specs.Array]:
    """Returns the spec of one step of every column of a shard, by the column's name.

    It is the spec of a column as rlstack has it. The shard holds the environment's own values, of
    `rlstack.envs.values.own_spec`.
    """
    found = {
        "step_type": specs.Array((), np.int32),
        "reward": specs.Array((), np.float32),
        "discount": specs.Array((), np.float32),
    }
    for name, tree in spec._asdict().items():
        nest = Nest(tree)
        found |= {f"{name}{path}": leaf for path, leaf in zip(nest.paths, nest.leaves, strict=True)}
    return found


def check_values(
    arrays: Mapping[str, np.ndarray], columns: Mapping[str, specs.Array], where: str
) -> None:
    """Checks that the integers of recorded steps are within their spaces.

    Args:
      arrays: column name -> ``[steps, ...]``, as a shard holds the column.
      columns: column name -> its spec, from `columns`.
      where: the beginning of the error message.

    Raises:
      DatasetError: a number is outside of its space; the message names the first such column.
    """
    for name, spec in columns.items():
        if not is_limited(spec):
            continue
        allowed, array = Range(own_spec(spec)), arrays[name]
        if not allowed.holds(array):
            step = np.argwhere(allowed.outside(array))[0]
            raise DatasetError(
                f"{where}: {name} must lie in its space, integers in [{brief(allowed.low)}, "
                f"{brief(allowed.high)}]; got {array[tuple(step)]} at step {step[0]}. Record it "
                "again, or mend what wrote it."
            )


def check_specs(recorded: EnvSpec, spec: EnvSpec, where: str) -> None:
    """Checks that an agent for one environment can learn from steps of another.

    Structure, shapes, dtypes and the ranges of integers must be equal. Bounds of real numbers may
    differ.

    Args:
      recorded: the spec of the environment that the steps come from.
      spec: the spec of the environment to act in.
      where: the beginning of the error message.

    Raises:
      DatasetError: the specs differ; the message names the first entry that differs.
    """
    wanted, held = columns(spec), columns(recorded)
    for name in [*wanted, *held]:
        if name in held and name in wanted and not np.any(start_of(held[name])):
            # It starts at 0, or it was written before datasets kept the start.
            wanted[name] = from_zero(wanted[name])
        sides = [_describe(side[name]) if name in side else "nothing" for side in (wanted, held)]
        if sides[0] != sides[1]:
            raise DatasetError(
                f"{where}: the recorded steps must be of the environment's spec; {name} is "
                f"{sides[0]} there and {sides[1]} in the dataset. Choose the environment and its "
                "options as in the header, or other data."
            )


def _describe(spec: specs.Array) -> str:
    spec = own_spec(spec)
    text = f"{np.dtype(spec.dtype).name}{list(spec.shape)}"
    if np.issubdtype(spec.dtype, np.integer) and isinstance(spec, specs.BoundedArray):
        text += f" in {_bound(spec.minimum)}..{_bound(spec.maximum)}"
    return text


def _bound(bound: Any) -> Any:
    """Returns one number if all numbers are equal, as in nearly all bounds, otherwise a list."""
    bound = np.asarray(bound)
    alike = bound.size and (bound == bound.flat[0]).all()
    return bound.flat[0].item() if alike else bound.tolist()


def spec_to_json(tree: PyTree) -> dict[str, Any]:
    """Returns specs as values of JSON."""
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise DatasetError(
                f"DatasetWriter: keys of nested specs must be strings; got {list(tree)}. "
                "Rename them in an environment adapter."
            )
        return {"dict": {key: spec_to_json(value) for key, value in tree.items()}}
    if isinstance(tree, tuple | list):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [spec_to_json(value) for value in tree]}
    theirs = own_spec(tree)  # as the shards hold them
    found = {"shape": list(tree.shape), "dtype": np.dtype(theirs.dtype).name, "name": tree.name}
    if np.any(start := start_of(tree)):
        found["start"] = np.asarray(start).tolist()
    if isinstance(tree, specs.DiscreteArray):
        return {**found, "num_values": int(tree.num_values)}
    if isinstance(theirs, specs.BoundedArray):
        return {**found, "minimum": _bound(theirs.minimum), "maximum": _bound(theirs.maximum)}
    return found


def spec_from_json(value: Mapping[str, Any]) -> PyTree:
    """Returns the specs that `spec_to_json` was given; raises what wrong values raise."""
    if "dict" in value:
        return {key: spec_from_json(part) for key, part in value["dict"].items()}
    if "list" in value:
        return [spec_from_json(part) for part in value["list"]]
    if "tuple" in value:
        return tuple(spec_from_json(part) for part in value["tuple"])
    shape, dtype, name = tuple(value["shape"]), _dtype(value["dtype"]), value["name"]
    sizes_fit = all(type(size) is int and 0 <= size < _MOST for size in shape)
    if len(shape) > _MOST_DIMENSIONS or not sizes_fit:
        raise ValueError(f"a shape must be sizes of at least 0; got {list(shape)}")
    start = np.asarray(value.get("start", 0))
    if start.dtype.kind not in "iu" or start.shape not in ((), shape):
        raise ValueError(f"a start must be whole numbers of shape {shape}; got {start.tolist()}")
    if np.any(start):
        dtype = narrow(dtype)  # what rlstack counts from 0 needs fewer bits
    if "num_values" in value:
        return with_start(specs.DiscreteArray(value["num_values"], dtype, name), start)
    if "minimum" in value:
        # Infinities are strings in JSON, and numpy reads them as numbers.
        bounds = (np.array(value[bound]) for bound in ("minimum", "maximum"))
        low, high = ((x - start if np.any(start) else x).astype(dtype) for x in bounds)
        return with_start(specs.BoundedArray(shape, dtype, low, high, name), start)
    return specs.Array(shape, dtype, name)


def _dtype(name: object) -> np.dtype:
    """Returns the dtype of a name; a numeric one, for others could hold pointers or records."""
    found = np.dtype(name) if isinstance(name, str) else None
    if found is None or found.kind not in _NUMBERS:
        raise ValueError(f"a dtype must be that of numbers or bool; got {name!r}")
    return found
