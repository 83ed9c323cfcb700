"""The settings of the benchmark of programs."""

import pytest

from benchmarks import topologies

pytestmark = pytest.mark.reference


@pytest.mark.timeout(60)
def test_a_name_that_no_setting_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        topologies.main(["--only", "nothing"])
    assert "no setting's name has 'nothing' in it" in capsys.readouterr().err


def test_what_has_a_target_is_measured_in_both_lengths():
    for settings in (topologies.QUICK, topologies.FULL):
        names = [setting.name for setting in settings]
        assert len(set(names)) == len(names)
        assert all(any(n.startswith(kind) for n in names) for kind in topologies.TARGETS)
