"""Recorded trajectories on disk: a writer, a reader, and windows to learn from.

A dataset is a directory of whole episodes:

```
dataset.json         the header: format, env, observation, action, counts, returns, source
shard-00000.npz      steps of whole episodes, one after the other, by column
shard-00001.npz      ...
```

Every column of a shard has one row per step: ``step_type`` int32, ``reward`` and ``discount``
float32, ``observation`` and ``action``. Nested observations and actions have one column per leaf,
named by its path, such as ``observation['camera'][0]``. Steps have the same meaning as everywhere
(`rlstack.types`): an episode of n actions has n + 1 rows. The last row has the true last
observation and an action that the environment ignored. Actions of real numbers are stored as the
environment received them, within their bounds. Discrete values are the environment's own: those of
``Discrete(3, start=5)`` are 5, 6 and 7, and the header has the start. ``numpy.load`` reads the
shards. The writer does not compress them, so that they can be mapped into memory and read in any
order without loading them.
"""

from rlstack.storage.datasets.header import DatasetError, Header, Shard, check_specs, fingerprint
from rlstack.storage.datasets.minari import located
from rlstack.storage.datasets.reader import Dataset
from rlstack.storage.datasets.windows import Windows, check_steps, window_starts
from rlstack.storage.datasets.writer import DatasetWriteError, DatasetWriter

__all__ = [
    "Dataset",
    "DatasetError",
    "DatasetWriteError",
    "DatasetWriter",
    "Header",
    "Shard",
    "Windows",
    "check_specs",
    "check_steps",
    "fingerprint",
    "located",
    "window_starts",
]
