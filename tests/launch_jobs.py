"""JobSpecs for tests of what is made from them: one that says everything, and changes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import JobSpec, dump, load

JOBSPECS = Path(__file__).parent / "jobspecs"
RUN_ID = "ring-20260114-093012-x3k9"


def complete_job() -> JobSpec:
    """The JobSpec of this version's complete file."""
    return load((JOBSPECS / "v1-complete.json").read_text(encoding="utf-8"))


def changed(job: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """The JobSpec with other values: dotted keys as in job.json, such as `spec.resources.nodes`."""
    value = json.loads(dump(job))
    for key, new in changes.items():
        *path, last = key.split(".")
        inner = value
        for name in path:
            inner = inner[name]
        assert last in inner, key
        inner[last] = new
    return load(json.dumps(value))


def bare_slurm_job(**slurm: Any) -> JobSpec:
    """A run on Slurm for which nobody asked for more than a size; `slurm`: fields of spec.slurm."""
    job = load((JOBSPECS / "v1-minimal.json").read_text(encoding="utf-8"))
    assert job.spec.slurm is not None
    part = dataclasses.replace(job.spec.slurm, **slurm)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, slurm=part))


def local_job(folder: Path | str, **changes: Any) -> JobSpec:
    """A run of one process on this machine in `folder`. changes: dotted keys with `__` for the dot."""
    return changed(
        bare_slurm_job(),
        {
            "metadata.folder": str(folder),
            "metadata.run_id": Path(folder).name,
            "spec.slurm": None,
            "spec.resources.scheduler": "local",
            "spec.resources.profile": "local:1",
            "spec.resources.cluster": "local",
            "spec.resources.device": "cpu",
            "spec.resources.gpus_per_node": 1,
            **{name.replace("__", "."): value for name, value in changes.items()},
        },
    )


def write_run(job: JobSpec, script: str = "", kernel: bytes = b"") -> RunFolder:
    """The run folder of a JobSpec as far as its script reads it, with any text as its script."""
    run = RunFolder(Path(job.metadata.folder))
    for folder in (run.path, run.ingest, run.out, run.slurm, run.submissions, run.attempts_folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = dump(job)
    run.job.write_text(text, encoding="utf-8")
    run.kernel.write_bytes(kernel)
    run.script.write_bytes(script.encode("utf-8", "surrogateescape"))
    sums = [(text.encode(), "job.json"), (kernel, "kernel.pyz")]
    run.sums.write_text("".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for data, name in sums))
    return run
