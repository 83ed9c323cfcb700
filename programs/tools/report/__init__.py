"""Reports on finished runs: tables, statistics, pictures and pages from their files.

`runs` reads runs, `normalisation` puts scores of different tasks on one scale, and `statistics`
has the numbers of a report. `tables`, `plots` and `page` show them; `report` writes the files.
"""

from typing import Literal

By = Literal["preset", "agent", "directory"]  # what the rows of a table are
Pictures = Literal["png", "svg", "none"]  # of a Markdown file
