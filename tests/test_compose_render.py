"""`tp config NAME`: the configuration with the origin of each value."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from compose_folders import H200, Folders, folders, h200

from tuneplane.compose import render_config

__all__ = ["folders", "h200"]


def test_the_printed_configuration_is_yaml_of_the_same_values_with_origins(h200: Folders) -> None:
    h200.write(
        "user",
        "defaults",
        "cluster:\n  description: 'a: # \"quoted\" ünï'\n  environment: {NCCL_X: 'no', 'Y': '1'}\n"
        "  mounts: ['/a b:/c', '-x:/y']\n".replace(", '-x:/y'", ""),
    )
    composed = h200.compose("h200:16", cluster__slurm__time=("--time", "12:00:00"))
    text = render_config(composed)
    read = yaml.load(text, Loader=yaml.BaseLoader)
    assert read["cluster"]["description"] == 'a: # "quoted" ünï'
    assert read["cluster"]["environment"] == {"NCCL_X": "no", "Y": "1"}
    assert read["cluster"]["mounts"] == ["/a b:/c"]
    strict = yaml.safe_load(text)
    assert strict["cluster"]["environment"]["NCCL_X"] == "no"
    assert strict["cluster"]["slurm"]["time"] == "12:00:00"
    assert strict["cluster"]["gpus_per_node"] == 8
    assert strict["cluster"]["slurm"]["exclusive"] is False
    line = next(line for line in text.splitlines() if line.strip().startswith("partition:"))
    assert line.endswith(f"# {h200.site}/cluster/h200.yaml:9")
    columns = {line.index("  # ") for line in text.splitlines() if "built in" in line}
    assert len(columns) == 1


def test_the_configuration_as_json(h200: Folders) -> None:
    h200.environ["SBATCH_EXPORT"] = "NONE"
    value = json.loads(render_config(h200.compose("h200:16"), as_json=True))
    assert value["profile"] == "h200:16"
    assert value["config"]["cluster"]["slurm"]["partition"] == "gpu"
    assert value["origins"]["cluster.slurm.partition"] == f"{h200.site}/cluster/h200.yaml:9"
    assert [layer["name"] for layer in value["layers"]] == ["packaged", "site", "user", "lab"]
    assert len(value["notices"]) == 1


def test_every_key_has_an_origin(h200: Folders) -> None:
    composed = h200.compose()
    text = render_config(composed)
    headings = ("site:", "cluster:", "caps:", "slurm:", "container:")
    for line in text.splitlines():
        if not line.startswith("#") and line.strip() not in headings and not line.endswith("{}"):
            assert "  # " in line, line


def test_a_folder_whose_name_is_no_text_breaks_no_line(tmp_path: Path) -> None:
    folders = Folders(tmp_path / os.fsdecode(b"a\nb\xff: #c"))
    folders.write("site", "cluster/h200", H200)
    composed = folders.compose()
    text = render_config(composed)
    assert yaml.safe_load(text)["cluster"]["slurm"]["partition"] == "gpu"
    text.encode("utf-8")
    value = json.loads(render_config(composed, as_json=True).encode("utf-8"))
    assert value["layers"][1]["folder"] == str(folders.site)
