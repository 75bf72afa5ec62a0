"""The report as one HTML file: no script, nothing fetched, plots inside."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from glm5_plugins.campaign.plots import Plot
from glm5_plugins.campaign.report import FIRED, Failure, Report, Table

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 72rem;
  padding: 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .3rem .8rem .3rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #ddd; }
.figure { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pays { color: #00634a; font-weight: 600; } .does-not { color: #a04000; font-weight: 600; }
.did-not-start { color: #a04000; } .cannot-tell { color: #555; font-weight: 600; }
.failure { border-left: 4px solid #d55e00; padding: .1rem 1rem; margin: 1rem 0; background: #fdf4ee; }
code { font-size: .85rem; overflow-wrap: anywhere; } img { max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; } .method { color: #444; max-width: 60rem; }
"""


def html(report: Report, plots: Sequence[Plot]) -> str:
    """The whole page."""
    ratios, levels = ([plot for plot in plots if plot.title.startswith("Ratio") is first] for first in (True, False))
    body = [
        f"<h1>{escape(report.title)}</h1>",
        "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in report.summary) + "</ul>",
        "<h2>What pays</h2>",
        _table(report.decisions),
        *map(_plot, ratios),
        f'<p class="method">{_inline(report.method)}</p>',
    ]
    if report.failures:
        body += ["<h2>What did not start</h2>", *map(_failure, report.failures)]
    if report.troubles:
        body += ["<h2>What to mind</h2>", "<ul>" + "".join(f"<li>{_inline(t)}</li>" for t in report.troubles) + "</ul>"]
    body += ["<h2>Figures</h2>", *map(_plot, levels), _table(report.figures)]
    if report.latencies.rows:
        body += ["<h2>Latency against the baseline</h2><p>Below 1 is faster.</p>", _table(report.latencies)]
    if report.in_force.rows:
        body += ["<h2>What was in force</h2>", _table(report.in_force), f'<p class="method">{escape(FIRED)}</p>']
    body += ["<h2>What it ran on</h2>", _table(report.about)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.svg.encode()).decode()
    return (
        f"<h3>{escape(plot.title)}</h3>"
        f'<img alt="{escape(plot.text, quote=True)}" src="data:image/svg+xml;base64,{data}">'
    )


def _failure(failure: Failure) -> str:
    evidence = f"<code>{escape(failure.evidence)}</code>" if failure.evidence else ""
    rows = [
        ("cause", escape(failure.cause)),
        ("cure", escape(failure.cure)),
        ("see", f'<a href="{escape(failure.link, quote=True)}">{escape(failure.link)}</a>' if failure.link else ""),
        ("the log says", evidence),
        ("log", f"<code>{escape(failure.log)}</code>"),
    ]
    inner = "".join(f"<dt>{head}</dt><dd>{text}</dd>" for head, text in rows if text)
    return f'<div class="failure"><h3>{escape(failure.title)}</h3><p>{escape(failure.reason)}</p><dl>{inner}</dl></div>'


def _table(of: Table) -> str:
    if not of.rows:
        return "<p>None.</p>"
    heads = "".join(f"<th{_of_column(of, index)}>{escape(head)}</th>" for index, head in enumerate(of.heads))
    head = f"<thead><tr>{heads}</tr></thead>" if any(of.heads) else ""
    rows = "".join(
        "<tr>"
        + "".join(f"<td{_of_cell(of, index, cell)}>{escape(cell)}</td>" for index, cell in enumerate(row))
        + "</tr>"
        for row in of.rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _of_column(of: Table, index: int) -> str:
    return ' class="figure"' if index in of.figures else ""


def _of_cell(of: Table, index: int, cell: str) -> str:
    if of.heads[index] == "verdict" and cell in ("pays", "does not", "cannot tell", "did not start"):
        return f' class="{cell.replace(" ", "-")}"'
    return _of_column(of, index)


def _inline(text: str) -> str:
    """The two marks of Markdown that a report's sentences use."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
