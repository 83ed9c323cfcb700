"""The public API: the names that ``import rlstack`` offers, and that the import is cheap."""

import subprocess
import sys
from pathlib import Path

import rlstack

ROOT = Path(__file__).resolve().parent.parent
SKETCHED = """
Agent Actor Learner Inferencer Evaluator SyncEnv AsyncEnv ReplayBuffer InProcessReplay
SharedMemReplayBuffer ReverbReplayBuffer TimeStep Transition Batch Network
"""


def test_every_public_name_is_there_and_under_its_own_name():
    assert set(SKETCHED.split()) <= set(rlstack.__all__) <= set(dir(rlstack))
    for name in rlstack.__all__:
        found = getattr(rlstack, name)
        assert name == "__version__" or getattr(found, "__name__", name) in (name, "Transition")


def test_importing_rlstack_loads_no_package_but_its_own():
    code = (
        "import sys, rlstack\n"
        "before = set(sys.modules)\n"
        "assert not {'jax', 'numpy', 'launchpad'} & before, before\n"
        "from rlstack import Actor\n"
        "assert 'jax' in sys.modules and 'courier' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_wrong_name_is_an_attribute_error():
    try:
        rlstack.Nothing  # noqa: B018
    except AttributeError as error:
        assert "no attribute 'Nothing'" in str(error)
    else:
        raise AssertionError


def test_the_version_is_that_of_the_package():
    assert f'version = "{rlstack.__version__}"' in (ROOT / "pyproject.toml").read_text()
