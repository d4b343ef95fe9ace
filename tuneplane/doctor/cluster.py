"""A profile and its site, from this machine: Slurm's programs and word, accounts, storage, runtime, images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tuneplane.compose import compose
from tuneplane.compose.composed import Composed
from tuneplane.discover.check import check_size, sizes
from tuneplane.discover.choice import grace_within, kill_wait_s
from tuneplane.discover.here import is_shared, program_version, python_version
from tuneplane.discover.said import Said, ask
from tuneplane.discover.slurm import Site as SlurmSite
from tuneplane.discover.slurm import read_site
from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.doctor.limits import look_at_limits
from tuneplane.images import Rules, allowed_registries, choose_image, image_faults
from tuneplane.images.registries import VARIABLE
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.launch.slurm_commands import run_slurm
from tuneplane.runs.folder import check_parents
from tuneplane.runs.index import current_user
from tuneplane.site import Cluster, Site

CLIENTS = ("sbatch", "squeue", "scontrol", "srun", "scancel", "sinfo")
OLDEST_SLURM = (20, 11)
LITTLE_BYTES, LITTLE_SHARE = 5 << 30, 0.02
"""Less free space than this on the storage is told."""

FEW_INODES = 10_000

SHARED = "storage shared"


def look_at_profile(
    name: str, lab: Path | None, environ: Mapping[str, str]
) -> tuple[Composed | None, list[Check]]:
    """The composed profile, or None where it does not compose, and what can be said of it from here."""
    try:
        composed = compose(name, lab_root=lab, flags={}, environ=environ)
    except TunePlaneError as error:
        return None, [Check(f"profile {name}", FAIL, _where(f.where, f.what), f.remedy) for f in error.faults]
    cluster = composed.config.cluster
    checks = [
        Check(f"profile {name}", OK, cluster.description or f"{cluster.device} nodes, {cluster.scheduler}")
    ]
    if cluster.scheduler == "slurm":
        checks += look_at_slurm(composed, environ)
    checks += look_at_storage(cluster)
    checks += look_at_interpreter(cluster)
    checks += look_at_runtime(cluster, environ)
    return composed, checks


def _where(where: str, what: str) -> str:
    return f"{where}: {what}" if where else what


def look_at_slurm(composed: Composed, environ: Mapping[str, str]) -> list[Check]:
    """Slurm's programs, controller, accounting, and its word on the profile's jobs."""
    checks = look_at_clients(environ)
    if any(check.level == FAIL for check in checks):
        return checks
    said = ask(current_user())
    site = read_site(said)
    checks += [_version(site), *_accounting(said), *_accounts(said, site, composed)]
    checks += look_at_kill_wait(site, composed.config.cluster)
    checks += look_at_limits(site, current_user(), composed.config.cluster.slurm.partition)
    for placement in sizes(composed.config):
        result = check_size(composed.config, placement)
        remedy = "" if result.ok else "tp cluster discover NAME shows what Slurm has; then edit the profile"
        checks.append(Check(f"job of {result.asked}", OK if result.ok else FAIL, result.said, remedy))
    return checks


def look_at_clients(environ: Mapping[str, str]) -> list[Check]:
    """Whether Slurm's programs are here and its controller answers."""
    path = environ.get("PATH", os.defpath)
    missing = [name for name in CLIENTS if shutil.which(name, path=path) is None]
    if missing:
        told = f"not on this machine's PATH: {', '.join(missing)}"
        return [
            Check("Slurm programs", FAIL, told, "run tp on a login node, or put Slurm's bin folder on PATH")
        ]
    try:
        answer = run_slurm(["scontrol", "ping"], timeout_s=20)
    except TunePlaneError as error:
        return [
            Check(
                "Slurm controller", FAIL, error.faults[0].what, "tell the administrators, or try again later"
            )
        ]
    up = [line for line in answer.splitlines() if " UP" in line]
    if not up:
        return [Check("Slurm controller", FAIL, " ".join(answer.split()), "tell the administrators")]
    return [Check("Slurm controller", OK, up[0].strip())]


