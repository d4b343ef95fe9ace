"""Why the command never started: the batch script, the agent and the container runtime in their own words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tuneplane.diagnose.evidence import Evidence, Log
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.told import ENDED_BADLY, at, has_begun, last_lines, shortly

ENDING_S = 0.5
"""Within so much after the end of an attempt its own script may still say something."""

FAILED_TO_START = "0:53"
"""Slurm's exit code where slurmd could not start the script or open its output file."""


def _words(evidence: Evidence) -> Iterator[tuple[Log, str]]:
    """What TunePlane's own programs said: in the batch script's output, in logs of nodes whose command is not up.

    The batch script's output holds the words of all starts: only its end is of the last one.
    """
    for log in evidence.logs:
        node = evidence.node(log.node)
        if node is not None and node.command_started_at is None:
            yield log, "\n".join([node.reason, *log.tail])
    if evidence.batch is not None:
        yield evidence.batch, "\n".join(evidence.batch.tail[-12:])


def _find(evidence: Evidence, pattern: str) -> tuple[Log, str] | None:
    """The log and the line that fits, where the command of the last start is not up on that node."""
    for log, text in _words(evidence):
        for line in text.splitlines():
            if re.search(pattern, line):
                return log, line
    return None


def _refusal(evidence: Evidence) -> bool:
    """Whether the last start was refused or failed before its command: else old words would be told anew."""
    batch = evidence.batch
    if evidence.state in ("PENDING", "RUNNING", "NOT_SUBMITTED") or batch is None:
        return False
    if not has_begun(evidence):
        return True
    told_at = evidence.now - batch.age_s
    ours = any(line.startswith("tuneplane: ") or line.lstrip().startswith("→") for line in batch.tail[-2:])
    return ours and (evidence.ended_at is None or told_at > evidence.ended_at + ENDING_S)


