"""Logins that users have already: found where Docker, Podman, Apptainer and enroot keep them, shown nowhere."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from registry_stub import program

from tuneplane.images.credentials import Found, find_login

HOST = "registry.example.com:5000"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def found(
    environ: dict[str, str], registry: str = HOST, repository: str = "team/trainer"
) -> tuple[str, str] | None:
    login = find_login(registry, repository, environ).login
    return (login.user, login.secret) if login else None


def test_without_any_file_there_is_no_login_and_no_trouble(environ: dict[str, str]) -> None:
    assert find_login(HOST, "x", environ) == Found(None)


@pytest.mark.parametrize(
    "place",
    [
        ".docker/config.json",
        ".config/containers/auth.json",
        ".apptainer/docker-config.json",
        ".singularity/docker-config.json",
    ],
)
def test_each_tools_file_is_read(environ: dict[str, str], tmp_path: Path, place: str) -> None:
    write(tmp_path / place, {"auths": {HOST: auth("alice", "pass:with:colons")}})
    assert found(environ) == ("alice", "pass:with:colons")


@pytest.mark.parametrize(
    ("variable", "file"),
    [
        ("REGISTRY_AUTH_FILE", ""),
        ("XDG_RUNTIME_DIR", "containers/auth.json"),
        ("XDG_CONFIG_HOME", "containers/auth.json"),
        ("DOCKER_CONFIG", "config.json"),
    ],
)
def test_their_variables_are_obeyed(
    environ: dict[str, str], tmp_path: Path, variable: str, file: str
) -> None:
    base = tmp_path / "else where"
    write(base / file if file else base, {"auths": {HOST: auth("alice", "s")}})
    assert found({**environ, variable: str(base)}) == ("alice", "s")


@pytest.mark.parametrize(
    "key",
    [
        HOST,
        f"https://{HOST}",
        f"https://{HOST}/",
        f"http://{HOST}/v1/",
        f"https://{HOST}/v2/",
        f"{HOST}/team",
    ],
)
def test_a_registry_is_found_under_every_form_of_its_name(
    environ: dict[str, str], tmp_path: Path, key: str
) -> None:
    write(tmp_path / ".docker/config.json", {"auths": {key: auth("alice", "s")}})
    assert found(environ) == ("alice", "s")


@pytest.mark.parametrize(
    "key",
    [
        "registry.example.com",
        "evil-registry.example.com:5000",
        f"{HOST}.evil.example",
        f"{HOST}0",
        f"{HOST}/other",
        f"{HOST}/team/train",
        f"evil.example/{HOST}",
        f"user@{HOST}",
        "",
    ],
)
def test_a_login_for_another_registry_or_repository_is_not_taken(
    environ: dict[str, str], tmp_path: Path, key: str
) -> None:
    write(tmp_path / ".docker/config.json", {"auths": {key: auth("alice", "s")}})
    assert found(environ) is None


@pytest.mark.parametrize(
    "key", ["https://index.docker.io/v1/", "docker.io", "registry-1.docker.io", "index.docker.io"]
)
def test_docker_hub_is_one_registry_under_all_its_names(
    environ: dict[str, str], tmp_path: Path, key: str
) -> None:
    write(tmp_path / ".docker/config.json", {"auths": {key: auth("alice", "s")}})
    assert found(environ, "docker.io", "library/alpine") == ("alice", "s")


def test_the_most_exact_of_podmans_keys_counts(environ: dict[str, str], tmp_path: Path) -> None:
    keys = {
        HOST: auth("all", "1"),
        f"{HOST}/team": auth("team", "2"),
        f"{HOST}/team/trainer": auth("one", "3"),
    }
    write(tmp_path / ".config/containers/auth.json", {"auths": keys})
    assert found(environ) == ("one", "3")
    assert found(environ, repository="team/other") == ("team", "2")
    assert found(environ, repository="else") == ("all", "1")


def test_podmans_file_goes_before_dockers_and_that_before_apptainers(
    environ: dict[str, str], tmp_path: Path
) -> None:
    for place, user in ((".apptainer/docker-config.json", "c"), (".docker/config.json", "b")):
        write(tmp_path / place, {"auths": {HOST: auth(user, "s")}})
    assert found(environ) == ("b", "s")
    write(tmp_path / ".config/containers/auth.json", {"auths": {HOST: auth("a", "s")}})
    assert found(environ) == ("a", "s")


HELPER = """#!/usr/bin/env python3
import json, sys
assert sys.argv[1:] == ["get"], sys.argv
asked = sys.stdin.read()
known = {known!r}
if asked not in known:
    print("credentials not found in native keychain")
    sys.exit(1)
