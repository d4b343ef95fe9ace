"""What is known of a run when somebody asks why: plain, immutable data that JSON can hold (`jsonform.py`).

`gather.py` fills it, rules read it, `case.py` keeps it. Nothing here looks at a file or asks Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trace:
    """One Python traceback as a log has it.

    kind: the exception's class as printed. rank: of the prefix that torch writes, None where there is none.
    before: classes of the exceptions that this one came from, in the order printed. lines: cut to a few.
    """

    kind: str
    message: str
    offset: int
    rank: int | None = None
    before: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A line that a rule may want to see, by its pattern's name in `marks.py`; the first and the last such."""

    name: str
    count: int
    first: str
    first_offset: int
    last: str
    rank: int | None = None  # of the first


@dataclass(frozen=True)
class RankFailure:
    """One rank in the summary that torchrun prints when a rank has failed. root: it calls this one the first."""

    rank: int
    exitcode: int
    host: str
    time: str
    root: bool
    error: str = ""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Stack:
    """Where one rank was, by what it wrote on SIGQUIT. frames: the innermost first."""

    rank: int | None
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class RankEnd:
    """The rank of a node that failed first, by the node's exit record. at: by that node's clock.

    victim: it only lost another rank, or was ended because of one. trace: of its own error file.
    """

    rank: int
    at: float | None = None
    exception: str = ""
    message: str = ""
    exitcode: int | None = None
    victim: bool = False
    trace: Trace | None = None


@dataclass(frozen=True)
class Refusal:
    """What the check before training found wrong, and of which node, where it is one."""

    told: str
    node: int | None = None


