"""The policy of a run as a file that needs no rlstack: ``rlstack export``."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from dm_env import specs

from rlstack.envs.values import own_spec, start_of
from rlstack.programs.build.policies.policy import Policy, load
from rlstack.programs.build.restored import Which
from rlstack.programs.config.encoding import to_json
from rlstack.programs.tools.greedy import (
    GreedyFunction,
    Port,
    greedy_function,
    path_name,
    row_by_row,
    without_unused,
)
from rlstack.storage import files
from rlstack.types import EnvSpec

Format = Literal["npz", "stablehlo", "onnx"]

_PLATFORMS = ("cpu", "cuda", "tpu")
_ROWS, _STEPS = 16, 4  # batch size and steps of the comparison with the policy itself
_TOLERANCE = 1e-4  # for continuous actions: other runtimes sum in another order

# Actions of another runtime: (observation, state) -> (action, state), each by name, ``[B, ...]``.
Run = Callable[
    [Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
]


class Exported(NamedTuple):
    """The files that were written."""

    path: Path
    description: Path  # JSON that names the arrays
    batch: int | None  # the only batch size; None for any


def export(
    run_dir: str | os.PathLike[str],
    format: Format,
    out: str | os.PathLike[str] | None = None,
    *,
    params: Which = "last",
    spec: EnvSpec | None = None,
) -> Exported:
    """Writes the greedy policy of a run to a file, and a description of it beside the file.

    npz: the params by name, for numpy. stablehlo: a function for `jax.export.deserialize`. onnx: a
    model for ONNX runtimes. The last two contain the normalisation of observations and the bounds
    of actions, and are first compared with the policy itself.

    Args:
      run_dir: the directory of a run with a checkpoint.
      format: format of the file.
      out: the file; by default ``policy`` with the name of the format in the run directory.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      spec: the spec of the environments, see `rlstack.programs.build.policies.policy.load`.

    Raises:
      ValueError: there is no run or no checkpoint, or the policy cannot be exported; the message
        says why.
      OSError: a file cannot be written.
    """
    if format not in get_args(Format):
        raise ValueError(f"export: format must be {', '.join(get_args(Format))}; got {format!r}.")
    _require_package(format)
    policy = load(run_dir, params=params, spec=spec)
    path = files.local(run_dir) / f"policy.{format}" if out is None else Path(out)
    description: dict[str, Any] = {"format": format, **_description(policy)}
    batch = None
    if format == "npz":
        named = jax.tree_util.tree_leaves_with_path(policy.params)
        arrays: dict[str, Any] = {path_name(place): np.asarray(leaf) for place, leaf in named}
        description["params"] = {k: [str(v.dtype), list(v.shape)] for k, v in arrays.items()}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        content = buffer.getvalue()
    else:
        function = greedy_function(policy)
        content, batch = _converted(policy, function, format)
        description |= _ports(function, batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, content)
    beside = path.with_name(f"{path.name}.json")
    files.write(beside, json.dumps(description, indent=2) + "\n")
    return Exported(path, beside, batch)


def _description(policy: Policy) -> dict[str, Any]:
    config = json.loads(to_json(policy.experiment))
    kept = ("preset", "agent", "network", "network_factory", "normalisation")
    return {
        **{name: config[name] for name in kept},
        "env": config["env"]["name"],
        "env_frames": policy.env_frames,
        "observation_spec": _spec(policy.seen_spec),
        "action_spec": _spec(policy.spec.action),
    }


def _spec(tree: Any) -> list[dict[str, Any]]:
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        theirs = own_spec(leaf)
        entry: dict[str, Any] = {"name": path_name(path), "shape": list(theirs.shape)}
        entry["dtype"] = str(theirs.dtype)
        if isinstance(leaf, specs.DiscreteArray):
            entry["num_values"] = int(leaf.num_values)
        elif isinstance(theirs, specs.BoundedArray):
            bounds = np.asarray(theirs.minimum), np.asarray(theirs.maximum)
            entry["minimum"], entry["maximum"] = (_finite(x.tolist()) for x in bounds)
        if np.any(start := start_of(leaf)):  # the environment's own value of the network's 0
            entry["start"] = np.asarray(start).tolist()
        found.append(entry)
    return found


def _finite(value: Any) -> Any:
    """Returns numbers for JSON, which has no infinity: it becomes None."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if np.isfinite(value) else None


