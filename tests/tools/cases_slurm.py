"""Runs on the testbed's Slurm that `record_cases.py` makes: each function brings one about, and names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from record_cases import CaseRun, keep
from slurm_lab import SlurmLab
from testbed_client import CommandFailed, Testbed

BARE = "h200-bare:1"
TWO_NODES = ("h200-bare:2", "--nodes", "2")


class Bed:
    """The testbed as alice uses it, with one lab of many experiments."""

    def __init__(self, bed: Testbed, torch: str) -> None:
        self.bed, self.torch = bed, torch
        self.lab = SlurmLab(bed, experiment="none")
        self.name = ""

    def train(self, text: str, files: dict[str, str] | None = None) -> None:
        """An experiment of the case's name."""
        self.lab.experiment = self.name
        self.lab.sh(["tp", "new", self.name, "--method", "custom/custom"])
        self.lab.write(
            f"experiments/{self.name}/train.sh",
            "#!/bin/bash\nset -euo pipefail\n" + text.replace("@TORCH@", self.torch) + "\n",
        )
        for file, content in (files or {}).items():
            self.lab.write(f"experiments/{self.name}/{file}", content)
        self.lab.commit()

    def submit(self, profile: str = BARE, *more: str) -> str:
        """The id of a submitted run of this case."""
        return self.lab.submit(profile, *more).run_id

    def refused(self, *more: str) -> str:
        """A submit that Slurm refuses; the run that it leaves."""
        said = self.lab.sh(["tp", "submit", self.name, *self.lab.flags(BARE), *more], check=False)
        print(said.stderr)
        return self.name

    def state(self, run: str) -> str:
        import json

        said = self.lab.sh(["tp", "job", "status", run, "--json"]).stdout
        return str(json.loads(said)["state"])

    def wait(self, run: str, *states: str, log: str = "", timeout_s: float = 150) -> str:
        """Wait for one of the states and a line of the log; the run."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state(run)
            said = self.lab.sh(["tp", "job", "logs", run], check=False).stdout if log else ""
            if (not states or state in states) and log in said:
                return run
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: it is {state}, not {states}\n{said}")
            time.sleep(0.5)

    def job_id(self, run: str) -> str:
        import json

        return str(json.loads(self.lab.sh(["tp", "job", "status", run, "--json"]).stdout)["job_id"])

    def folder(self, run: str) -> Path:
        import json

        return Path(json.loads(self.lab.sh(["tp", "job", "status", run, "--json"]).stdout)["folder"])

    def root(self, *argv: str) -> str:
        return self.bed.exec(list(argv), user="root").stdout.strip()

    def bob(self, *argv: str) -> str:
        return self.bed.exec(list(argv), user="bob").stdout.strip()

    def occupy(self, nodes: int = 4) -> str:
        """Bob's job on so many whole nodes."""
        script = [
            "sbatch",
            "--parsable",
            f"--nodes={nodes}",
            "--exclusive",
            "--time=30:00",
            "--partition=gpu",
        ]
        job = self.bob(*script, "--wrap", "sleep 1800")
        while self.bed.job(job).get("JobState") != "RUNNING":
            time.sleep(0.2)
        return job

    def config(self, text: str) -> None:
        self.lab.own_user_config("defaults.yaml", text)


@dataclass(frozen=True)
class SlurmCase:
    make: Callable[[Bed], str]
    run: CaseRun


CASES: list[SlurmCase] = []


def case(
    name: str, cause: str, how: str, **more: object
) -> Callable[[Callable[[Bed], str]], Callable[[Bed], str]]:
    def note(make: Callable[[Bed], str]) -> Callable[[Bed], str]:
        CASES.append(SlurmCase(make, CaseRun(name, cause, "", how, **more)))  # type: ignore[arg-type]
        return make

    return note


# --- how Slurm ends jobs ---


