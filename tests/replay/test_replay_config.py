import pytest

from rlstack.replay import ReplayConfig


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"sampler": "lifo"}, "sampler"),
        ({"batch_size": 0}, "batch_size"),
        ({"unroll_length": 0}, "unroll_length"),
        ({"period": 4}, r"period must be in 1\.\.unroll_length \(3\)"),
        ({"max_size": 3}, r"max_size must be at least batch_size \(4\)"),
        ({"max_size_per_env": 0}, "max_size_per_env"),
        ({"min_size": 0}, "min_size"),
        ({"starts": "first"}, "starts"),
        ({"samples_per_insert": 0.0}, "samples_per_insert"),
        ({"samples_per_insert_tolerance": -1.0}, "tolerance"),
        ({"max_times_sampled": -1}, "max_times_sampled"),
        ({"sampler": "fifo", "max_times_sampled": 0}, "max_times_sampled"),
        ({"max_staleness": 1}, "max_staleness"),
        ({"sampler": "fifo", "max_staleness": -1}, "max_staleness"),
        ({"priority_exponent": 1.5}, "priority_exponent"),
        ({"importance_exponent": -0.1}, "importance_exponent"),
        ({"importance_anneal_samples": -1}, "importance_anneal_samples"),
    ],
)
def test_every_range_is_checked(changes, match):
    fields = {"sampler": "uniform", "batch_size": 4, "unroll_length": 3, "max_size": 8}
    with pytest.raises(ValueError, match=match):
        ReplayConfig(**{**fields, **changes})


def test_defaults_follow_the_sampler():
    fields = {"batch_size": 4, "unroll_length": 3, "max_size": 8}
    fifo, uniform = (ReplayConfig(sampler=s, **fields) for s in ("fifo", "uniform"))
    assert (fifo.step_period, uniform.step_period) == (3, 1)
    assert (fifo.times_limit, uniform.times_limit) == (1, 0)
    assert (fifo.items_per_env(4), uniform.items_per_env(4)) == (4, 2)
    assert fifo.tolerance == 4
