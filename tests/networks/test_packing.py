"""Packing is first fit decreasing, loses nothing, and wastes little."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlstack.networks.ragged.packing import ladder, pack, packed_index


def first_fit_decreasing(lengths, width):
    """The textbook loop over items and bins; rows in the order of their first members."""
    rows = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not lengths[item]:
            continue
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[item] <= width:
                row.append(item)
                break
        else:
            rows.append([item])
    return sorted(sorted(row) for row in rows)


@hypothesis.given(
    st.integers(1, 12).flatmap(
        lambda width: st.tuples(st.just(width), st.lists(st.integers(0, width), max_size=30))
    )
)
@hypothesis.settings(deadline=None, derandomize=True)
def test_pack_is_first_fit_decreasing(case):
    width, lengths = case
    packing = pack(np.array(lengths, np.int64), width)
    rows = [[] for _ in range(packing.num_rows)]
    for item, length in enumerate(lengths):
        if length:
            rows[packing.row[item]].append((int(packing.column[item]), item))
        else:
            assert packing.row[item] == packing.column[item] == 0
    for row in rows:
        end = 0
        for column, item in sorted(row):
            assert column == end
            end += lengths[item]
        assert end <= width
    assert [[i for _, i in sorted(row)] for row in rows] == first_fit_decreasing(lengths, width)

    entities, batch, inverse = packed_index(packing, np.array(lengths, np.int64), width)
    total = sum(lengths)
    np.testing.assert_array_equal(entities.ravel()[inverse], np.arange(total))
    np.testing.assert_array_equal(
        batch.ravel()[inverse], np.repeat(np.arange(len(lengths)), lengths)
    )
    assert entities.shape == batch.shape == (packing.num_rows, width)
    assert (batch >= 0).sum() == total


@pytest.mark.parametrize("size", [256, 4096])
def test_little_is_padding_when_sizes_are_skewed(size):
    lengths = np.minimum(np.random.default_rng(0).geometric(0.12, size), 64)
    lengths[0] = 64
    assert np.median(lengths) <= 8
    packing = pack(lengths, 64)
    assert 1 - lengths.sum() / (ladder(packing.num_rows) * 64) < 0.34  # the bound of the ladder
    assert 1 - lengths.sum() / (packing.num_rows * 64) < 0.05
    assert 1 - lengths.sum() / (size * 64) > 0.8  # the waste of padding without packing


def test_ladder_has_few_rungs_and_wastes_a_bounded_share():
    assert [ladder(n) for n in range(10)] == [1, 1, 2, 3, 4, 6, 6, 8, 8, 12]
    for steps in (1, 2, 4):
        rungs = {ladder(n, steps) for n in range(1, 4097)}
        assert len(rungs) <= 12 * steps + 1
        for n in range(1, 4097):
            assert ladder(n, steps) in rungs and ladder(ladder(n, steps), steps) == ladder(n, steps)
            assert n <= ladder(n, steps) and ladder(n, steps) - n < ladder(n, steps) / (steps + 1)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"pack: lengths must lie in \[0, width=4\].*got 1 to 5"):
        pack(np.array([1, 5]), 4)
    with pytest.raises(ValueError, match="ladder"):
        ladder(-1)
    with pytest.raises(ValueError, match="power of two"):
        ladder(4, steps=3)