@case("slurm-walltime", "walltime", "a run that needs more than its minute", says="time limit of 00:01:00")
def walltime(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    return b.wait(b.submit(BARE, "--time", "1"), "TIMEOUT")


@case(
    "slurm-walltime-saved",
    "saved-and-ended",
    "a trainer that saves and exits 0 on the stop marker before its limit",
)
def walltime_saved(b: Bed) -> str:
    b.train('while [ ! -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.2; done\necho saved')
    return b.wait(b.submit(BARE, "--time", "3"), "CANCELLED", "COMPLETED", "TIMEOUT", timeout_s=300)


@case(
    "slurm-memory",
    "host-out-of-memory",
    "Slurm ends a job over its memory (OverMemoryKill)",
    certainty="certain",
    says="it had 400M",
)
def memory(b: Bed) -> str:
    b.bed.set(JobAcctGatherParams="OverMemoryKill", JobAcctGatherFrequency=1)
    b.config("cluster:\n  request_memory: true\n  memory_per_node: 400M\n")
    b.train(
        'exec python3 "$TUNEPLANE_EXP_DIR/train.py"',
        {
            "train.py": "import time\nheld = []\nfor step in range(120):\n    held.append(b'x' * (8 << 20))\n"
            "    print('step', step, flush=True)\n    time.sleep(0.3)\n"
        },
    )
    return b.wait(b.submit("h200-bare:8"), "OUT_OF_MEMORY", "FAILED", "CANCELLED")


@case(
    "slurm-preempted",
    "preempted",
    "a job of a higher partition took the nodes; it waits to start again",
    says="attempt 1 starts by itself, and waits in the queue",
)
def preempted(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit("h200-bare:32", "--partition", "preempt"), "RUNNING", log="step 1")
    b.occupy()
    return b.wait(run, "PENDING", "PREEMPTED", "REQUEUED")


@case("slurm-preempted-cancel", "preempted", "the same on a site that cancels preempted jobs")
def preempted_cancel(b: Bed) -> str:
    b.bed.set(PreemptMode="CANCEL")
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit("h200-bare:32", "--partition", "preempt"), "RUNNING", log="step 1")
    b.occupy()
    return b.wait(run, "PREEMPTED")


@case(
    "slurm-node-down",
    "node-failure",
    "a node is declared down under a run that may not be requeued",
    says="failed under it",
)
def node_down(b: Bed) -> str:
    b.config('cluster:\n  slurm:\n    extra_directives:\n      no-requeue: ""\n')
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1")
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    last = b.root("scontrol", "show", "hostnames", nodes).split()[-1]
    b.bed.node_exec(
        last, ["pkill", "-STOP", "-x", "slurmd"]
    )  # a node that is gone does not come back by itself
    b.root("scontrol", "update", f"nodename={last}", "state=down", "reason=test")
    return b.wait(run, "NODE_FAIL")


