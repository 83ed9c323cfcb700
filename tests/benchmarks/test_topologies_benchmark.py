"""The settings of the benchmark of programs."""

import pytest

from benchmarks import topologies

pytestmark = pytest.mark.launchpad


@pytest.mark.timeout(60)
def test_an_unknown_setting_is_refused(capsys):
    with pytest.raises(SystemExit):
        topologies.main(["--only", "nothing"])
    assert "no setting has a name that contains 'nothing'" in capsys.readouterr().err


def test_settings_with_a_target_are_in_the_full_and_the_quick_run():
    for settings in (topologies.QUICK, topologies.FULL):
        names = [setting.name for setting in settings]
        assert len(set(names)) == len(names)
        assert all(any(n.startswith(kind) for n in names) for kind in topologies.TARGETS)
