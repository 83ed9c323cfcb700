"""The launcher `hosts`: its hosts, the nodes that each runs, and what happens when one ends.

Hosts are loopback addresses of this machine, each with a command of its own.
"""

import contextlib
import dataclasses
import json
import signal
import socket

import numpy as np
import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import Setup
from rlstack.programs.program.launch import hosts
from rlstack.programs.program.launch.wiring import indexed, on_this_host
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import addresses
from tests.programs.launched import FAST, Launched
from tests.programs.running import series
from tests.rpc.test_addresses import needs_loopback

pytestmark = pytest.mark.timeout(200)


def known(variables=None, **cfg):
    return hosts.of_program(ProgramConfig(launch="hosts", **cfg), variables or {})


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (("a", "b.c"), ["a", "b.c"]),
        (("node[01-03,7],gpu1",), ["node01", "node02", "node03", "node7", "gpu1"]),
        (("r[1-2]n[0-1]",), ["r1n0", "r1n1", "r2n0", "r2n1"]),
        (("one-learner-0-[0-1].one", "10.0.0.[8-10]"),
         ["one-learner-0-0.one", "one-learner-0-1.one", "10.0.0.8", "10.0.0.9", "10.0.0.10"]),
        (("fd00::2", "fd00::3"), ["fd00::2", "fd00::3"]),
    ],
)  # fmt: skip
def test_hosts_are_listed_as_slurm_does(listed, names):
    assert list(known(hosts=listed, host=0).names) == names


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}, (("n1", "n2", "n3"), 1)),
        (
            {
                "SLURM_HET_SIZE": "2",
                "SLURM_JOB_NODELIST": "gpu1",
                "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu1",
                "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]",
                "SLURMD_NODENAME": "cpu2",
            },
            (("gpu1", "cpu1", "cpu2"), 2),
        ),
        (
            {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"},
            (("10.0.0.1", "10.0.0.2"), 1),
        ),
    ],
)
def test_schedulers_say_which_hosts_there_are(variables, expected):
    assert known(variables) == expected
    assert known(variables, host=0).leads


def test_a_pod_finds_itself_by_its_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "one-actor-0-1")
    found = known(hosts=("one-learner-0-[0-1].one", "one-actor-0-[0-3].one"))
    assert found.names[found.own] == "one-actor-0-1.one" and found.own == 3


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({}, r"neither in a job of Slurm nor of SkyPilot.*--program\.hosts"),
        ({"hosts": ("a", "b")}, r"one of the 2 \(a, b\); got .*--program\.host says"),
        ({"hosts": ("a", "b"), "host": 2}, r"got 2\."),
        ({"hosts": ("a[1-2]", "a2"), "host": 0}, r"hosts must differ; got a1, a2, a2"),
    ],
)
def test_what_is_not_known_is_said(cfg, said):
    with pytest.raises(ValueError, match=said):
        known(**cfg)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ports", "20000", "FIRST-LAST"),
        ("ports", "30000-20000", "FIRST-LAST"),
        ("ports", "0-100", "FIRST-LAST"),
        ("ports", "65000-66000", "FIRST-LAST"),
        ("metrics", "here", "PORT or ADDRESS:PORT"),
        ("metrics", "0.0.0.0:99999", "PORT or ADDRESS:PORT"),
    ],
)
def test_ports_are_checked(field, value, said):
    with pytest.raises(ValueError, match=f"ProgramConfig: {field} must be {said}"):
        ProgramConfig(**{field: value})


def test_reverb_takes_no_range_of_ports():
    base = preset("cartpole-ppo")
    with pytest.raises(ValueError, match=r"program\.ports must be empty with replay\.service rev"):
        dataclasses.replace(
            base,
            topology="distributed",
            program=ProgramConfig(ports="20000-20100"),
            replay=dataclasses.replace(base.replay, service="reverb"),
        )


def experiment(processes=1, actors=4, services=2, ports=""):
    base = preset("cartpole-ppo")
    return dataclasses.replace(
        base,
        topology="distributed",
        learner=LearnerConfig(processes=processes),
        replay=dataclasses.replace(base.replay, service="table"),
        program=ProgramConfig(
            launch="hosts",
            num_actors=actors,
            num_inferencers=services,
            hosts=("127.0.0.[11-13]",),
            host=0,
            ports=ports,
        ),
    )


