"""The whole pipeline, in the order in which it happens: check, prepare the run folder, hand it over.

Nothing is written before every check has passed, and nothing is submitted before the folder is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tuneplane.capsule import build_capsule
from tuneplane.capsule.kernel import kernel_application
from tuneplane.compile import Draft, Request, compile_request
from tuneplane.findings import Findings
from tuneplane.images.progress import Progress, silent
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.secret_names import SHORTEST_SECRET, is_secret_name
from tuneplane.lab.marker import Lab
from tuneplane.launch.render import script_of
from tuneplane.recipes.catalog import Catalog
from tuneplane.runs.folder import check_parents, make_run_folder, new_run_id, run_path
from tuneplane.runs.index import current_user, remember_root
from tuneplane.runs.token import run_token, token_digest
from tuneplane.spec import Image, JobSpec, Spec, dump, read
from tuneplane.start import Submitted, check_room, hand_over, write_secrets


def examine(
    lab: Lab,
    catalog: Catalog,
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress = silent,
) -> tuple[Draft | None, Findings]:
    """Every check of a submit that needs no queue, all faults at once (C30). The draft is None where any is."""
    draft, found = compile_request(lab, catalog, request, environ, cache, progress)
    if draft is None:
        return None, found
    job = job_of(draft, new_run_id(request.experiment), "", token="")
    found.attempt(refuse_secrets_in, job, draft.site.secrets, environ)
    found.attempt(script_of, job)
    found.faults += check_parents(Path(job.metadata.folder), (os.getuid(),))
    return (None if found.faults or found.refused else draft), found


def check(
    lab: Lab,
    catalog: Catalog,
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress = silent,
) -> tuple[Draft, Findings]:
    """`examine`, which must find nothing. Raises UsageError or OperationError with all that is wrong."""
    draft, found = examine(lab, catalog, request, environ, cache, progress)
    found.faults += found.missing
    found.raise_all()
    assert draft is not None  # nothing was missing and nothing wrong
    return draft, found


def preview(draft: Draft) -> tuple[JobSpec, str]:
    """The JobSpec and script of a run that is never made: no side effect at all (C42)."""
    job = job_of(draft, new_run_id(draft.request.experiment), sha256_bytes(kernel_application()), token="")
    return job, script_of(job)


def fetch_image(draft: Draft, progress: Progress = silent) -> Draft:
    """The draft with its image's file there: fetched and converted now where it was not. Raises OperationError."""
    if draft.image is None:
        return draft
    remember_root(draft.storage_root)  # tp image gc looks there for what an interrupted fetch leaves
    image = Image(**dataclasses.asdict(draft.image.fetch(progress)))
    container = dataclasses.replace(draft.spec.container, image=image)
    return dataclasses.replace(draft, spec=dataclasses.replace(draft.spec, container=container))


def prepare(draft: Draft, environ: Mapping[str, str], progress: Progress = silent) -> RunFolder:
    """Make the run's folder, complete. Raises OperationError; what was begun is then removed.

    progress: told while the image is fetched, which comes first and may take long.
    """
    draft = fetch_image(draft, progress)
    user, experiment = current_user(), draft.request.experiment
    run_id = new_run_id(experiment)
    kernel = kernel_application()
    token = run_token(run_id) if draft.spec.reporting.enabled else ""
    job = job_of(draft, run_id, sha256_bytes(kernel), token)
    mode = int(draft.site.run_folder_mode, 8)
    run = make_run_folder(draft.storage_root, user, experiment, run_id, mode)
    try:
        info = build_capsule(
            draft.lab.root,
            run.capsule,
            allow_dirty=draft.request.allow_dirty,
            limit_bytes=draft.site.capsule_limit_mb << 20,
        )
        if info.digest != draft.capsule.digest:
            raise UsageError(
                Fault("the lab changed while it was packed", str(draft.lab.root), "submit again")
            )
        write_run(run, job, kernel, environ)
        remember_root(draft.storage_root)
    except BaseException as error:
        remove_unfinished(run)
        if isinstance(error, OSError):
            raise OperationError(
                Fault(f"run folder not written: {error.strerror}", str(error.filename or run.path))
            ) from None
        raise
    return run


def write_run(run: RunFolder, job: JobSpec, kernel: bytes, environ: Mapping[str, str]) -> None:
    """All of a run's folder but its capsule, which is there. Raises OSError."""
    text = dump(job)
    write_atomic(run.kernel, kernel, 0o444)
    write_atomic(run.job, text, 0o444)
    sums = f"{sha256_bytes(text.encode())}  job.json\n{sha256_bytes(kernel)}  kernel.pyz\n"
    write_atomic(run.sums, sums, 0o444)
    write_atomic(run.canary, f"{run.run_id}\n", 0o444)
    write_secrets(run, job, environ)
    write_atomic(run.script, script_of(job), 0o444)  # last: a folder with a script is complete


def submit(draft: Draft, environ: Mapping[str, str], progress: Progress = silent) -> Submitted:
    """Prepare a run and hand it over. Raises UsageError where the user's GPUs in flight would pass the cap.

    progress: see `prepare`.
    """
    check_room(draft.spec.resources, draft.site)
    run = prepare(draft, environ, progress)
    return hand_over(run, read(run.job))


def job_of(draft: Draft, run_id: str, kernel_sha256: str, token: str) -> JobSpec:
    """The draft as the JobSpec of one run. Its time is the one in the run's id."""
    user = current_user()
    folder = run_path(draft.storage_root, user, draft.request.experiment, run_id)
    spec = bound_spec(draft.spec, folder, kernel_sha256, token)
    return JobSpec(draft.metadata(run_id, created_at(run_id), user, folder), spec)


def bound_spec(spec: Spec, folder: Path, kernel_sha256: str, token: str) -> Spec:
    """A spec as that of the run in `folder`: what depends on the run's id, and the kernel."""
    reporting = spec.reporting
    if reporting.enabled:
        ingest = RunFolder(folder).ingest.as_uri()
        reporting = dataclasses.replace(reporting, endpoint=ingest, token_sha256=token_digest(token))
    capsule = dataclasses.replace(spec.capsule, kernel_sha256=kernel_sha256)
    return dataclasses.replace(spec, reporting=reporting, capsule=capsule)


def created_at(run_id: str) -> str:
    """The time in a run's id, UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.strptime(run_id[-20:-5], "%Y%m%d-%H%M%S"))


def refuse_secrets_in(job: JobSpec, named: Iterable[str], environ: Mapping[str, str]) -> None:
    """A secret of this shell that stands in the JobSpec would be readable for ever (C11).

    named: the site's list. Raises UsageError.
    """
    text = dump(job)
    names = {name for name in environ if is_secret_name(name)} | set(named)
    leaked = sorted(name for name in names if _stands_in(text, environ.get(name, "")))
    if leaked:
        raise UsageError(
            *(
                Fault(
                    f"the value of {name} stands in the run's configuration or parameters",
                    name,
                    "a secret reaches the job by its name alone: have the site list it in site.secrets",
                )
                for name in leaked
            )
        )


def _stands_in(text: str, value: str) -> bool:
    """Whether a secret's value is in the text of a JobSpec, as it is or as JSON writes it. A path is none."""
    if len(value) < SHORTEST_SECRET or Path(value).exists():
        return False
    return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def remove_unfinished(run: RunFolder) -> None:
    """Take back a folder that was never complete."""
    from shutil import rmtree

    rmtree(run.path, ignore_errors=True)
    for folder in (run.path.parent, run.path.parent.parent):
        try:
            folder.rmdir()
        except OSError:
            return
