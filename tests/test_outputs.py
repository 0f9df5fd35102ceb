"""No verb writes over an input, or over a file without being told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.errors import UsageError
from slotwise.outputs import check_output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.mark.parametrize("force", [False, True])
def test_an_input_is_never_written_over(model: Path, force: bool) -> None:
    link = model.with_name("link.json")
    link.symlink_to(model)
    for path in (model, link):
        with pytest.raises(UsageError, match="is an input"):
            check_output(path, force=force, inputs=[model])


def test_another_file_only_by_force(model: Path) -> None:
    notes = model.with_name("notes.txt")
    check_output(notes, force=False, inputs=[model])
    notes.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        check_output(notes, force=False, inputs=[model])
    check_output(notes, force=True, inputs=[model])


def test_a_device_is_always_written_to() -> None:
    check_output(Path("/dev/null"), force=False, inputs=[])
