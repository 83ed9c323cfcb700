"""What stands in the way of the next sample from a Reverb table."""

from __future__ import annotations

from typing import Any

from rlstack.replay.base import ReplayClosedError, ReplayConfig
from rlstack.replay.limits import Counted, exceeds_samples_per_insert, rule_of
from rlstack.replay.reverb.batches import BatchFetcher
from rlstack.replay.reverb.calls import Shared
from rlstack.replay.reverb.fetcher import ItemFetcher
from rlstack.replay.reverb.rules import TableInfo, is_early, shortage
from rlstack.replay.reverb.tables import table_info
from rlstack.replay.reverb.waiting import Waiting

FETCHING = "fetching"  # nothing: the items are there, and only to be brought
ANSWER = 2.0  # seconds in which a server answers that is there


class Obstacles:
    """Looks, for a reader that holds its lock, at what is here and at what the server holds."""

    def __init__(
        self,
        cfg: ReplayConfig,
        client: Any,
        address: str,
        fetcher: BatchFetcher | ItemFetcher,
        waiting: Waiting,
        shared: Shared,
        *,
        room: int,
        ahead: bool,
    ):
        """Takes what it looks at.

        Args:
          cfg: the table.
          client: of Reverb.
          address: of the server, ``host:port``.
          fetcher: brings items, and has those that are here.
          waiting: what of them is of use, and for which round.
          shared: knows the newest params' version.
          room: items that the table holds.
          ahead: whether items are fetched before they are asked for.
        """
        self._cfg, self._client, self._address = cfg, client, address
        self._fetcher, self._waiting = fetcher, waiting
        self._shared, self._room, self._ahead = shared, room, ahead

    def find(self, size: int, samples: int, *, fetch: bool) -> str:
        """Returns the name of what stands in the way, or nothing.

        Args:
          size: of the batch.
          samples: items sampled by this reader so far.
          fetch: whether to begin to fetch what is missing.

        Raises:
          ReplayClosedError: the server has ended.
          ReplayTimeoutError: it does not answer.
        """
        cfg, fetcher = self._cfg, self._fetcher
        if fetcher.error is not None:
            raise ReplayClosedError(
                f"ReverbReplayBuffer.sample: the Reverb server at {self._address} ended: "
                f"{fetcher.error}"
            )
        info = None
        if not self._ahead:
            info = self._look()
            if self._is_early(info):
                return "min_size"
            if self._waiting.looks:
                info = self._collect(size, info)
        with fetcher.changed:
            self._waiting.drop_stale()
            if self._waiting.in_rounds:
                size = self._waiting.plan()
                if not size:
                    if self._ahead:
                        fetcher.want(self._room)  # there may be room for more now
                    return "round"
            missing = size - fetcher.count
            if cfg.sampler == "fifo" and cfg.samples_per_insert is not None:
                info = info or self._look()
                if exceeds_samples_per_insert(cfg, info.inserts, samples, size):
                    return "samples_per_insert"
            if missing <= 0:
                return ""
            if info is not None and (obstacle := shortage(cfg, info, missing)):
                return obstacle
            if self._ahead:
                fetcher.want(size)
                return "items"
            if fetch:
                fetcher.want(size)
                return FETCHING
            return ""

    def explain(self, obstacle: str, size: int, samples: int) -> str:
        """Returns the rule that an obstacle comes from, in words, with what was counted.

        Raises:
          ReplayTimeoutError: the server does not answer.
        """
        cfg, have = self._cfg, self._fetcher.count
        info = self._look()
        if obstacle in ("items", FETCHING):
            early = self._is_early(info)
            obstacle = "min_size" if early else shortage(cfg, info, size - have) or "items"
        samples = samples if cfg.sampler == "fifo" else info.samples
        counted = Counted(info.inserts, samples, info.size + have, self._shared.version)
        return rule_of(cfg, obstacle, size, counted)

    def _look(self) -> TableInfo:
        return table_info(self._client, self._address, ANSWER)

    def _is_early(self, info: TableInfo) -> bool:
        """Whether min_size is still to come, seen what is in the table and what is here."""
        held = info._replace(size=info.size + self._fetcher.count)
        return is_early(self._cfg, self._room, held)

    def _collect(self, size: int, info: TableInfo) -> TableInfo:
        """Takes waiting items over, to see how old they are; where none are fetched ahead."""
        fetcher = self._fetcher
        with fetcher.changed:
            self._waiting.drop_stale()
            missing = (self._room if self._waiting.in_rounds else size) - fetcher.count
            take = min(missing, info.size)
            if take <= 0:
                return info
            fetcher.want(fetcher.count + take)
            count = fetcher.count + take
            fetcher.changed.wait_for(lambda: fetcher.count >= count or fetcher.error, ANSWER)
            fetcher.want(0)
        return self._collect(size, self._look())
