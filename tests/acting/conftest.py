"""Inference services for tests, and a check that no thread is left behind."""

import threading

import pytest

from tests.acting.services import PATIENT, Source, started


@pytest.fixture
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert [t for t in threading.enumerate() if t not in before] == []


@pytest.fixture
def serve():
    """Makes services; closes them at the end."""
    services = []

    def make(cfg=PATIENT, agent=None, source=None, num_envs=8):
        service = started(cfg, source or Source(), agent, num_envs)
        services.append(service)
        return service

    yield make
    for service in services:
        service.close()
