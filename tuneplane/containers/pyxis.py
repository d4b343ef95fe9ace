"""pyxis (0.11 and later): a Slurm plugin by which a step's task is in the image. `launch` calls this.

The agent stays on the host and starts a step of its own for its node; what the step starts is no child of the
agent. Sources: pyxis' `srun --help`, srun(1), and runs on Slurm 22.05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuneplane.containers.container import (
    Container,
    Launch,
    Mount,
    argv_faults,
    environment_faults,
    sorted_mounts,
)
from tuneplane.containers.enroot import device_variables, folder_faults, unsayable_faults
from tuneplane.containers.start_script import (
    DEFAULT_PATH,
    ENTER,
    RUN,
    script_faults,
    script_path,
    start_script,
)
from tuneplane.kernel.errors import Fault, OperationError

FORGOTTEN = (
    *("SLURM_*", "SLURMD_*", "SRUN_*", "SBATCH_*", "PMI_*", "PMI2_*", "PMIX_*", "PYXIS_*", "ENROOT_*"),
    *("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
)
"""What Slurm, pyxis and enroot's hooks have beside the image's environment.

Each node is a step of one task: SLURM_PROCID is 0 everywhere, and where an image has PYTORCH_VERSION so are RANK
and LOCAL_RANK.
"""

_FOR_THE_RUNTIME = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "SLURM_CONF_SERVER")
"""What srun's own process may have of the host. No other of Slurm's variables: each is an option of srun."""

_INTO_THE_STEP = ("HOME", "USER", "LOGNAME", "TERM")
"""What pyxis may have of them: the site's enroot.conf may name the user, a shell has a terminal."""


def launch(
    container: Container,
    argv: Sequence[str],
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    host: Mapping[str, str],
) -> Launch:
    """`srun --overlap` of one task on this node. Raises OperationError outside of a Slurm job.

    --overlap --mem=0: beside the agent's own step, with all that it has; without --mem=0 it is refused.
    --cpus-per-task: all CPUs of the agent's step. GPUs are the job's where nothing is said of them.
    --mpi=none: nothing here is an MPI task of Slurm's.
    --export: names; values pass by srun's environment. The job's own are in the script, since pyxis lets the
        image win and Slurm adds its own.
    Not --container-name: pyxis then names the container after the step, of which each node has its own, so
        that nodes which share enroot's folder do not collide.
    The script appends to the log itself: through srun a line would stand there when it is complete, and a
    progress bar never.
    """
    job = host.get("SLURM_JOB_ID")
    if not job:
        raise OperationError(
            Fault(
                "pyxis starts containers in Slurm jobs alone, and this is none", "cluster.container.runtime"
            )
        )
    script = script_path(container)
    devices = device_variables(container, env)
    settings = {
        # Else /etc/profile of the image takes the place of the image's own PATH.
        "ENROOT_LOGIN_SHELL": "no",
        "ENROOT_CONFIG_PATH": f"{container.state_dir}/enroot/config",
    }
    environ = {name: host[name] for name in _FOR_THE_RUNTIME if name in host}
    environ.setdefault("PATH", DEFAULT_PATH)
    environ.update({**devices, **settings})
    names = [*(n for n in _INTO_THE_STEP if n in host or n == "TERM"), *devices, *settings]
    step = [container.binary or "srun", f"--jobid={job}", "--nodes=1", "--ntasks=1"]
    step += [f"--nodelist={host['SLURMD_NODENAME']}"] if "SLURMD_NODENAME" in host else []
    step += [f"--cpus-per-task={host['SLURM_CPUS_ON_NODE']}"] if "SLURM_CPUS_ON_NODE" in host else []
    step += ["--overlap", "--mem=0", "--mpi=none", f"--export={','.join(names)}"]
    step += ["--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"]
    step += ["--container-readonly", f"--container-image={container.image}"]
    step += [f"--container-mounts={','.join(map(_mount_entry, _all_mounts(container, mounts)))}"]
    command = [*step, *container.options, "/bin/sh", script]
    return Launch(
        [*command, RUN, *argv],
        environ,
        "/",
        files={script: start_script(container, env, FORGOTTEN, container.log)},
        enter=[*command, ENTER],
        terminal="--pty",
        leader=["/bin/sh", script, RUN],
    )


def faults(
    container: Container, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount]
) -> list[Fault]:
    """All that `launch` could not say to the runtime."""
    return [
        *argv_faults(argv),
        *environment_faults(env),
        *script_faults(env),
        *folder_faults(container, "pyxis"),
        *unsayable_faults(container, _own_mounts(container, mounts), "pyxis"),
    ]


def _own_mounts(container: Container, mounts: Sequence[Mount]) -> list[Mount]:
    """The given mounts, the script, and the log, which stands in a folder that is not writable inside."""
    script = script_path(container)
    own = [Mount(script, script, read_only=True)]
    if container.log:
        own.append(Mount(container.log, container.log))
    return [*mounts, *own]


def _all_mounts(container: Container, mounts: Sequence[Mount]) -> list[Mount]:
    return sorted_mounts(container, _own_mounts(container, mounts))


def _mount_entry(mount: Mount) -> str:
    """One of `--container-mounts`: SRC:DST[:FLAGS]."""
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"
