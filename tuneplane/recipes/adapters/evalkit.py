"""The evalkit adapter: lm-eval in one process on node 0, of an experiment's own model or of a run's export."""

from __future__ import annotations

from pathlib import PurePosixPath

from tuneplane.recipes.adapters import Command, Launch, NodeFacts

OPERATIONS = {"train": Launch.ONE_PROCESS, "eval": Launch.ONE_PROCESS}

MODULE = "tuneplane.evalkit"


def train(node: NodeFacts) -> Command:
    """An experiment of its own: the bound model, its report in the run's own output folder."""
    return _command(node, f"--model={node.bindings.get('model', '')}", f"--out={node.out_dir}")


def eval(node: NodeFacts) -> Command:
    """`tp eval`: the export of the run worked on, whose output folder takes the report."""
    return _command(node, f"--out={node.out_dir}", f"--subject={PurePosixPath(node.out_dir).parent.name}")


def _command(node: NodeFacts, *model: str) -> Command:
    """One word for each option, so that no value is taken for an option itself."""
    params = node.params
    words = [*model, *(f"--tasks={task}" for task in params.get("tasks") or ())]
    include = str(params.get("include_path") or "")
    if include:
        words.append(f"--include-path={PurePosixPath(node.exp_dir, include)}")
    words.append(f"--batch-size={params.get('batch_size') or 'auto'}")
    for name in ("num_fewshot", "limit", "dtype", "system_instruction", "seed"):
        value = params.get(name)
        if value is not None and value != "":
            words.append(f"--{name.replace('_', '-')}={value}")
    if params.get("apply_chat_template"):
        words.append("--apply-chat-template")
    return Command(argv=("python3", "-m", MODULE, *words), cwd=node.work_dir, launch=Launch.ONE_PROCESS)
