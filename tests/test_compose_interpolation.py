"""`${…}` in files: plain values of the right type, and no secret among them."""

from __future__ import annotations

import re

import pytest
from compose_folders import Folders, folders, h200
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.compose.interpolation import resolve
from tuneplane.compose.tree import Statement, built_in
from tuneplane.kernel.errors import Fault

__all__ = ["folders", "h200"]


def test_interpolations_become_plain_values_of_the_keys_type(h200: Folders) -> None:
    h200.environ["N"] = "6"
    h200.write(
        "user",
        "defaults",
        r"""
        cluster:
          storage_root: /scratch/${oc.env:USER}/runs
          scratch: ${oc.env:NOT_SET,/node}
          default_gpus: ${oc.env:N}
          max_nodes: ${cluster.default_gpus}
          cpus_per_node: ${.gpus_per_node}
          mounts: ['${cluster.scratch}:/s', '/a\${b}:/c']
          environment: {WHO: '${oc.env:USER}-${cluster.slurm.partition}'}
        """,
    )
    cluster = h200.compose(cluster__slurm__partition=("--partition", "flag")).config.cluster
    assert cluster.storage_root == "/scratch/alice/runs"
    assert (cluster.default_gpus, cluster.max_nodes, cluster.cpus_per_node) == (6, 6, 8)
    assert cluster.mounts == ["/node:/s", "/a${b}:/c"]
    assert cluster.environment == {"WHO": "alice-flag"}


def test_the_environment_that_is_read_is_the_users_not_the_processes(h200: Folders, monkeypatch) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    h200.write("user", "defaults", "cluster: {storage_root: '/s/${oc.env:USER}'}\n")
    assert h200.compose().config.cluster.storage_root == "/s/alice"


def test_what_cannot_be_resolved_names_file_and_key(h200: Folders) -> None:
    path = h200.write(
        "user",
        "defaults",
        """
        cluster:
          storage_root: ${oc.env:NOWHERE}
          scratch: ${cluster.nothing}
          python: ${cluster.python}
          path: ${oc.env
          default_gpus: ${oc.env:USER}
          mounts: ${cluster.scheduler}
          environment: ${site.environment}
          description: ${nonsense:1}
        """,
    )
    message = h200.refusal()
    for line, words in (
        (3, "cluster.storage_root cannot be resolved: the environment has no variable NOWHERE"),
        (4, "cluster.scratch cannot be resolved"),
        (5, "cluster.python cannot be resolved"),
        (6, "cluster.path cannot be resolved"),
        (7, "cluster.default_gpus is, after interpolation, wrong: 'alice' is not a whole number"),
        (8, "cluster.mounts is, after interpolation, wrong: 'slurm' is not a list of texts"),
        (9, "cluster.environment is not a mapping of names to texts"),
        (10, "cluster.description cannot be resolved"),
    ):
        assert re.search(rf"{re.escape(str(path))}:{line}: .*{re.escape(words)}", message), words


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    "text",
    [
        "cluster: {environment: {A: '${oc.env:HF_TOKEN}'}}",
        "cluster: {environment: {A: '${oc.env:HF_TOKEN,none}'}}",
        "cluster: {environment: {A: 'x-${oc.decode:${oc.env:hf_token}}'}}",
        "cluster: {environment: {A: '${oc.env:${cluster.description}}'}, description: HF_TOKEN}",
        "cluster: {environment: {A: '${oc.env:HF_${cluster.description}}'}, description: TOKEN}",
        "cluster: {environment: {A: '${oc.select:none,${oc.env:\"HF_TOKEN\"}}'}}",
        "cluster: {environment: {A: '${${cluster.description}:HF_TOKEN}'}, description: oc.env}",
        "cluster: {mounts: ['/${oc.env:MY_PASSWORD_FILE}:/x']}",
        "cluster: {slurm: {account: '${oc.env:AWS_SECRET}'}}",
        "cluster: {slurm: {account: '${oc.env:deploy_key}'}}",
        "cluster: {slurm: {account: '${oc.env:GCP_CREDENTIALS}'}}",
        "cluster: {description: '${oc.env:SITES_OWN}'}",
        "defaults: [override /container@cluster.container: '${oc.env:HF_TOKEN}']",
    ],
)
def test_no_secret_is_interpolated_in_any_nesting(h200: Folders, text: str) -> None:
    names = ("HF_TOKEN", "hf_token", "MY_PASSWORD_FILE", "AWS_SECRET", "deploy_key", "GCP_CREDENTIALS")
    h200.environ.update(dict.fromkeys((*names, "SITES_OWN"), "none"))
    h200.write("site", "site/default", "secrets: [SITES_OWN]\n")
    path = h200.write("lab", "defaults", text + "\n")
    message = h200.refusal()
    assert f"{path}:1: " in message
    assert "whose name says that it is a secret" in message


@pytest.mark.contract("C11")
def test_a_secret_is_refused_where_its_value_would_not_even_be_used(h200: Folders) -> None:
    path = h200.write("user", "defaults", "cluster:\n  description: ${oc.env:HF_TOKEN}\n")
    h200.write("lab", "defaults", "cluster: {description: plain}\n")
    assert f"{path}:2: cluster.description interpolates HF_TOKEN" in h200.refusal()


def test_a_flag_and_an_environment_variable_are_no_templates(h200: Folders) -> None:
    h200.environ["SBATCH_JOB_NAME"] = "a\\${oc.env:USER}"
    h200.write("user", "defaults", "cluster: {description: '${cluster.slurm.job_name}'}\n")
    composed = h200.compose(
        cluster__mounts=("--mount", ["/we${ird}:/x"]), cluster__slurm__account=("--account", "${oc.env:USER}")
    )
    assert composed.config.cluster.mounts == ["/we${ird}:/x"]
    assert composed.config.cluster.slurm.account == "${oc.env:USER}"
    assert (
        composed.config.cluster.description == composed.config.cluster.slurm.job_name == "a\\${oc.env:USER}"
    )


@pytest.mark.slow
@given(st.text(alphabet="\\${}ab:'\"\n ", max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_literal_value_survives_interpolation_of_others(text: str) -> None:
    key, other = ("cluster", "description"), ("cluster", "storage_root")
    tree = built_in()
    tree[key] = Statement(key, text, "--flag", "flags")
    tree[other] = Statement(other, "${cluster.description}", "file:1", "user", interpolated=True)
    faults: list[Fault] = []
    assert resolve(tree, {}, faults)[other].value == text
    assert not faults
