"""One node of a profile, by a one-minute job: does it see the storage, has it what the agent and the image need.

The job writes its report into a folder of the storage root, which is removed afterwards.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from tuneplane.discover.check import job_of
from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.kernel.errors import OperationError, TunePlaneError
from tuneplane.kernel.files import room_or_right, write_atomic
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.launch.slurm_commands import FINAL, query_queue, run_slurm, submit_script
from tuneplane.profile import place
from tuneplane.site import Config

WAIT_S = 300.0
POLL_S = 1.0
SETTLE_S = 8.0
"""How long a report may take to be seen here after its job has ended: NFS caches folders for seconds."""

NODE_STORAGE = "storage on node"

FEW_BYTES = 2 << 30
SMALL_SHM_BYTES = 1 << 30
CLOCK_WARN_S, CLOCK_FAIL_S = 5.0, 240.0
"""munge refuses credentials of a clock that differs by 5 minutes; heartbeats are told by their age."""

_DROPPED = re.compile(
    r"#SBATCH --(?:output|error|chdir|time|signal|job-name|dependency|mail-\w+|open-mode)\b"
)


def look_at_node(config: Config, image: str | None, wait_s: float = WAIT_S) -> list[Check]:
    """Submit the job, wait for its report, and judge it. Ends the job where it does not start in time."""
    cluster = config.cluster
    root = Path(cluster.storage_root).expanduser()
    folder = root / "doctor" / secrets.token_hex(4)
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        return [Check("storage", FAIL, f"{folder} cannot be made: {error.strerror}", "set `storage_root`")]
    try:
        write_atomic(folder / "canary", folder.name, 0o600)
        script = folder / "doctor.sbatch"
        write_atomic(script, node_script(config, folder, image), 0o600)
        return _run(folder, script, config, wait_s)
    except TunePlaneError as error:
        return [Check("node job", FAIL, fault.what, fault.remedy) for fault in error.faults]
    except OSError as error:
        return [Check("storage", FAIL, f"{error.filename}: {error.strerror}", room_or_right(error))]
    finally:
        rmtree(folder, ignore_errors=True)
        _remove_empty(folder.parent)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # another doctor looks too
        return


def node_script(config: Config, folder: Path, image: str | None) -> str:
    """The job's text: the profile's own directives for its smallest job, and a look at the node."""
    cluster = config.cluster
    job = job_of(cluster, place(cluster, 1, site=config.site))
    directives = [
        line
        for line in SlurmLauncher(job).render().split("\n")
        if line.startswith("#SBATCH") and not _DROPPED.match(line)
    ]
    output = str(folder).replace("%", "%%")
    quote = shlex.quote
    unfinished = quote(str(folder / "report.tmp"))
    runtime = cluster.container.binary or cluster.container.runtime
    python = cluster.python or job.spec.node.python
    looks = [
        'report host "$(uname -n)"',
        f'report canary "$(cat {quote(str(folder / "canary"))})"',
        f"report python \"$({quote(python)} -I -S -c 'import sys; print(*sys.version_info[:3])' 2>&1"
        ' | tail -n 1)"',
        'report resolves "$(getent hosts "$(uname -n)" | head -n 1)"',
        f'report scratch "$(d={quote(cluster.scratch)}/tuneplane-doctor.$$ && mkdir "$d" 2>&1 &&'
        ' rmdir "$d" && echo yes)"',
        f'report scratch_kb "$(df -Pk {quote(cluster.scratch)} 2>/dev/null | tail -n 1)"',
        'report shm_kb "$(df -Pk /dev/shm 2>/dev/null | tail -n 1)"',
        'report memlock "$(ulimit -l)"',
        'report visible "${CUDA_VISIBLE_DEVICES-unset}"',
        'report devices "$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)"',
        'report driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1)"',
    ]
    if cluster.container.runtime != "none":
        version = "version" if cluster.container.runtime == "enroot" else "--version"
        looks.append(f'report runtime "$({quote(runtime)} {version} 2>&1 | head -n 1)"')
        if (
            image is not None
            and image.startswith("/")
            and cluster.container.runtime in ("apptainer", "singularity")
        ):
            looks.append(
                f'report image "$({quote(runtime)} --quiet exec --cleanenv {quote(image)} sh -c "echo'
                ' yes" 2>&1 | tail -n 1)"'
            )
    return "\n".join(
        [
            "#!/bin/bash",
            *directives,
            "#SBATCH --job-name=tp-doctor",
            "#SBATCH --time=1",
            f"#SBATCH --chdir={shlex.quote(str(folder))}",
            f"#SBATCH --output={shlex.quote(output + '/slurm.out')}",
            "report() { printf '%s=%s\\n' \"$1\" \"${2//$'\\n'/ }\"; }",
            f"export PATH={quote(cluster.path)}",
            "{",
            *(f"  {line}" for line in _module_lines(cluster.slurm.modules)),
            *(f"  {look}" for look in looks),
            '  report time "$(date +%s.%N)"',
            f"}} >{unfinished} && mv {unfinished} {quote(str(folder / 'report'))}",
            "",
        ]
    )


def _module_lines(modules: list[str]) -> list[str]:
    """Lines that load the profile's modules as a run's script does, and report those that cannot be."""
    if not modules:
        return []
    return [
        "missing=",
        'if [ -z "${MODULESHOME-}" ]; then',
        "  report no_modules 'the login profile there sets up no modules'",
        "else",
        '  source "$MODULESHOME/init/bash"',
        f"  for name in {' '.join(map(shlex.quote, modules))}; do",
        '    module load "$name" >/dev/null 2>&1 || missing+=" $name"',
        "  done",
        '  [ -z "$missing" ] || report modules "$missing"',
        "fi",
    ]


def _run(folder: Path, script: Path, config: Config, wait_s: float) -> list[Check]:
    job = submit_script(script)
    deadline = time.monotonic() + wait_s
    report = folder / "report"
    try:
        state = _wait(job, report, deadline)
    finally:
        _cancel(job)
    if report.exists():
        said = parse_report(report.read_text(encoding="utf-8", errors="replace"))
        return judge_node(said, config, _clock_difference_s(said, report, folder / "now"))
    if state in FINAL:
        words = _tail(folder / "slurm.out")
        what = f"job {job} ended ({state}) and left no report in {config.cluster.storage_root}"
        what += f": {words}" if words else ""
        mend = "storage is not shared with nodes, or not writable there: choose another `storage_root`"
        return [Check(NODE_STORAGE, FAIL, what, mend)]
    what = f"job {job} did not start within {wait_s:.0f} s ({state or 'not known'}), and was cancelled"
    mend = "try again when the queue is shorter; tp doctor --wait SECONDS waits longer"
    return [Check("node job", WARN, what, mend)]


def _wait(job: str, report: Path, deadline: float, sleep: Callable[[float], None] = time.sleep) -> str:
    """Wait for the report, or the job's end, or the deadline; Slurm's last word on the job."""
    state, settled = "", None
    while time.monotonic() < deadline:
        if report.exists():
            return state
        known = query_queue([job]).jobs.get(job)
        state = known.state if known else "COMPLETED"
        if state in FINAL:
            os.listdir(report.parent)  # asks the server anew
            settled = settled or time.monotonic()
            if time.monotonic() - settled > SETTLE_S:
                return state
        sleep(POLL_S)
    return state


def _cancel(job: str) -> None:
    try:
        run_slurm(["scancel", job], timeout_s=20)
    except OperationError:  # it has ended
        return


def _clock_difference_s(said: dict[str, str], report: Path, touched: Path) -> float | None:
    """How far the node's clock is ahead of this machine's: both are compared with the storage's own."""
    try:
        node_ahead = float(said.get("time", "")) - report.stat().st_mtime
    except ValueError:
        return None
    touched.touch()
    return node_ahead - (time.time() - touched.stat().st_mtime)


