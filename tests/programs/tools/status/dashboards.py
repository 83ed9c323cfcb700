"""Runs with made-up logs, and the command `rlstack dashboard` on them."""

import contextlib
import http.client
import json
import subprocess
import sys

from rlstack.programs.session.run_dir import RunDir

RESULT = {
    "eval_return_mean": 9.0,
    "eval_return_std": 1.0,
    "eval_episodes": 10,
    "env_frames": 1000,
    "learner_steps": 5,
    "wall_seconds": 3.0,
    "frames_per_second": 300.0,
    "seed": 1,
    "topology": "heavy_env",
    "preset": "cartpole-ppo",
    "git_commit": "unknown",
}


# Texts of a config.json that is not of rlstack, or damaged.
FOREIGN = (
    '["not rlstack"]',
    '"text"',
    "{",
    "",
    "[" * 100_000,
    '{"frames": null}',
    '{"frames": "many"}',
    '{"frames": [1]}',
    '{"frames": 1e999}',
    '{"frames": NaN}',
    '{"frames": 1' + 400 * "0" + "}",
)


def make_run(path, seed=1, discount=0.9, env=None):
    directory = RunDir.create(path, "cartpole-ppo", seed)
    config = {"preset": "cartpole-ppo", "topology": "heavy_env", "frames": 1000, "seed": seed}
    if env is not None:
        config["env"] = {"name": env, "options": {}}
    directory.write_config(json.dumps({**config, "agent": {"discount": discount}}))
    return directory


def log(run, *lines):
    with open(run.metrics, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def line(frames, **logs):
    return {"env_frames": frames, "wall_time": 1_000_000.0 + frames / 10, **logs}


def finish(run):
    log(run, *(line(100 * i, **{"evaluator/episode_return": i}) for i in range(1, 11)))
    run.write_result(RESULT)
    return run


def ask(port, path, host=None, method="GET"):
    """The status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        hosts = [f"127.0.0.1:{port}"] if host is None else host
        connection.putrequest(method, path, skip_host=True)
        for name in hosts:
            connection.putheader("Host", name)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def ask_json(port, path):
    status, _, body = ask(port, path)
    assert status == 200, body
    return json.loads(body)


@contextlib.contextmanager
def command(*args):
    """Runs the command; yields its process and its port."""
    started = subprocess.Popen(
        [sys.executable, "-m", "rlstack", "dashboard", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = started.stdout.readline()
        assert first.startswith("http://127.0.0.1:"), started.stderr.read()
        yield started, int(first.split("/")[2].split(":")[1])
    finally:
        started.kill()
        started.communicate()
