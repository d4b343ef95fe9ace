"""Storage: no space, no inodes, a quota, a folder that is read-only, not there, or not the output folder."""

from __future__ import annotations

import posixpath
import re

from tuneplane.diagnose.culprit import culprit
from tuneplane.diagnose.evidence import Evidence, Log, Mark, Space
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.told import ENDED_BADLY, at, lines_of, on, place

_SPACE = re.compile(r"No space left on device")
_QUOTA = re.compile(r"Disk quota exceeded")
_SHM = re.compile(r"shared memory|/dev/shm")
_QUOTED = re.compile(r"'(/[^']*)'|: (/\S+)")
_FEW_INODES = 16
_LITTLE_BYTES = 64 << 20
"""Less than this free on a file system that said it was full is no contradiction to its being full of bytes."""


def _said(
    evidence: Evidence, pattern: re.Pattern[str], mark: str
) -> tuple[str, tuple[str, ...], dict[str, object]] | None:
    """What said so: the culprit's exception, else a line of a log of a run that failed without another cause."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    text = found.text()
    if pattern.search(text):
        line = next(line for line in text.splitlines() if pattern.search(line))
        return line, lines_of(found), place(found)
    marked = evidence.marked(mark)
    if marked is None or (found.trace is not None and not found.is_victim):
        return None
    log, line_mark = marked
    return line_mark.last, (line_mark.last,), at(evidence, log, line_mark)


def no_space(evidence: Evidence) -> Finding | None:
    """ENOSPC: bytes or inodes, of the storage or of a node's own disk."""
    said = _said(evidence, _SPACE, "no-space")
    if said is None or _SHM.search(said[0]):
        return None
    line, lines, where = said
    path = _path(line)
    full = _full_of_inodes(evidence, path)
    name = _folder_name(evidence, path)
    spaces = tuple(_space_line(space) for space in evidence.spaces)
    if full is not None:
        return Finding(
            "no-inodes",
            f"{name} can hold no more files: all its {full.inodes} inodes are in use, though bytes are left",
            "remove small files (caches, old runs; `df -i` shows them), or pack them into few archives",
            evidence=(*lines, _space_line(full)),
            **where,  # type: ignore[arg-type]
        )
    return Finding(
        "no-space",
        f"there was no space left on {name}",
        "free some (tp job artifacts RUN lists what runs left; keep fewer checkpoints), or set"
        " `storage_root`, or for"
        " a node's own disk `scratch`, of the cluster profile to another place",
        evidence=(*lines, *spaces),
        **where,  # type: ignore[arg-type]
    )


def quota(evidence: Evidence) -> Finding | None:
    """EDQUOT: the user's or group's share is used up, however much the file system has."""
    said = _said(evidence, _QUOTA, "quota")
    if said is None:
        return None
    line, lines, where = said
    return Finding(
        "quota-exceeded",
        f"your quota on {_folder_name(evidence, _path(line))} is used up",
        "remove old runs and checkpoints, or ask for a larger quota; `quota -s`, or `lfs quota -h -u"
        " $USER PATH` on"
        " Lustre, tells how much",
        evidence=lines,
        **where,  # type: ignore[arg-type]
    )


def _path(line: str) -> str:
    found = _QUOTED.search(line)
    return (found[1] or found[2] or "") if found else ""


