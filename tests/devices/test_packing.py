"""Batches packed as two arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.devices.packing import Layout, columns

RNG = np.random.default_rng(0)
# [T, B, ...], the last leaf [B].
TREE = {
    "floats": RNG.normal(size=(3, 4, 2)).astype(np.float32),
    "doubles": RNG.normal(size=(3, 4)),  # JAX has 32 bits by default
    "halves": RNG.normal(size=(3, 4)).astype(jnp.bfloat16),
    "pixels": RNG.integers(0, 255, (3, 4, 5, 1), np.uint8),
    "flags": RNG.integers(0, 2, (3, 4)).astype(bool),
    "steps": RNG.integers(-9, 9, (3, 4), np.int32),
    "empty": np.zeros((3, 4, 0), np.float32),
    "weights": np.array([np.nan, -0.0, np.inf, 1e-42], np.float32),  # one is denormal
}
ROWS = {name: 0 if name == "weights" else 1 for name in TREE}


def test_shares_that_were_packed_are_joined_bit_for_bit():
    shares = columns(TREE, ROWS, 2)
    assert shares[1]["floats"].shape == (3, 2, 2) and shares[1]["weights"].shape == (2,)
    assert np.shares_memory(shares[0]["pixels"], TREE["pixels"])
    layout = Layout.of(shares[0], ROWS)
    assert layout == Layout.of(shares[1], ROWS) and hash(layout) == hash(layout)
    words, octets = zip(*map(layout.pack, shares), strict=True)
    # Words: floats, doubles, steps and weights; bytes: halves, pixels and flags.
    assert words[0].shape == (1, 12 + 6 + 6 + 2) and words[0].dtype == np.uint32
    assert octets[0].shape == (1, 12 + 30 + 6) and octets[0].dtype == np.uint8
    joined = jax.jit(layout.unpack)(np.concatenate(words), np.concatenate(octets))
    for name, x in joined.items():
        expected = TREE[name].astype(jax.dtypes.canonicalize_dtype(TREE[name].dtype))
        assert x.dtype == expected.dtype and x.shape == expected.shape, name
        assert np.asarray(x).tobytes() == expected.tobytes(), name


def test_one_share_is_the_batch():
    (share,) = columns(TREE, ROWS, 1)
    assert share is TREE
    layout = Layout.of(share, ROWS)
    found = jax.jit(layout.unpack)(*layout.pack(share))
    assert np.asarray(found["pixels"]).tobytes() == TREE["pixels"].tobytes()
