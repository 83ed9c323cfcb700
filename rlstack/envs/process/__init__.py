"""Process pools: worker processes step the environments and share their data through memory.

``backend`` is the pool's side, ``worker_handle`` the pool's handle on one worker, ``worker`` the
code of a worker process, and ``protocol`` what both sides share: messages and memory. A worker
never imports JAX, so the last two must not either.
"""