def made(path, made_of):
    setup = Setup(made_of, RunDir(path), None)
    vars(setup)["step"] = None
    return setup, graph_of(setup)


@pytest.mark.parametrize(
    ("processes", "count", "places"),
    [
        (1, 1, {"learner": 0, "actor/3": 0, "evaluator": 0}),
        (1, 3, {"learner": 0, "replay": 0, "coordinator": 0, "actor/0": 1, "actor/1": 2,
                "actor/2": 1, "inferencer/0": 1, "inferencer/1": 2, "evaluator": 2}),
        (2, 3, {"learner/0": 0, "learner/1": 1, "replay/1": 1, "actor/0": 2, "actor/3": 2}),
        (2, 2, {"learner/1": 1, "actor/0": 0, "actor/1": 1, "evaluator": 1}),
    ],
)  # fmt: skip
def test_learners_have_the_first_hosts_and_actors_the_others(tmp_path, processes, count, places):
    whole = experiment(processes)
    _, graph = made(tmp_path, whole)
    found = {n.name: hosts.place_of(n, i, whole, count) for n, i in indexed(graph)}
    assert {name: found[name] for name in places} == places
    assert set(found.values()) == set(range(count))


def test_every_host_computes_the_same_addresses(tmp_path):
    setup, graph = made(tmp_path, experiment(ports="24000-24020"))
    found = []
    for own in range(3):
        all_hosts = hosts.of_program(dataclasses.replace(setup.experiment.program, host=own))
        with hosts._part_of(graph, setup, all_hosts) as part:
            found.append(dict(part.program.addresses))
            for node, _ in part.nodes:
                if address := part.program.addresses.get(node.name):
                    host, port = addresses.split(address)
                    assert host == f"127.0.0.{11 + own}"
                    with socket.socket() as taken, pytest.raises(OSError):
                        taken.bind(("127.0.0.1", int(port)))
    assert found[0] == found[1] == found[2]
    assert found[0]["coordinator"] == "127.0.0.11:24000"
    assert len(set(found[0].values())) == 5  # coordinator, replay, learner and two services


def test_programs_of_one_host_share_a_range_of_ports(tmp_path):
    one = experiment()
    program = dataclasses.replace(one.program, launch="processes", ports="24100-24120")
    setup, graph = made(tmp_path, dataclasses.replace(one, program=program))
    with on_this_host(graph, setup) as first, on_this_host(graph, setup) as second:
        found = [addresses.split(a) for p in (first, second) for a in p.addresses.values()]
    assert len(set(found)) == len(found) == 10
    assert all(host == "127.0.0.1" and 24100 <= int(port) <= 24120 for host, port in found)


def test_too_few_ports_are_refused(tmp_path):
    setup, graph = made(tmp_path, experiment(ports="24000-24004"))
    all_hosts = hosts.of_program(setup.experiment.program)
    with (
        pytest.raises(ValueError, match=r"a port for each of 5 servers, and another one; got 5"),
        hosts._part_of(graph, setup, all_hosts),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--launch hosts needs --run-dir, a directory that all hosts see"),
        (("--run-dir", "x", "--seeds", "2"), "--launch hosts runs one program: leave out --seeds"),
        (("--run-dir", "x", "--topology", "heavy_env"), "must be distributed with launch hosts"),
    ],
)
def test_the_command_says_what_it_needs(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    topology = () if "--topology" in words else ("--topology", "distributed")
    args = ["cartpole-ppo", "--launch", "hosts", "--program.hosts", "a", "b", *topology, *words]
    assert cli.main("train", args) in (1, 2)
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / ".program"
    assert hosts._read(path) is None
    path.write_bytes(b"")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="only this user may own and read"):
        hosts._read(path)


@contextlib.contextmanager
def commands(tmp_path, count, *words, first="127.0.0.11"):
    """A command for each host."""
    run_dir = tmp_path / "run"
    args = (
        "cartpole-ppo", "--topology", "distributed", "--launch", "hosts", "--replay.service",
        "table", "--program.hosts", first, f"127.0.0.[12-{10 + count}]", "--run-dir", run_dir,
        *FAST, *words,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_Command(run_dir, own, *args)) for own in range(count)]


