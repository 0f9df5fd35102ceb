"""Self-contained HTML pages: waterfalls and fits of logs, two arms compared, levers predicted.

No scripts, no other files, no hosts. The markup is in the ``*.html.j2`` beside this file; the
geometry in `drawing.py` and `drawing_arms.py`; this module only puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from slotwise import __version__
from slotwise.explain import drawing, drawing_arms, wording
from slotwise.explain.compare import Comparison
from slotwise.explain.levers import LeverReport
from slotwise.explain.record import Life
from slotwise.explain.summary import Explained, Summary

MOST_WATERFALLS = 60


def page(result: Explained) -> str:
    """What was read, as a page."""
    lives = [_life(v, s) for v, s in zip(result.reading.lives, result.summaries, strict=True)]
    return _render("page.html.j2", lives=lives, reading=result.reading, draw=drawing)


def comparison_page(result: Comparison) -> str:
    """Two arms as a page: every phase's change as a dot with its interval."""
    forests = [drawing_arms.changes(size) for size in result.sizes]
    return _render("compare.html.j2", result=result, forests=forests)


def levers_page(report: LeverReport) -> str:
    """Levers as a page: now, predicted and, with an arm, measured."""
    levers = [list(of) for _, of in groupby(report.predictions, key=lambda p: p.lever.key)]
    forests = {p: drawing_arms.prediction(p) for p in report.predictions}
    return _render("levers.html.j2", report=report, levers=levers, forests=forests)


def _render(template: str, **parts: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("slotwise.explain", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(version=__version__, words=wording, **parts)


def _life(life: Life, said: Summary) -> Mapping[str, Any]:
    colours, full = drawing.hues(life), drawing.scales(life, said)
    shown = life.requests[:MOST_WATERFALLS]
    return {
        "life": life,
        "summary": said,
        "waterfalls": [drawing.waterfall(r, full_ms=full[r.index], colours=colours) for r in shown],
        "not_drawn": len(life.requests) - len(shown),
        "colours": colours,
        "overview": drawing.overview(said, colours=colours),
        "plots": list(_plots(said)),
        "costs": said.costs,
    }


def _plots(said: Summary) -> list[drawing.Plot]:
    plots = []
    if said.read.line is not None:
        words = wording.fit_title(said.read.what, said.read.line)
        plots.append(
            drawing.fit_plot(said.read.line, floor=said.read.floor, words=words, per="token")
        )
    if said.refill is not None:
        words = f"refill: {wording.formula(said.refill.rate)} through the origin"
        plots.append(drawing.fit_plot(said.refill.rate, floor=None, words=words, per="slot"))
    return plots
