"""The Dockerfile names what there is: extras, versions of the lock, and the devices it takes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.timeout(30)
ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "Dockerfile").read_text()


def test_its_constraints_are_the_versions_of_the_lock(tmp_path):
    (command,) = re.findall(r"sed -e .*? requirements\.lock", TEXT)
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    )
    found = [Requirement(line) for line in done.stdout.splitlines() if line.strip()]
    lock = (ROOT / "requirements.lock").read_text()
    assert len(found) == len(re.findall(r"^[\w.-]+==", lock, re.MULTILINE)) > 200
    assert all(str(one.specifier).startswith("==") for one in found)


def test_each_device_has_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    devices = dict(re.findall(r"(\w+)\) extras=([\w,]+)", TEXT))
    assert devices == {"cpu": "cluster,store", "gpu": "cluster,store,cuda"}
    for extras in devices.values():
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    version = re.search(r"^FROM python:(3\.\d+)-slim$", TEXT, re.MULTILINE)[1]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


@pytest.mark.parametrize(("device", "said"), [("gpu", ""), ("tpu", "DEVICE must be cpu or gpu")])
def test_another_device_is_refused(device, said):
    case = re.search(r"case .*? esac", TEXT, re.DOTALL)[0].replace("\\\n", "")
    done = subprocess.run(
        ["sh", "-c", case], env={"DEVICE": device}, capture_output=True, text=True, timeout=10
    )
    assert (done.returncode != 0) == bool(said) and said in done.stderr
