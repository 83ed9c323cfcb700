"""Errors of the limit of open files name the limit and the way out."""

from programs.tracking import open_files


def test_other_errors_get_no_advice():
    assert open_files.advice("ValueError: no") == ""
    assert open_files.noted("ValueError: no") == "ValueError: no"
    assert "RLIMIT_NOFILE" in open_files.advice("OSError: [Errno 24] Too many open files: 'x'")
