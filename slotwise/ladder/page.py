"""A ladder's report as one self-contained HTML page, drawn with `explain`'s pieces."""

from __future__ import annotations

from slotwise import __version__
from slotwise.explain import drawing, drawing_arms, wording
from slotwise.ladder import report_text
from slotwise.ladder.report import ArmReport, LadderReport


def page(report: LadderReport) -> str:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    packages = ("slotwise.ladder", "slotwise.explain")
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in packages]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    forests = [[drawing_arms.changes(s) for s in result.sizes] for result in report.comparisons]
    return environment.get_template("ladder.html.j2").render(
        report=report, plots={a.name: plots(a) for a in report.arms}, forests=forests,
        texts=report_text, words=wording, draw=drawing, version=__version__,
    )  # fmt: skip


def plots(arm: ArmReport) -> list[drawing.Plot]:
    """The arm's fits: first token and read by tokens, refill by slots."""
    fits = [(arm.first_token, None, "token"), (arm.read.line, arm.read.floor, "token")]
    drawn = [
        drawing.fit_plot(fit, floor=floor, words=f"{fit.name}: {wording.formula(fit)}", per=per)
        for fit, floor, per in fits if fit is not None
    ]  # fmt: skip
    if arm.refill is not None:
        rate = arm.refill.rate
        words = f"refill: {wording.formula(rate)} through the origin"
        drawn.append(drawing.fit_plot(rate, floor=None, words=words, per="slot"))
    return drawn