class _Command(Launched):
    """The command of one host; its output and its temporary files are its own."""

    def __init__(self, run_dir, own, *args):
        self._files = run_dir.with_name(f"host-{own}")
        super().__init__(self._files, *args, "--program.host", own)
        self.run_dir, self._args, self._own = run_dir, args, own

    @property
    def stderr(self):
        return self._files.with_suffix(".stderr").read_text(errors="replace")

    def again(self):
        """Another command for the same host."""
        return _Command(self.run_dir, self._own, *self._args)


ENDLESS = ("--frames", 100_000_000, "--program.num-actors", 2)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("leader", ["127.0.0.11", pytest.param("::1", marks=needs_loopback)])
def test_two_learner_processes_on_hosts_of_their_own_learn_together(tmp_path, leader):
    words = ("--learner.processes", 2, "--program.num-actors", 2, "--frames", 6000)
    ports = ("--program.ports", "23000-23030", "--program.transport", "zmq")
    with commands(tmp_path, 3, *words, *ports, first=leader) as (first, second, third):
        servers = set()

        def all_listen():
            for command in (first, second, third):
                for name, process in command.nodes().items():
                    # Between learners gloo listens too, at a port of its own choice.
                    if name.startswith(("coordinator", "replay", "inferencer")):
                        found = process.net_connections("tcp")
                        servers.update(c.laddr for c in found if c.status == "LISTEN")
            return len({port for _, port in servers}) >= 4

        first.wait_for(all_listen, "servers of the coordinator, two replays and a service")
        assert [command.end(120) for command in (third, second, first)] == [(0, [])] * 3
    assert all(23000 <= port <= 23030 for _, port in servers)
    assert {leader, "127.0.0.12", "127.0.0.13"} <= {ip for ip, _ in servers}
    run_dir = tmp_path / "run"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["env_frames"] >= 6000 and result["learner_steps"] > 4
    assert np.isfinite(series(run_dir, "learner/loss")).all()
    assert first.failures() == []


@pytest.mark.slow
@pytest.mark.chosen
def test_a_host_of_actors_that_is_taken_away_comes_back_and_the_run_goes_on(tmp_path):
    with commands(tmp_path, 3, *ENDLESS) as (first, second, third):
        first.wait_for_update()
        third.process.send_signal(signal.SIGTERM)  # as before a spot machine ends
        code, left = third.end(20)
        assert (code, left) == (143, []), third.stderr
        updates = series(tmp_path / "run", "learner/steps")[-1]
        first.wait_for_log("learner/steps", updates + 5)  # with the actor of the second host
        with third.again() as back:
            first.wait_for_log("program/restarts", 1)
            first.wait_for_log("learner/steps", updates + 20)
            first.process.send_signal(signal.SIGTERM)
            assert first.end(40) == (143, [])
            assert back.end(40)[1] == second.end(40)[1] == []
    assert first.saved_frames() > 0
    assert first.failures() == []


@pytest.mark.slow
def test_the_loss_of_a_learner_on_another_host_ends_the_program_and_is_named(tmp_path):
    words = (*ENDLESS, "--learner.processes", 2)
    with commands(tmp_path, 2, *words) as (first, second):
        first.wait_for_update()
        second.kill("learner/1")
        code, left = first.end(40)
        assert (code, left) == (1, []), first.stderr
        assert "learner/1" in first.stderr
        assert second.end(60)[0] == 1


@pytest.mark.slow
@pytest.mark.launchpad
def test_launchpad_takes_ports_of_a_range(tmp_path):
    pytest.importorskip("launchpad")
    run_dir = tmp_path / "run"
    words = ("--topology", "heavy_env", "--launch", "launchpad", "--program.ports", "24200-24220")
    with Launched(run_dir, "cartpole-ppo", *words, *FAST, *ENDLESS, "--run-dir", run_dir) as one:
        one.wait_for_update()
        listening = {
            connection.laddr.port
            for process in one.processes()
            if process.is_running()
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN"
        }
        one.process.send_signal(signal.SIGINT)
        assert one.end(40) == (130, [])
    assert len(listening) == 2 and all(24200 <= port <= 24220 for port in listening)
