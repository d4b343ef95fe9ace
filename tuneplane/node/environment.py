"""The job's environment, built from nothing (C9, C10, C11). Pure but for reading the secrets file.

Names and meanings stand in `kernel/env.py`; here are the values.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel import env
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.node.allocation import Allocation
from tuneplane.node.sampler import samples_hardware
from tuneplane.spec import JobSpec

KERNEL_FOLDER = ".tuneplane/kernel"
"""Where the kernel lies in the capsule: not importable from the work folder itself (C23)."""

FROM_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CPUS_ON_NODE")

NOT_FROM_MODULES = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMIX)_.*|CUDA_VISIBLE_DEVICES|_|PWD|OLDPWD|SHLVL|.*[^A-Za-z0-9_].*", re.DOTALL
)
"""What Slurm and the batch shell leave in the agent's environment besides what `module load` made there.

The last alternative: a shell function that modules export (`BASH_FUNC_module%%`), no name for a program.
"""


@dataclass(frozen=True)
class Place:
    """Folders of this node and attempt, and what all nodes share."""

    work: Path
    temporary: str  # TMPDIR as the trainer sees it
    home: str  # HOME as the trainer sees it
    attempt: int
    address: str
    port: int
    out: str  # TUNEPLANE_OUT_DIR


def job_environment(
    job: JobSpec,
    given: Allocation,
    place: Place,
    agent: Mapping[str, str],
    secrets: Mapping[str, str],
) -> dict[str, str]:
    """Every variable of the trainer. `agent` is the agent's own environment, clean since the batch script."""
    spec, run = job.spec, RunFolder(Path(job.metadata.folder))
    attempt = run.attempt(place.attempt)
    framework, _, recipe = spec.recipe.name.partition("/")
    container = spec.container.runtime != "none"
    values: dict[str, str] = {}
    if not container:
        if spec.slurm and spec.slurm.modules:  # what `module load` made is the site's PATH and libraries
            values.update({k: v for k, v in agent.items() if not NOT_FROM_MODULES.fullmatch(k)})
        else:
            values["PATH"] = spec.node.path
    values.update(spec.node.environment)
    values.update(
        {
            env.WORK_DIR: str(place.work),
            env.EXP_DIR: str(place.work / "experiments" / job.metadata.experiment),
            env.OUT_DIR: place.out,
            env.FRAMEWORK: framework,
            env.RECIPE: recipe,
            env.NUM_NODES: str(given.nodes),
            env.GPUS_PER_NODE: str(given.gpus),
            env.MACHINE_RANK: str(given.rank),
            env.MACHINE_COUNT: str(given.nodes),
            env.MAIN_PROCESS_IP: place.address,
            env.MAIN_PROCESS_PORT: str(place.port),
            env.CLUSTER_PROFILE: spec.resources.profile,
            env.RECIPE_VERSION: spec.recipe.version,
            env.RECIPE_DIGEST: spec.recipe.digest,
            env.CAPSULE_DIGEST: spec.capsule.digest,
            env.PARAMS_FILE: str(attempt.params),
            env.STOP_FILE: str(attempt.stop_marker),
            env.ATTEMPT: str(place.attempt),
            env.NRL_RUN_ID: job.metadata.run_id,
            env.ENABLED: "1" if spec.reporting.enabled else "0",
            "HOME": place.home,
            "USER": job.metadata.user,
            "LOGNAME": job.metadata.user,
            "LANG": "C.UTF-8",
            "TMPDIR": place.temporary,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
        }
    )
    if spec.reporting.enabled:
        values[env.ENDPOINT] = spec.reporting.endpoint
        values[env.RUN_ID] = job.metadata.run_id
    if samples_hardware(job):
        values[env.HARDWARE_BRIDGE] = "1"
    if spec.framework.observability == "platform":
        # First: what a module put there stays behind it.
        values["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(place.work / KERNEL_FOLDER), values.get("PYTHONPATH")))
        )
    if spec.framework.observability_url is not None:
        values[env.OBSERVABILITY_URL] = spec.framework.observability_url
    if given.visible_devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = given.visible_devices
    values.update({name: agent[name] for name in FROM_SLURM if name in agent})
    wanted = [*spec.node.secrets, *([env.TOKEN] if spec.reporting.enabled else [])]
    missing = [name for name in wanted if name not in secrets]
    if missing:
        raise OperationError(
            Fault(f"{', '.join(missing)} not in secrets.env", remedy=f"tp job retry {job.metadata.run_id}")
        )
    values.update({name: secrets[name] for name in wanted})
    return values


def data_folders(values: Mapping[str, str]) -> list[str]:
    """Folders that site variables name and the container must see: HF_HOME and every *_DATA_DIR (C10)."""
    names = sorted(n for n in values if n == "HF_HOME" or n.endswith("_DATA_DIR"))
    return [values[n] for n in names if values[n].startswith("/")]


def read_secrets(path: Path) -> dict[str, str]:
    """`secrets.env`: one shell assignment a secret. Empty where the run has none. Raises OperationError."""
    try:
        pairs = [
            w.partition("=") for w in shlex.split(path.read_text(encoding="utf-8", errors="surrogateescape"))
        ]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OperationError(Fault(f"secrets cannot be read: {error.strerror}", str(path))) from None
    except ValueError:  # its own text stays unsaid: it is secret
        remedy = f"tp job retry {path.parent.name} writes it anew"
        raise OperationError(Fault("the secrets file is damaged", str(path), remedy)) from None
    return {name: value for name, _, value in pairs}


def render_secrets(secrets: Mapping[str, str]) -> str:
    """The text of `secrets.env`; `read_secrets` and a shell both read it."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(secrets.items()))
