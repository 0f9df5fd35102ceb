"""A bar on stderr while long logs are read; silent where nobody watches.

How far the reading is comes from the positions of this process's open files (Linux), so readers
know nothing of it and gzip counts in compressed bytes. Elsewhere the bar moves without an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

AFTER_S = 2.0
EVERY_S = 0.2


@contextmanager
def reading(
    paths: Sequence[Path], *, after_s: float = AFTER_S, console: Console | None = None
) -> Iterator[None]:
    """Shows a bar from `after_s` seconds on until the block ends."""
    if console is None:
        from rich.console import Console

        console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    done = Event()
    watcher = Thread(target=_show, args=(paths, done, after_s, console), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _show(paths: Sequence[Path], done: Event, after_s: float, console: Console) -> None:
    if done.wait(after_s):
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    seen = [0] * len(sizes)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(sizes) or None)
        while not done.wait(EVERY_S):
            for place, at in _positions(paths):
                seen[place] = at
                seen[:place] = sizes[:place]  # files are read one after the other
            bar.update(task, completed=sum(seen))


def _positions(paths: Sequence[Path]) -> Iterator[tuple[int, int]]:
    """(index, byte) of those of `paths` that this process has open."""
    places = {path.resolve(): i for i, path in enumerate(paths)}
    try:
        descriptors = [*Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            place = places.get(descriptor.readlink())
            if place is not None:
                text = Path("/proc/self/fdinfo", descriptor.name).read_text()
                yield place, int(text.split()[1])
        except (OSError, ValueError, IndexError):
            continue  # closed meanwhile
