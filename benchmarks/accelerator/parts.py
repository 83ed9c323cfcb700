"""The parts of the benchmark, with the time that each may take."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One part, which runs in a process of its own."""

    kind: str  # the function of `benchmarks.accelerator.child`
    preset: str = ""
    seconds: float = 30.0  # that it needs, as a rule
    limit: float = 120.0  # after which it is killed
    xla_flags: str = ""  # in addition to those of the environment

    @property
    def name(self) -> str:
        """The kind and the preset."""
        return f"{self.kind}/{self.preset}" if self.preset else self.kind


LEARNED = ("pong-ppo", "pong-impala", "breakout-dqn", "breakout-rainbow", "pong-r2d2")
PLAYED = ("halfcheetah-ppo", "halfcheetah-sac")
FUSED = ("gymnax-cartpole-ppo", "gymnax-cartpole-pqn", "gymnax-cartpole-sac")

FULL = (
    Part("updates", seconds=60, limit=150),
    Part("acting", seconds=15),
    Part("checkpoint", seconds=10),
    *(Part("learner", name, 25) for name in LEARNED),
    Part("learner_run", "breakout-dqn", 25),
    Part("bfloat16", "pong-ppo", 25),
    *(Part("fused", name, 40) for name in FUSED),
    *(Part("run", name, 25) for name in PLAYED),
    Part("service", seconds=20),
    Part("actor", "pong-gpu-ppo", 30),
    Part("pool", "pong-gpu-ppo", 20),
)
_PONG = ("pong-gpu-ppo", "pong-gpu-impala")
# Parts that run only if they are named.
MORE = (
    Part("learner_run", "breakout-rainbow", 25),
    Part("repeats", seconds=60, limit=150),
    Part("repeats_with_deterministic_ops", "", 60, 150, "--xla_gpu_deterministic_ops=true"),
    *(Part(kind, "pong-gpu-ppo", 45) for kind in ("single_process", "heavy_env", "light_env")),
    Part("heavy_env", "pong-gpu-impala", 45),
    *(Part("layouts", name, 140, limit=250) for name in _PONG),
    *(Part(kind, name, 100, limit=200) for kind in ("actors", "actors_shared") for name in _PONG),
    *(
        Part("actors_without_cuda_graphs", name, 100, 200, "--xla_gpu_enable_command_buffer=")
        for name in _PONG
    ),
    *(Part("heavy_env_half", name, 45) for name in (*_PONG, "breakout-gpu-ppo")),
    *(Part("run", name, 25) for name in ("pong-ppo", "breakout-ppo")),
    Part("fused", "catch-ppo", 40),
    Part("fused", "minatar-breakout-ppo", 40),
    Part("fused", "brax-ant-ppo", 90, limit=180),
)
# One of each kind that a CPU does in a second or two; the others need minutes there.
QUICK = (
    Part("updates", "", 0),
    Part("acting", "", 0),
    Part("checkpoint", "", 0),
    Part("learner", "cartpole-dqn", 0),
    Part("actor", "cartpole-ppo", 0),
    Part("fused", "catch-ppo", 0),
    Part("service", "", 0),
)
