"""Several learner processes that learn as one."""
