"""Runs on this machine that `record_cases.py` makes: what train.sh does, and what is to be found."""

from __future__ import annotations

import os
import subprocess
import time

from record_cases import URL, CaseRun, Place

RANKS = 'exec @TORCH@ -m torch.distributed.run --standalone --nproc_per_node 2 "$TUNEPLANE_EXP_DIR/train.py"'
PYTHON = 'exec python3 "$TUNEPLANE_EXP_DIR/train.py"'
TWO = ("--profile", "local:2")

KERNEL = 'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"'

HEAD = "import os, time, torch, torch.distributed as dist\n"
JOINED = HEAD + 'dist.init_process_group("gloo")\nrank = dist.get_rank()\nx = torch.ones(4)\n'

CUDA = (
    "'CUDA out of memory. Tried to allocate 2.31 GiB. GPU 1 has a total capacity of 139.80 GiB of"
    " which 1.02 GiB is free."
    " Process 4242 has 138.77 GiB memory in use.'"
)
NCCL = """
import sys
if rank == 0:
    for line in (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12,"
        " OpType=ALLREDUCE, NumelIn=4096, "
        "NumelOut=4096, Timeout(ms)=600000) ran for 600071 milliseconds before timing out.",
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] Exception (either an error or timeout) detected by"
        " watchdog at work: 12",
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] To avoid data inconsistency, we are taking the"
        " entire process down.",
    ):
        print(f"[rank0]:[E1129 10:00:00.000000000 ProcessGroupNCCL.cpp:683] {line}", file=sys.stderr, flush=True)
    os.abort()
time.sleep(60)
"""

LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(3, 224, 224)
for batch in DataLoader(Images(), batch_size=16, num_workers=2):
    print(batch.shape, flush=True)
"""


def by_hand(place: Place, run: str) -> None:
    """Start the script again by hand, after its end."""
    folder = place.folder(run)
    place.sh(
        [
            "bash",
            "-c",
            'bash "$1" >>"$2" 2>&1',
            "sh",
            str(folder / "job.sbatch"),
            str(folder / "slurm/local.out"),
        ],
        code=None,
    )


def stop(place: Place, run: str) -> None:
    place.sh(["tp", "job", "stop", run])


def quiet(place: Place, run: str) -> None:
    """Let some time pass, and the log look as old as a run's that has been silent for 20 minutes."""
    time.sleep(2)
    then = time.time() - 1200
    folder = place.folder(run)
    for path in [*folder.glob("attempts/*/node-*.log"), *folder.glob("ingest/*.jsonl")]:
        os.utime(path, (then, then))
    for path in folder.glob("attempts/*/node-0.json"):
        text = path.read_text()
        import json

        value = json.loads(text)
        value["command_started_at"] = then - 60
        path.write_text(json.dumps(value))


def no_canary(place: Place, run: str) -> None:
    folder = place.folder(run)
    (folder / "ingest" / ".canary").unlink()
    by_hand(place, run)


def small_disk(place: Place) -> None:
    """A file system of 8 MB with few inodes, at BASE/small."""
    image, folder = place.base / "small.img", place.base / "small"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-N", "128", str(image)], check=True)
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)


def no_small_disk(place: Place) -> None:
    subprocess.run(["fsfreeze", "-u", str(place.base / "small")], check=False, capture_output=True)
    subprocess.run(["umount", "-l", str(place.base / "small")], check=False)


def kill_agent(place: Place, run: str) -> None:
    folder = place.folder(run)
    for path in folder.glob("submissions/*.json"):
        os.kill(int(path.stem.removeprefix("local-")), 9)
    time.sleep(1)
    then = time.time() - 300
    for path in folder.glob("attempts/*/node-*.beat"):
        os.utime(path, (then, then))


def change_spec(place: Place, run: str) -> None:
    folder = place.folder(run)
    (folder / "job.json").chmod(0o644)
    with (folder / "job.json").open("a") as file:
        file.write(" ")
    by_hand(place, run)


def cut_capsule(place: Place, run: str) -> None:
    folder = place.folder(run)
    (folder / "capsule.tar").chmod(0o644)
    os.truncate(folder / "capsule.tar", 4096)
    by_hand(place, run)


def occupy(place: Place) -> None:
    """A run that has every CPU of this machine."""
    place.write("occupier", {"train.sh": "#!/bin/bash\nsleep 120\n"})
    cpus = max(2, len(os.sched_getaffinity(0)))
    place.sh(["tp", "submit", "occupier", "--profile", f"local:{cpus}", "--observability-url", URL])
    time.sleep(2)


