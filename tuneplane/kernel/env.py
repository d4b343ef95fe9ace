"""The environment of a job as one table: what the node agent sets, what `docs/environment.md` lists.

A test compares this table with that page and with what a real job prints (C9, C10).
"""

from __future__ import annotations

from dataclasses import dataclass

WORK_DIR = "TUNEPLANE_WORK_DIR"
EXP_DIR = "TUNEPLANE_EXP_DIR"
OUT_DIR = "TUNEPLANE_OUT_DIR"
FRAMEWORK = "TUNEPLANE_FRAMEWORK"
RECIPE = "TUNEPLANE_RECIPE"
NUM_NODES = "TUNEPLANE_CLUSTER_NUM_NODES"
GPUS_PER_NODE = "TUNEPLANE_CLUSTER_GPUS_PER_NODE"
MACHINE_RANK = "TUNEPLANE_MACHINE_RANK"
MACHINE_COUNT = "TUNEPLANE_MACHINE_COUNT"
MAIN_PROCESS_IP = "TUNEPLANE_MAIN_PROCESS_IP"
MAIN_PROCESS_PORT = "TUNEPLANE_MAIN_PROCESS_PORT"
CLUSTER_PROFILE = "CLUSTER_PROFILE"
RECIPE_VERSION = "TUNEPLANE_RECIPE_VERSION"
RECIPE_DIGEST = "TUNEPLANE_RECIPE_DIGEST"
CAPSULE_DIGEST = "TUNEPLANE_CAPSULE_DIGEST"
PARAMS_FILE = "TUNEPLANE_PARAMS_FILE"
STOP_FILE = "TUNEPLANE_STOP_FILE"
ATTEMPT = "TUNEPLANE_JOB_ATTEMPT"
ENDPOINT = "TUNEPLANE_JOB_ENDPOINT"
RUN_ID = "TUNEPLANE_JOB_RUN_ID"
TOKEN = "TUNEPLANE_JOB_TOKEN"
ENABLED = "TUNEPLANE_JOB_ENABLED"
OBSERVABILITY_URL = "TUNEPLANE_EXTERNAL_OBSERVABILITY_URL"
MONITOR_INTERVAL = "TUNEPLANE_JOB_MONITOR_INTERVAL"
HARDWARE_BRIDGE = "TUNEPLANE_JOB_HARDWARE_BRIDGE"
NRL_RUN_ID = "NRL_RUN_ID"

ALWAYS, INGEST, URL, SITE, PLATFORM, BARE, SLURM, GPU, BRIDGE = (
    "always",
    "where ingest is bound",
    "with --observability-url",
    "where the site sets it",
    "platform recipes",
    "without a container",
    "on Slurm",
    "where GPUs were given",
    "platform recipes, where ingest is bound",
)


@dataclass(frozen=True)
class Variable:
    """One variable of a job: its name (or pattern, with `*`), when it is set, what it holds."""

    name: str
    when: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(WORK_DIR, ALWAYS, "root of the unpacked capsule; the working directory"),
    Variable(EXP_DIR, ALWAYS, "this experiment's folder inside it"),
    Variable(
        OUT_DIR,
        ALWAYS,
        "`<run folder>/out`, on shared storage, this run's alone; of an export or eval, its subject's",
    ),
    Variable(FRAMEWORK, ALWAYS, "first half of the recipe's name"),
    Variable(RECIPE, ALWAYS, "second half of the recipe's name"),
    Variable(NUM_NODES, ALWAYS, "nodes really allocated"),
    Variable(GPUS_PER_NODE, ALWAYS, "GPUs per node really allocated; processes asked for on a CPU profile"),
    Variable(MACHINE_RANK, ALWAYS, "this node's number, 0 and up"),
    Variable(MACHINE_COUNT, ALWAYS, "how many nodes take part"),
    Variable(MAIN_PROCESS_IP, ALWAYS, "address of node 0; never loopback on more than one node"),
    Variable(MAIN_PROCESS_PORT, ALWAYS, "a port there, below the ephemeral range"),
    Variable(CLUSTER_PROFILE, ALWAYS, "the profile as asked, `h200:8`"),
    Variable(RECIPE_VERSION, ALWAYS, "version of the recipe that was locked"),
    Variable(RECIPE_DIGEST, ALWAYS, "digest of the recipe that was locked"),
    Variable(CAPSULE_DIGEST, ALWAYS, "digest of the capsule"),
    Variable(PARAMS_FILE, ALWAYS, "JSON object of what `--set` said"),
    Variable(STOP_FILE, ALWAYS, "appears when the run is asked to save and end"),
    Variable(ATTEMPT, ALWAYS, "0, then one more for each restart of this run"),
    Variable(ENABLED, ALWAYS, "`1` where ingest is bound, else `0`"),
    Variable(ENDPOINT, INGEST, "URI of the run's ingest folder"),
    Variable(RUN_ID, INGEST, "the run id that points belong to"),
    Variable(TOKEN, INGEST, "random for each run; a secret"),
    Variable(OBSERVABILITY_URL, URL, "passed on unchanged, never contacted"),
    Variable(NRL_RUN_ID, ALWAYS, "the run id"),
    Variable("HOME", ALWAYS, "the user's home; in a container a folder of this attempt"),
    Variable("USER", ALWAYS, "the user's name"),
    Variable("LOGNAME", ALWAYS, "the user's name"),
    Variable("LANG", ALWAYS, "`C.UTF-8`"),
    Variable("TMPDIR", ALWAYS, "a folder of this node and attempt, discarded at its end"),
    Variable("PYTHONUNBUFFERED", ALWAYS, "`1`: what a trainer prints is in the log at once"),
    Variable("PYTHONDONTWRITEBYTECODE", ALWAYS, "`1`: the capsule stays as it is"),
    Variable("PYTHONNOUSERSITE", ALWAYS, "`1`: packages in `~/.local` do not reach the trainer"),
    Variable("PATH", BARE, "the cluster profile's `path`; in a container the image's own"),
    Variable(
        "PYTHONPATH",
        PLATFORM,
        "the capsule's folder with `tuneplane.report`, then the image's or the modules' own",
    ),
    Variable("CUDA_VISIBLE_DEVICES", GPU, "the GPUs given to this node, as Slurm numbers them"),
    Variable("SLURM_JOB_ID", SLURM, "the Slurm job"),
    Variable("SLURM_JOB_NODELIST", SLURM, "its nodes in Slurm's short form"),
    Variable("SLURM_CPUS_ON_NODE", SLURM, "CPUs given on this node"),
    Variable("HF_HOME", SITE, "Hugging Face cache; its folder is mounted"),
    Variable("HF_TOKEN", SITE, "a secret, from the submitting shell where the site lists its name"),
    Variable("*_DATA_DIR", SITE, "data folders; mounted"),
    Variable("TUNEPLANE_JOB_JUDGE_*", SITE, "optional judge service"),
    Variable("TUNEPLANE_JOB_SANDBOX_*", SITE, "optional sandbox service"),
    Variable(MONITOR_INTERVAL, SITE, "seconds between hardware samples, 10 by default"),
    Variable(
        HARDWARE_BRIDGE, BRIDGE, "`1`: the node agent samples hardware; the trainer's sampler stays off"
    ),
)

RESERVED = frozenset(v.name for v in VARIABLES if v.when not in (SITE, BRIDGE))
"""Names that no site configuration may set: the agent sets them."""
