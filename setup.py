"""What a build takes from git: the version, the commit, and where the links of README.md lead.

The version is that of the tag ``vX.Y.Z`` at HEAD. After a tag it is the next version with
``.devN+gCOMMIT``, which no index accepts. A source distribution repeats what its build found.
"""

import re
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
FIRST = "0.1.0"  # the version that is developed as long as there is no tag
SOURCES = ("rlstack", "agents", "programs", "pyproject.toml", "setup.py", "README.md")
COMMIT = Path("rlstack", "commit.txt")  # in wheels and source distributions only


def git(*words: str) -> str:
    """Returns what git prints about this checkout; "" on errors."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def described() -> tuple[str, str]:
    """Returns the version and the commit, which is "unknown" without git."""
    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != ROOT or not (commit := git("rev-parse", "HEAD")):
        info, built = ROOT / "PKG-INFO", ROOT / COMMIT
        found = re.search(r"^Version: (.+)$", info.read_text(), re.M) if info.exists() else None
        version = found[1] if found else f"{FIRST}.dev0+unknown"
        return version, built.read_text().strip() if built.exists() else "unknown"
    changed = bool(git("status", "--porcelain", "--", *SOURCES))
    tagged = git("describe", "--tags", "--long", "--match", "v[0-9]*")
    tag, since, _ = (
        tagged.rsplit("-", 2) if tagged else ("", git("rev-list", "--count", "HEAD"), "")
    )
    if tag and since == "0" and not changed:
        return tag[1:], commit
    numbers = tag[1:].split(".")
    upcoming = ".".join([*numbers[:-1], str(int(numbers[-1]) + 1)]) if tag else FIRST
    version = f"{upcoming}.dev{since}+g{commit[:8]}{'.dirty' if changed else ''}"
    return version, commit + ("-dirty" if changed else "")


VERSION, BUILT_FROM = described()


def readme() -> str:
    """Returns README.md with links that work outside of the repository."""
    address = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    commit = "main" if BUILT_FROM == "unknown" else BUILT_FROM.removesuffix("-dirty")
    ref = commit if ".dev" in VERSION else f"v{VERSION}"
    text = (ROOT / "README.md").read_text()
    return re.sub(r"\]\((?!\w+:|#)", f"]({address}/blob/{ref}/", text)


def write_commit(folder: str) -> None:
    """Writes the commit into a tree that becomes a distribution."""
    path = Path(folder, COMMIT)
    path.unlink(missing_ok=True)  # it may be a link to a file of the sources
    path.write_text(f"{BUILT_FROM}\n")


class BuildWithCommit(build_py):
    """Adds the commit to the files of a wheel; an editable installation asks git."""

    def run(self) -> None:
        """Copies the modules, then adds the commit."""
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    """Adds the commit to a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copies the files, then adds the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(
    version=VERSION,
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit},
)
