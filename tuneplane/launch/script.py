"""The batch script as pure text, for a cluster admin to read. `slurm.py` wraps it in submitit's directives.

JobSpec in, text out; nothing in it depends on the Slurm job's id, so that it is the same by hand (C42).
"""

from __future__ import annotations

import shlex

from tuneplane.spec import Image, JobSpec, Spec


def header(job: JobSpec) -> list[str]:
    """Comment lines that say what runs: experiment, recipe, command, resources, image, digests, folder."""
    meta, spec = job.metadata, job.spec
    dirty = f" with {_counted(len(meta.dirty), 'uncommitted file')}" if meta.dirty else ""
    commit = f"commit {meta.commit[:12]}" if meta.commit else "no commit"
    image = spec.container.image
    rows = [
        ("run", meta.run_id),
        ("experiment", f"{meta.experiment} of lab {meta.lab}, {commit}{dirty}"),
        ("submitted", f"by {meta.user} with tuneplane {meta.tuneplane}"),
        ("recipe", f"{spec.recipe.name} {spec.recipe.version}  {spec.recipe.digest}"),
        ("command", command_line(spec)),
        ("resources", resources_line(job)),
        *_image_rows(image, spec.container.runtime),
        ("capsule", f"{spec.capsule.digest}  {_counted(spec.capsule.files, 'file')} of the lab"),
        ("folder", meta.folder),
    ]
    return ["#", *(f"# {name:<12}{_one_line(value)}" for name, value in rows), "#"]


def command_line(spec: Spec) -> str:
    """What the nodes start, in a few words: the log shows the whole command."""
    if spec.launch == "each-node":
        return f"bash {spec.entrypoint}, once on every node"
    module = "-m " if spec.entrypoint_kind == "module" else ""
    what = f"{module}{spec.entrypoint}" if spec.operation == "train" else spec.operation
    return f"torchrun {what}, one rank a GPU" if spec.launch == "torchrun" else f"{what}, one process"


def _image_rows(image: Image | None, runtime: str) -> list[tuple[str, str]]:
    """A registry's image by what it was frozen to: that is known before its file is made."""
    if image is None:
        return [("image", "no container")]
    if image.digest:
        return [("image", f"{image.reference}  {image.digest}  ({runtime})"), ("image file", image.path)]
    if not image.sha256:
        return [("image", f"{image.reference}  frozen and prepared by a job at submit  ({runtime})")]
    return [("image", f"{image.path}  sha256:{image.sha256}  ({runtime})")]


def resources_line(job: JobSpec) -> str:
    """`2 nodes × 8 GPUs (h200:16)`."""
    resources = job.spec.resources
    one, many = ("GPU", "GPUs") if resources.device == "gpu" else ("process", "processes")
    share = f"{resources.gpus_per_node} {one if resources.gpus_per_node == 1 else many}"
    return f"{_counted(resources.nodes, 'node')} × {share} ({resources.profile})"


CLEAN = "clean"
"""The argument with which the script starts itself again, once its environment is clean."""


def preamble(job: JobSpec) -> list[str]:
    """Lines that both schedulers share: clean environment, kernel, digests checked."""
    spec = job.spec
    modules = spec.slurm.modules if spec.slurm else []
    # A local run started within somebody's Slurm job is no part of that job.
    names = ['"${!SLURM@}"'] if spec.slurm else []
    names += ['"${!MODULE@}"', '"${!LMOD@}"'] if modules else []
    names += ["CUDA_VISIBLE_DEVICES", "HOME", "USER", "LOGNAME"]
    lines = [
        "# Nothing of the submitting shell and of the login profile goes further than this: the script starts",
        "# itself again with these variables alone.",
        f"if [[ ${{1-}} != {CLEAN} ]]; then",
        *(["  unset -v SLURM_JWT  # a token of the user, which no job needs"] if spec.slurm else []),
        f"  kept=(PATH={quote(spec.node.path)} LANG=C.UTF-8)",
        f"  for name in {' '.join(names)}; do",
        '    [[ ! -v $name ]] || kept+=("$name=${!name}")',
        "  done",
        f'  exec /usr/bin/env -i "${{kept[@]}}" /bin/bash "$0" {CLEAN}',
        "fi",
        *_module_lines(modules),
        "",
        "set -u",
        f"run={quote(job.metadata.folder)}",
        "",
        "# What was reviewed is what runs.",
        'cd "$run" || exit',
        "sha256sum --check --strict --quiet SHA256SUMS || exit",
        f'kernel=({quote(spec.node.python)} -I -S "$run/kernel.pyz")',
    ]
    return lines


