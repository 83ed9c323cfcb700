"""Benchmarks: `python -m benchmarks.NAME [--quick]`; the last line of output is a JSON object."""