def _version(site: SlurmSite) -> Check:
    parts = tuple(int(part) for part in site.version.split(".")[:2] if part.isdecimal())
    if parts and parts < OLDEST_SLURM:
        told = f"{site.version}: older than 20.11, for which --gpus-per-node and overlapping steps differ"
        return Check(
            "Slurm version",
            WARN,
            told,
            "try `tp cluster check`; a newer Slurm is the administrators' to install",
        )
    return Check("Slurm version", OK, site.version or "not told")


def look_at_kill_wait(site: SlurmSite, cluster: Cluster) -> list[Check]:
    """Whether the agents, which Slurm kills too, have time to write how a trainer that was told to end did."""
    kill_wait = kill_wait_s(site)
    if kill_wait is None or cluster.stop_grace_s <= grace_within(kill_wait):
        return []
    told = f"Slurm kills all {kill_wait} s after TERM, and a trainer has {cluster.stop_grace_s:g} s of that"
    what = f"{told}: its node is then lost without a word of how it ended"
    remedy = f"set `stop_grace_s: {grace_within(kill_wait)}` of the profile, or have KillWait raised"
    return [Check("KillWait", WARN, what, remedy)]


def _accounting(said: Said) -> list[Check]:
    try:
        run_slurm(["sacct", "--noheader", "--jobs=1", "--format=JobID"], timeout_s=20)
    except TunePlaneError as error:
        told = error.faults[0].what
        if "accounting storage is disabled" in told or "is not on this machine" in told:
            return [
                Check(
                    "accounting", OK, "this site keeps no accounts (sacct); TunePlane's own records are used"
                )
            ]
        return [
            Check(
                "accounting", WARN, told, "states of jobs that squeue forgot are then told by our own records"
            )
        ]
    return [Check("accounting", OK, "sacct answers")]


def _accounts(said: Said, site: SlurmSite, composed: Composed) -> list[Check]:
    """What the user may use, beside what the profile says."""
    slurm = composed.config.cluster.slurm
    if not site.associations:
        return []
    accounts = list(dict.fromkeys(a.account for a in site.associations))
    qos = list(dict.fromkeys(q for a in site.associations for q in a.qos))
    default = site.default_account or "none"
    told = f"yours: {', '.join(accounts)} (default {default}); QOS {', '.join(qos) or 'none'}"
    checks = []
    if slurm.account and slurm.account not in accounts:
        what = f"the profile says {slurm.account}; {told}"
        checks.append(Check("account", FAIL, what, f"set slurm.account to one of {', '.join(accounts)}"))
    elif (
        not slurm.account
        and not site.default_account
        and "associations" in site.config.get("AccountingStorageEnforce", "")
    ):
        what = f"the profile names none and you have no default; {told}"
        checks.append(Check("account", FAIL, what, f"set slurm.account, like {accounts[0]}"))
    else:
        checks.append(Check("account", OK, told))
    if slurm.qos and qos and slurm.qos not in qos:
        checks.append(
            Check(
                "QOS",
                FAIL,
                f"the profile says {slurm.qos}; {told}",
                f"set slurm.qos to one of {', '.join(qos)}",
            )
        )
    return checks


def look_at_storage(cluster: Cluster) -> list[Check]:
    """The storage root: whose it is, whether it can be written, what is free, whether others see it."""
    root = Path(cluster.storage_root).expanduser()
    faults = check_parents(root / "runs" / current_user(), (os.getuid(),))
    if faults:
        return [Check("storage", FAIL, _where(f.where, f.what), f.remedy) for f in faults]
    there = next((folder for folder in (root, *root.parents) if folder.exists()), Path("/"))
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"{there} cannot be written" + ("" if there == root else f", so {root} cannot be made")
        return [Check("storage", FAIL, what, "set `storage_root` of the profile to a folder of your own")]
    status = os.statvfs(there)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    room = f"{free / 1e9:.1f} of {size / 1e9:.1f} GB free"
    checks = []
    if free < min(LITTLE_BYTES, LITTLE_SHARE * size) or (status.f_files and status.f_favail < FEW_INODES):
        what = f"{root}: {room}, {status.f_favail} inodes free"
        checks.append(Check("storage", WARN, what, "remove old runs, or choose another storage root"))
    else:
        checks.append(Check("storage", OK, f"{root}: {room} (a quota may leave you less)"))
    if cluster.scheduler == "slurm":
        checks.append(_shared(root, there, cluster))
    return checks


