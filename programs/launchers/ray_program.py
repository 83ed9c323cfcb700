"""Runs a program's nodes on the hosts of a Ray cluster, one process of Ray's for each.

Ray places and watches the processes. All that nodes have to say to one another goes by Courier and
Reverb, to the addresses that the launcher binds once it knows where each node has come to lie.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from programs.launchers import ray_cluster
from programs.launchers.program import build
from programs.launchers.ray_host import Berth, Outcome
from programs.launchers.ray_members import ENDED, PAUSED, PLACING, RUNNING, Member, Members
from programs.launchers.watch import Watch
from programs.nodes.coordination import RUNNING as ACTING
from programs.nodes.coordination import SAVING
from programs.nodes.line import Setup
from programs.nodes.supervise import Backoff, record_failure
from programs.tracking.display import ProgressDisplay
from programs.tracking.signals import StopSignals
from rlstack.storage import checkpoint

_LOOK = 0.1  # seconds between two looks at everything
_PATIENCE = 20.0  # seconds after an interruption in which a program ends by itself
_GRACE = 7.5  # seconds in which nodes end after they were told to
_DOUBT = 3.0  # seconds after a failure in which the loss that caused it may show
_CUT = ("UnavailableError", "ReplayClosedError", "ReplayTimeoutError", "ParamsError")


class _Loss(NamedTuple):
    """The end of a node without which the program cannot go on."""

    member: Member
    reason: str
    traceback: str = ""
    by_accident: bool = True  # a process or host was lost; nothing that would happen again


def run_ray(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes on a cluster; returns the signal that came, or 0."""
    program = setup.experiment.program
    setup.directory.node_logs.mkdir(exist_ok=True)
    tries = Backoff(program.max_restarts if program.ray.on_loss == "resume" else 0)
    incarnations: collections.Counter[str] = collections.Counter()
    with StopSignals() as signals, ray_cluster.joined(program) as ray:
        while True:
            begun = time.monotonic()
            with _token(setup.directory.path) as token_file:
                members = Members(ray, setup, build(setup).program, token_file)
                loss = _Program(setup, members, incarnations, signals).run(display)
            if loss is None:
                break
            pause = None
            if loss.by_accident and not signals.received:
                pause = tries.failed(time.monotonic() - begun)
            _record(setup, loss.member, loss.reason, loss.traceback, restarts=pause is not None)
            if pause is None:
                break
            time.sleep(pause)
            newest = checkpoint.latest(setup.directory.checkpoints)
            setup = dataclasses.replace(setup, restored=newest or setup.restored)
        return signals.received or 0


@contextlib.contextmanager
def _token(directory: Path) -> Iterator[Path]:
    """A file by which other hosts show that they see the run directory."""
    path = directory / f".hosts-{secrets.token_hex(8)}"
    path.write_text(secrets.token_hex(16))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _record(setup: Setup, member: Member, reason: str, text: str, *, restarts: bool) -> None:
    record_failure(
        str(setup.directory.failures),
        node=member.name,
        incarnation=member.incarnation,
        host=member.berth.host if member.berth else "",
        reason=reason,
        traceback=text,
        restarts=restarts,
    )