def _ports(function: GreedyFunction, batch: int | None) -> dict[str, Any]:
    def listed(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
        return [{"name": p.name, "shape": list(p.shape), "dtype": str(p.dtype)} for p in ports]

    state = listed(function.state)
    for entry in state:
        entry["initial"] = function.initial_state[entry["name"]].tolist()
    return {
        "batch": "any" if batch is None else batch,
        "observation": listed(function.observation),
        "action": listed(function.action),
        "state": state,
    }


def _converted(
    policy: Policy, function: GreedyFunction, format: Format
) -> tuple[bytes, int | None]:
    """Returns the content of the file, which acts as the policy does, and the only batch size.

    The batch size is None if any fits.

    Raises:
      ValueError: the function cannot be converted.
    """
    convert = _to_stablehlo if format == "stablehlo" else _to_onnx
    # A network may need to know the batch size, such as one that packs rows.
    attempts = ((function, None), (row_by_row(function), None), (function, 1))
    reasons = []
    for candidate, batch in attempts:
        try:
            content = convert(candidate, batch)
            _compare(policy, function, _runs(function, content, format), batch or _ROWS)
            return content, batch
        except Exception as error:  # whatever a converter raises for an operation that it lacks
            text = str(error).strip().split("\n", 1)[0]
            reasons.append(f"{type(error).__name__}: {text}")
    others = "stablehlo or npz" if format == "onnx" else "npz"
    raise ValueError(
        f"export: the policy must have only operations that {format} has; {reasons[-1]:.300}. "
        f"Use --format {others}."
    )


def _to_stablehlo(function: GreedyFunction, batch: int | None) -> bytes:
    from jax import export as jax_export

    rows = jax_export.symbolic_shape("batch")[0] if batch is None else batch
    arguments = [
        _packed([jax.ShapeDtypeStruct((rows, *p.shape), p.dtype) for p in ports], ports)
        for ports in (function.observation, function.state)
    ]
    if not function.state:
        arguments.pop()

    def act(observation: Any, state: Any = None) -> Any:
        given = _unpacked(observation, function.observation), _unpacked(state, function.state)
        action, after = function.call(*given)
        shown = _packed(list(action.values()), function.action)
        return (shown, after) if function.state else shown

    made = jax_export.export(jax.jit(act), platforms=_PLATFORMS)(*arguments)
    return bytes(made.serialize())


def _packed(values: list[Any], ports: tuple[Port, ...]) -> Any:
    """Returns arrays as users pass them: one array, or a dict by name; state is always a dict."""
    if len(ports) == 1 and not ports[0].name.startswith("state/"):
        return values[0]
    return {port.name: value for port, value in zip(ports, values, strict=True)}


def _unpacked(packed: Any, ports: tuple[Port, ...]) -> dict[str, Any]:
    if not ports:
        return {}
    return dict(packed) if isinstance(packed, Mapping) else {ports[0].name: packed}


def _require_package(format: Format) -> None:
    package = {"stablehlo": "flatbuffers", "onnx": "jax2onnx"}.get(format)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"export: format {format} needs the package {package}, which is not installed. "
            f"`rlstack doctor` says how to get the extra {format}; --format npz needs no package."
        )