def _full_of_inodes(evidence: Evidence, path: str) -> Space | None:
    """The file system that has bytes and no inodes; of another one than the path's it says nothing."""
    for space in evidence.spaces:
        if space.name == "scratch" and path.startswith(evidence.folder):
            continue
        has_bytes = space.free_bytes > min(_LITTLE_BYTES, space.size_bytes // 50)
        if space.inodes and space.free_inodes <= _FEW_INODES and has_bytes:
            return space
    return None


def _folder_name(evidence: Evidence, path: str) -> str:
    if path.startswith(evidence.folder):
        return f"the storage of the run ({evidence.folder.partition('/runs/')[0]})"
    if path.startswith("/dev/shm"):
        return "/dev/shm"
    job = evidence.job
    if job and path.startswith((job.scratch.rstrip("/") + "/", "/tmp/", "/var/tmp/")):
        return f"the node's own disk ({job.scratch})"
    if path:
        return posixpath.dirname(path)
    full = next((s for s in evidence.spaces if s.free_bytes < max(_LITTLE_BYTES, s.size_bytes // 100)), None)
    if full is None:
        return "a file system of the run"
    return (
        f"the storage of the run ({evidence.folder.partition('/runs/')[0]})"
        if full.name == "storage"
        else (f"the node's own disk ({job.scratch if job else 'scratch'})")
    )


def _space_line(space: Space) -> str:
    return (
        f"{space.name} now: {space.free_bytes / 1e9:.2f} of {space.size_bytes / 1e9:.2f} GB and"
        f" {space.free_inodes} of {space.inodes} inodes free"
    )


def work_folder_read_only(evidence: Evidence) -> Finding | None:
    """In a container the unpacked code is mounted read-only."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    text = found.text()
    marked = evidence.marked("read-only")
    if "Read-only file system" not in text:
        if marked is None or found.trace is not None:
            return None
        text = marked[1].last
    path = re.search(r"Read-only file system: '([^']+)'|[‘']([^’']+)[’'].*: Read-only file system", text)
    name = (path[1] or path[2]) if path else "a read-only folder"
    return Finding(
        "work-folder-read-only",
        f"the program wrote where it may not write{on(found)}: {name}",
        'write to "$TUNEPLANE_OUT_DIR" (kept) or "$TMPDIR" (of this attempt): in a container the code, the working'
        " folder too, and the image are read-only",
        evidence=lines_of(found),
        **place(found),
    )


def data_missing(evidence: Evidence) -> Finding | None:
    """A file below a folder that the site's variables or --mount name is not on the node."""
    if evidence.state not in ENDED_BADLY or evidence.job is None:
        return None
    found = culprit(evidence)
    text = found.text()
    if "No such file or directory" not in text:
        return None
    path = _path(text)
    folders = [pair.partition("=")[2] for pair in evidence.job.data] + list(evidence.job.mounts)
    within = next((f for f in folders if f and (path == f or path.startswith(f.rstrip("/") + "/"))), None)
    outside = path.startswith("/") and not path.startswith(
        (evidence.folder, evidence.job.scratch, "/tmp", "/usr", "/proc", "/dev")
    )
    if within is None and not outside:
        return None
    contained = evidence.job.runtime != "none"
    remedy = "look whether it is there on a compute node, and spelt so"
    if within is None and contained:
        folder = posixpath.dirname(path)
        remedy = f"a container sees only what is mounted: --mount {folder}:{folder}"
    return Finding(
        "data-missing",
        f"{path} is not there{on(found)}" + (f", below {within} of the job's data folders" if within else ""),
        remedy,
        evidence=lines_of(found),
        certainty=CERTAIN if within else LIKELY,
        **place(found),
    )


def checkpoints_outside(evidence: Evidence) -> Finding | None:
    """C13: what is written elsewhere does not outlive the job."""
    if evidence.outputs.outside:
        link = evidence.outputs.outside[0]
        return Finding(
            "checkpoints-outside",
            f"{link.partition(' -> ')[0]} of the output folder is a link that leads out of it, so it"
            " is not followed",
            'write into "$TUNEPLANE_OUT_DIR" itself',
            evidence=evidence.outputs.outside,
        )
    if evidence.outputs.checkpoints or evidence.state in ("PENDING", "PREPARED", "NOT_SUBMITTED"):
        return None
    for log in evidence.logs:
        mark = log.mark("saves")
        path = _saved_outside(evidence, log, mark) if mark else None
        if mark and path:
            return Finding(
                "checkpoints-outside",
                f"the program saved to {path}, which is not below the output folder: it is not kept",
                'save below "$TUNEPLANE_OUT_DIR/checkpoints"; a relative path is of the working folder, which is'
                " discarded with the attempt",
                evidence=(mark.last,),
                certainty=LIKELY,
                **at(evidence, log, mark),
            )
    return None


_TARGET = re.compile(
    r"[Ss]av(?:ing|ed)\b.*?(?:to|in|at|as|:)?[\s'\"=:(]((?:\.{1,2}/|~?/)?[\w.@+-]+/[\w./@+-]*)"
)
_CHECKPOINT = re.compile(
    r"(?i)checkpoint|model|weights|state|adapter|\.pt\b|\.pth\b|\.bin\b|\.safetensors|\.ckpt"
)


def _saved_outside(evidence: Evidence, log: Log, mark: Mark) -> str | None:
    found = _TARGET.search(mark.last)
    if found is None or not _CHECKPOINT.search(mark.last):
        return None
    path = found[1]
    if not path.startswith("/"):
        return path if not path.startswith("~") else None
    out = f"{evidence.folder}/out"
    if path == out or path.startswith(f"{out}/"):
        return None
    data = [pair.partition("=")[2] for pair in evidence.job.data] if evidence.job else []
    return None if any(path.startswith(folder) for folder in data if folder) else path


RULES = (work_folder_read_only, quota, no_space, data_missing)
LATER = (checkpoints_outside,)
"""Asked where nothing says why a run ended: it is no cause of an end."""
