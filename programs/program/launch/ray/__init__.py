"""A Ray cluster as a launcher: nodes on several hosts."""
