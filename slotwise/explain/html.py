"""One self-contained HTML page: a waterfall per request, the fits with residuals, all tables.

No scripts, no other files, no hosts. The markup is in ``page.html.j2``; the geometry in
`drawing.py`; this module only puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotwise import __version__
from slotwise.explain import drawing, wording
from slotwise.explain.record import Life
from slotwise.explain.summary import Explained, Summary

MOST_WATERFALLS = 60


def page(result: Explained) -> str:
    """The whole page as text. Needs jinja2."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("slotwise.explain", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    lives = [_life(v, s) for v, s in zip(result.reading.lives, result.summaries, strict=True)]
    return environment.get_template("page.html.j2").render(
        lives=lives, reading=result.reading, version=__version__, words=wording, draw=drawing
    )


def _life(life: Life, said: Summary) -> Mapping[str, Any]:
    colours, full = drawing.hues(life), drawing.scales(life, said)
    shown = life.requests[:MOST_WATERFALLS]
    return {
        "life": life,
        "summary": said,
        "waterfalls": [drawing.waterfall(r, full_ms=full[r.index], colours=colours) for r in shown],
        "not_drawn": len(life.requests) - len(shown),
        "colours": colours,
        "plots": list(_plots(said)),
        "costs": said.costs,
    }


def _plots(said: Summary) -> list[drawing.Plot]:
    plots = []
    if said.read.line is not None:
        words = f"{said.read.what}: {wording.formula(said.read.line)}"
        plots.append(
            drawing.fit_plot(said.read.line, floor=said.read.floor, words=words, per="token")
        )
    if said.refill is not None:
        words = f"refill: {wording.formula(said.refill.rate)} through the origin"
        plots.append(drawing.fit_plot(said.refill.rate, floor=None, words=words, per="slot"))
    return plots