@case("slurm-node-requeued", "node-failure", "a node is declared down, and Slurm requeues the run")
def node_requeued(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1")
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    last = b.root("scontrol", "show", "hostnames", nodes).split()[-1]
    b.bed.node_exec(
        last, ["pkill", "-STOP", "-x", "slurmd"]
    )  # a node that is gone does not come back by itself
    b.root("scontrol", "update", f"nodename={last}", "state=down", "reason=test")
    return b.wait(run, "PENDING", "REQUEUED")


@case("slurm-node-cut", "node-silent", "a node off the network, while Slurm has not noticed yet")
def node_cut(b: Bed) -> str:
    b.train("echo step 1\nsleep 600")
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1")
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    last = b.root("scontrol", "show", "hostnames", nodes).split()[-1]
    beats = b.folder(run) / "attempts" / "0" / "node-1.beat"
    # The hosts of the testbed share this machine's disk, so the cut node's agent is stopped as well: on a
    # cluster a node without network beats on no shared storage.
    b.bed.cut(last)
    pids = b.bed.node_exec(last, ["pgrep", "-f", "kernel.pyz node"]).stdout.split()
    b.bed.node_exec(last, ["kill", "-STOP", *pids])
    b.lab.sh(["touch", "-d", "5 minutes ago", str(beats)])
    return run


@case(
    "slurm-node-given-up",
    "node-failure",
    "a node off the network: it ended its own ranks, and the others gave it up",
    node=1,
    says="gave no sign of life for",
)
def node_given_up(b: Bed) -> str:
    b.train("echo step 1\nsleep 600")
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1")
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    b.bed.cut(b.root("scontrol", "show", "hostnames", nodes).split()[-1])
    fence = b.folder(run) / "attempts" / "0" / "fence.json"
    while b.lab.sh(["test", "-e", str(fence)], check=False).returncode:
        time.sleep(0.5)
    return run


@case(
    "slurm-agent-fenced",
    "agent-fenced",
    "a node off the network ended its own ranks, while the program on the other does not heed TERM yet",
    node=1,
    says="has been silent for",
    near=("node-failure", "healthy"),
)
def agent_fenced(b: Bed) -> str:
    b.train('[ "$TUNEPLANE_MACHINE_RANK" = 1 ] || trap "" TERM\necho step 1\nwhile :; do sleep 1; done')
    run = b.wait(b.submit(*TWO_NODES, "--max-restarts", "0"), "RUNNING", log="step 1")
    time.sleep(3)  # each node was heard
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    b.bed.cut(b.root("scontrol", "show", "hostnames", nodes).split()[-1])
    record = b.folder(run) / "attempts" / "0" / "node-1.json"
    while b.lab.sh(["grep", "-q", '"state": "ended"', str(record)], check=False).returncode:
        time.sleep(0.3)
    return run


@case("slurm-scancel", "cancelled", "scancel by the user")
def scancel(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.lab.sh(["scancel", b.job_id(run)])
    return b.wait(run, "CANCELLED")


@case("slurm-scancel-admin", "cancelled", "scancel by an administrator", says="by root, an administrator")
def scancel_admin(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.root("scancel", b.job_id(run))
    return b.wait(run, "CANCELLED")


@case("slurm-stopped", "stopped-by-user", "tp job stop", near=("cancelled",))
def stopped(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.lab.sh(["tp", "job", "stop", run], timeout=120)
    return run


@case("slurm-completing", "ending", "cancelled, and the program takes its time to end", near=("healthy",))
def completing(b: Bed) -> str:
    b.train("trap '' TERM\necho step 1\nwhile :; do sleep 1; done")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.lab.sh(["scancel", b.job_id(run)])
    return b.wait(run, "COMPLETING")


CHAIN = (
    'd="$TUNEPLANE_OUT_DIR/checkpoints"; mkdir -p "$d"; echo step 1\n'
    'while [ ! -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.2; done\n'
)
SAVES = 'touch "$d/step-$TUNEPLANE_JOB_ATTEMPT"; echo saved'


@case(
    "slurm-walltime-goes-on",
    "walltime",
    "it saved before its limit, and waits to go on",
    says="starts by itself",
)
def walltime_goes_on(b: Bed) -> str:
    b.train(CHAIN + SAVES)
    run = b.wait(b.submit(BARE, "--time", "1"), log="saved")
    return b.wait(run, "PENDING", "REQUEUED")


@case(
    "slurm-no-progress",
    "restarts-without-progress",
    "it ends at the stop marker and saves nothing",
    near=("walltime", "saved-and-ended"),
)
def no_progress(b: Bed) -> str:
    b.train(CHAIN + "echo saved nothing")
    run = b.wait(b.submit(BARE, "--time", "1"), log="saved nothing")
    return b.wait(run, "TIMEOUT", "CANCELLED", "FAILED")


@case(
    "slurm-restarts-used-up",
    "restarts-used-up",
    "its second attempt meets its limit too, with one restart allowed",
    near=("walltime",),
)
def restarts_used_up(b: Bed) -> str:
    b.train(CHAIN + SAVES)
    return b.wait(b.submit(BARE, "--time", "1", "--max-restarts", "1"), "TIMEOUT", "CANCELLED", "FAILED")


@case(
    "slurm-restart-refused", "restart-lost", "its successor is refused: the partition takes no jobs any more"
)
def restart_refused(b: Bed) -> str:
    b.config("cluster:\n  restart_way: successor\n")
    b.train(CHAIN.replace("echo step 1", "echo step 1; sleep 6") + SAVES)
    run = b.wait(b.submit(BARE, "--time", "1"), log="step 1")
    b.root("scontrol", "update", "partitionname=gpu", "state=drain")
    return b.wait(run, "TIMEOUT", "CANCELLED", "FAILED", log="saved")


@case("slurm-suspended", "suspended", "an administrator suspends it")
def suspended(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.root("scontrol", "suspend", b.job_id(run))
    return b.wait(run, "SUSPENDED")


@case("slurm-paused", "paused", "tp job pause, and the program saves")
def paused(b: Bed) -> str:
    b.train(CHAIN.replace("echo step 1", "echo step 1; sleep 2") + SAVES)
    run = b.wait(b.submit(BARE), "RUNNING", log="step 1")
    b.lab.sh(["tp", "job", "pause", run])
    return b.wait(run, "PAUSED")


@case("slurm-agent-killed", "agent-gone", "the agent of one node is killed")
def agent_killed(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1")
    nodes = b.bed.job(b.job_id(run))["NodeList"]
    last = b.root("scontrol", "show", "hostnames", nodes).split()[-1]
    pids = b.bed.node_exec(last, ["pgrep", "-f", "kernel.pyz node"]).stdout.split()
    b.bed.node_exec(last, ["kill", "-KILL", *pids])
    return b.wait(run, "FAILED", "CANCELLED", "NODE_FAIL")


@case("slurm-saving", "saving", "asked to save by Slurm's signal, and still at it", near=("healthy",))
def saving(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.lab.sh(["scancel", "--batch", "--signal=USR2", b.job_id(run)])
    time.sleep(3)
    return run


# --- how nodes and ranks fail ---


JOINED = (
    "import os, time, torch, torch.distributed as dist\n"
    'dist.init_process_group("gloo")\nrank = dist.get_rank()\nx = torch.ones(4)\n'
)
RANKS = (
    "exec @TORCH@ -m torch.distributed.run --nnodes 2 --nproc_per_node 1 --node_rank $TUNEPLANE_MACHINE_RANK "
    "--master_addr $TUNEPLANE_MAIN_PROCESS_IP --master_port $TUNEPLANE_MAIN_PROCESS_PORT "
    '"$TUNEPLANE_EXP_DIR/train.py"'
)


@case(
    "slurm-ranks",
    "first-failing-rank",
    "torchrun on two nodes: rank 1 raises, rank 0 loses it",
    rank=1,
    node=1,
)
def ranks(b: Bed) -> str:
    b.train(
        f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0\n{RANKS}",
        {
            "train.py": JOINED + "for step in range(5):\n    if rank == 1 and step == 3:\n"
            "        raise ValueError('batch of 3 does not divide into 2')\n    dist.all_reduce(x)\n"
        },
    )
    return b.wait(b.submit(*TWO_NODES), "FAILED", "CANCELLED")


@case(
    "slurm-ranks-late",
    "first-failing-rank",
    "the same where the culprit takes seconds to end: its victim ends first",
    rank=1,
    node=1,
)
def ranks_late(b: Bed) -> str:
    b.train(
        f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0\n{RANKS}",
        {
            "train.py": JOINED
            + "import atexit, sys\nfor step in range(5):\n    if rank == 1 and step == 3:\n"
            "        dist.destroy_process_group()\n        atexit.register(time.sleep, 6)\n"
            "        raise ValueError('batch of 3 does not divide into 2')\n    dist.all_reduce(x)\n"
        },
    )
    return b.wait(b.submit(*TWO_NODES), "FAILED", "CANCELLED")


@case("slurm-node-exit", "command-failed", "one node's script fails, the other is told to end", node=1)
def node_exit(b: Bed) -> str:
    b.train('if [ "$TUNEPLANE_MACHINE_RANK" = 1 ]; then sleep 1; echo bad disk; exit 5; fi\nsleep 300')
    return b.wait(b.submit(*TWO_NODES), "FAILED", "CANCELLED")


@case(
    "slurm-hang", "waits-for-rank", "two nodes, one of which never comes to the collective, 20 minutes later"
)
def hang(b: Bed) -> str:
    b.train(
        f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0\n{RANKS}",
        {
            "train.py": JOINED
            + "print('step 1', rank, flush=True)\nif rank == 1: time.sleep(600)\ndist.all_reduce(x)\n"
        },
    )
    run = b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 1 0")
    time.sleep(3)
    folder = b.folder(run)
    for name in ("node-0.log", "node-1.log"):
        b.lab.sh(["touch", "-d", "20 minutes ago", str(folder / "attempts/0" / name)])
    script = (
        "import json, sys\nfor path in sys.argv[1:]:\n    value = json.load(open(path))\n"
        "    value['command_started_at'] -= 1300\n    json.dump(value, open(path, 'w'))\n"
    )
    paths = [str(folder / "attempts/0" / f"node-{n}.json") for n in (0, 1)]
    b.lab.sh(["python3", "-c", script, *paths])
    return run


@case("slurm-secrets-gone", "secrets-gone", "sbatch by hand once more after its end")
def secrets_gone(b: Bed) -> str:
    b.train("echo trained")
    run = b.wait(b.submit(), "COMPLETED")
    folder = b.folder(run)
    job = b.lab.sh(["sbatch", "--parsable", str(folder / "job.sbatch")]).stdout.strip()
    b.bed.wait_job(job)
    time.sleep(1)
    return run


@case("slurm-deadline", "slurm-ended", "its deadline passes while it waits")
def deadline(b: Bed) -> str:
    b.occupy()
    b.config("cluster:\n  slurm:\n    time: '1'\n    extra_directives:\n      deadline: now+90\n")
    b.train("echo trained")
    return b.wait(b.submit(), "DEADLINE", timeout_s=200)


@case("slurm-starting", "starting", "the interpreter on the node takes its time")
def starting(b: Bed) -> str:
    python = b.bed.home() / "slow-python"
    b.lab.sh(
        [
            "sh",
            "-c",
            'printf "#!/bin/sh\\nsleep 20\\nexec /usr/bin/python3 \\"\\$@\\"\\n" >"$1"; chmod +x "$1"',
            "sh",
            str(python),
        ]
    )
    b.config(f"cluster:\n  python: {python}\n")
    b.train("echo trained")
    run = b.wait(b.submit(), "RUNNING")
    time.sleep(2)
    return run


@case("slurm-modules", "modules-missing", "modules on nodes that have none")
def modules(b: Bed) -> str:
    b.config("cluster:\n  slurm:\n    modules: [cuda/13.0]\n")
    b.train("echo trained")
    return b.wait(b.submit(), "FAILED")


@case("slurm-reporting-stopped", "reporting-stopped", "the ingest folder takes no file")
def reporting_stopped(b: Bed) -> str:
    b.train(
        'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"\nchmod 500 "${TUNEPLANE_JOB_ENDPOINT#file://}"\n'
        'exec python3 "$TUNEPLANE_EXP_DIR/train.py"',
        {
            "train.py": "import time\nfrom tuneplane.report import log\nfor step in range(30):\n"
            "    log({'loss': 1.0}, step=step)\n    time.sleep(0.1)\n"
        },
    )
    return b.wait(b.submit(), "COMPLETED")


# --- what a node lacks ---


@case("slurm-no-interpreter", "interpreter-missing", "an interpreter that is not on the nodes")
def no_interpreter(b: Bed) -> str:
    b.config("cluster:\n  python: /opt/python-3.13/bin/python3\n")
    b.train("echo trained")
    return b.wait(b.submit(), "FAILED")


@case("slurm-storage-missing", "storage-not-shared", "a storage root that the nodes do not see")
def storage_missing(b: Bed) -> str:
    b.config("cluster:\n  shared: []\n  storage_root: /tmp/store-of-alice\n")
    b.train("echo trained")
    return b.wait(b.submit(), "FAILED", "LOST")


@case("slurm-mount-missing", "mount-missing", "a mount whose folder is not on the node")
def mount_missing(b: Bed) -> str:
    b.train("echo trained")
    return b.wait(b.submit("h200:1", "--mount", "/datasets/imagenet:/data:ro"), "FAILED")


@case("slurm-image-broken", "container-failed", "an image file that was copied by half")
def image_broken(b: Bed) -> str:
    b.train("echo trained")
    image = b.bed.home() / "broken.sif"
    script = 'cp "$2" "$1" && dd if=/dev/urandom of="$1" bs=4096 seek=8 count=400 conv=notrunc status=none'
    b.lab.sh(["sh", "-c", script, "sh", str(image), str(b.bed.image)])
    return b.wait(b.lab.submit("h200:1", image=image).run_id, "FAILED")


@case(
    "slurm-image-missing", "image-missing", "an image that was removed while the run waited", says="removed"
)
def image_missing(b: Bed) -> str:
    return image_meddled(b, "rm")


@case("slurm-image-changed", "image-changed", "an image that was built anew while the run waited")
def image_changed(b: Bed) -> str:
    return image_meddled(b, "touch", "-d", "1 hour ago")


def image_meddled(b: Bed, *argv: str) -> str:
    """A run that is held while `argv` meets its image, and let go then."""
    b.train("echo trained")
    image = b.bed.home() / "mine.sif"
    b.lab.sh(["cp", str(b.bed.image), str(image)])
    b.config("cluster:\n  slurm:\n    extra_directives:\n      hold: ''\n")
    run = b.lab.submit("h200:1", image=image).run_id
    b.lab.sh([*argv, str(image)])
    b.lab.sh(["scontrol", "release", b.job_id(run)])
    return b.wait(run, "FAILED")


@case("slurm-runtime-missing", "runtime-missing", "a container runtime that is not on the node")
def runtime_missing(b: Bed) -> str:
    b.config("cluster:\n  container:\n    binary: /opt/apptainer/bin/apptainer\n")
    b.train("echo trained")
    return b.wait(b.submit("h200:1"), "FAILED")


@case("slurm-read-only", "work-folder-read-only", "a program in a container writes beside its code")
def read_only(b: Bed) -> str:
    b.train(
        'exec python3 "$TUNEPLANE_EXP_DIR/train.py"',
        {"train.py": "import os\nos.makedirs('outputs/checkpoint-10')\n"},
    )
    return b.wait(b.submit("h200:1"), "FAILED")


@case("slurm-image-python", "other-python", "the image's packages are in another Python than train.sh runs")
def image_python(b: Bed) -> str:
    folder, image = b.bed.home() / "two", b.bed.home() / "two.sif"
    script = (
        'rm -rf "$1" "$2"; apptainer -q build --sandbox "$1" "$3" && mkdir -p "$1/opt/venv/bin" '
        '"$1/opt/venv/lib/python3.11/site-packages/trainerlib" && ln -s /usr/bin/python3'
        ' "$1/opt/venv/bin/python3" && '
        'printf "home = /usr/bin\\n" >"$1/opt/venv/pyvenv.cfg" && touch '
        '"$1/opt/venv/lib/python3.11/site-packages/trainerlib/__init__.py" && apptainer -q build "$2" "$1"'
    )
    b.lab.sh(["sh", "-c", script, "sh", str(folder), str(image), str(b.bed.image)], timeout=300)
    b.train("exec /usr/bin/python3 -c 'import trainerlib'")
    return b.wait(b.lab.submit("h200:1", image=image).run_id, "FAILED")


@case(
    "slurm-image-foreign",
    "foreign-tuneplane",
    "the image has another project's package of that name",
    says="tuneplane 0.4 (A console)",
)
def image_foreign(b: Bed) -> str:
    folder, image = b.bed.home() / "foreign", b.bed.home() / "foreign.sif"
    script = (
        'rm -rf "$1" "$2"; apptainer -q build --sandbox "$1" "$3" && p="$1/usr/lib/python3/dist-packages" && '
        'mkdir -p "$p/tuneplane" "$p/tuneplane-0.4.dist-info" && touch "$p/tuneplane/__init__.py" && '
        'printf "Metadata-Version: 2.1\\nName: tuneplane\\nVersion: 0.4\\nSummary: A console\\n" '
        '>"$p/tuneplane-0.4.dist-info/METADATA" && apptainer -q build "$2" "$1"'
    )
    b.lab.sh(["sh", "-c", script, "sh", str(folder), str(image), str(b.bed.image)], timeout=300)
    b.train("exec python3 -c 'from tuneplane.report import log'")
    return b.wait(b.lab.submit("h200:1", image=image).run_id, "FAILED")


@case("slurm-scaffold", "scaffold-unedited", "a scaffold submitted as it is, in a container")
def scaffold(b: Bed) -> str:
    b.train('echo "no training command yet" >&2\nexit 1')
    return b.wait(b.submit("h200:1"), "FAILED")


@case("slurm-command-missing", "command-not-found", "a program that the image does not have")
def command_missing(b: Bed) -> str:
    b.train("accelerate launch train.py")
    return b.wait(b.submit("h200:1"), "FAILED")


# --- waiting ---


def waits(name: str, how: str, says: str) -> Callable[[Callable[[Bed], str]], Callable[[Bed], str]]:
    """A run that waits. says: part of the sentence."""
    return case(f"pending-{name}", "pending", how, says=says)


@waits("resources", "another user has every node", "not enough nodes are free")
def pending_resources(b: Bed) -> str:
    b.occupy()
    b.train("echo trained")
    run = b.submit("h200-bare:16")
    time.sleep(2)
    return b.wait(run, "PENDING")


@waits("priority", "another run of the user's is before it", "higher priority are before it")
def pending_priority(b: Bed) -> str:
    b.occupy()
    b.train("echo trained")
    b.submit("h200-bare:32")
    run = b.submit("h200-bare:32")
    time.sleep(3)
    return b.wait(run, "PENDING")


@waits("dependency", "it waits for the end of another job", "another job must end first")
def pending_dependency(b: Bed) -> str:
    job = b.occupy(1)
    b.train("echo trained")
    run = b.submit(BARE, "--dependency", f"afterok:{job}")
    time.sleep(1)
    return b.wait(run, "PENDING")


@waits("never", "it waits for the success of a job that failed", "so it never starts")
def pending_never(b: Bed) -> str:
    b.train("echo trained")
    job = b.lab.sh(["sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 3; false"]).stdout.strip()
    run = b.submit(BARE, "--dependency", f"afterok:{job}")
    time.sleep(6)
    return b.wait(run, "PENDING")


@waits("qos", "the QOS allows a user one job at a time", "a limit of the QOS debug for one user")
def pending_qos(b: Bed) -> str:
    b.root("sacctmgr", "-i", "modify", "qos", "debug", "set", "MaxJobsPerUser=1")
    b.train("sleep 300")
    b.wait(b.submit(BARE, "--qos", "debug"), "RUNNING")
    run = b.submit(BARE, "--qos", "debug")
    time.sleep(3)
    return b.wait(run, "PENDING")


@waits("qos-gpus", "the QOS allows a user two GPUs", "a limit of the QOS debug for one user")
def pending_qos_gpus(b: Bed) -> str:
    b.root(
        "sacctmgr", "-i", "modify", "qos", "debug", "set", "MaxJobsPerUser=-1", "MaxTRESPerUser=gres/gpu=2"
    )
    b.train("sleep 300")
    run = b.submit("h200-bare:4", "--qos", "debug")
    time.sleep(3)
    b.wait(run, "PENDING")
    return run


@waits("account", "the account's GPUs are all in use", "has reached a limit")
def pending_account(b: Bed) -> str:
    b.root("sacctmgr", "-i", "modify", "account", "research", "set", "GrpTRES=gres/gpu=8")
    b.train("sleep 300")
    b.wait(b.submit("h200-bare:8"), "RUNNING")
    run = b.submit("h200-bare:8")
    time.sleep(3)
    return b.wait(run, "PENDING")


@waits("held", "held by its user", "it is held, by you")
def pending_held(b: Bed) -> str:
    b.occupy()
    b.train("echo trained")
    run = b.submit(BARE)
    b.lab.sh(["scontrol", "hold", b.job_id(run)])
    return b.wait(run, "PENDING")


@waits("held-admin", "held by an administrator", "held by an administrator")
def pending_held_admin(b: Bed) -> str:
    b.occupy()
    b.train("echo trained")
    run = b.submit(BARE)
    b.root("scontrol", "hold", b.job_id(run))
    return b.wait(run, "PENDING")


@waits("requeued-held", "requeued by hand, into a hold", "and is held")
def pending_requeued_held(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    b.root("scontrol", "requeuehold", b.job_id(run))
    time.sleep(4)
    return run


@waits("begin", "it asked to begin in an hour", "not to begin before")
def pending_begin(b: Bed) -> str:
    b.config("cluster:\n  slurm:\n    extra_directives:\n      begin: now+1hour\n")
    b.train("echo trained")
    run = b.submit(BARE)
    time.sleep(1)
    return b.wait(run, "PENDING")


@waits("node-drained", "the node it asks for is drained", "down, drained or reserved: ")
def pending_node_drained(b: Bed) -> str:
    b.root("scontrol", "update", "nodename=n4", "state=drain", "reason=fan replaced")
    b.train("echo trained")
    run = b.submit(BARE, "--nodelist", "n4")
    time.sleep(3)
    b.wait(run, "PENDING")
    return run


@waits("partition-down", "the partition is down", "partition preempt is down")
def pending_partition_down(b: Bed) -> str:
    b.root("scontrol", "update", "partitionname=preempt", "state=down")
    b.train("echo trained")
    run = b.submit(BARE, "--partition", "preempt")
    time.sleep(2)
    return b.wait(run, "PENDING")


@waits(
    "time-limit",
    "it asks for more time than the partition gives",
    "more time (1-00:00:00) than its partition gives (01:00:00)",
)
def pending_time_limit(b: Bed) -> str:
    b.root("scontrol", "update", "partitionname=preempt", "maxtime=60")
    b.train("echo trained")
    run = b.submit(BARE, "--partition", "preempt", "--time", "1-00:00:00")
    time.sleep(2)
    return b.wait(run, "PENDING")


@waits(
    "node-limit",
    "it asks for more nodes than the partition gives a job",
    "more nodes (2) than its partition gives a job (1)",
)
def pending_node_limit(b: Bed) -> str:
    b.root("scontrol", "update", "partitionname=preempt", "maxnodes=1")
    b.train("echo trained")
    run = b.submit("h200-bare:16", "--partition", "preempt")
    time.sleep(2)
    return b.wait(run, "PENDING")


@waits("reservation", "the nodes are reserved for maintenance", "reserved, for maintenance")
def pending_reservation(b: Bed) -> str:
    b.root(
        *("scontrol", "create", "reservation", "reservationname=maint", "starttime=now+5minutes"),
        *("duration=60", "user=root", "flags=maint,ignore_jobs", "nodes=ALL"),
    )
    b.train("echo trained")
    run = b.submit(BARE, "--time", "2:00:00")
    time.sleep(3)
    b.wait(run, "PENDING")
    return run


# --- refused ---


@case(
    "refused-account",
    "slurm-refused",
    "an account that the user does not have",
    says="may not use the account",
)
def refused_account(b: Bed) -> str:
    b.train("echo trained")
    return b.refused("--account", "physics")


@case(
    "refused-partition", "slurm-refused", "a partition that does not exist", says="there is no partition h100"
)
def refused_partition(b: Bed) -> str:
    b.train("echo trained")
    return b.refused("--partition", "h100")


@case("refused-qos", "slurm-refused", "a QOS that the user does not have", says="may not use the QOS urgent")
def refused_qos(b: Bed) -> str:
    b.train("echo trained")
    return b.refused("--qos", "urgent")


@case(
    "refused-time",
    "slurm-refused",
    "more time than the partition has, on a site that refuses it",
    says="more time (1-00:00:00) than the partition gives",
)
def refused_time(b: Bed) -> str:
    b.bed.set(EnforcePartLimits="ALL")
    b.root("scontrol", "update", "partitionname=gpu", "maxtime=60")
    b.train("echo trained")
    return b.refused("--time", "1-00:00:00")


@case("refused-feature", "slurm-refused", "a node feature that no node has", says="no node has the feature")
def refused_feature(b: Bed) -> str:
    b.train("echo trained")
    return b.refused("--constraint", "infiniband")


@case("slurm-silent", "cannot-tell", "Slurm's controller does not answer")
def silent(b: Bed) -> str:
    b.train("echo step 1\nsleep 300")
    run = b.wait(b.submit(), "RUNNING", log="step 1")
    folder = b.folder(run)
    b.lab.sh(["touch", "-d", "5 minutes ago", str(folder / "attempts/0/node-0.beat")])
    script = (
        'sed "s/^SlurmctldHost=.*/SlurmctldHost=ctl(10.77.0.99)/;'
        ' s/^AccountingStorageHost=.*/AccountingStorageHost=10.77.0.99/" /etc/slurm/slurm.conf >"$1";'
        ' echo MessageTimeout=2 >>"$1"'
    )
    b.lab.sh(["sh", "-c", script, "sh", str(b.bed.home() / "silent.conf")])
    b.lab.env["SLURM_CONF"] = str(b.bed.home() / "silent.conf")
    b.lab.sh(["touch", "-d", "5 minutes ago", str(folder / "attempts/0/node-0.beat")])
    return run


@case("slurm-healthy", "healthy", "a run of two nodes that trains and reports")
def healthy(b: Bed) -> str:
    b.train(
        'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"\nexec python3 "$TUNEPLANE_EXP_DIR/train.py"',
        {
            "train.py": "import time\nfrom tuneplane.report import log\nfor step in range(600):\n"
            "    log({'loss': 1.0 / (step + 1)}, step=step)\n    print('step', step, flush=True)\n  "
            "  time.sleep(0.1)\n"
        },
    )
    return b.wait(b.submit(*TWO_NODES), "RUNNING", log="step 20")


def record_all(state: Path, names: list[str], torch: str) -> None:
    """Make the runs one after another, each on a testbed put back to its defaults."""
    bed = Testbed(state)
    bed.start()
    for made in CASES:
        if names and made.run.name not in names:
            continue
        user = Bed(bed, torch)
        user.name = f"c-{made.run.name}"
        try:
            run = made.make(user)
            scratch = f"{user.lab.base}/case"
            print(user.lab.sh(["tp", "job", "why", run, "--save-case", scratch], timeout=120).stdout)
            text = user.lab.sh(["cat", f"{scratch}/evidence.json"]).stdout
            keep(made.run, text)
        except (SystemExit, CommandFailed) as error:
            print(f"!! {made.run.name}: {error}", flush=True)
        finally:
            put_back(bed)


def put_back(bed: Testbed) -> None:
    """As `testbed reset` does, and what cases changed with scontrol and sacctmgr."""
    bed.exec(["scontrol", "delete", "reservationname=maint"], user="root", check=False)
    for partition in ("gpu", "preempt"):
        words = ["state=up", "maxtime=infinite", "maxnodes=unlimited"]
        bed.exec(["scontrol", "update", f"partitionname={partition}", *words], user="root")
    for node in bed.nodes:
        bed.join(node)
        bed.node_exec(node, ["pkill", "-CONT", "-x", "slurmd"], check=False)
        pids = bed.node_exec(node, ["pgrep", "-f", "kernel.pyz node"], check=False).stdout.split()
        if pids:
            bed.node_exec(node, ["kill", "-CONT", *pids], check=False)
        bed.exec(["scontrol", "update", f"nodename={node}", "state=resume"], user="root", check=False)
    limits = ["MaxJobsPerUser=-1", "MaxTRESPerUser=gres/gpu=-1"]
    bed.exec(["sacctmgr", "-i", "modify", "qos", "debug", "set", *limits], user="root", check=False)
    argv = ["sacctmgr", "-i", "modify", "account", "research", "set", "GrpTRES=gres/gpu=-1"]
    bed.exec(argv, user="root", check=False)
    bed.cancel_all()
    with suppress(Exception):
        bed.reset()
