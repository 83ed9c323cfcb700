"""The public API: the names that ``import rlstack`` offers, and that the import is cheap."""

import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

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


def test_the_version_is_one_that_installers_understand():
    assert rlstack.__version__ == "unknown" or Version(rlstack.__version__) >= Version("0.1.0.dev0")


def test_only_the_addresses_in_the_metadata_have_a_placeholder_and_no_release_has():
    """A tagged commit fails here until the repository's owner is named (docs/release.md)."""
    lines = (ROOT / "pyproject.toml").read_text().split("[project.urls]\n")[1].split("\n\n")[0]
    addresses = re.findall(r'^\w+ = "(https://[^"]+)"$', lines, re.M)
    assert len(addresses) == 4
    left = [address for address in addresses if "/OWNER/" in address]
    assert left in ([], addresses)
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    tags = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    assert not (left and tags), f"{tags} is tagged, and pyproject.toml still says OWNER"
