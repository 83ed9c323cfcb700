"""Process pools: worker processes step the environments and return the data in shared memory.

``backend`` is the pool's side, ``worker`` the code of a worker process, and ``protocol`` the
messages and memory that both sides share. A worker never imports JAX, so ``worker`` and
``protocol`` must not import it either.
"""
