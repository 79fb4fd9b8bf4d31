"""scripts/crash_test.py, with fewer kills: one of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_test.py"


@pytest.mark.heavy
def test_a_run_that_is_killed_four_times_equals_the_run_that_was_not(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--rollouts", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"kill {n}" in done.stdout for n in (1, 2, 3, 4)) and "equal, nothing lost" in done.stdout
