"""Reports on finished runs: tables, statistics, pictures and pages from their files.

`runs` reads runs, `normalisation` puts scores of different tasks on one scale, and `statistics`
has the numbers of a report. `tables`, `figures` and `page` show them; `report` writes the files.

May import: rlstack.math, rlstack.programs, rlstack.programs.components, rlstack.programs.presets,
rlstack.programs.tracking, rlstack.storage.
"""