def ingest_unreachable(evidence: Evidence) -> Finding | None:
    """C31: the canary file of the ingest folder is not seen where the job started."""
    found = _find(evidence, r"the canary file .* is not there") if _refusal(evidence) else None
    if found is None:
        return None
    host = re.search(r"node (\S+):", found[1])
    return Finding(
        "ingest-unreachable",
        f"the run's ingest folder cannot be reached{' on ' + host[1] if host else ''}: its canary"
        " file is not there",
        "the storage root must be on storage that login and compute nodes share: set `storage_root` of the cluster"
        " profile, and `shared` so that a submit checks it",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def secrets_gone(evidence: Evidence) -> Finding | None:
    """C11: started by hand after it had ended for good."""
    found = _find(evidence, r"secrets\.env is gone|not in secrets\.env|the secrets file is damaged")
    if found is None or not _refusal(evidence):
        return None
    return Finding(
        "secrets-gone",
        "the last start was refused: the run had ended for good, and its secrets were removed then",
        f"tp job retry {evidence.run_id} writes them anew and starts it",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def changed_after_submit(evidence: Evidence) -> Finding | None:
    """job.json or kernel.pyz is not what was submitted."""
    found = _find(evidence, r"^sha256sum: WARNING|^(?:job\.json|kernel\.pyz): FAILED|digest .* is not")
    if found is None or not _refusal(evidence):
        return None
    return Finding(
        "changed-after-submit",
        "a file of the run was changed after the submit, so it was not started",
        f"tp job verify {evidence.run_id} tells which; submit the experiment again",
        evidence=tuple(line for line in last_lines(found[0], 4)),
        **at(evidence, found[0]),
    )


def interpreter_missing(evidence: Evidence) -> Finding | None:
    """The Python that runs the kernel is not on the node."""
    python = evidence.job.python if evidence.job else ""
    if not python or evidence.state not in ENDED_BADLY:
        return None
    program = re.escape(python)
    pattern = (
        rf"{program}: (?:No such file or directory|Permission denied|cannot execute)|execve\(\)?: {program}"
    )
    found = _find(evidence, pattern)
    if found is None:
        return None
    return Finding(
        "interpreter-missing",
        f"there is no {python} on the node, by which TunePlane starts there",
        "set `python` of the cluster profile to a Python 3.9 or later that every node has, like /usr/bin/python3;"
        " tp doctor --profile P --deep looks",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def storage_not_shared(evidence: Evidence) -> Finding | None:
    """slurmd could not open the output file, or the script its folder: the node does not see the run."""
    if evidence.state not in ENDED_BADLY or evidence.attempts:
        return None
    steps = [s for s in evidence.slurm.steps if s.exit_code == FAILED_TO_START]
    fields = evidence.slurm.fields.get("ExitCode") == FAILED_TO_START or evidence.code == 53
    moved = _find(
        evidence, r"couldn't chdir to|job\.sbatch: line \d+: cd: |[Cc]ould not open (?:stdout|stderr) file"
    )
    if not steps and not fields and moved is None:
        return None
    root = evidence.folder.partition("/runs/")[0]
    nodes = evidence.slurm.fields.get("BatchHost") or next(
        (s.nodes for s in evidence.slurm.steps if s.nodes), ""
    )
    lines = [moved[1]] if moved else []
    lines += (
        [f"Slurm: exit code {FAILED_TO_START}: slurmd could not start the script or open its output"]
        if fields or steps
        else []
    )
    lines += [f"sacct: {s.job_id} {s.state} {s.exit_code} {s.nodes}" for s in steps][:2]
    return Finding(
        "storage-not-shared",
        f"the run's folder is not there{' on ' + nodes if nodes else ' on the node'}: {root} is not"
        " shared with it, or not"
        " mounted",
        "choose a `storage_root` that every node sees, and list what is shared in `shared` of the cluster profile;"
        " tp doctor --profile P --deep looks",
        evidence=tuple(lines),
        certainty=CERTAIN if moved else LIKELY,
    )


def modules_missing(evidence: Evidence) -> Finding | None:
    """`module load` failed in the batch script."""
    found = _find(
        evidence, r"module.*(?:unknown|not found|cannot be loaded|Unable to locate)|sets up no modules"
    )
    if found is None or evidence.state not in ENDED_BADLY or has_begun(evidence):
        return None
    return Finding(
        "modules-missing",
        "a module of the cluster profile could not be loaded on the node",
        "`module avail` there shows what it has; set `slurm.modules` of the profile",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def mount_missing(evidence: Evidence) -> Finding | None:
    """A folder that is to be mounted is not on the node."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = _find(evidence, r"is to be mounted and is not on this node")
    if found is None:
        return None
    path = found[1].partition(" is to be mounted")[0].rpartition(": ")[2]
    return Finding(
        "mount-missing",
        f"{path} is to be mounted into the container, and the node does not have it",
        "--mount, the site's mounts, HF_HOME and *_DATA_DIR must name what compute nodes see: look there, with"
        f" srun ls -d {path}",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def image_missing(evidence: Evidence) -> Finding | None:
    """The image's file was removed since the submit, or the login node alone sees it."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = _find(evidence, r"the image \S.* is not on this node")
    if found is None:
        return None
    image = found[1].partition("the image ")[2].partition(" is not on this node")[0]
    if evidence.job is not None and evidence.job.image_there:
        why = "this machine sees it, so its folder is not shared with the node"
        remedy = (
            "keep images on storage that every node sees; one of a registry is put there by tp submit itself"
        )
    else:
        why = "it was removed after the submit"
        remedy = "submit again with an image that is there; keep the images of runs that have not ended"
    return Finding(
        "image-missing",
        f"the image {image} is not on the node: {why}",
        remedy,
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def image_changed(evidence: Evidence) -> Finding | None:
    """C27: another file stands where the submitted image was."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = _find(evidence, r"the image \S.* is not the one that was submitted")
    if found is None:
        return None
    image = found[1].partition("the image ")[2].partition(" is not the one")[0]
    return Finding(
        "image-changed",
        f"the image {image} was changed after the submit, so the run was not started",
        "submit again to run what is there now; give a new image a new name while runs wait for the old one",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def runtime_missing(evidence: Evidence) -> Finding | None:
    """The container runtime's program, or bash without a container, is not there."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = _find(evidence, r"^(?:tuneplane: )?(?:node agent: )?\S+ cannot be started: ")
    if found is None:
        return None
    said = re.search(r"(\S+) cannot be started: (.*?)(?:;|$)", found[1])
    program = said[1] if said else "the container runtime"
    return Finding(
        "runtime-missing",
        f"{program} cannot be started on the node: {said[2] if said else ''}".rstrip(": "),
        "set `container.binary` of the cluster profile to its path on the nodes, or `slurm.modules`"
        " to the module that"
        " brings it",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def container_failed(evidence: Evidence) -> Finding | None:
    """The container runtime refused: the image, a mount, a missing right."""
    if evidence.state not in ENDED_BADLY or evidence.job is None or evidence.job.runtime == "none":
        return None
    for log in evidence.logs:
        mark = log.mark("runtime-fatal")
        if mark is None or mark.last not in log.tail[-4:]:
            continue
        said = mark.last.partition("FATAL:")[2].strip()
        broken = re.search(
            r"image format not recognized|while (?:checking|opening|loading) image|not a valid|squashfs", said
        )
        remedy = f"start it by hand on a node: {evidence.job.runtime} exec {evidence.job.image} true"
        if broken:
            remedy = "the image file is damaged or none: build or copy it again, and submit again"
        return Finding(
            "container-failed",
            f"{evidence.job.runtime} did not start the container: {shortly(said)}",
            remedy,
            evidence=last_lines(log, 3),
            **at(evidence, log, mark),
        )
    return None


def scratch_full(evidence: Evidence) -> Finding | None:
    """No room, or no right, for the unpacked code on the node."""
    if evidence.state not in ENDED_BADLY or has_begun(evidence):
        return None
    found = _find(
        evidence, r"no scratch folder on this node|scratch: .* (?:belongs to|is a link|is not a folder)"
    )
    if found is None:
        return None
    is_full = re.search("No space left|quota", found[1]) is not None
    return Finding(
        "scratch-unusable",
        f"the node has no {'room' if is_full else 'place'} for the unpacked code:"
        f" {found[1].removeprefix('tuneplane: ')[:200]}",
        f"{'free space there, or ' if is_full else ''}set `scratch` of the cluster profile to another"
        " node-local folder",
        evidence=(found[1],),
        **at(evidence, found[0]),
    )


def agent_failed(evidence: Evidence) -> Finding | None:
    """Whatever else the agent or the claim said before there was a command."""
    if evidence.state not in ENDED_BADLY or has_begun(evidence):
        return None
    found = _find(evidence, r"^tuneplane: (?!warning: |node \d+ of )")
    if found is None:
        return None
    said = found[1].removeprefix("tuneplane: ")
    lines = list(found[0].tail)
    after = lines[lines.index(found[1]) + 1 :] if found[1] in lines else []
    remedy = after[0].strip().removeprefix("→").strip() if after and after[0].lstrip().startswith("→") else ""
    return Finding(
        "start-failed",
        f"the command was not started: {said[:240]}",
        remedy,
        evidence=last_lines(found[0], 4),
        **at(evidence, found[0]),
    )


REFUSED = (secrets_gone, ingest_unreachable, changed_after_submit)
"""Of a start that was refused, whatever an earlier one came to."""

RULES = (
    interpreter_missing,
    storage_not_shared,
    modules_missing,
    mount_missing,
    image_missing,
    image_changed,
    runtime_missing,
    container_failed,
    scratch_full,
)
LAST = (agent_failed,)