def freeze(place: Place, run: str) -> None:
    subprocess.run(["fsfreeze", "-f", str(place.base / "small")], check=True)
    time.sleep(4)
    quiet(place, run)


def own_python(place: Place) -> None:
    (place.base / "python3").symlink_to("/usr/bin/python3")


def lose_python(place: Place, run: str) -> None:
    (place.base / "python3").unlink()
    quiet(place, run)


SMALL = {"defaults.yaml": "cluster:\n  storage_root: @BASE@/small\n"}

RUNS: tuple[CaseRun, ...] = (
    # --- the script ---------------------------------------------------------------------------------------------
    CaseRun("scaffold", "scaffold-unedited", "", "a scaffold submitted as it is"),
    CaseRun(
        "scaffold-near",
        "command-failed",
        'echo "no training command yet: waiting for data" >&2\nsleep 0.2\necho data never came\nexit 3',
        "a script of the user's own that says the scaffold's words and fails otherwise",
        near=("scaffold-unedited",),
    ),
    CaseRun(
        "script-file-misspelt",
        "file-missing",
        'python3 "$TUNEPLANE_EXP_DIR/trian.py"',
        "train.sh starts a file whose name is misspelt",
        files={"train.py": "print(1)\n"},
        says="which is not there: it is not among the files",
        near=("command-failed",),
    ),
    CaseRun(
        "script-file-elsewhere",
        "file-missing",
        "python3 train.py",
        "train.sh takes the experiment's folder for the working folder",
        files={"train.py": "print(1)\n"},
    ),
    CaseRun(
        "script-sourced", "file-missing", "source activate\necho never", "train.sh sources what is not there"
    ),
    CaseRun(
        "script-opens",
        "python-exception",
        PYTHON,
        "the program itself opens a file that is not there, by a relative path",
        files={"train.py": "open('labels.csv')\n"},
        near=("file-missing",),
    ),
    CaseRun(
        "script-crlf",
        "script-line-endings",
        "true\r\necho trained\r",
        "a script that was saved with Windows line endings",
    ),
    CaseRun(
        "exception-masked",
        "completed-with-exception",
        f'{KERNEL}\npython3 "$TUNEPLANE_EXP_DIR/train.py" || true',
        "train.sh hides the exit code of a program that failed",
        files={"train.py": "from tuneplane.report import log\nlog({'loss': 1.0}, step=1)\n{}['a']\n"},
        near=("completed",),
    ),
    CaseRun(
        "term-self",
        "rank-killed",
        "kill -TERM $$\nsleep 5",
        "a script that ends itself by TERM",
        says="SIGTERM",
    ),
    CaseRun(
        "variable-misspelt",
        "contract-variable-missing",
        ': "${TUNEPLANE_OUTPUT_DIR:?is missing}"\necho never',
        "train.sh asks for a variable that is not in the contract",
    ),
    CaseRun(
        "variable-cleaned",
        "contract-variable-missing",
        'exec env -i PATH="$PATH" bash "$TUNEPLANE_EXP_DIR/inner.sh"',
        "train.sh starts another script with an empty environment",
        files={"inner.sh": 'set -u\nmkdir -p "$TUNEPLANE_OUT_DIR/checkpoints"\n'},
    ),
    CaseRun(
        "variable-own",
        "unbound-variable",
        'echo "lr is $LEARNING_RATE"',
        "a variable of the user's own is not set",
        near=("contract-variable-missing",),
    ),
    CaseRun(
        "command-missing", "command-not-found", "accelerate launch train.py", "a program that is not there"
    ),
    CaseRun("syntax", "script-syntax", 'if true; then\necho "starts"', "an if without its end"),
    CaseRun(
        "not-executable",
        "not-executable",
        '"$TUNEPLANE_EXP_DIR/go.py"',
        "a file without the right to be run",
        files={"go.py": "print(1)\n"},
    ),
    CaseRun("exit-code", "command-failed", "echo preparing\nexit 7", "an exit code and no word of why"),
    # --- Python -------------------------------------------------------------------------------------------------
    CaseRun(
        "exception",
        "python-exception",
        PYTHON,
        "an exception of plain Python, raised from another",
        files={
            "train.py": "import json\ndef load(text):\n    try:\n        return json.loads(text)\n"
            "    except ValueError as error:\n        raise KeyError('learning_rate') from error\nload('{')\n"
        },
    ),
    CaseRun(
        "exception-handled",
        "completed-without-points",
        PYTHON,
        "an exception that the program printed and overcame",
        files={
            "train.py": "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n   "
            " traceback.print_exc()\nprint('done')\n"
        },
        near=("python-exception", "first-failing-rank"),
    ),
    CaseRun(
        "no-tuneplane",
        "tuneplane-not-importable",
        PYTHON,
        "an external recipe whose Python has no tuneplane",
        files={"train.py": "from tuneplane.report import log\nlog({'loss': 1.0}, step=0)\n"},
    ),
    CaseRun(
        "stranger-tuneplane",
        "foreign-tuneplane",
        f'export PYTHONPATH="$TUNEPLANE_EXP_DIR/lib"\n{PYTHON}',
        "a package of that name which is another project's",
        files={
            "lib/tuneplane/__init__.py": "__version__ = '0.4'\n",
            "train.py": "from tuneplane.report import log\nlog({'loss': 1.0}, step=0)\n",
        },
        near=("tuneplane-not-importable",),
    ),
    CaseRun(
        "stranger-no-name",
        "foreign-tuneplane",
        f'export PYTHONPATH="$TUNEPLANE_EXP_DIR/lib"\n{PYTHON}',
        "a package of that name whose report has no log",
        files={
            "lib/tuneplane/__init__.py": "",
            "lib/tuneplane/report.py": "",
            "train.py": "from tuneplane.report import log\nlog({'loss': 1.0}, step=0)\n",
        },
    ),
    CaseRun(
        "module-elsewhere",
        "other-python",
        f'export PATH="/usr/bin:$PATH"\n{PYTHON}',
        "the module is in another Python of the PATH than the one that runs",
        files={"train.py": "import torch\nprint(torch.__version__)\n"},
        config={"defaults.yaml": "cluster:\n  path: /usr/bin:/bin:@TORCHBIN@\n"},
    ),
    CaseRun(
        "module-nowhere",
        "module-missing",
        PYTHON,
        "a module that no Python there has",
        files={"train.py": "import flash_attention_of_mine\n"},
        near=("other-python", "tuneplane-not-importable"),
    ),
    CaseRun(
        "module-of-lab",
        "module-of-lab",
        PYTHON,
        "a module that stands in the lab's common folder, which is not on the path",
        files={"train.py": "import losses_of_lab\n", "../../common/losses_of_lab.py": "x = 1\n"},
        near=("module-missing",),
    ),
    CaseRun(
        "segfault",
        "segmentation-fault",
        'python3 -X faulthandler "$TUNEPLANE_EXP_DIR/train.py"\necho after',
        "a null pointer read in C",
        files={"train.py": "import ctypes\nprint('step 1', flush=True)\nctypes.string_at(0)\n"},
    ),
    CaseRun(
        "segfault-exec",
        "segmentation-fault",
        PYTHON,
        "the same where exec leaves no shell to say so",
        files={"train.py": "import ctypes\nctypes.string_at(0)\n"},
    ),
    CaseRun(
        "address-used",
        "address-in-use",
        PYTHON,
        "two servers at one port",
        files={
            "train.py": "import socket\na = socket.socket(); a.bind(('', 0)); a.listen()\n"
            "b = socket.socket(); b.bind(('', a.getsockname()[1]))\n"
        },
    ),
    CaseRun(
        "offline",
        "no-network",
        PYTHON,
        "a download where names do not resolve",
        files={
            "train.py": "import urllib.request\n"
            "urllib.request.urlopen('https://huggingface.co.invalid/x/config.json', timeout=5)\n"
        },
    ),
    # --- memory -------------------------------------------------------------------------------------------------
    CaseRun(
        "memory-error",
        "host-out-of-memory",
        f"ulimit -v 400000\n{PYTHON}",
        "an allocation that the limit of the shell refuses",
        files={"train.py": "print('loading', flush=True)\nx = bytearray(1 << 30)\n"},
    ),
    CaseRun(
        "kernel-oom",
        "host-out-of-memory",
        "mkdir -p /sys/fs/cgroup/memory/cases\necho 60M >/sys/fs/cgroup/memory/cases/memory.limit_in_bytes\n"
        'echo $$ >/sys/fs/cgroup/memory/cases/cgroup.procs\npython3 "$TUNEPLANE_EXP_DIR/train.py"',
        "the kernel's out-of-memory killer in a memory cgroup of 60 MB",
        files={
            "train.py": "import time\nheld = []\nfor step in range(100):\n    held.append(bytearray(4 << 20))\n"
            "    print('step', step, flush=True)\n"
        },
        certainty="likely",
    ),
    CaseRun(
        "kernel-oom-exec",
        "host-out-of-memory",
        "mkdir -p /sys/fs/cgroup/memory/cases\necho 60M >/sys/fs/cgroup/memory/cases/memory.limit_in_bytes\n"
        f"echo $$ >/sys/fs/cgroup/memory/cases/cgroup.procs\n{PYTHON}",
        "the same where exec leaves no shell to say Killed",
        files={"train.py": "held = []\nfor step in range(100):\n    held.append(bytearray(4 << 20))\n"},
        certainty="likely",
    ),
    CaseRun(
        "worker-memory",
        "shared-memory-full",
        "exec unshare --mount sh -c 'mount -t tmpfs -o size=4m tmpfs /dev/shm && "
        'exec @TORCH@ "$TUNEPLANE_EXP_DIR/train.py"\'',
        "torch's data loader with a /dev/shm of 4 MB",
        files={"train.py": LOADER},
    ),
    # --- storage ------------------------------------------------------------------------------------------------
    CaseRun(
        "disk-full",
        "no-space",
        PYTHON,
        "a checkpoint on a full file system",
        files={
            "train.py": "import os\npath = os.environ['TUNEPLANE_OUT_DIR'] + '/checkpoints'\nos.mkdir(path)\n"
            "with open(path + '/model.pt', 'wb', buffering=0) as f:\n    for i in range(64):"
            " f.write(bytes(1 << 20))\n"
        },
        config=SMALL,
        prepare=small_disk,
        after=no_small_disk,
    ),
    CaseRun(
        "inodes-full",
        "no-inodes",
        PYTHON,
        "more files than the file system has inodes",
        files={
            "train.py": "import os\npath = os.environ['TUNEPLANE_OUT_DIR']\n"
            "for i in range(500): open(f'{path}/{i}.txt', 'w').close()\n"
        },
        config=SMALL,
        prepare=small_disk,
        after=no_small_disk,
    ),
    CaseRun(
        "quota",
        "quota-exceeded",
        PYTHON,
        "made without quotas: the exception that a file system with them raises",
        files={
            "train.py": "import errno, os\npath = os.environ['TUNEPLANE_OUT_DIR'] + '/model.pt'\n"
            "raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)\n"
        },
        near=("no-space",),
    ),
    CaseRun(
        "outside-output",
        "checkpoints-outside",
        PYTHON,
        "checkpoints written beside the code, which is gone at the end",
        files={
            "train.py": "import os\npath = 'outputs/checkpoint-10'\nos.makedirs(path)\n"
            "open(path + '/model.bin', 'wb').close()\nprint('Saving model checkpoint to"
            " ./outputs/checkpoint-10')\n"
        },
    ),
    CaseRun(
        "outside-link",
        "checkpoints-outside",
        'mkdir -p @BASE@/elsewhere\nln -s @BASE@/elsewhere "$TUNEPLANE_OUT_DIR/checkpoints"\n'
        'touch "$TUNEPLANE_OUT_DIR/checkpoints/model.bin"',
        "an output folder whose checkpoints are a link that leads out",
    ),
    CaseRun(
        "inside-output",
        "completed-without-points",
        PYTHON,
        "a checkpoint where it belongs, said with its absolute path",
        files={
            "train.py": "import os\npath = os.environ['TUNEPLANE_OUT_DIR'] +"
            " '/checkpoints/step-10'\nos.makedirs(path)\n"
            "open(path + '/model.bin', 'wb').close()\nprint('Saving model checkpoint to', path)\n"
        },
        near=("checkpoints-outside",),
    ),
    CaseRun(
        "canary",
        "ingest-unreachable",
        "echo trained",
        "the canary file is not there when the run is started",
        act=no_canary,
        starts=False,
    ),
    CaseRun(
        "secrets-gone",
        "secrets-gone",
        "echo trained",
        "started by hand once more after its end",
        act=by_hand,
    ),
    CaseRun(
        "no-interpreter",
        "interpreter-missing",
        "echo trained",
        "an interpreter that is not on this machine",
        config={"defaults.yaml": "cluster:\n  python: /opt/python-3.13/bin/python3\n"},
    ),
    # --- ranks --------------------------------------------------------------------------------------------------
    CaseRun(
        "rank-exception",
        "first-failing-rank",
        RANKS,
        "torchrun: rank 1 raises, rank 0 loses its connection",
        files={
            "train.py": JOINED + "for step in range(5):\n    if rank == 1 and step == 3:\n"
            "        raise ValueError('batch of 3 does not divide into 2')\n    dist.all_reduce(x)\n"
        },
        flags=TWO,
        rank=1,
    ),
    CaseRun(
        "rank-killed",
        "host-out-of-memory",
        RANKS,
        "torchrun: rank 1 is killed from outside, rank 0 loses its connection",
        files={
            "train.py": JOINED + "for step in range(5):\n    if rank == 1 and step == 3:\n"
            "        os.kill(os.getpid(), 9)\n    dist.all_reduce(x)\n"
        },
        flags=TWO,
        rank=1,
        certainty="likely",
    ),
    CaseRun(
        "rank-aborted",
        "rank-killed",
        RANKS,
        "torchrun: rank 1 aborts, rank 0 loses its connection",
        files={
            "train.py": JOINED + "for step in range(5):\n    if rank == 1 and step == 3:\n"
            "        os.abort()\n    dist.all_reduce(x)\n"
        },
        flags=TWO,
        rank=1,
        near=("host-out-of-memory",),
    ),
    CaseRun(
        "nccl-timeout",
        "nccl-timeout",
        RANKS,
        "made without GPUs: the program says what torch's NCCL watchdog says"
        " (pytorch/pytorch#118369) and aborts as it does",
        files={"train.py": JOINED + NCCL},
        flags=TWO,
    ),
    CaseRun(
        "nccl-timeout-near",
        "first-failing-rank",
        RANKS,
        "made without GPUs: the watchdog of rank 0 gives up because rank 1 has raised",
        files={
            "train.py": JOINED + "if rank == 1: raise KeyError('labels')\ntime.sleep(1)\n" + NCCL,
        },
        flags=TWO,
        rank=1,
        near=("nccl-timeout",),
    ),
    CaseRun(
        "gpu-memory",
        "gpu-out-of-memory",
        RANKS,
        "made without GPUs: torch's own exception with the words of its CUDA allocator",
        files={
            "train.py": JOINED
            + "if rank == 1: raise torch.OutOfMemoryError(\n    "
            + CUDA
            + ")\ndist.all_reduce(x)\n"
        },
        flags=TWO,
        rank=1,
        near=("host-out-of-memory",),
    ),
    CaseRun(
        "gpu-memory-overcome",
        "completed-without-points",
        'exec @TORCH@ "$TUNEPLANE_EXP_DIR/train.py"',
        "made without GPUs: a program that catches the exception and takes a smaller batch",
        files={
            "train.py": "import torch\ntry:\n    raise torch.OutOfMemoryError(" + CUDA + ")\n"
            "except torch.OutOfMemoryError as error:\n    print(error, '- halving the batch')\nprint('done')\n"
        },
        near=("gpu-out-of-memory",),
    ),
    CaseRun(
        "no-driver",
        "cuda-error",
        "exec @TORCH@ -c 'import torch; raise RuntimeError(\"Found no NVIDIA driver on your system."
        " Please check\")'",
        "made without GPUs: torch's words for a node without a driver",
    ),
    CaseRun(
        "file-missing",
        "data-missing",
        PYTHON,
        "a data file that is not there",
        files={"train.py": "open('/datasets/imagenet/train/index.json')\n"},
        certainty="likely",
    ),
    CaseRun(
        "offline-overcome",
        "python-exception",
        PYTHON,
        "a download that failed and was overcome, before another failure",
        files={
            "train.py": "import urllib.request\ntry:\n   "
            " urllib.request.urlopen('https://hub.invalid/x', timeout=5)\n"
            "except OSError as error:\n    print('no hub:', error)\nraise TypeError('step is a str')\n"
        },
        near=("no-network",),
    ),
    CaseRun(
        "rank-segfault",
        "segmentation-fault",
        RANKS,
        "torchrun: rank 0 reads a null pointer",
        files={
            "train.py": JOINED + "import ctypes\nfor step in range(5):\n    if rank == 0 and step == 3:\n"
            "        ctypes.string_at(0)\n    dist.all_reduce(x)\n"
        },
        flags=TWO,
        rank=0,
    ),
    CaseRun(
        "rank-timeout",
        "collective-timeout",
        RANKS,
        "torchrun: rank 1 does not come to a collective, and rank 0 waits no longer",
        files={
            "train.py": HEAD + "import datetime\n"
            "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=4))\n"
            "x = torch.ones(4)\nif dist.get_rank() == 1: time.sleep(60)\ndist.all_reduce(x)\n"
        },
        flags=TWO,
    ),
    CaseRun(
        "rank-import",
        "tuneplane-not-importable",
        RANKS,
        "torchrun: both ranks fail for want of tuneplane",
        files={"train.py": "from tuneplane.report import log\n"},
        flags=TWO,
        near=("first-failing-rank",),
    ),
    CaseRun(
        "rank-memory",
        "host-out-of-memory",
        f"ulimit -v 12000000\n{RANKS}",
        "torchrun: rank 1 asks for more than the limit",
        files={"train.py": JOINED + "if rank == 1: y = torch.zeros(1 << 34)\ndist.all_reduce(x)\n"},
        flags=TWO,
        rank=1,
    ),
    # --- reporting ----------------------------------------------------------------------------------------------
    CaseRun(
        "no-log-call",
        "completed-without-points",
        "echo step 1 loss=0.5\necho step 2 loss=0.25",
        "a run that prints its loss and reports none",
    ),
    CaseRun(
        "no-log-call-running",
        "no-log-call",
        "echo step 1 loss=0.5\nsleep 60",
        "the same while it runs",
        until="step 1",
    ),
    CaseRun(
        "guarded-import",
        "completed-without-points",
        PYTHON,
        "an import that the program catches: nothing is said of it",
        files={
            "train.py": "try:\n    from tuneplane.report import log\nexcept ImportError:\n    log ="
            " lambda *a, **k: None\n"
            "for step in range(3):\n    log({'loss': 1.0}, step=step)\nprint('done')\n"
        },
    ),
    CaseRun(
        "loading",
        "still-loading",
        "printf 'Loading checkpoint shards:  33%%|###       | 1/3\\r'\nsleep 60",
        "weights are being loaded",
        files={"train.py": "from tuneplane.report import log\n"},
        until="Loading checkpoint",
    ),
    CaseRun(
        "healthy",
        "healthy",
        f"{KERNEL}\n{PYTHON}",
        "a run that trains and reports",
        files={
            "train.py": "import time\nfrom tuneplane.report import log\nfor step in range(600):\n"
            "    log({'loss': 1.0 / (step + 1)}, step=step)\n    print('step', step, flush=True)\n  "
            "  time.sleep(0.1)\n"
        },
        until="step 20",
    ),
    CaseRun(
        "completed",
        "completed",
        f"{KERNEL}\n{PYTHON}",
        "a run that trained, reported and ended",
        files={
            "train.py": "import os\nfrom tuneplane.report import finish, log\nfor step in range(10):\n"
            "    log({'loss': 1.0}, step=step)\nfinish()\npath = os.environ['TUNEPLANE_OUT_DIR'] +"
            " '/checkpoints/1'\n"
            "os.makedirs(path)\n"
        },
        near=("completed-without-points",),
    ),
    CaseRun(
        "guarded-import-running",
        "no-points-yet",
        PYTHON,
        "the same while it runs",
        files={
            "train.py": "import time\ntry:\n    from tuneplane.report import log\nexcept ImportError:\n"
            "    log = lambda *a, **k: None\nprint('step 1', flush=True)\nlog({'loss': 1.0}, step=1)\n"
            "time.sleep(60)\n"
        },
        until="step 1",
        certainty="possible",
    ),
    CaseRun(
        "points-refused",
        "points-refused",
        f"{KERNEL}\nexport TUNEPLANE_JOB_TOKEN=another\n{PYTHON}",
        "points that are written with another token",
        files={
            "train.py": "from tuneplane.report import finish, log\nlog({'loss': 1.0}, step=1)\nfinish()\n"
        },
        near=("completed-without-points",),
    ),
    # --- how it goes --------------------------------------------------------------------------------------------
    CaseRun("stopped", "stopped-by-user", "echo started\nsleep 60", "tp job stop", until="started", act=stop),
    CaseRun(
        "agent-killed",
        "agent-gone",
        "echo started\nsleep 5",
        "the agent was killed, and left no record",
        until="started",
        act=kill_agent,
    ),
    CaseRun(
        "changed",
        "changed-after-submit",
        "echo trained",
        "job.json is changed after the submit",
        act=change_spec,
        starts=False,
    ),
    CaseRun(
        "started-twice",
        "no-log-call",
        "echo started\nsleep 60",
        "started by hand while it runs: it runs on",
        until="started",
        act=by_hand,
    ),
    CaseRun(
        "scratch-missing",
        "scratch-unusable",
        "echo trained",
        "a scratch folder that is not there",
        config={"defaults.yaml": "cluster:\n  scratch: @BASE@/no-such-disk\n"},
    ),
    CaseRun(
        "capsule-damaged",
        "start-failed",
        "echo trained",
        "a capsule that was cut",
        act=cut_capsule,
        starts=False,
    ),
    CaseRun(
        "waits-here",
        "waits-for-machine",
        "sleep 60",
        "another run has this machine's CPUs",
        flags=TWO,
        until="PENDING",
        prepare=occupy,
    ),
    CaseRun(
        "storage-hangs",
        "waits-for-storage",
        PYTHON,
        "a file system that does not answer, 20 minutes after the last line",
        files={
            "train.py": "import os, time\nprint('step 1', flush=True)\ntime.sleep(3)\nwhile True:\n"
            "    with open('@BASE@/small/model.pt', 'wb') as f:\n"
            "        f.write(bytes(1 << 20)); os.fsync(f.fileno())\n"
        },
        prepare=small_disk,
        until="step 1",
        act=freeze,
        after=no_small_disk,
    ),
    CaseRun(
        "cannot-look",
        "silent",
        "echo step 1\nsleep 60",
        "silent, and its processes cannot be looked at",
        config={"defaults.yaml": "cluster:\n  python: @BASE@/python3\n"},
        prepare=own_python,
        until="step 1",
        act=lose_python,
        certainty="possible",
    ),
    CaseRun(
        "sigill",
        "illegal-instruction",
        PYTHON,
        "an instruction that no processor has",
        files={
            "train.py": "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\ncode.write(bytes([15, 11]))\n"
            "place = ctypes.addressof(ctypes.c_char.from_buffer(code))\nctypes.CFUNCTYPE(None)(place)()\n"
        },
    ),
    CaseRun(
        "sigbus",
        "bus-error",
        PYTHON,
        "a mapped file that was cut",
        files={
            "train.py": "import mmap, os\npath = os.environ['TMPDIR'] + '/x'\nf = open(path, 'w+b')\n"
            "f.truncate(8192)\nm = mmap.mmap(f.fileno(), 8192)\nf.truncate(0)\nprint(m[5000])\n"
        },
    ),
    CaseRun(
        "rendezvous",
        "rendezvous-failed",
        "exec @TORCH@ -m torch.distributed.run --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id x "
        "--rdzv_endpoint localhost:29871 --rdzv_conf join_timeout=5,timeout=5,last_call_timeout=1 "
        '"$TUNEPLANE_EXP_DIR/train.py"',
        "torchrun waits for a second node that does not come",
        files={"train.py": "print(1)\n"},
    ),
    CaseRun("prepared", "not-started", "echo trained", "rendered and never submitted", starts=False),
    CaseRun(
        "hang",
        "no-progress",
        PYTHON,
        "a program that waits for a lock that nobody frees, 20 minutes after its last line",
        files={
            "train.py": "import threading\nprint('step 1', flush=True)\nlock = threading.Lock()\nlock.acquire()\n"
            "def wait_for_turn():\n    lock.acquire()\nwait_for_turn()\n"
        },
        until="step 1",
        act=quiet,
        near=("healthy",),
    ),
    CaseRun(
        "slow-start",
        "slow-start",
        PYTHON,
        "a program that computes before its first line, for 20 minutes",
        files={"train.py": "def tokenize():\n    while True: pass\ntokenize()\n"},
        until="RUNNING",
        act=quiet,
        near=("healthy",),
    ),
    CaseRun(
        "hang-ranks",
        "waits-for-rank",
        RANKS,
        "two ranks, of which one never comes to the collective, 20 minutes after the last line",
        files={
            "train.py": JOINED + "print('step 1', rank, flush=True)\nif rank == 1: time.sleep(600)\n"
            "dist.all_reduce(x)\n"
        },
        flags=TWO,
        until="step 1 0",
        act=quiet,
    ),
)
