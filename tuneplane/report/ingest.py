"""Where this process's points go, as the job's environment says (C9). Read once a session; decides who reports."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ENABLED = "TUNEPLANE_JOB_ENABLED"
ENDPOINT = "TUNEPLANE_JOB_ENDPOINT"
RUN_ID = "TUNEPLANE_JOB_RUN_ID"
TOKEN = "TUNEPLANE_JOB_TOKEN"
ATTEMPT = "TUNEPLANE_JOB_ATTEMPT"
MACHINE_RANK = "TUNEPLANE_MACHINE_RANK"
GPUS_PER_NODE = "TUNEPLANE_CLUSTER_GPUS_PER_NODE"
RANK = "RANK"  # torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


class Ingest:
    """The bound ingest of one process: folder, run, token and which of the run's processes this is."""

    __slots__ = ("attempt", "folder", "rank", "run_id", "token")

    def __init__(self, folder: str, run_id: str, token: str, attempt: int, rank: int) -> None:
        self.folder = folder
        self.run_id = run_id
        self.token = token
        self.attempt = attempt
        self.rank = rank


def is_bound(environ: Mapping[str, str]) -> bool:
    """Whether there is anything to report to: a token, and reporting not switched off (C17)."""
    return bool(environ.get(TOKEN)) and environ.get(ENABLED, "1").strip() != "0"


def read_ingest(environ: Mapping[str, str]) -> Ingest | str:
    """The ingest that `environ` binds, or one sentence that says why none can be used."""
    endpoint = environ.get(ENDPOINT, "")
    folder = folder_of(endpoint)
    if not folder:
        return f"{ENDPOINT} is {endpoint!r}, which is no file:///… URI of a folder"
    return Ingest(
        folder=folder,
        run_id=environ.get(RUN_ID, ""),
        token=environ.get(TOKEN, ""),
        attempt=max(0, _integer(environ.get(ATTEMPT), 0)),
        rank=global_rank(environ),
    )


def folder_of(uri: str) -> str:
    """The absolute folder that a file URI names (RFC 8089), or `""` where it names none."""
    import os

    for scheme in ("file://localhost/", "file:///"):
        if uri.lower().startswith(scheme):
            path = _unquoted("/" + uri[len(scheme) :])
            return "" if b"\0" in path else os.fsdecode(path)
    return ""


def _unquoted(text: str) -> bytes:
    """Percent escapes resolved (RFC 3986, 2.1). By hand: urllib costs 10 ms of import."""
    from binascii import unhexlify

    path, *parts = text.encode("utf-8", "surrogateescape").split(b"%")
    for part in parts:
        try:
            path += unhexlify(part[:2].ljust(2)) + part[2:]
        except ValueError:  # a lone % stands for itself
            path += b"%" + part
    return path


def global_rank(environ: Mapping[str, str]) -> int:
    """RANK where a launcher set it; else made of the node's number and LOCAL_RANK; else the node's number."""
    rank = _integer(environ.get(RANK), -1)
    if rank >= 0:
        return rank
    node = max(0, _integer(environ.get(MACHINE_RANK), 0))
    local = _integer(environ.get(LOCAL_RANK), -1)
    if local < 0:
        return node
    per_node = _integer(environ.get(LOCAL_WORLD_SIZE) or environ.get(GPUS_PER_NODE), 1)
    return node * max(per_node, local + 1) + local


def _integer(text: str | None, default: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return default
