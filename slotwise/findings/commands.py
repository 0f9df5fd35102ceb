"""The verbs of `slotwise findings`: new, check, render.

Exit codes: 2 wrong usage, 3 something could not be checked, 4 the record is invalid or does not
hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from slotwise.errors import UsageError

INVALID = 4
RECORD = click.argument(
    "record", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True)
)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
OUT = click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="File to write.  [default: standard output]",
)  # fmt: skip
FORCE = click.option("--force", is_flag=True, help="Write over a file that is there.")


@click.group("findings")
def findings_group() -> None:
    """Keep claims about an engine as records that a program can check."""


@findings_group.command("new")
@OUT
@FORCE
@click.option("--subject-repo", type=FOLDER,
              help="Git checkout the claims are about, at its HEAD.")  # fmt: skip
@click.option(
    "--evidence", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File the claims rest on; repeatable. Lies in the record's folder or below.",
)  # fmt: skip
def new_command(
    out: Path | None, force: bool, subject_repo: Path | None, evidence: tuple[Path, ...]
) -> None:
    """Write an empty record to fill in, with revision and checksums."""
    from slotwise.findings.skeleton import new_record

    folder = out.parent if out is not None and str(out) != "-" else Path()
    arguments = [text for path in evidence for text in ("--evidence", path.name)]
    if subject_repo is not None:
        arguments += ["--subject-repo", subject_repo.resolve().name]
    record = new_record(
        subject_repo=subject_repo, evidence=evidence, folder=folder, arguments=arguments
    )
    _write(json.dumps(record, indent=1, ensure_ascii=False) + "\n", out, force=force)


@findings_group.command("check")
@RECORD
@click.option("--repo", type=FOLDER, help="Git checkout that has the cited revision.")
@click.option("--evidence", type=FOLDER,
              help="Folder the evidence's paths begin at.  [default: the record's]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def check_command(record: Path, repo: Path | None, evidence: Path | None, as_json: bool) -> int:
    """Look up everything RECORD cites: source lines, evidence, and the numbers of its claims.

    Exit code 4 if something does not hold, 3 if something could not be checked.
    """
    from slotwise.findings.check import check_record
    from slotwise.findings.record import read_record
    from slotwise.findings.report import Report, report_lines

    read, issues = read_record(record, _bytes(record))
    report = Report(None, issues)
    if read is not None:
        report = check_record(
            read, repo=repo, folder=evidence or record.parent, folder_given=evidence is not None,
            issues=issues,
        )  # fmt: skip
    if as_json:
        _write(json.dumps(report.to_dict(), indent=1) + "\n", None)
    else:
        _write("".join(f"{line}\n" for line in report_lines(report, record.name)), None)
    return report.exit_code


@findings_group.command("render")
@RECORD
@OUT
@FORCE
def render_command(record: Path, out: Path | None, force: bool) -> int:
    """Write RECORD as Markdown, as it is: nothing is looked up."""
    from slotwise.findings.record import read_record
    from slotwise.findings.render import markdown
    from slotwise.findings.report import Report, report_lines

    read, issues = read_record(record, _bytes(record))
    if read is None:
        for line in report_lines(Report(None, issues), record.name):
            click.echo(line, err=True)
        return INVALID
    _write(markdown(read), out, force=force)
    return 0


def _bytes(record: Path) -> bytes:
    from slotwise.findings.record import LARGEST_RECORD

    if str(record) == "-":
        return sys.stdin.buffer.read(LARGEST_RECORD + 1)
    with record.open("rb") as file:
        return file.read(LARGEST_RECORD + 1)


def _write(text: str, out: Path | None, *, force: bool = False) -> None:
    """UTF-8 whatever the terminal; what is no text (half a surrogate pair) becomes `?`."""
    data = text.encode("utf-8", errors="replace")
    if out is None or str(out) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    if out.exists() and not force:
        raise UsageError(f"{out} is there already", next_step="Pass --force to write over it.")
    out.write_bytes(data)
