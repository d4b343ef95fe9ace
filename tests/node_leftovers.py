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
    folder = RunFolder(run.folder)
    try:
        scratch = scratch_folder(read(folder.job), 0, 0).path.name.split(".")[0]
        jobs = [path.stem for path in folder.submissions.glob("*.json")]
        starts = [json.loads(a.start.read_text(encoding="utf-8")) for a in folder.attempts()]
    except FileNotFoundError:  # its test cleared it
        return [run.run_id]
    ids = {*jobs, *(str(start["job_id"]) for start in starts)}
    return [run.run_id, scratch, *(f"/job_{job_id}/" for job_id in ids if job_id.isdecimal())]


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
        active = running_folders(bed)
        over = [run for run in made if str(run.folder) not in active]
        found = left_now(bed, over) if over else set()
        left = found if left is None else left & found  # of one that has begun anew it is another process
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.3)


def running_folders(bed: Testbed) -> set[str]:
    """Folders in which a job has its nodes, and does not end: those of runs that may be there."""
    states = "RUNNING,CONFIGURING,SUSPENDED,STOPPED,SIGNALING"
    said = bed.exec(["squeue", "--noheader", f"--states={states}", "--format=%Z"], user="root").stdout
    return {line.strip() for line in said.splitlines()}
