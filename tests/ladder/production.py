"""A production server that is started and stopped by commands, as a service manager does it.

`python production.py start FOLDER PORT VERSION` ends at once and leaves the server running,
`serve` is the server itself, `stop FOLDER` ends it. FOLDER holds its process id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def main() -> None:
    verb, folder, *rest = sys.argv[1:]
    pid_file = Path(folder) / "pid"
    if verb == "stop":
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        while alive(pid):
            time.sleep(0.02)
        return
    server = [str(Path(__file__).with_name("small_server.py")), rest[0], "/prod.gguf", rest[1]]
    if verb == "serve":
        pid_file.write_text(str(os.getpid()))
        os.execv(sys.executable, [sys.executable, *server])
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(
        [sys.executable, *server], stdin=nothing, stdout=nothing, stderr=nothing,
        start_new_session=True,
    )  # fmt: skip
    pid_file.write_text(str(child.pid))


if __name__ == "__main__":
    main()