print(json.dumps({{"ServerURL": asked, "Username": known[asked][0], "Secret": known[asked][1]}}))
"""


def test_a_credential_helper_is_asked_on_its_input_and_goes_before_what_the_file_holds(
    environ: dict[str, str], tmp_path: Path
) -> None:
    program(tmp_path / "bin", "docker-credential-vault", HELPER.format(known={HOST: ("helped", "s")}))
    document = {"credHelpers": {HOST: "vault"}, "auths": {HOST: auth("written", "s")}}
    write(tmp_path / ".docker/config.json", document)
    assert found(environ) == ("helped", "s")


def test_the_store_is_asked_by_dockers_name_for_the_hub(environ: dict[str, str], tmp_path: Path) -> None:
    known = {"https://index.docker.io/v1/": ("hub", "s"), HOST: ("own", "t")}
    program(tmp_path / "bin", "docker-credential-store", HELPER.format(known=known))
    write(tmp_path / ".docker/config.json", {"credsStore": "store", "auths": {HOST: {}}})
    assert found(environ, "docker.io") == ("hub", "s")
    assert found(environ) == ("own", "t")
    assert find_login("other.example", "x", environ) == Found(None)


def test_an_identity_token_of_a_helper_is_known_as_one(environ: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin", "docker-credential-cloud", HELPER.format(known={HOST: ("<token>", "refresh")}))
    write(tmp_path / ".docker/config.json", {"credHelpers": {HOST: "cloud"}})
    login = find_login(HOST, "x", environ).login
    assert login is not None and login.is_identity_token and login.secret == "refresh"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "docker-credential-absent: No such file"),
        ("../../bin/evil", "is no name of a credential helper"),
        ("a b", "is no name of a credential helper"),
        ("broken", "docker-credential-broken: answered without JSON"),
        ("failing", "docker-credential-failing: ended with 3"),
    ],
)
def test_a_helper_that_does_not_help_is_told(
    environ: dict[str, str], tmp_path: Path, name: str, words: str
) -> None:
    program(tmp_path / "bin", "docker-credential-broken", "#!/bin/sh\necho '{secret'\n")
    program(tmp_path / "bin", "docker-credential-failing", "#!/bin/sh\necho secret >&2; exit 3\n")
    write(tmp_path / ".docker/config.json", {"credHelpers": {HOST: name}})
    result = find_login(HOST, "x", environ)
    assert result.login is None
    assert words in " ".join(result.troubles)
    assert "secret" not in " ".join(result.troubles)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("[" * 200_000, "not a JSON object"),
        ("x" * (1 << 20) + "x", "larger than"),
        (json.dumps({"auths": {HOST: {"auth": "%%%"}}}), "an entry's auth is not base64"),
        (json.dumps({"auths": {HOST: {"auth": "//8="}}}), "an entry's auth is not base64"),
    ],
)
def test_a_broken_file_is_told_by_its_name(
    environ: dict[str, str], tmp_path: Path, text: str, words: str
) -> None:
    write(tmp_path / ".docker/config.json", text)
    result = find_login(HOST, "x", environ)
    assert result.login is None
    (trouble,) = result.troubles
    assert trouble.startswith(str(tmp_path / ".docker/config.json")) and words in trouble


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"auths": 7},
        {"auths": {HOST: 7}},
        {"auths": {HOST: {}}},
        {"auths": {HOST: auth("", "")}},
        {"credsStore": 7},
        "",
    ],
)
def test_a_file_without_a_login_is_no_trouble(
    environ: dict[str, str], tmp_path: Path, document: object
) -> None:
    write(tmp_path / ".docker/config.json", document)
    assert find_login(HOST, "x", environ) == Found(None)


def test_enroots_file_is_read_by_host_without_port(environ: dict[str, str], tmp_path: Path) -> None:
    text = (
        "# a comment\n"
        "machine nvcr.io login $oauthtoken password nv-token\n"
        "machine registry.example.com login alice password 'pass word'\n"
        "machine auth.docker.io login hub password h4b\n"
    )
    write(tmp_path / ".config/enroot/.credentials", text)
    assert found(environ) == ("alice", "pass word")
    assert found(environ, "nvcr.io", "nvidia/pytorch") == ("$oauthtoken", "nv-token")
    assert found(environ, "docker.io", "library/x") == ("hub", "h4b")
    assert found(environ, "example.com", "x") is None
    write(tmp_path / "own/.credentials", "machine registry.example.com login bob password b\n")
    assert found({**environ, "ENROOT_CONFIG_PATH": str(tmp_path / "own")}) == ("bob", "b")


def test_a_command_in_enroots_file_is_not_run_and_that_is_said(
    environ: dict[str, str], tmp_path: Path
) -> None:
    text = f"machine registry.example.com login a password $(touch {tmp_path}/ran; echo secret)\n"
    write(tmp_path / ".config/enroot/.credentials", text)
    result = find_login(HOST, "x", environ)
    assert result.login is None
    assert "is a shell expression, which tp does not run" in result.troubles[0]
    assert "secret" not in result.troubles[0] and not (tmp_path / "ran").exists()


def test_no_secret_is_shown_by_accident(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / ".docker/config.json", {"auths": {HOST: auth("alice", "hunter2")}})
    result = find_login(HOST, "x", environ)
    assert result.login is not None and result.login.secret == "hunter2"
    assert "hunter2" not in f"{result} {result!r} {result.login}"
