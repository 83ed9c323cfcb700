"""Run directories in object stores: a run writes to a copy on this machine, which is mirrored.

The manifest (`rlstack.storage.mirror`) names the command that writes, and is its lease: the command
changes it every few seconds, under the condition that it is as this command left it. Another one
takes the directory over when the process is gone or, on another host, when the manifest has not
changed for a minute of that command's own clock. What the first one then still writes to the store
is in no manifest, and the copy's `.lock` names the other command to its writers.

Readers bring the files that they need up to date. A copy to which a command of this machine writes,
or has written more than the store has, is used as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.programs.session import run_lock, timing
from rlstack.programs.session.run_lock import ClaimLostError, RunLock, holder_of
from rlstack.programs.session.signals import Interrupted, at_sudden_end
from rlstack.storage import files
from rlstack.storage.mirror import MANIFEST, STATE, Manifest, Mirror
from rlstack.storage.objects import ChangedError, Objects, StoreAwayError, StoreError

AWAY = "RLSTACK_STORE_AWAY_SECONDS"  # for which a run goes on without its store; 600 by default
BOUND = "RLSTACK_STORE_CACHE_GB"  # most of all copies of this user; 20 by default
NEWEST = "the newest checkpoint"
_STEP = "checkpoints/step_"
_DEPTH = 4  # folder, sweep, trials, trial, run
_TIDY = 60.0  # seconds between two looks at the size of all copies
_IN_USE = 600.0  # seconds since a copy was up to date in which it is not removed

_log = logging.getLogger(__name__)
_writers: set[Path] = set()  # the folders to which this process writes
_fetched: dict[tuple[Path, str], float] = {}  # when each part was brought up to date


@contextlib.contextmanager
def written(folder: Path, lock: RunLock) -> Iterator[None]:
    """Mirrors a copy to its store until the context ends; then the store has all of it.

    Args:
      folder: the copy on this machine.
      lock: the lock of this command on it.

    Raises:
      RunLockedError: another command writes to the directory.
      ClaimLostError: another command has taken it over.
      StoreError: the store refuses it, or has not answered for too long.
    """
    writer = _Writer(folder, lock)
    _writers.add(folder)
    try:
        try:
            yield
        except BaseException as error:
            try:
                writer.finish()
            except (StoreError, ClaimLostError) as other:
                if isinstance(error, Interrupted | KeyboardInterrupt):
                    raise other from error
                _log.warning("%s", other)
            raise
        writer.finish()
    finally:
        _writers.discard(folder)


def holds_run(folder: Path) -> bool:
    """Whether the store has a run; an old copy of one that it no longer has is removed.

    Raises:
      StoreError: the store refuses it, or does not answer.
    """
    objects = _objects(folder)
    found = Manifest.read(objects)
    if found is not None and found[0].files:
        return True
    if folder.is_dir():
        with _alone(folder):
            _forget(Mirror(folder, objects))
    return False


def fetch(folder: Path, part: str = "") -> None:
    """Brings a copy up to date.

    Args:
      folder: the copy on this machine.
      part: a folder in it, with all that is below; "" for the files of the run directory itself,
        and `NEWEST` for the newest checkpoint.

    Raises:
      StoreError: the store refuses it, or does not answer.
      OSError: a file cannot be written.
    """
    if folder not in _writers and _is_due((folder, part), timing.STORE_READ):
        with _as_it_was((folder, part)):
            _fetch(folder, part)


def _fetch(folder: Path, part: str) -> None:
    mirror = Mirror(folder, objects := _objects(folder))
    if _is_written_here(mirror):
        return
    found = Manifest.read(objects)
    if found is None and not (folder / STATE).is_file():
        _fetched[folder, part] = time.monotonic()
        return
    with _alone(folder):
        mirror = Mirror(folder, objects)
        for _ in range(3):  # a writer may remove pieces of the manifest that is read
            if _is_written_here(mirror):
                return
            manifest = Manifest() if found is None else found[0]
            if mirror.ahead and (found is None or mirror.continues(manifest)):
                return  # a command that was killed here has written more than the store has
            _set_aside(mirror)
            damaged: list[str] = []
            error: StoreError | None = None
            try:
                damaged = mirror.pull(manifest, _wanted(manifest, part))
            except StoreError as raised:
                error = raised
            if not (damaged or error):
                break
            newer = Manifest.read(objects)
            if newer is None or newer[0].revision == manifest.revision:
                if error is not None:
                    raise error
                _tell_damage(damaged)
                break
            found = newer
        run_lock.write(folder / ".lock", manifest.holder)
    _fetched[folder, part] = time.monotonic()
    _tidy(folder)


def _wanted(manifest: Manifest, part: str) -> Callable[[str], bool]:
    if part == NEWEST:
        steps = {name.split("/")[1] for name in manifest.files if name.startswith(_STEP)}
        newest = max(steps, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], default="")
        part = f"checkpoints/{newest}"
    return lambda name: name.startswith(f"{part}/") if part else "/" not in name


def fetch_below(folder: Path) -> None:
    """Brings the copies of all runs and studies below a folder up to date.

    Raises:
      StoreError: the store refuses it, or does not answer.
    """
    fetch(folder)
    if (folder / "config.json").is_file():  # it is a run, which needs no list
        return
    if _is_due((folder, "*"), timing.STORE_LIST):
        with _as_it_was((folder, "*")):
            listed = set(_listed(_objects(folder), folder, "", _DEPTH))
            for path in {state.parent for state in folder.rglob(STATE)} - listed:
                with _alone(path):
                    _forget(Mirror(path, _objects(path)))
            for path in listed:
                fetch(path)
            _fetched[folder, "*"] = time.monotonic()
    for state in list(folder.rglob(STATE)):
        fetch(state.parent)


def _is_due(key: tuple[Path, str], seconds: float) -> bool:
    return key not in _fetched or time.monotonic() > _fetched[key] + seconds


@contextlib.contextmanager
def _as_it_was(key: tuple[Path, str]) -> Iterator[None]:
    """Keeps a part as this process has read it before, while the store does not answer."""
    try:
        yield
    except StoreAwayError as error:
        if key not in _fetched:
            raise
        _log.warning("%s What was read last is shown.", error)
        _fetched[key] = time.monotonic()


def _listed(objects: Objects, folder: Path, below: str, depth: int) -> Iterator[Path]:
    names, folders = objects.below(below)
    if MANIFEST in names:
        yield folder / below
        if any(name.startswith("config.json.") for name in names):
            return
    for name in folders if depth else ():
        yield from _listed(objects, folder, f"{below}/{name}" if below else name, depth - 1)


class _Writer:
    """Mirrors a folder to its store in a thread, as the only command that does."""

    def __init__(self, folder: Path, lock: RunLock) -> None:
        """Takes the lease, and brings the copy up to date.

        Raises: see `written`.
        """
        self._folder, self._lock = folder, lock
        self._objects = _objects(folder)
        self._manifest, self._tag = Manifest(), ""
        self._beaten = time.monotonic()
        self._away_seconds = _number(AWAY, timing.STORE_AWAY)
        self._unneeded: list[str] = []  # pieces that an earlier manifest names
        self._error: StoreError | ClaimLostError | None = None
        self._ended = threading.Event()
        with _alone(folder):
            self._mirror = Mirror(folder, self._objects)
            unneeded = self._take()
            try:
                with self._beating():
                    self._align()
            except BaseException:
                with contextlib.suppress(StoreError, ClaimLostError):
                    self._commit(holder={})
                raise
            lock.hold()  # a reader may have written the name of an earlier holder
        self._thread = threading.Thread(
            target=self._run, args=(unneeded,), name="store", daemon=True
        )
        self._thread.start()

    def _take(self) -> Manifest:
        """Takes the lease; returns the manifest of before."""
        found = Manifest.read(self._objects)
        # The lock of the copy is this command's, so an earlier one that wrote to it has ended.
        while (
            found is not None
            and not self._mirror.continues(found[0])
            and _is_held(self._objects, *found)
        ):
            now = Manifest.read(self._objects)
            if now is not None and now[0].holder.get("token") == found[0].holder.get("token"):
                raise run_lock.locked(self._objects.url, now[0].holder)
            found = now
        before, self._tag = found or (Manifest(), "")
        mirror = self._mirror
        self._continues = mirror.ahead and (found is None or mirror.continues(before))
        if found is None and mirror.ahead:
            before = dataclasses.replace(before, run=mirror.run)
        if self._continues:
            mirror.marks.append(mirror.mark)  # before it is in the store
            mirror.save()
        self._manifest = before
        try:
            self._commit(holder=self._lock.content(), mark=mirror.mark)
        except ClaimLostError:
            found = Manifest.read(self._objects)
            raise run_lock.locked(self._objects.url, found[0].holder if found else {}) from None
        return before

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        """Renews the lease in the body, which does not."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(ClaimLostError):  # the next look will find out
                while not done.wait(timing.STORE_PERIOD):
                    with contextlib.suppress(StoreError):
                        self._commit()

        thread = threading.Thread(target=beat, name="store-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _align(self) -> None:
        """Makes the folder the directory of the run, to which this command writes."""
        mirror = self._mirror
        if not self._continues:
            _set_aside(mirror)
            _tell_damage(mirror.pull(self._manifest, lambda name: True))
        mirror.run, mirror.ahead, mirror.marks = self._manifest.run, True, [mirror.mark]
        mirror.save()

    def _run(self, before: Manifest) -> None:
        with contextlib.suppress(StoreError):  # without a list they stay, and nothing else
            self._unneeded += self._mirror.unnamed(before)
        since, told = time.monotonic(), False  # when the store answered last
        while not self._ended.wait(timing.STORE_PERIOD):
            try:
                self._sync()
            except ClaimLostError as error:
                self._error = error
                return
            except Exception as error:
                if not told:
                    _log.warning("%s The run goes on in %s.", error, self._folder)
                told = True
                if time.monotonic() > since + self._away_seconds and not self._ended.is_set():
                    self._error = self._left(error)
                    os.kill(os.getpid(), signal.SIGINT)  # which saves the run, and ends it
                    return
            else:
                if told:
                    _log.warning("%s answers again.", self._objects.url)
                since, told = time.monotonic(), False

    def _sync(self, **changes: Any) -> bool:
        """Writes what has changed to the store; returns False if the folder does not rest."""
        found = self._mirror.push(self._beat)
        if found is None:
            self._beat()
            return False
        before = self._manifest
        if found == before.files and not changes:
            self._beat()
            return True
        self._commit(files=found, revision=before.revision + 1, **changes)
        self._mirror.committed(self._manifest)
        unneeded, now = self._unneeded, _keys(found)
        self._unneeded = sorted(_keys(before.files) - now)  # a reader may be reading them
        with contextlib.suppress(StoreError):
            self._objects.delete([key for key in unneeded if key not in now])
        return True

    def _beat(self) -> None:
        """Renews the lease if it is time."""
        if time.monotonic() > self._beaten + timing.STORE_PERIOD:
            self._commit()

    def _commit(self, **changes: Any) -> None:
        """Writes the manifest, if no other command has.

        Raises:
          ClaimLostError: another command has.
        """
        new = dataclasses.replace(self._manifest, beat=self._manifest.beat + 1, **changes)
        token = self._lock.claim.token
        while True:
            try:
                self._tag = self._objects.put_if(MANIFEST, new.encode(), self._tag)
                break
            except ChangedError:  # by another command, or by a request without an answer
                found = Manifest.read(self._objects)
                if found is not None and found[0] == new:
                    self._tag = found[1]
                    break
                holder = {} if found is None else found[0].holder
                if found is None or holder.get("token") != token:
                    # It names the other command to all that write to the folder.
                    run_lock.write(self._lock.claim.path, holder)
                    self._lock.claim.check()
                    raise
                self._tag = found[1]
        self._manifest, self._beaten = new, time.monotonic()

    def finish(self) -> None:
        """Brings the store up to date, and gives the lease back.

        Raises: see `written`.
        """
        self._ended.set()
        self._objects.give_up()  # this method repeats itself
        self._thread.join()
        if isinstance(self._error, ClaimLostError):
            raise self._error
        # Ctrl-C ends a command of `rlstack` at once now.
        done = at_sudden_end(lambda: os.write(2, f"{self._left()}\n".encode()))
        try:
            self._store_all()
        finally:
            done()
        if not self._manifest.files:  # the directory is free for another run
            self._objects.delete([MANIFEST, *self._unneeded])
        self._mirror.ahead = False
        self._mirror.save()
        with contextlib.suppress(StoreError):
            self._objects.delete(self._unneeded)
        _tidy(self._folder)

    def _store_all(self) -> None:
        until, told = time.monotonic() + (0.0 if self._error else self._away_seconds), False
        while True:
            try:
                if self._sync(holder={}):
                    return
                error: Exception = StoreError(f"{self._folder} changes all the time.")
            except ClaimLostError:
                raise
            except (StoreError, OSError) as failure:
                error = failure
            if time.monotonic() > until:
                raise self._left(error) from error
            if not told:
                _log.warning("%s This command waits up to %g s.", error, self._away_seconds)
            told = True
            time.sleep(timing.STORE_PERIOD / 10)

    def _left(self, error: Exception | None = None) -> StoreAwayError:
        url, why = self._objects.url, f"{error} " if error else ""
        return StoreAwayError(
            f"{why}{url} has not all files of the run; those are in {self._folder}. "
            f"rlstack train --resume {url} on this host stores them and goes on. {AWAY} says for "
            f"how long a run goes on without its store ({self._away_seconds:g})."
        )


def _objects(folder: Path) -> Objects:
    return Objects(files.url_of(folder), timing.STORE_ANSWER)


def _keys(named: Mapping[str, Any]) -> set[str]:
    return {piece.key for pieces in named.values() for piece in pieces}


def _is_held(objects: Objects, manifest: Manifest, tag: str) -> bool:
    """Whether the command that a manifest names is alive; may wait for its next beat."""
    holder = manifest.holder
    if "pid" in holder and run_lock.is_alive(holder) is None:
        _log.warning(
            "%s has %s; this command waits up to %g s to see whether it still runs.",
            run_lock.describe(holder),
            objects.url,
            timing.STORE_LEASE,
        )
    return run_lock.is_held(
        holder,
        lambda: objects.tag(MANIFEST) != tag,
        timing.STORE_LEASE,
        timing.STORE_PERIOD / 4,
    )


def _is_written_here(mirror: Mirror) -> bool:
    """Whether a command of this machine writes to the copy."""
    holder = holder_of(mirror.folder) if mirror.ahead else None
    return holder is not None and bool(holder.alive)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Makes a folder if it is missing, and lets one process at a time bring it up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f"{STATE}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _set_aside(mirror: Mirror) -> None:
    """Moves the files of a copy away if it has some that its store lacks, which is newer."""
    if not mirror.ahead:
        return
    number = 1
    while (aside := mirror.folder / f"{STATE}.aside-{number}").exists():
        number += 1
    aside.mkdir()
    for path in mirror.folder.iterdir():
        if not path.name.startswith("."):
            path.rename(aside / path.name)
    mirror.files, mirror.ahead, mirror.marks = {}, False, []
    mirror.save()
    _log.warning(
        "Another command has gone on with %s; what an earlier one here had not stored is in %s.",
        files.url_of(mirror.folder),
        aside,
    )


def _tell_damage(damaged: Sequence[str]) -> None:
    for text in damaged:
        _log.warning("%s It is left out.", text)


def _number(variable: str, default: float) -> float:
    """Returns the number in an environment variable."""
    text = os.environ.get(variable) or str(default)
    try:
        return float(text)
    except ValueError:
        raise StoreError(f"{variable} must be a number; got {text!r}.") from None


def _forget(mirror: Mirror) -> int:
    """Removes a copy that has nothing of its own; returns its bytes."""
    if mirror.ahead:
        return 0
    freed = sum(copied.size for copied in mirror.files.values())
    mirror.pull(Manifest(), lambda name: False)
    (mirror.folder / STATE).unlink(missing_ok=True)
    for key in list(_fetched):
        if key[0] == mirror.folder:
            del _fetched[key]
    return freed


def _tidy(kept: Path) -> None:
    """Removes the copies that were not used for longest while all together take too much space."""
    if not _is_due((files.copies(), "tidy"), _TIDY):
        return
    _fetched[files.copies(), "tidy"] = time.monotonic()
    found = []
    for state in files.copies().rglob(STATE):
        with contextlib.suppress(OSError, StoreError):
            mirror = Mirror(state.parent, _objects(state.parent))
            size = sum(copied.size for copied in mirror.files.values())
            found.append((state.stat().st_mtime, size, mirror))
    total = sum(size for _, size, _ in found)
    bound = _number(BOUND, 20.0) * 1e9
    for used, _, mirror in sorted(found, key=lambda one: one[0]):
        if total > bound and mirror.folder != kept and time.time() > used + _IN_USE:
            with _alone(mirror.folder):
                total -= _forget(mirror)
