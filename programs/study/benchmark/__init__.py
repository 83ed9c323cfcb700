"""The field's benchmarks: suites of tasks as data, their runs, their pages, and a watch.

`suites` reads the tables of the folder ``suites/``, one for each suite. `runs` trains the tasks of
a suite as studies, `records` keeps their scores in small files, `page` makes a page of them, and
`watch` compares them with recorded bands. `bsuite` scores whole trainings of bsuite,
and makes the part of the page that has these scores.
"""
