"""The site's documentation against the code: no key is missing from it, none is there that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tuneplane.compose.layers import PACKAGED, Layer
from tuneplane.compose.rules import OWN_DIRECTIVES
from tuneplane.compose.schema import SECTION, dotted, fields, kind_of
from tuneplane.compose.slurm_environment import read_slurm_environment
from tuneplane.compose.tree import built_in
from tuneplane.packaged import packaged_configs
from tuneplane.site import Cluster, Config

PAGE = Path(__file__).parent.parent / "docs" / "site.md"


def every_key(section: type = Config, above: tuple[str, ...] = ()) -> set[str]:
    keys: set[str] = set()
    for name, kind in fields(section).items():
        if kind.word == SECTION:
            assert kind.section is not None
            keys |= every_key(kind.section, (*above, name))
        else:
            keys.add(dotted((*above, name)))
    return keys


def test_the_page_explains_every_key_once_and_no_other() -> None:
    rows = re.findall(
        r"^\| `((?:site|cluster)\.[a-z_.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(rows) == sorted(every_key())


def test_the_example_has_every_key_of_a_cluster() -> None:
    example = yaml.safe_load((packaged_configs() / "cluster" / "example.yaml").read_text(encoding="utf-8"))

    def said(value: dict[str, object], section: type) -> set[str]:
        keys = set(value)
        for name, kind in fields(section).items():
            below = value.get(name)
            if kind.section is not None and isinstance(below, dict):
                keys |= {f"{name}.{key}" for key in said(below, kind.section)}
        return keys

    left_out = {"name", "container.runtime"}  # the file's name; the defaults list's choice
    wanted = {key.removeprefix("cluster.") for key in every_key() if key.startswith("cluster.")} - left_out
    headings = {"slurm", "container", "defaults"}
    assert said(example, Cluster) - headings == wanted


def test_the_page_lists_the_variables_that_are_read() -> None:
    named = set(re.findall(r"`(SBATCH_[A-Z_]+)`", PAGE.read_text(encoding="utf-8")))
    values = dict.fromkeys(named, "1")
    said, notices = read_slurm_environment(values)
    assert {statement.where.removeprefix("$") for statement in said} == named
    assert not notices


def test_directives_with_a_key_of_their_own_name_one_that_exists() -> None:
    for reason in OWN_DIRECTIVES.values():
        for key in re.findall(r"cluster\.[a-z_.]+", reason):
            assert kind_of(tuple(key.split("."))) is not None, key


def test_what_is_built_in_is_what_the_dataclasses_say() -> None:
    keys = {dotted(key) for key in built_in()}
    mappings = {"site.default_images", "site.runtime_images", "site.environment", "cluster.environment"}
    assert keys == every_key() - mappings - {"cluster.slurm.extra_directives"}


def test_packaged_files_are_found_where_the_wheel_has_them() -> None:
    layer = Layer(PACKAGED, packaged_configs())
    for config in (
        "config",
        "defaults",
        "site/default",
        "cluster/local",
        "container/none",
        "container/apptainer",
    ):
        assert layer.file(config) is not None, config