def _to_onnx(function: GreedyFunction, batch: int | None) -> bytes:
    converter: Any = importlib.import_module("jax2onnx")
    observed, state = len(function.observation), [port.name for port in function.state]

    def act(*arrays: Any) -> Any:
        given = dict(zip((p.name for p in function.observation), arrays, strict=False))
        action, after = function.call(given, dict(zip(state, arrays[observed:], strict=True)))
        return (*action.values(), *after.values())

    def act_only(*arrays: Any) -> Any:
        return tuple(without_unused(act, *arrays))

    ports = (*function.observation, *function.state)
    model = converter.to_onnx(
        act_only,
        [jax.ShapeDtypeStruct((1, *p.shape), p.dtype) for p in ports]
        if batch
        else [jax.ShapeDtypeStruct(_symbolic(p), p.dtype) for p in ports],
        model_name="policy",
        input_names=[p.name for p in ports],
        output_names=[*(p.name for p in function.action), *(f"next_{name}" for name in state)],
    )
    return bytes(model.SerializeToString())


def _symbolic(port: Port) -> tuple[Any, ...]:
    return ("batch", *port.shape)


def _runs(function: GreedyFunction, content: bytes, format: Format) -> Run:
    """Returns a function that acts with a file's content, as another program would."""
    states = [port.name for port in function.state]
    if format == "stablehlo":
        from jax import export as jax_export

        loaded = jax_export.deserialize(bytearray(content))

        def run(observation: Any, state: Any) -> Any:
            seen = _packed(list(observation.values()), function.observation)
            found = loaded.call(seen, state) if states else loaded.call(seen)
            action, after = found if states else (found, {})
            return _unpacked(action, function.action), after

        return run
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it warns of constants that it leaves out
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run_onnx(observation: Any, state: Any) -> Any:
        found = session.run(None, {**observation, **state})
        acts = len(function.action)
        names = [port.name for port in function.action]
        return dict(zip(names, found, strict=False)), dict(zip(states, found[acts:], strict=True))

    return run_onnx


def _compare(policy: Policy, function: GreedyFunction, run: Run, rows: int) -> None:
    """Checks that exported actions equal those of the policy, for random observations.

    Raises:
      ValueError: the actions differ.
    """
    rng = np.random.default_rng(0)
    state: Mapping[str, np.ndarray] = {
        name: np.repeat(value[None], rows, axis=0) for name, value in function.initial_state.items()
    }
    seen_spec = policy.seen_spec
    tree = jax.tree.structure(seen_spec)
    policy.reset()
    for _ in range(_STEPS):
        leaves = [_random(rng, leaf, rows) for leaf in jax.tree.leaves(seen_spec)]
        ports = function.observation
        seen = {p.name: x.astype(p.dtype) for p, x in zip(ports, leaves, strict=True)}
        wanted = jax.tree.leaves(policy.act(jax.tree.unflatten(tree, leaves)))
        action, state = run(seen, state)
        for port, right in zip(function.action, wanted, strict=True):
            found = np.asarray(action[port.name])
            same = np.allclose(found, right, _TOLERANCE, _TOLERANCE)
            if np.issubdtype(right.dtype, np.integer):
                same = np.array_equal(found, right)
            if not same:
                raise ValueError(f"{port.name} does not equal the policy's own")


def _random(rng: np.random.Generator, spec: specs.Array, rows: int) -> np.ndarray:
    """Returns random observations as the environment gives them, ``[rows, ...]``."""
    spec = own_spec(spec)
    shape, dtype = (rows, *spec.shape), np.dtype(spec.dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if not isinstance(spec, specs.BoundedArray):
        return (3 * rng.normal(size=shape)).astype(dtype)
    low = np.asarray(spec.minimum, float)
    high = np.asarray(spec.maximum, float)
    if np.issubdtype(dtype, np.integer):
        low = np.clip(low, np.minimum(-3, high), None)
        high = np.clip(high, None, low + 255)
        return np.floor(rng.uniform(low, high + 1, shape)).astype(dtype)
    low = np.clip(low, -3, None)
    high = np.maximum(np.clip(high, None, 255), low)
    return rng.uniform(low, np.minimum(high, low + 6), shape).astype(dtype)
