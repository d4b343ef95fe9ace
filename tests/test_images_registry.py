"""Asking a registry: logins, redirects, certificates, limits, and one message for each of its refusals."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_stub import Handler, Image, Stub, digest_of, layer_of, stub_registry

from tuneplane.images import distribution, transport
from tuneplane.images.distribution import Refused, Registry
from tuneplane.images.reference import parse_reference
from tuneplane.images.transport import CannotAsk, Transport
from tuneplane.kernel.errors import OperationError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_registry() as found:
        yield found


@pytest.fixture
def image(stub: Stub) -> Image:
    made = Image([layer_of({"bin/true": b"x" * 1000})])
    stub.add(made, "v1")
    return made


def registry(stub: Stub, home: Path | None = None, name: str = "trainer", tag: str = "v1") -> Registry:
    reference = parse_reference(f"{stub.host}/{name}:{tag}")
    environ = None if home is None else {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    return Registry(reference, environ, pause_s=0.01)


def docker_login(home: Path, host: str, user: str = "alice", password: str = "s3:cr et") -> None:
    coded = base64.b64encode(f"{user}:{password}".encode()).decode()
    (home / ".docker").mkdir(parents=True, exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps({"auths": {host: {"auth": coded}}}))


def fault(error: pytest.ExceptionInfo[OperationError]) -> str:
    return str(error.value.faults[0])


def always(status: int, body: bytes = b"", headers: dict[str, str] | None = None):
    return lambda handler: handler.answer(status, body, headers)


def test_a_tag_is_resolved_by_one_request_that_counts_as_no_pull(stub: Stub, image: Image) -> None:
    assert registry(stub).resolve("v1") == image.digest
    assert [r.method for r in stub.requests if r.path.startswith("/v2/trainer")] == ["HEAD"]


def test_a_manifest_is_given_by_tag_and_by_digest(stub: Stub, image: Image) -> None:
    assert registry(stub).manifest("v1") == (image.manifest, image.kind)
    assert registry(stub).manifest(image.digest)[0] == image.manifest


def test_a_manifest_unlike_its_digest_is_refused(stub: Stub, image: Image) -> None:
    stub.manifests[image.digest] = (image.kind, image.manifest + b" ")
    with pytest.raises(Refused) as error:
        registry(stub).manifest(image.digest)
    assert "gave bytes unlike their digest for the manifest" in fault(error)
    assert digest_of(image.manifest + b" ").removeprefix("sha256:") in fault(error)


def test_an_unknown_tag_an_unknown_digest_and_an_unknown_repository_are_told_apart(stub: Stub) -> None:
    assert registry(stub).resolve("v9") is None
    with pytest.raises(Refused) as error:
        registry(stub).manifest("v9")
    assert f"{stub.host} has no tag v9 of trainer" in fault(error)
    missing = "sha256:" + "0" * 64
    with pytest.raises(Refused) as error:
        registry(stub).manifest(missing)
    assert f"{stub.host} does not have trainer@{missing}" in fault(error)
    stub.answers.append(always(404, b'{"errors":[{"code":"NAME_UNKNOWN"}]}'))
    with pytest.raises(Refused) as error:
        registry(stub).manifest("v1")
    assert f"{stub.host} has no repository trainer" in fault(error)


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"errors": 7}', b'{"errors":[7]}', b"{" * 100_000]
)
def test_a_404_with_any_body_is_an_unknown_tag(stub: Stub, body: bytes) -> None:
    stub.answers.append(always(404, body))
    with pytest.raises(Refused) as error:
        registry(stub).manifest("v1")
    assert "has no tag v1" in fault(error)


@pytest.mark.parametrize("status", [401, 403])
def test_a_denied_pull_says_as_whom_and_how_to_log_in(stub: Stub, tmp_path: Path, status: int) -> None:
    stub.answers.append(always(status, b"{}"))
    with pytest.raises(Refused) as error:
        registry(stub, tmp_path).manifest("v1")
    assert f"{stub.host} denies access to {stub.host}/trainer:v1 (without a login)" in fault(error)
    assert f"docker login {stub.host}" in fault(error)


def test_the_users_docker_login_gets_a_token_and_the_token_is_used(
    stub: Stub, image: Image, tmp_path: Path
) -> None:
    stub.login = ("alice", "s3:cr et")
    docker_login(tmp_path, stub.host)
    asked = registry(stub, tmp_path)
    assert asked.resolve("v1") == image.digest
    assert asked.manifest("v1")[0] == image.manifest
    assert asked.used_login
    assert len([p for p in stub.paths() if p.startswith("/token")]) == 1, "one token for all requests"
    (token,) = [p for p in stub.paths() if p.startswith("/token")]
    assert "scope=repository%3Atrainer%3Apull" in token and "service=stub" in token


def test_a_login_by_basic_is_used(stub: Stub, image: Image, tmp_path: Path) -> None:
    stub.login, stub.basic = ("alice", "s3:cr et"), True
    docker_login(tmp_path, stub.host)
    assert registry(stub, tmp_path).resolve("v1") == image.digest


def test_a_wrong_password_is_denied_and_named_by_its_file_never_by_itself(stub: Stub, tmp_path: Path) -> None:
    stub.login = ("alice", "right")
    docker_login(tmp_path, stub.host, password="wrong-secret")
    with pytest.raises(Refused) as error:
        registry(stub, tmp_path).manifest("v1")
    assert f"(as alice, of {tmp_path}/.docker/config.json)" in fault(error)
    everything = repr(error.value) + fault(error) + repr(registry(stub, tmp_path))
    assert "wrong-secret" not in everything
    assert base64.b64encode(b"alice:wrong-secret").decode() not in everything


def test_an_expired_token_is_replaced(stub: Stub, image: Image, tmp_path: Path) -> None:
    stub.login = ("alice", "s3:cr et")
    docker_login(tmp_path, stub.host)
    asked = registry(stub, tmp_path)
    asked.manifest("v1")
    stub.tokens.clear()
    assert asked.manifest("v1")[0] == image.manifest


def test_an_identity_token_is_exchanged_by_post_and_stands_in_no_url(
    stub: Stub, image: Image, tmp_path: Path
) -> None:
    stub.login = ("", "")
    (tmp_path / ".docker").mkdir()
    entry = {"auths": {stub.host: {"identitytoken": "refresh-me"}}}
    (tmp_path / ".docker/config.json").write_text(json.dumps(entry))

    def exchange(handler: Handler) -> bool:
        if handler.command != "POST":
            return False
        stub.tokens.add("fresh")
        return handler.answer(200, b'{"access_token": "fresh"}')

    stub.answers.append(exchange)
    assert registry(stub, tmp_path).resolve("v1") == image.digest
    (post,) = [r for r in stub.requests if r.method == "POST"]
    assert b"refresh_token=refresh-me" in post.body and b"grant_type=refresh_token" in post.body
    assert not any("refresh-me" in request.path for request in stub.requests)


@pytest.mark.parametrize(
    "token", ['{"token": "a\\r\\nX-Evil: 1"}', '{"token": 7}', "[]", "nonsense", '{"token": ""}']
)
def test_a_token_that_is_none_is_refused(stub: Stub, token: str) -> None:
    stub.login = ("a", "b")
    stub.answers.append(lambda h: h.path.startswith("/token") and h.answer(200, token.encode()))
    with pytest.raises(CannotAsk, match="gives no token"):
        registry(stub).manifest("v1")


@pytest.mark.parametrize("realm", ["file:///etc/passwd", "ftp://x/", "", "http://evil.example/token"])
def test_a_login_goes_to_no_unsafe_place(stub: Stub, tmp_path: Path, realm: str) -> None:
    docker_login(tmp_path, stub.host)
    stub.answers.append(always(401, b"", {"WWW-Authenticate": f'Bearer realm="{realm}"'}))
    with pytest.raises(CannotAsk):
        registry(stub, tmp_path).manifest("v1")


def test_a_redirect_to_another_origin_gets_no_login(stub: Stub, image: Image, tmp_path: Path) -> None:
    stub.login, stub.basic = ("alice", "s3:cr et"), True
    docker_login(tmp_path, stub.host)
    with stub_registry() as elsewhere:
        elsewhere.add(image)
        layer = digest_of(image.layers[0])
        target = f"http://{elsewhere.host}/v2/trainer/blobs/{layer}?X-Amz-Signature=signed"
        elsewhere.answers.append(lambda h: h.blob(image.layers[0]) or True)
        stub.answers.append(
            lambda h: "/blobs/" in h.path and h._allowed() and h.answer(307, b"", {"Location": target})
        )
        with registry(stub, tmp_path).blob(layer, 5) as answer:
            assert answer.status == 206
        (request,) = elsewhere.requests
        assert "Authorization" not in request.headers
        assert request.headers["Range"] == "bytes=5-"


def test_a_redirect_within_the_registry_keeps_the_login(stub: Stub, image: Image, tmp_path: Path) -> None:
    stub.login, stub.basic = ("alice", "s3:cr et"), True
    docker_login(tmp_path, stub.host)
    layer = digest_of(image.layers[0])
    moved = {"Location": f"/v2/moved/blobs/{layer}"}
    stub.answers.append(
        lambda h: h.path.startswith("/v2/trainer/blobs/") and h._allowed() and h.answer(308, b"", moved)
    )
    with registry(stub, tmp_path).blob(layer) as answer:
        assert answer.status == 200


def test_another_hosts_challenge_is_not_answered_with_the_login(
    stub: Stub, image: Image, tmp_path: Path
) -> None:
    docker_login(tmp_path, stub.host)
    with stub_registry() as evil:
        evil.login = ("x", "y")
        stub.answers.append(lambda h: h.answer(302, b"", {"Location": f"http://{evil.host}{h.path}"}))
        with pytest.raises(CannotAsk) as error:
            registry(stub, tmp_path).manifest("v1")
        assert f"sends on to http://{evil.host}, which answers 401" in fault(error)
        assert not any("token" in r.path or "Authorization" in r.headers for r in evil.requests)


@pytest.mark.parametrize(
    "to", ["http://10.255.255.1/x", "file:///etc/passwd", "ftp://127.0.0.1/x", "gopher:x"]
)
def test_a_redirect_to_what_is_not_https_is_refused(stub: Stub, to: str) -> None:
    stub.answers.append(always(302, b"", {"Location": to}))
    with pytest.raises(CannotAsk):
        registry(stub).manifest("v1")


def test_a_registry_that_redirects_in_circles_ends(stub: Stub) -> None:
    stub.answers.append(lambda h: h.answer(302, b"", {"Location": h.path}))
    with pytest.raises(CannotAsk, match="answers 302"):
        registry(stub).manifest("v1")
    assert len(stub.requests) < 10


def test_a_rate_limit_says_when_it_ends(stub: Stub) -> None:
    stub.answers.append(always(429, b"{}", {"Retry-After": "731"}))
    with pytest.raises(CannotAsk) as error:
        registry(stub).manifest("v1")
    assert "its rate limit is reached" in fault(error)
    assert "try again in 731 s; a login has a limit of its own" in fault(error)


def test_a_passing_error_of_the_server_is_asked_again(stub: Stub, image: Image) -> None:
    left = [500, 503]
    stub.answers.append(lambda h: bool(left) and "/v2/" in h.path and h.answer(left.pop()))
    assert registry(stub).manifest("v1")[0] == image.manifest


@pytest.mark.parametrize("status", [500, 502, 503, 504, 418])
def test_a_lasting_error_of_the_server_is_told_with_its_number(stub: Stub, status: int) -> None:
    stub.answers.append(always(status, b"<html>"))
    with pytest.raises(CannotAsk, match=f"answers {status}"):
        registry(stub).manifest("v1")


def test_an_answer_cut_short_is_asked_again_and_then_told(stub: Stub) -> None:
    stub.answers.append(always(200, b"{", {"Content-Length": "1000", "Connection": "close"}))

    def hang_up(handler: Handler) -> bool:
        handler.close_connection = True
        return False

    stub.answers.insert(0, hang_up)
    with pytest.raises(CannotAsk, match="ended the connection too early"):
        registry(stub).manifest("v1")


def test_a_manifest_without_end_is_not_read_to_its_end(stub: Stub) -> None:
    def endless(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 65536)

    stub.answers.append(endless)
    with pytest.raises(CannotAsk, match="answers with more than 4194304 bytes"):
        registry(stub).manifest("v1")


def test_a_registry_that_never_answers_is_given_up(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    stub.answers.append(lambda _: over.wait(20))
    asked = registry(stub)
    asked._transport = Transport(timeout_s=0.3)
    with pytest.raises(CannotAsk, match="it does not answer"):
        asked.manifest("v1")
    over.set()


def test_an_answer_that_drips_is_given_up(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "ANSWER_S", 0.3)

    def drip(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wait(0.05)
        return True

    stub.answers.append(drip)
    with pytest.raises(CannotAsk, match="takes longer than"):
        registry(stub).manifest("v1")


def test_a_host_without_a_registry_says_where_proxies_are_taken_from() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(CannotAsk) as error:
        Registry(parse_reference(f"{host}/x"), pause_s=0.01).manifest("latest")
    assert "cannot be asked: Connection refused" in fault(error) and "HTTPS_PROXY" in fault(error)


def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(CannotAsk) as error:
        Registry(parse_reference("no-such-host.invalid/x"), pause_s=0.01).manifest("latest")
    assert "https://no-such-host.invalid cannot be asked" in fault(error)


def test_plain_http_is_for_loopback_alone_and_what_the_site_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub under a name that is no loopback's: refused, until the site lists it."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: real("127.0.0.1" if host == "registry.test" else host, *rest, **more),
    )
    with stub_registry() as stub:
        image = Image([layer_of({"x": b"x"})])
        stub.add(image, "v1")
        reference = parse_reference(f"registry.test:{stub.port}/trainer:v1")
        with pytest.raises(CannotAsk) as error:
            Registry(reference).resolve("v1")
        assert "speaks plain HTTP, which is taken from loopback addresses alone" in fault(error)
        assert "site.insecure_registries" in fault(error)
        assert Registry(reference, None, [f"registry.test:{stub.port}"]).resolve("v1") == image.digest
        assert (
            Registry(reference, None, ["registry.test"], pause_s=0.01)._transport.may_be_plain(
                f"registry.test:{stub.port}"
            )
            is False
        )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    folder = tmp_path_factory.mktemp("tls")
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    argv += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "crt"),
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    return folder / "crt", folder / "key"


def test_an_untrusted_certificate_is_refused_with_the_way_to_trust_it(certificate: tuple[Path, Path]) -> None:
    with stub_registry(certificate) as stub:
        with pytest.raises(CannotAsk) as error:
            registry(stub).resolve("v1")
        assert "shows a certificate that is not trusted here: self-signed certificate" in fault(error)
        assert "SSL_CERT_FILE=" in fault(error) and f"certs.d/{stub.host}/ca.crt" in fault(error)
        assert stub.requests == [], "and plain HTTP is not tried in its place, though this is loopback"


def test_a_certificate_is_trusted_by_ssl_cert_file_and_by_certs_d(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image([layer_of({"x": b"x"})])
    with stub_registry(certificate) as stub:
        stub.add(image, "v1")
        with monkeypatch.context() as patched:
            patched.setenv("SSL_CERT_FILE", str(certificate[0]))
            assert registry(stub).resolve("v1") == image.digest
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        trusted = tmp_path / "containers/certs.d" / stub.host
        trusted.mkdir(parents=True)
        shutil.copy(certificate[0], trusted / "ca.crt")
        assert registry(stub).resolve("v1") == image.digest


def test_a_proxy_is_used_for_others_and_never_for_loopback(
    stub: Stub, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_registry() as proxy:
        proxy.answers.append(always(407, b""))
        for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://user:pa55word@{proxy.host}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert registry(stub).resolve("v1") == image.digest
        assert proxy.requests == []
        with pytest.raises(CannotAsk) as error:
            Registry(parse_reference("registry.example.com/x"), pause_s=0.01).resolve("latest")
        assert proxy.requests or "proxy" in fault(error)
        assert "pa55word" not in fault(error)


def test_what_is_no_http_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        for _ in range(2):
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 3)
            connection.close()

    threading.Thread(target=talk, daemon=True).start()
    host = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(CannotAsk) as error:
        Registry(parse_reference(f"{host}/x"), pause_s=0.01).resolve("latest")
    server.close()
    assert "cannot be asked" in fault(error)


def test_docker_hub_is_asked_where_its_registry_is() -> None:
    assert Registry(parse_reference("alpine"))._authority == "registry-1.docker.io"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('Bearer realm="https://a/t",service="s",scope="x:y:pull,push"',
         {"bearer": {"realm": "https://a/t", "service": "s", "scope": "x:y:pull,push"}}),
        ('Basic realm="a \\"b\\""', {"basic": {"realm": 'a "b"'}}),
        ("bearer realm=https://a/t, Basic realm=x", {"bearer": {"realm": "https://a/t"}, "basic": {"realm": "x"}}),
        ("Negotiate", {"negotiate": {}}),
        ("", {"": {}}),
    ],
)  # fmt: skip
def test_challenges_are_read(line: str, expected: dict[str, dict[str, str]]) -> None:
    assert distribution._challenges([line]) == expected


def test_an_origin_shows_neither_login_nor_signature() -> None:
    assert transport.origin("https://user:secret@Host.example:443/p?sig=secret") == "https://host.example:443"
