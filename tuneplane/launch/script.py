"""The batch script as pure text, for a cluster admin to read. `slurm.py` wraps it in submitit's directives.

JobSpec in, text out; nothing in it depends on the Slurm job's id, so that it is the same by hand (C42).
"""

from __future__ import annotations

import shlex

from tuneplane.spec import JobSpec


def header(job: JobSpec) -> list[str]:
    """Comment lines that say what runs: experiment, recipe, command, resources, image, digests, folder."""
    meta, spec = job.metadata, job.spec
    dirty = f" with {len(meta.dirty)} uncommitted files" if meta.dirty else ""
    commit = f"commit {meta.commit[:12]}" if meta.commit else "no commit"
    image = spec.container.image
    rows = [
        ("run", meta.run_id),
        ("experiment", f"{meta.experiment} of lab {meta.lab}, {commit}{dirty}"),
        ("submitted", f"by {meta.user} with tuneplane {meta.tuneplane}"),
        ("recipe", f"{spec.recipe.name} {spec.recipe.version}  {spec.recipe.digest}"),
        ("command", f"bash {spec.entrypoint}, once on every node"),
        ("resources", resources_line(job)),
        (
            "image",
            f"{image.path}  sha256:{image.sha256}  ({spec.container.runtime})" if image else "no container",
        ),
        ("capsule", f"{spec.capsule.digest}  {spec.capsule.files} files, {spec.capsule.size_bytes} bytes"),
        ("folder", meta.folder),
    ]
    return ["#", *(f"# {name:<12}{_one_line(value)}" for name, value in rows), "#"]


def resources_line(job: JobSpec) -> str:
    """`2 nodes × 8 GPUs (h200:16)`."""
    resources = job.spec.resources
    unit = "GPU" if resources.device == "gpu" else "process"
    plural = {"GPU": "GPUs", "process": "processes"}[unit] if resources.gpus_per_node != 1 else unit
    nodes = "1 node" if resources.nodes == 1 else f"{resources.nodes} nodes"
    return f"{nodes} × {resources.gpus_per_node} {plural} ({resources.profile})"


def preamble(job: JobSpec) -> list[str]:
    """Lines that both schedulers share: clean environment, kernel, digests checked."""
    spec = job.spec
    modules = spec.slurm.modules if spec.slurm else []
    keep = "SLURM_*|SLURMD_*|CUDA_VISIBLE_DEVICES|HOME|USER|LOGNAME"
    lines = [
        "set -u",
        f"run={quote(job.metadata.folder)}",
        "",
        "# Nothing of the submitting shell and of the login profile goes further than this.",
        "for name in $(compgen -e); do",
        '  case "$name" in',
        f"    {keep}{'|MODULE*|LMOD*|__LMOD*|LOADEDMODULES|_LMFILES_' if modules else ''}) ;;",
        '    *) unset -v "$name" 2>/dev/null ;;',
        "  esac",
        "done",
    ]
    if not modules:
        lines.append('for name in $(compgen -A function); do unset -f "$name"; done')
    lines.append(f"export PATH={quote(spec.node.path)} LANG=C.UTF-8")
    lines += [f"module load {quote(name)} || exit" for name in modules]
    lines += [
        "",
        "# What was reviewed is what runs.",
        'cd "$run" || exit',
        "sha256sum --check --quiet SHA256SUMS || exit",
        f'kernel=({quote(spec.node.python)} -I -S "$run/kernel.pyz")',
    ]
    return lines


def slurm_setup(job: JobSpec) -> list[str]:
    """From the preamble to the trap: the attempt is claimed, node 0's address known."""
    return [
        *preamble(job),
        "",
        "# The attempt's number, node 0's address and a port there; refused while another start runs.",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'claim=$("${kernel[@]}" claim "$run" "${nodes[@]}") || exit',
        'read -r attempt address port <<<"$claim"',
        "",
        "# Slurm warns this shell before the limit; the trainer is asked to save by a marker file.",
        "trap ': >>\"$run/attempts/$attempt/stop\"' USR2",
        "trap : TERM  # outlive the step, to write how it ended",
    ]


def slurm_command(job: JobSpec) -> str:
    """One srun task a node, in the background so that the trap runs."""
    resources, slurm = job.spec.resources, job.spec.slurm
    assert slurm is not None
    arguments = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--nodes={resources.nodes}"]
    arguments += [f"--ntasks={resources.nodes}", "--ntasks-per-node=1"]
    if resources.cpus_per_node is not None:  # since 22.05 srun does not take it from sbatch
        arguments.append(f"--cpus-per-task={resources.cpus_per_node}")
    arguments += slurm.srun_options
    task = '"${kernel[@]}" node "$run" "$attempt" "$address" "$port" &'
    return f"{' '.join(map(quote, arguments))} {task}"


def slurm_teardown() -> list[str]:
    """Wait through signals, write the attempt's end, leave with the first failing node's code."""
    return [
        "step=$!",
        "code=0",
        'wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done',
        'code=$("${kernel[@]}" end "$run" "$attempt" "$code") || exit',
        'exit "$code"',
        "",
    ]


def local_script(job: JobSpec) -> str:
    """The script of a run on this machine: the same preamble, then the same agent."""
    return "\n".join(
        [
            "#!/bin/bash",
            *header(job),
            *preamble(job),
            "",
            "# Waits for its share of this machine, then claims an attempt and runs it as on a cluster's node.",
            'exec "${kernel[@]}" local "$run"',
            "",
        ]
    )


def quote(text: str) -> str:
    """`text` as one shell word."""
    return shlex.quote(text).replace("'\"'\"'", "'\\''")


def _one_line(text: str) -> str:
    """`text` as one comment line: a newline in a folder's name must not become a command."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