def _shared(root: Path, there: Path, cluster: Cluster) -> Check:
    outside = cluster.outside_shared(root)
    if outside:
        return Check(SHARED, FAIL, outside, "set `storage_root` below one of these")
    if cluster.shared:
        return Check(SHARED, OK, f"below {', '.join(cluster.shared)}, which the site calls shared")
    if is_shared(str(there)):
        return Check(SHARED, OK, "a network file system; that nodes mount it, --deep finds out")
    what = f"{there} is on a file system of a kind that other machines mostly do not see"
    return Check(
        SHARED, WARN, what, f"tp doctor --profile {cluster.name} --deep finds out with a one-minute job"
    )


def look_at_interpreter(cluster: Cluster) -> list[Check]:
    """The nodes' interpreter, as far as this machine has it too."""
    if cluster.python is None:
        return []
    version = python_version(cluster.python)
    if version is None:
        if cluster.scheduler == "slurm":
            what = f"{cluster.python} is not on this machine; whether nodes have it, --deep finds out"
            return [Check("interpreter", WARN, what, f"tp doctor --profile {cluster.name} --deep")]
        return [Check("interpreter", FAIL, f"{cluster.python} cannot be run", "set `python` of the profile")]
    told = f"{cluster.python}, {'.'.join(map(str, version))} on this machine"
    if version[:2] < (3, 9):
        return [
            Check(
                "interpreter", FAIL, f"{told}: older than 3.9", "set `python` of the profile to a newer one"
            )
        ]
    return [Check("interpreter", OK, told)]


def look_at_runtime(cluster: Cluster, environ: Mapping[str, str]) -> list[Check]:
    """The container runtime, as far as this machine has it."""
    runtime = cluster.container.runtime
    if runtime == "none":
        return [Check("container runtime", OK, "none: trainers run on the node itself")]
    program = cluster.container.binary or runtime
    found = shutil.which(program, path=f"{environ.get('PATH', os.defpath)}:{cluster.path}")
    if found is None:
        what = f"{program} is not on this machine; whether nodes have it, --deep finds out"
        level = WARN if cluster.scheduler == "slurm" else FAIL
        return [
            Check(
                "container runtime", level, what, "set `container.binary`, or `slurm.modules`, of the profile"
            )
        ]
    version = program_version(found)
    if not version:
        return [Check("container runtime", WARN, f"{found} does not tell its version", f"{found} --version")]
    return [Check("container runtime", OK, f"{found}, {version} on this machine")]


def look_at_images(site: Site, image: str | None, environ: Mapping[str, str]) -> list[Check]:
    """Which images a user may name (C28), and the judgement of one."""
    said = environ.get(VARIABLE)
    try:
        allowed = allowed_registries(site.allowed_registries, said)
    except TunePlaneError as error:
        return [Check("image registries", FAIL, _where(f.where, f.what), f.remedy) for f in error.faults]
    told = f"allowed: {', '.join(allowed) or 'none'}"
    if site.image_folders is not None:
        told += f"; image files below {', '.join(site.image_folders)}"
    checks = [Check("image registries", OK, told)]
    if not allowed and (said is not None or site.allowed_registries):
        whose = (
            f"{VARIABLE} leaves none of the site's" if site.allowed_registries else f"{VARIABLE} names none"
        )
        mend = (
            f"unset {VARIABLE}"
            if site.allowed_registries
            else f"export {VARIABLE}=HOST, or ask {site.contact}"
        )
        checks = [Check("image registries", WARN, f"{whose}: images of registries are refused", mend)]
    if image is None:
        return checks
    try:
        choice = choose_image(
            "custom/custom",
            flag=image,
            site_defaults=site.default_images,
            runtime_id=None,
            runtime_images=site.runtime_images,
            pin=None,
        )
        faults = image_faults(
            choice, Rules(registries=allowed, folders=site.image_folders, contact=site.contact)
        )
    except TunePlaneError as error:
        faults = list(error.faults)
    if not faults:
        return [*checks, Check("image", OK, f"{image} may be used")]
    return [*checks, *(Check("image", FAIL, fault.what, fault.remedy) for fault in faults)]
