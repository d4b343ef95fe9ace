"""What runs left on the testbed's nodes: processes, mounts, folders of their own.

Asked by the fixture `nothing_left` of conftest.py, by `chain_lab.py`, and where something is left on purpose.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from slurm_lab import Run
from testbed_client import Testbed

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.node.scratch import scratch_folder
from tuneplane.spec import read

SETTLES_S = 15.0
"""How long after its end a run may be on its nodes: agents write their records, Slurm kills and reaps."""

PROBE = r"""
import json, os, sys

marks = json.loads(sys.argv[1])  # run -> words, each of which names it
own = os.readlink("/proc/1/ns/mnt")


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def runs_of(text):
    return [run for run, words in marks.items() if any(word in text for word in words)]


found, looked = [], set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    base = f"/proc/{pid}/"
    try:
        if os.stat(base).st_uid == 0:  # Slurm's own, and whoever looks
            continue
        space, folder = os.readlink(base + "ns/mnt"), os.readlink(base + "cwd")
    except OSError:
        space, folder = own, ""
    line = read(base + "cmdline").replace("\0", " ").strip()
    state = read(base + "stat").rpartition(")")[2].split()[:1]
    if state == ["Z"]:
        continue
    mounts = read(base + "mountinfo") if space != own else ""
    text = "\n".join([line, read(base + "environ"), folder, read(base + "cgroup") + "/", mounts])
    for run in runs_of(text.replace("\n", "/\n")):
        found.append([run, f"process {pid}: {line or read(base + 'comm').strip()}"])
for line in read("/proc/1/mountinfo").splitlines():
    for run in runs_of(line):
        found.append([run, f"mount: {line}"])
    if " - fuse." in line or " - fuse " in line:
        found.append(["", f"mount: {line}"])
for top in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
    for folder, names, files in os.walk(top):
        if folder.count("/") > 3:
            names.clear()
            continue
        for name in [*names, *files]:
            for run in runs_of(os.path.join(folder, name)):
                found.append([run, "file: " + os.path.join(folder, name)])
print(json.dumps(found))
"""
"""Run on a node, outside any job. A process is a run's by its arguments, environment, folder, mounts or cgroup."""


def marks_of(run: Run) -> list[str]:
    """Words that name a run on a node: its id, its scratch folder, the cgroups of its jobs."""
    try:
        scratch = scratch_folder(read(run.folder / "job.json"), 0, 0).path.name.split(".")[0]
        groups = [f"/job_{job_id}/" for job_id in jobs_of(run) if job_id.isdecimal()]
    except FileNotFoundError:  # its test cleared it
        return [run.run_id]
    return [run.run_id, scratch, *groups]


def jobs_of(run: Run) -> set[str]:
    """Slurm jobs of a run, `12` or `12_0`."""
    folder = RunFolder(run.folder)
    starts = [json.loads(a.start.read_text(encoding="utf-8")) for a in folder.attempts()]
    return {path.stem for path in folder.submissions.glob("*.json")} | {str(s["job_id"]) for s in starts}


def left_now(bed: Testbed, runs: Iterable[Run]) -> set[str]:
    """What is on the nodes of runs, a line each."""
    marks = json.dumps({run.run_id: marks_of(run) for run in runs})

    def ask(node: str) -> list[str]:
        said = bed.node_exec(node, ["/usr/bin/python3", "-I", "-S", "-c", PROBE, marks]).stdout
        return [f"{node}: {run or 'somebody'}: {what}" for run, what in json.loads(said)]

    with ThreadPoolExecutor(len(bed.nodes)) as pool:
        return {line for lines in pool.map(ask, bed.nodes) for line in lines}


def left_by(bed: Testbed, runs: Iterable[Run], settles_s: float = SETTLES_S) -> list[str]:
    """What runs that do not run left on the nodes, and what does not go away within `settles_s`."""
    made, deadline = [run for run in runs if run.lab.bed is bed], time.monotonic() + settles_s
    left: set[str] | None = None
    while True:
        active = running(bed)
        over = [run for run in made if not active & {str(run.folder), *jobs_of(run)}]
        found = left_now(bed, over) if over else set()
        left = found if left is None else left & found  # of one that has begun anew it is another process
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.3)


def running(bed: Testbed) -> set[str]:
    """Folders and names of jobs that have their nodes and do not end: what their runs have there may be there."""
    states = "RUNNING,CONFIGURING,SUSPENDED,STOPPED,SIGNALING"
    words = ["squeue", "--noheader", "--array", f"--states={states}", "--format=%i\n%F_%K\n%Z"]
    return {line.strip() for line in bed.exec(words, user="root").stdout.splitlines()}
