"""How a shell beside a running command is reached: by an overlapping step on its node, or right here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.launch.slurm_commands import slurm_environment
from tuneplane.runs.folder import check_own
from tuneplane.runs.state import read_state
from tuneplane.spec import read


def shell_argv(
    run: RunFolder,
    node: str,
    command: list[str],
    *,
    terminal: bool,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The argv that opens it. Raises UsageError where the run does not run, or has no such node.

    environ: of the process that will start it; what of it would change srun's request is taken away.
    """
    check_own(run)
    state = read_state(run)
    if state.state != "RUNNING" or not state.nodes or state.attempt is None:
        why = "has no node yet" if state.state == "RUNNING" else f"is {state.state}"
        what = f"{run.run_id} {why}, so there is nothing to enter"
        raise UsageError(Fault(what, "RUN", f"tp job status {run.run_id}"))
    found = next((n for n in state.nodes if node in (str(n.rank), n.host)), None)
    if found is None:
        names = ", ".join(f"{n.rank} ({n.host})" for n in state.nodes)
        raise UsageError(Fault(f"{run.run_id} has no node {node}", "--node", f"nodes: {names}"))
    if found.code is not None:
        what = f"node {found.rank} of {run.run_id} has ended with exit code {found.code}"
        raise UsageError(Fault(what, "--node", f"tp job logs {run.run_id} --node {found.rank}"))
    job = read(run.job)
    kernel = [job.spec.node.python, "-I", "-S", str(run.kernel)]
    inside = [*kernel, "shell", str(run.path), str(state.attempt), str(found.rank), *command]
    if job.spec.resources.scheduler == "local":
        if found.host != os.uname().nodename:
            raise UsageError(Fault(f"{run.run_id} runs on {found.host}", "RUN", "say it there"))
        return inside
    given = os.environ if environ is None else environ
    unset = [word for name in sorted(set(given) - set(slurm_environment(given))) for word in ("-u", name)]
    step = ["srun", f"--jobid={state.job_id}", f"--nodelist={found.host}", "--nodes=1", "--ntasks=1"]
    step += ["--overlap", "--mem=0", "--export=NONE", *(["--pty"] if terminal else [])]
    return [*(["env", *unset] if unset else []), *step, *inside]
