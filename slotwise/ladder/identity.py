"""Who answers at an address, and on what machine this runs.

Everything a server says of itself goes through `clean`: model names lose their folders. Two
identities can be compared, to see whether production is again what it was.
"""

from __future__ import annotations

import os
import platform
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slotwise.ladder.clean import clean, clean_text, sha256
from slotwise.ladder.client import Client, NoAnswer

VERSIONS = ("build_info", "version", "engine_version", "slotwise")
PROBE_SECONDS = 10.0


def server_identity(client: Client, *, ready_ms: float | None = None) -> dict[str, Any]:
    """The Server header, models, version, health and properties; null for what it has not."""
    status, headers, models = client.get("/v1/models", seconds=PROBE_SECONDS)
    found = models.get("data") if status == 200 and isinstance(models, dict) else None
    props, health = (_page(client, path) for path in ("/props", "/health"))
    version = _version(props) or _version(health) or _version(_page(client, "/version"))
    return {
        "local": is_local(client.url),
        "software": clean_text(headers["server"]) if "server" in headers else None,
        "version": version,
        "models": [_model(m) for m in found or () if isinstance(m, dict)],
        "health": clean(health),
        "props": clean(props),
        "ready_ms": ready_ms,
    }


def same_server(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In words what is not as it was; empty when software, version and models are the same."""
    found = []
    for what in ("software", "version"):
        if before[what] != after[what]:
            found.append(f"{what}: was {before[what]}, is {after[what]}")
    was, now = ({m["sha256"]: m["name"] for m in of["models"]} for of in (before, after))
    if was != now:
        names = [", ".join(of.values()) or "none" for of in (was, now)]
        found.append(f"model: was {names[0]}, is {names[1]}")
    return found


def answers(client: Client) -> int | None:
    """The status of /health, or of /v1/models where there is none; None without an answer."""
    try:
        status, _, _ = client.get("/health", seconds=PROBE_SECONDS)
        if status == 404:
            status, _, _ = client.get("/v1/models", seconds=PROBE_SECONDS)
    except NoAnswer:
        return None
    return status


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine() -> dict[str, Any]:
    """Processor, memory, GPU and load of this machine; no names of people or hosts."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _line("/proc/cpuinfo", "model name") or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_kb": int((_line("/proc/meminfo", "MemTotal") or "0").split()[0]) or None,
        "gpus": _gpus(),
        "load_at_start": load,
    }  # fmt: skip


def _page(client: Client, path: str) -> dict[str, Any] | None:
    try:
        status, _, page = client.get(path, seconds=PROBE_SECONDS)
    except NoAnswer:
        return None
    return page if status == 200 and isinstance(page, dict) else None


def _version(page: dict[str, Any] | None) -> str | None:
    values = (page.get(name) for name in VERSIONS) if page else ()
    return next((clean_text(v) for v in values if isinstance(v, str) and v), None)


def _model(model: dict[str, Any]) -> dict[str, Any]:
    name = str(model.get("id", ""))
    out = {"name": clean_text(name), "sha256": sha256(name)}
    if isinstance(model.get("meta"), dict):
        out["meta"] = clean(model["meta"])
    return out


def _line(path: str, key: str) -> str | None:
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
