"""The batch script's last lines: a step's exit code arrives however slowly its digits do."""

from __future__ import annotations

import subprocess

import pytest

from tuneplane.launch.script import slurm_teardown

STEPS = {
    "at once": ("echo 7", 7),
    "in the middle of a second's end": ("printf 1; sleep 1.2; printf 3; sleep 1.2; echo", 13),
    "without its line's end": ("printf 5", 5),
    "not at all": ("exit 3", 137),
}


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", STEPS)
def test_the_steps_code_is_the_scripts(how: str) -> None:
    writes, code = STEPS[how]
    head = ["set -u", 'end() { echo "$4"; }', "kernel=(end) run=run attempt=0", f"exec 3< <({writes})"]
    script = "\n".join([*head, *slurm_teardown()])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (code, "")
