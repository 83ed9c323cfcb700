"""A report as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from rlstack.programs.tools import charts
from rlstack.programs.tools.charts import Bars, Lines, Points
from rlstack.programs.tools.report.tables import Table

_TEMPLATE = Path(__file__).with_name("page.html")


def html(
    title: str,
    intro: str,
    plots: Mapping[str, Lines | Bars | Points],
    sections: Sequence[tuple[str, Table]],
    remarks: Sequence[str] = (),
) -> str:
    """Returns the page.

    Args:
      title: title of the page.
      intro: a paragraph below the title.
      plots: the plots; the keys are not shown.
      sections: titles and tables below the plots.
      remarks: sentences above the plots.
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(intro)}</p>"]
    if remarks:
        items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
        parts.append(f"<ul>{items}</ul>")
    figures = "\n".join(charts.figure(plot) for plot in plots.values())
    parts.append(f'<div class="plots">\n{figures}\n</div>')
    parts += [f"<h2>{escape(name)}</h2>{_table(table)}" for name, table in sections if table[1]]
    return Template(_TEMPLATE.read_text()).substitute(
        title=escape(title), charts=charts.HEAD, body="\n".join(parts)
    )


def _table(table: Table) -> str:
    columns, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n" for cells in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'