class _Program:
    """One life of the program, from the placing of its nodes to the end of the last."""

    def __init__(
        self,
        setup: Setup,
        members: Members,
        incarnations: collections.Counter[str],
        signals: StopSignals,
    ) -> None:
        """Takes what it needs, and how often each node was started before, to go on counting."""
        self._setup, self._members, self._signals = setup, members, signals
        self._incarnations = incarnations
        self._coordinator = members.named("coordinator")
        self._watch: Watch | None = None
        self._moved: dict[str, str] = {}  # addresses that the coordinator is yet to hear
        self._loss: _Loss | None = None
        self._lost_at = 0.0

    def run(self, display: ProgressDisplay) -> _Loss | None:
        """Runs until the coordinator has ended; returns what ended the program before, if so."""
        try:
            if self._place_all():
                address = self._coordinator.node.addresses[0].resolve()
                self._watch = Watch(address, display)
                self._supervise()
            self._end()
        finally:
            for member in self._members.all:
                self._members.drop(member)
            if self._watch is not None:
                self._watch.close()
        return self._loss

    def _place_all(self) -> bool:
        """Places all nodes, then starts all; says whether that was so, or a signal came."""
        cfg, members = self._setup.experiment.program.ray, self._members
        for follow in (False, True):
            wave = [m for m in members.all if bool(cfg.beside(m.group)) == follow]
            for member in wave:
                member.incarnation = self._incarnations[member.name]
                members.place(member, members.first_place(member))
            while any(member.state == PLACING and member.berth is None for member in wave):
                if self._signals.received:
                    return False
                for member, answer in members.answers(_LOOK):
                    if not isinstance(answer, Berth):
                        raise ValueError(f"launch ray: no process for {member.name}: {answer}")
                    members.moor(member, answer)
                for member in members.unplaced():
                    raise ValueError(
                        f"launch ray: the cluster must have room for {member.name}, which takes "
                        f"{ray_cluster.needs(cfg, member.group)}; there was none in "
                        f"{cfg.place_seconds:g} s. Add hosts, or ask for less (--program.ray)."
                    )
        for member in members.all:
            members.start(member)
        return True

    def _supervise(self) -> None:
        """Until the program is over, or has lost what it cannot do without."""
        told = 0.0
        while self._coordinator.state != ENDED:
            for member, answer in self._members.answers(_LOOK):
                self._heed(member, answer)
            for member in self._members.silent():
                self._fail(member, "its host does not answer")
            for member in self._members.unplaced():
                self._fail(member, "there was no place for it")
            now = time.monotonic()
            for member in self._members.all:
                if member.state == PAUSED and now >= member.until:
                    self._members.place(member, self._members.next_place(member))
                if member.state == ENDED and not member.settled and now > member.since + _DOUBT:
                    self._settle(member)
            self._announce()
            if self._loss and (self._loss.by_accident or now > self._lost_at + _DOUBT):
                return
            if self._signals.received and not told:
                told = now
                if not self._watch or self._watch.interrupt(self._signals.received) != SAVING:
                    return
            if told and now > told + _PATIENCE:
                return

    def _heed(self, member: Member, answer: Berth | Outcome | str | None) -> None:
        """Goes by what a node's process said."""
        if isinstance(answer, Berth):
            try:
                self._members.moor(member, answer)
            except ValueError as error:
                self._members.shun(member)
                self._fail(member, str(error))
                return
            self._members.start(member)
            if member.node.addresses:
                self._moved[member.name] = member.node.addresses[0].resolve()
        elif isinstance(answer, Outcome):
            if answer.failed:
                self._fail(member, answer.reason, answer.traceback)
            else:
                member.enter(ENDED)
        elif answer is not None:
            self._fail(member, answer)

    def _settle(self, member: Member) -> None:
        """Asks whether a node has ended because the program does."""
        assert self._watch is not None
        member.settled = True
        if self._watch.phase() == ACTING:
            self._fail(member, "it left, having heard nothing from the coordinator for long")

    def _announce(self) -> None:
        """Tells the coordinator where nodes have moved."""
        assert self._watch is not None
        for name, address in list(self._moved.items()):
            if self._watch.relocate(name, address):
                del self._moved[name]

    def _fail(self, member: Member, reason: str, text: str = "") -> None:
        """Has a node placed anew, or the program end."""
        lived = time.monotonic() - member.since
        self._members.drop(member)
        self._incarnations[member.name] += 1
        if not member.node.restartable:
            member.enter(ENDED)
            member.settled = True
            by_accident = not text or reason.split(":")[0] in _CUT
            if self._loss is None or (by_accident and not self._loss.by_accident):
                self._loss, self._lost_at = _Loss(member, reason, text, by_accident), member.since
            return
        pause = member.backoff.failed(lived)
        _record(self._setup, member, reason, text, restarts=pause is not None)
        if pause is None:
            member.enter(ENDED)
            member.settled = True
            self._loss, self._lost_at = _Loss(member, reason, text, False), 0.0
            return
        member.incarnation = self._incarnations[member.name]
        member.enter(PAUSED)
        member.until, member.settled = member.since + pause, False

    def _end(self) -> None:
        """Has all nodes end that still run; `run` kills whoever does not in time."""
        running = [m for m in self._members.all if m.state == RUNNING]
        for member in running:
            self._members.stop(member)
        until = time.monotonic() + _GRACE
        while any(m.state == RUNNING for m in running) and time.monotonic() < until:
            for member, answer in self._members.answers(_LOOK):
                if answer is not None:
                    member.enter(ENDED)