def slurm_setup(job: JobSpec) -> list[str]:
    """From the preamble to the trap: the attempt is claimed, node 0's address known."""
    return [
        "# Slurm may warn before the limit (USR2) as soon as the job begins.",
        "asked=",
        "trap 'asked=1' USR2",
        "",
        *preamble(job),
        "",
        "# The attempt's number, node 0's address and a port there; refused while another start runs.",
        'hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is a Slurm job: sbatch starts it}") || exit',
        'mapfile -t nodes <<<"$hosts"',
        'claim=$("${kernel[@]}" claim "$run" "${nodes[@]}") || exit',
        'read -r attempt address port <<<"$claim"',
        "[[ $attempt != over ]] || exit 0  # a restart that came too late: the run has ended",
        "",
        "# The trainer is asked to save and end by a marker file: a signal would kill its processes.",
        'ask_to_save() { : >>"$run/attempts/$attempt/stop"; }',
        "trap ask_to_save USR2",
        "trap : TERM  # outlive the step, to write how it ended",
        "[[ -z $asked ]] || ask_to_save",
    ]


def slurm_command(job: JobSpec) -> str:
    """One srun task on each node that was really given, beside this shell so that its traps run.

    bash loses a background job's exit code where a trapped signal comes as it ends. So srun is in the
    foreground of a shell of its own, which writes the code into a pipe.
    """
    resources, slurm = job.spec.resources, job.spec.slurm
    assert slurm is not None
    arguments = ["srun", "--kill-on-bad-exit=1", "--export=ALL", "--ntasks-per-node=1"]
    if resources.cpus_per_node is not None:  # since 22.05 srun does not take it from sbatch
        arguments.append(f"--cpus-per-task={resources.cpus_per_node}")
    arguments += slurm.srun_options
    return "\n".join(
        [
            "step() {",
            "  trap : USR2 TERM",
            f'  {" ".join(map(quote, arguments))} --nodes="${{#nodes[@]}}" --ntasks="${{#nodes[@]}}" \\',
            '    "${kernel[@]}" node "$run" "$attempt" "$address" "$port" >&4 4>&-',
            '  echo "$?"',
            "}",
            "exec 4>&1 3< <(step)",
        ]
    )


def slurm_teardown() -> list[str]:
    """Wait through signals, write the attempt's end, leave with the first failing node's code."""
    return [
        "code=",
        "until read -r -t 1 part <&3; do",
        "  [[ $? -gt 128 ]] || break  # neither a second nor a signal: its shell has ended",
        "  [[ ! -e $run/attempts/$attempt/fence.json ]] || break",
        "  code+=$part  # the second may be over in the middle of the number",
        "done",
        "code+=$part",
        "code=${code:-137}  # its shell was killed, or nodes are dead and srun still waits for them",
        "",
        "# How it ended is written, and whether the run goes on; killed half-way, it takes up again.",
        "for _ in 1 2 3; do",
        '  ended=$("${kernel[@]}" end "$run" "$attempt" "$code")',
        "  said=$?",
        "  [[ $said -ne 0 ]] || code=$ended",
        "  [[ $said -gt 128 ]] || break",
        "done",
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
    """`text` as one shell word on one line."""
    if any(_breaks(c) for c in text):
        return "$'" + "".join(f"\\{ord(c):03o}" if _breaks(c) else _escaped(c, "\\'") for c in text) + "'"
    if any(c in text for c in "'$`"):
        return '"' + "".join(_escaped(c, '\\"$`') for c in text) + '"'
    return shlex.quote(text)


def _escaped(character: str, special: str) -> str:
    return f"\\{character}" if character in special else character


def _breaks(character: str) -> bool:
    return character < " " or character == "\x7f"


def _module_lines(modules: list[str]) -> list[str]:
    if not modules:
        return []
    return [
        "",
        "# The site's modules, from none: what the login profile had loaded is gone with its variables.",
        "# shellcheck source=/dev/null",
        'source "${MODULESHOME:?the login profile on this node sets up no modules}/init/bash" || exit',
        *(f"module load {quote(name)} || exit" for name in modules),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _one_line(text: str) -> str:
    """`text` as one comment line: a newline in a folder's name must not become a command."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