def _tail(path: Path) -> str:
    try:
        return " ".join(path.read_text(encoding="utf-8", errors="replace").split())[-300:]
    except OSError:
        return ""


def parse_report(text: str) -> dict[str, str]:
    """`name=value` lines."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name: value.strip() for name, value in pairs}


def judge_node(said: dict[str, str], config: Config, clock_s: float | None) -> list[Check]:
    """What a node's report means. clock_s: how far its clock is ahead of this machine's."""
    cluster = config.cluster
    host = said.get("host", "the node")
    checks = [Check(NODE_STORAGE, OK, f"{host} sees {cluster.storage_root} and writes there")]
    checks += [
        _python(said, cluster.python or "the interpreter", host),
        _scratch(said, cluster.scratch, host),
    ]
    program = cluster.container.binary or cluster.container.runtime
    if cluster.container.runtime != "none":
        checks.append(_runtime(said, program, host))
    if "image" in said:
        sound = said["image"] == "yes"
        told = "it starts there" if sound else f"it does not start on {host}: {said['image']}"
        checks.append(Check("image on node", OK if sound else FAIL, told, f"srun {program} exec IMAGE true"))
    if cluster.slurm.modules:
        checks.append(_modules(said, cluster.slurm.modules))
    checks += [_names(said, host), _shm(said), *_gpus(said, cluster.device), _clock(clock_s)]
    return checks


def _python(said: dict[str, str], python: str, host: str) -> Check:
    parts = said.get("python", "").split()
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        what = f"{python} cannot be run on {host}: {said.get('python') or 'no answer'}"
        return Check("interpreter on node", FAIL, what, "set `python` of the profile to one that nodes have")
    told = f"{python}, {'.'.join(parts)}"
    if (int(parts[0]), int(parts[1])) < (3, 9):
        return Check("interpreter on node", FAIL, f"{told}: older than 3.9", "set `python` to a newer one")
    return Check("interpreter on node", OK, told)


def _kilobytes(said: dict[str, str], name: str) -> int | None:
    """Free kilobytes of a line of `df -Pk`."""
    parts = said.get(name, "").split()
    return int(parts[3]) if len(parts) > 4 and parts[3].isdecimal() else None


def _scratch(said: dict[str, str], scratch: str, host: str) -> Check:
    if said.get("scratch") != "yes":
        what = f"{scratch} cannot be written on {host}: {said.get('scratch') or 'it is not there'}"
        return Check("scratch on node", FAIL, what, "set `scratch` of the profile to a node-local folder")
    free = _kilobytes(said, "scratch_kb")
    if free is not None and free * 1024 < FEW_BYTES:
        what = f"{scratch}: {free / 1e6:.1f} GB free"
        return Check("scratch on node", WARN, what, "set `scratch` to a larger node-local folder")
    return Check("scratch on node", OK, scratch + (f", {free / 1e6:.1f} GB free" if free is not None else ""))


def _runtime(said: dict[str, str], program: str, host: str) -> Check:
    told = said.get("runtime", "")
    if not told or re.search(r"not found|No such file|Permission denied", told):
        what = f"{program} cannot be run on {host}: {told or 'no answer'}"
        mend = "set `container.binary` of the profile to its path there, or `slurm.modules`"
        return Check("runtime on node", FAIL, what, mend)
    return Check("runtime on node", OK, told)


def _modules(said: dict[str, str], names: list[str]) -> Check:
    mend = "set `slurm.modules` of the profile: `module avail` on a node shows what it has"
    if "no_modules" in said:
        return Check("modules on node", FAIL, said["no_modules"], mend)
    if "modules" in said:
        return Check("modules on node", FAIL, f"{said['modules']} cannot be loaded", mend)
    return Check("modules on node", OK, f"{', '.join(names)} can be loaded")


def _names(said: dict[str, str], host: str) -> Check:
    address = said.get("resolves", "").split()
    if not address:
        what = f"{host} does not know its own name's address: runs on several nodes need it"
        return Check(
            "names on node", WARN, what, "tell the administrators: nodes must resolve each other's names"
        )
    return Check("names on node", OK, f"{host} is {address[0]}")


def _shm(said: dict[str, str]) -> Check:
    free = _kilobytes(said, "shm_kb")
    if free is None:
        return Check(
            "/dev/shm on node", WARN, "it is not there: loader workers need it", "tell the administrators"
        )
    if free * 1024 < SMALL_SHM_BYTES:
        what = f"{free / 1e6:.2f} GB free: loader workers hand batches over in it"
        return Check("/dev/shm on node", WARN, what, "fewer workers, or a larger /dev/shm")
    return Check("/dev/shm on node", OK, f"{free / 1e6:.1f} GB free")


def _gpus(said: dict[str, str], device: str) -> list[Check]:
    if device != "gpu":
        return []
    visible = said.get("visible", "unset")
    if visible in ("", "unset", "NoDevFiles"):
        what = f"CUDA_VISIBLE_DEVICES is {visible or 'empty'} in a job that asked for a GPU"
        return [
            Check("GPUs on node", FAIL, what, "set `slurm.gpu_request` and `slurm.gpu_type` of the profile")
        ]
    driver = said.get("driver", "")
    driver = "" if "not found" in driver else driver
    told = f"CUDA_VISIBLE_DEVICES={visible}"
    if re.fullmatch(r"\d+(?:\.\d+)+", driver):
        return [Check("GPUs on node", OK, f"{told}, driver {driver}")]
    what = f"{told}; nvidia-smi tells no driver: {driver[:120] or 'it is not there'}"
    return [
        Check("GPUs on node", WARN, what, "tell the administrators; without a driver nothing trains on a GPU")
    ]


def _clock(ahead_s: float | None) -> Check:
    if ahead_s is None:
        return Check("clocks", WARN, "the node did not tell its time", "date, on the node")
    told = f"the node's clock and this machine's differ by {abs(ahead_s):.1f} s"
    if abs(ahead_s) >= CLOCK_FAIL_S:
        return Check("clocks", FAIL, told, "tell the administrators: Slurm itself fails beyond 5 minutes")
    if abs(ahead_s) >= CLOCK_WARN_S:
        return Check(
            "clocks", WARN, told, "tell the administrators: ages of heartbeats and points will be wrong"
        )
    return Check("clocks", OK, told)