@dataclass(frozen=True)
class Log:
    """What was found in one log. node: the node's number, None for the batch script's own output.

    searched_bytes: how much of it was looked at; less than its size in a log that is too large.
    head, tail: its first and last lines, cut. age_s: since it was last written to.
    image: what the agent said of the image after a command that failed at once.
    """

    node: int | None
    host: str
    size_bytes: int
    searched_bytes: int
    age_s: float
    head: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    traces: tuple[Trace, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    stacks: tuple[Stack, ...] = ()

    def mark(self, *names: str) -> Mark | None:
        """The first mark of these names, in the order of the names."""
        return next((m for name in names for m in self.marks if m.name == name), None)


@dataclass(frozen=True)
class Node:
    """One node of the last attempt, by its agent's record."""

    rank: int
    host: str
    state: str
    code: int | None = None
    reason: str = ""
    told_to_stop: bool = False
    started_at: float | None = None
    command_started_at: float | None = None
    command_pid: int | None = None
    ended_at: float | None = None
    beat_age_s: float | None = None
    differences: tuple[str, ...] = ()
    failure: RankEnd | None = None
    preflight: Refusal | None = None


@dataclass(frozen=True)
class Job:
    """What was submitted, of the JobSpec."""

    scheduler: str
    profile: str
    device: str
    nodes: int
    gpus_per_node: int
    recipe: str
    observability: str
    entrypoint: str
    runtime: str
    python: str
    scratch: str
    image: str = ""
    image_there: bool = True  # as this machine sees it
    memory_per_node: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    reporting: bool = True
    signal_before_end_s: int | None = None
    stop_grace_s: float = 20.0
    mounts: tuple[str, ...] = ()
    data: tuple[str, ...] = ()  # NAME=folder of HF_HOME and each *_DATA_DIR


@dataclass(frozen=True)
class Step:
    """One row of sacct: a start of the job, or a step of one. Text as sacct prints it."""

    job_id: str
    state: str
    exit_code: str = ""
    reason: str = ""
    nodes: str = ""
    max_rss: str = ""
    asked_memory: str = ""
    elapsed: str = ""
    time_limit: str = ""


@dataclass(frozen=True)
class Waiting:
    """What Slurm says of a job that waits: its reason word, when it expects it to start, who is before it."""

    reason: str
    start_estimate: str = ""
    fields: dict[str, str] = field(default_factory=dict)  # of `scontrol show job`
    nodes_by_state: dict[str, int] = field(default_factory=dict)  # of the partition
    largest: dict[str, str] = field(default_factory=dict)  # partition: MaxTime, MaxNodes, State, …


@dataclass(frozen=True)
class Silent:
    """A node that was given up for dead. silent_s: how long it had given no sign of life."""

    host: str
    rank: int | None = None
    silent_s: float | None = None


@dataclass(frozen=True)
class Fence:
    """That nodes were given up, and by which node."""

    nodes: tuple[Silent, ...] = ()
    by: int | None = None


@dataclass(frozen=True)
class Restart:
    """That the last attempt was to be followed by another: the intent, and what came of it.

    cause: walltime, preemption, node_failure or asked. way: requeue or successor. exclude: hosts that the next
    attempt is to avoid. age_s: of the intent. carried_out: Slurm took it. error: Slurm's words where it did not.
    """

    cause: str = ""
    way: str = ""
    exclude: tuple[str, ...] = ()
    age_s: float | None = None
    carried_out: bool = False
    job_id: str = ""
    error: str = ""


@dataclass(frozen=True)
class End:
    """The end record of the last attempt. cause: from outside, as of `Restart`; empty: its own.

    to_be_continued: another attempt is to follow. not_restarted: why none does, a sentence.
    """

    code: int | None = None
    cause: str = ""
    to_be_continued: bool = False
    not_restarted: str = ""
    step: float | None = None
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slurm:
    """Slurm's words on the job. refused: its own, where it did not answer."""

    job_id: str = ""
    state: str = ""
    reason: str = ""
    refused: str = ""
    fields: dict[str, str] = field(default_factory=dict)  # of `scontrol show job`, while it knows the job
    steps: tuple[Step, ...] = ()  # of sacct, former starts too
    nodes_now: tuple[str, ...] = ()  # `n1 idle`: the nodes of the last start, as they are now
    waiting: Waiting | None = None


@dataclass(frozen=True)
class Points:
    """Whether anything was reported, by a cheap look. newest_age_s: of the file last written to."""

    files: int = 0
    points: bool = False
    refused: str = ""  # why a file that is there cannot be this run's
    newest_age_s: float | None = None


@dataclass(frozen=True)
class Code:
    """What the experiment's committed code says, by a search for words.

    reports: files that name tuneplane.report or its callback. pythons: interpreters that train.sh names.
    """

    files: int = 0
    reports: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()  # files that import tuneplane in any way
    pythons: tuple[str, ...] = ()
    crlf: bool = False  # the entrypoint has Windows line endings
    own_modules: tuple[str, ...] = ()  # modules and packages that stand in the lab itself


@dataclass(frozen=True)
class Outputs:
    """What lies below the output folder, by a bounded look."""

    entries: tuple[str, ...] = ()  # of the output folder itself
    checkpoints: int = 0
    outside: tuple[str, ...] = ()  # links that lead out of it


@dataclass(frozen=True)
class Space:
    """What a file system has left, as this machine sees it now. Inodes: 0 of 0 where it counts none."""

    name: str  # storage, scratch
    free_bytes: int
    size_bytes: int
    free_inodes: int
    inodes: int


@dataclass(frozen=True)
class Process:
    """A process of a running command, looked at for a moment: of a rank, else the busiest of its node."""

    node: int
    pid: int
    name: str
    state: str  # of proc(5): R, S, D, …
    cpu_percent: float
    rank: int | None = None
    wait_channel: str = ""
    stack: tuple[str, ...] = ()
    no_stack: str = ""  # why there is none


@dataclass(frozen=True)
class Interpreter:
    """A Python in the image (or of this machine, without one). default: the one that `python3` starts."""

    path: str
    version: str
    default: bool
    has_module: bool


@dataclass(frozen=True)
class Evidence:
    """All of it. now: seconds since the epoch when it was gathered, against which ages are told."""

    run_id: str
    experiment: str
    folder: str
    state: str
    now: float
    code: int | None = None
    reason: str = ""
    job_id: str = ""
    attempt: int | None = None
    attempts: int = 0
    job: Job | None = None
    nodes: tuple[Node, ...] = ()
    hosts: tuple[str, ...] = ()
    logs: tuple[Log, ...] = ()
    batch: Log | None = None
    started_at: float | None = None
    ended_at: float | None = None
    stop_marker: bool = False
    submit_error: str = ""
    stopped: tuple[str, ...] = ()  # jobs that `tp job stop` ended
    paused: tuple[str, ...] = ()  # jobs that `tp job pause` ended or held
    submitted_at: float | None = None
    earlier_ends: tuple[str, ...] = ()  # one line for each earlier attempt, of the last ones
    follows: str = ""  # the cause for which the last attempt was started by itself
    end: End = field(default_factory=End)
    restart: Restart | None = None
    fence: Fence | None = None
    slurm: Slurm = field(default_factory=Slurm)
    points: Points = field(default_factory=Points)
    written: Code = field(default_factory=Code)
    outputs: Outputs = field(default_factory=Outputs)
    spaces: tuple[Space, ...] = ()
    processes: tuple[Process, ...] = ()
    missing_module: str = ""
    interpreters: tuple[Interpreter, ...] = ()
    unread: tuple[str, ...] = ()  # what could not be looked at, and why

    def node(self, rank: int | None) -> Node | None:
        """The node of a number."""
        return next((n for n in self.nodes if n.rank == rank), None)

    def log(self, rank: int | None) -> Log | None:
        """The log of a node."""
        return next((log for log in self.logs if log.node == rank), None)

    def marked(self, *names: str) -> tuple[Log, Mark] | None:
        """The first mark of these names in any node's log, then in the batch script's output."""
        for log in (*self.logs, *((self.batch,) if self.batch else ())):
            found = log.mark(*names)
            if found:
                return log, found
        return None
