"""Reports on finished runs: tables, statistics, pictures and pages from their files alone.

`runs` reads runs, `normalisation` puts scores of different tasks on one scale, and `statistics`
has the numbers of a report. `tables`, `figures` and `page` show them; `report` writes the files.

May import: programs, programs.components, programs.tracking, rlstack.math, rlstack.storage.
"""
