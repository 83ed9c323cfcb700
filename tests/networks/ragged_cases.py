"""A made-up entity environment with every feature, and random observations of it."""

import jax
import numpy as np

from rlstack.entity import Categorical, EntityType, GlobalCategorical, ObsSpace, SelectEntity
from rlstack.entity.padded import PaddedCodec
from rlstack.networks import RaggedTransformerConfig, RelativePositionsConfig, ragged_transformer
from rlstack.types import TimeStep

OBS_SPACE = ObsSpace(
    {
        "Ship": EntityType(("x", "y", "heading"), 2),
        "Rock": EntityType(("size", "x", "y"), 6),
        "Ghost": EntityType((), 3),
    },
    ("time",),
)
ACTION_SPACE = {
    "move": Categorical(("left", "right", "stay"), 2),
    "aim": SelectEntity(2),
    "mode": GlobalCategorical(("a", "b")),
}
CODEC = PaddedCodec(OBS_SPACE, ACTION_SPACE, "made up")
SLOTS = CODEC.slots
GRID = RelativePositionsConfig(kind="grid", extent=(2, 1), per_type_values=True)
POLAR = RelativePositionsConfig(
    kind="polar",
    sectors=6,
    rings=3,
    scale=2.0,
    angle_feature="heading",
    interpolate=True,
    value_gate="sigmoid",
    project_keys=True,
    project_values=True,
)
CONFIGS = {
    "plain": RaggedTransformerConfig(d_model=16),
    "grid": RaggedTransformerConfig(d_model=16, relative_positions=GRID),
    "polar-separate": RaggedTransformerConfig(
        d_model=16, relative_positions=POLAR, separate_value=True
    ),
    "meanmax": RaggedTransformerConfig(d_model=16, pooling="meanmax"),
}


def network(cfg, perturbed=True):
    """A network whose params all affect its outputs; heads that start at 0 would not."""
    made = ragged_transformer(CODEC.observation_spec, CODEC.action_spec, cfg)
    params = made.init(jax.random.PRNGKey(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.PRNGKey(1), len(leaves))
    if perturbed:
        leaves = [
            x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)
        ]
    return made, jax.tree.unflatten(structure, leaves)


def observations(size, seed=0, counts=None):
    """Random observations ``[size, ...]``; the last of a batch of several has no entities."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(size):
        if counts is not None:
            count = dict(counts)
        elif i and i == size - 1:
            count = dict.fromkeys(OBS_SPACE.entities, 0)
        else:
            count = {
                name: int(rng.integers(0, kind.capacity + 1))
                for name, kind in OBS_SPACE.entities.items()
            }
        rows.append(_observation(rng, count))
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _observation(rng, count):
    features, visible = {}, {}
    for name, kind in OBS_SPACE.entities.items():
        there = np.arange(kind.capacity) < count[name]
        visible[name] = there & ((rng.random(kind.capacity) < 0.7) | (name == "Ship"))
        if kind.features:
            shape = (kind.capacity, len(kind.features))
            features[name] = (there[:, None] * rng.normal(size=shape)).astype(np.float32)
    features["__global__"] = rng.normal(size=(1, 1)).astype(np.float32)
    actors = {
        name: np.where(np.arange(2) < count["Ship"], np.arange(2), -1).astype(np.int32)
        for name in ("aim", "move")
    }
    actors["mode"] = np.array([SLOTS.total - 1], np.int32)
    there = np.concatenate(
        [np.arange(kind.capacity) < count[name] for name, kind in OBS_SPACE.entities.items()]
        + [[True]]
    )
    mask = {}
    for name, width in (("move", 3), ("aim", SLOTS.total), ("mode", 2)):
        legal = rng.random((len(actors[name]), width)) < 0.7
        if name == "aim":  # only present entities are legal targets
            legal &= there
            legal[:, -1] = True
        else:
            legal[:, 1] = True
        legal[actors[name] < 0] = np.arange(width) == 0
        mask[name] = legal.reshape(-1)
    return {
        "features": features,
        "count": {name: np.int32(number) for name, number in count.items()},
        "visible": visible,
        "actors": actors,
        "action_mask": mask,
    }


def timestep_of(observation):
    """MID steps of a batch of observations."""
    size = len(jax.tree.leaves(observation["actors"])[0])
    return TimeStep(np.ones(size, np.int32), np.zeros(size), np.ones(size), observation)
