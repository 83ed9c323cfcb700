"""A node object with all kinds of methods, and helpers for tests of calls to it."""

import concurrent.futures
import os
import socket
import sys
import threading
import time
from pathlib import Path

from rlstack.rpc import remote, serve


class Node:
    """A node object with all kinds of methods."""

    def __init__(self, folder=None):
        self.folder, self.runs, self.gate = folder, [], threading.Event()
        self.futures = []

    @remote(idempotent=True)
    def echo(self, *args, **kwargs):
        return (args, kwargs) if kwargs or len(args) != 1 else args[0]

    @remote()
    def add(self, amount):
        self.runs.append(amount)
        return sum(self.runs)

    @remote()
    def fail(self, kind):
        raise {"key": KeyError, "exit": SystemExit, "value": ValueError}[kind](
            "the café's key\ud800"
        )

    @remote(idempotent=True)
    def unsendable(self):
        return {"x": [object()]}

    @remote()
    def wait(self, seconds=20.0):
        self.runs.append("wait")
        return self.gate.wait(seconds)

    @remote(prompt=True)
    def later(self, what):
        self.futures.append(concurrent.futures.Future())
        self.runs.append(what)
        return self.futures[-1]

    @remote(idempotent=True)
    def slow(self, seconds):
        self.log("slow")
        time.sleep(seconds)
        return os.getpid()

    @remote()
    def slow_once(self, seconds):
        self.log("once")
        time.sleep(seconds)
        return os.getpid()

    def log(self, what):
        with open(Path(self.folder) / "log", "a") as file:
            file.write(f"{what}\n")

    def secret(self):
        return "not remote"

    def run(self):
        return "ran"


class Heir(Node):
    def add(self, amount):
        return super().add(2 * amount)


def serve_for_ever(port, folder):
    server = serve(Node(folder), port=int(port))
    print("up", flush=True)
    sys.stdin.read()
    server.close()


def in_thread(function, *args):
    """Calls a function in a separate thread; returns a future."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def wait_until(condition, seconds=10.0):
    assert becomes(condition, seconds)


def becomes(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def tasks():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]
