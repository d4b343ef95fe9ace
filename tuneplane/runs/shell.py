"""How a shell beside a running command is reached: by an overlapping step on its node, or right here."""

from __future__ import annotations

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.state import read_state
from tuneplane.spec import read


def shell_argv(run: RunFolder, node: str, command: list[str], *, terminal: bool) -> list[str]:
    """The argv that opens it. Raises UsageError where the run does not run, or has no such node."""
    state = read_state(run)
    if state.state != "RUNNING" or not state.nodes or state.attempt is None:
        raise UsageError(
            Fault(
                f"{run.run_id} is {state.state}, so there is nothing to enter",
                "RUN",
                "tp job status shows it",
            )
        )
    found = next((n for n in state.nodes if node in (str(n.rank), n.host)), None)
    if found is None:
        names = ", ".join(f"{n.rank} ({n.host})" for n in state.nodes)
        raise UsageError(Fault(f"{run.run_id} has no node {node}", "--node", f"nodes: {names}"))
    job = read(run.job)
    kernel = [job.spec.node.python, "-I", "-S", str(run.kernel)]
    inside = [*kernel, "shell", str(run.path), str(state.attempt), str(found.rank), *command]
    if job.spec.resources.scheduler == "local":
        return inside
    step = ["srun", f"--jobid={state.job_id}", f"--nodelist={found.host}", "--nodes=1", "--ntasks=1"]
    step += ["--overlap", "--mem=0", "--gres=none", "--export=NONE", *(["--pty"] if terminal else [])]
    return [*step, *inside]
