"""Recorded trajectories on disk: a writer, a reader, and windows to learn from.

A dataset is a directory of whole episodes:

```
dataset.json         the header: format, env, observation, action, counts, returns, source
shard-00000.npz      steps of whole episodes, one after the other, by column
shard-00001.npz      ...
```

Every column of a shard has one row a step: ``step_type`` int32, ``reward`` and ``discount``
float32, ``observation`` and ``action``; nested ones have one column a leaf, named by its path, as
``observation['camera'][0]``. Steps mean what they mean everywhere (`rlstack.types`): an episode of
n actions has n + 1 rows, the last of which holds the true last observation and an action that the
environment ignored. Real-numbered actions are as the environment took them, within their bounds.
``numpy.load`` reads the shards; those written here are not compressed, so that they can be mapped
into memory and read at random without loading them.
"""

from rlstack.storage.datasets.header import DatasetError, Header, Shard, check_specs
from rlstack.storage.datasets.reader import Dataset
from rlstack.storage.datasets.windows import Windows
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
]
