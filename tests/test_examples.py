"""Each example runs, with `--fast`, as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("script", "made"), [("per_sample_gradients.py", "memory.png")], ids=lambda value: str(value))
def test_example(script: str, made: str, tmp_path: Path) -> None:
    # Its own process, where the warnings that users see are errors.
    command = [sys.executable, "-W", "error::UserWarning", str(ROOT / "examples" / script), "--fast"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / made).stat().st_size > 0
