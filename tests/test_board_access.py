"""Who gets to see the board: one link, one cookie, this host's names, reading alone."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_runs import make_run
from board_server import BoardServer, board, raw

from tuneplane.board.access import Access, is_our_name
from tuneplane.board.assets import read_assets
from tuneplane.board.listen import MAX_SOCKET_PATH, socket_folder, tunnel_command
from tuneplane.kernel.errors import OperationError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoardServer]:
    home = tmp_path_factory.mktemp("home")
    make_run(home / "tuneplane", "ring-20260114-093010-x3k9", 1_768_383_010.0)
    with board(home) as running:
        running.sign_in()
        running.next_link()
        yield running


def test_a_link_works_once_and_leaves_the_address(tmp_path: Path) -> None:
    with board(tmp_path) as server:
        first = server.link
        answer = server.sign_in()
        assert (answer.status, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
        assert server.token not in cookie
        assert server.request("/").status == 200
        used = first.partition("token=")[2]
        again = server.request(f"/?token={used}", cookie="")
        assert again.status == 403 and "set-cookie" not in again.headers
        assert server.request(f"/?token={used}").headers["location"] == "/", (
            "the same browser, by its history"
        )
        assert server.next_link() != first
        assert (
            server.request(f"/?token={server.token}", cookie="")
            .headers["set-cookie"]
            .startswith(server.cookie)
        )


def test_without_the_cookie_nothing_is_told(server: BoardServer) -> None:
    for path in (
        "/",
        "/static/app.js",
        "/api/runs",
        "/api/log?run=x",
        "/?token=",
        "/?token=guess",
        "/nothing",
    ):
        answer = server.request(path, cookie="")
        assert answer.status == 403, path
        assert b"ring-" not in answer.body
    name = server.cookie.partition("=")[0]
    for cookie in (f"{name}=", f"{name}=guess", "other=1", f"{name}; =;;", '"', f"{name}=é"):
        assert server.request("/api/runs", cookie=cookie).status == 403, cookie
    assert server.request("/api/runs", cookie=f"a=1; {server.cookie}; b=2").status == 200


def test_a_name_that_was_bent_to_this_host_gets_no_answer(server: BoardServer) -> None:
    for host in (
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        "[::2]:1",
    ):
        answer = server.request("/api/runs", {"Host": host})
        assert answer.status == 421, host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9999", "[::1]:8765", "[::1]"):
        assert server.request("/api/runs", {"Host": host}).status == 200, host
    cookie = server.cookie.encode()
    two = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nCookie: " + cookie
    assert raw(server.port, two + b"\r\nConnection: close\r\n\r\n").split()[1] in (b"400", b"421")
    old = b"GET /api/runs HTTP/1.0\r\nCookie: " + cookie + b"\r\n\r\n"
    assert raw(server.port, old).split()[1] == b"421"


@pytest.mark.parametrize("host", ["localhost:", "localhost:x", "localhost:１", "::1", "127.0.0.1:80:80"])
def test_a_malformed_name_is_not_ours(host: str) -> None:
    assert not is_our_name(host)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_it_is_read_only(server: BoardServer, method: str) -> None:
    assert server.request("/api/runs", method=method).status == 405


def test_a_head_has_no_body(server: BoardServer) -> None:
    answer = server.request("/", method="HEAD")
    assert answer.status == 200 and answer.body == b"" and int(answer.headers["content-length"]) > 0


def test_a_page_of_another_port_may_not_ask(server: BoardServer) -> None:
    for site in ("cross-site", "same-site"):
        assert server.request("/api/runs", {"Sec-Fetch-Site": site}).status == 403
        assert server.request("/static/app.js", {"Sec-Fetch-Site": site}).status == 403
    assert server.request("/api/runs", {"Sec-Fetch-Site": "same-origin"}).status == 200
    assert server.request("/", {"Sec-Fetch-Site": "cross-site"}).status == 200, (
        "a link elsewhere may lead here"
    )


def test_every_answer_says_what_its_page_may_do(server: BoardServer) -> None:
    answers = [
        server.request("/"),
        server.request("/static/app.js"),
        server.request("/api/runs"),
        server.request("/nothing"),
        server.request("/api/runs", method="POST"),
        server.request("/", cookie=""),
        server.request("/", {"Host": "evil.example"}),
        server.request("/api/lines?low=x"),
    ]
    assert [answer.status for answer in answers] == [200, 200, 200, 404, 405, 403, 421, 400]
    for answer in answers:
        policy = {
            part.split()[0]: part.split()[1:] for part in answer.headers["content-security-policy"].split(";")
        }
        assert policy["default-src"] == ["'none'"] and policy["frame-ancestors"] == ["'none'"]
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    page = answers[0].body.decode()
    assert "<script src=" in page and "onload" not in page and "style=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2f..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/app.js%00",
        "/static/",
        "/api/../app.py",
        "/api/log?run=../../../etc",
        "/api/log?run=%2e%2e",
        "/api/details?run=ring-20260114-093010-x3k9/../x",
        "/api/artifacts?run=",
        "/api/artifacts",
    ],
)
def test_no_path_leads_out(server: BoardServer, path: str) -> None:
    assert server.request(path).status == 404


def test_a_socket_of_the_users_own_and_the_command_that_reaches_it(tmp_path: Path) -> None:
    session = Path(tempfile.mkdtemp(dir="/tmp"))  # a worker's own folder may be too deep for a socket
    there = {"XDG_RUNTIME_DIR": str(session), "SSH_CONNECTION": "10.0.0.9 5 10.0.0.1 2222"}
    with board(tmp_path, "--socket", "--local-port", "9123", **there) as server:
        (path,) = session.glob("tuneplane/*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        (command,) = [line.strip() for line in server.said if line.strip().startswith("ssh ")]
        words = shlex.split(command)
        assert words[:6] == ["ssh", "-N", "-L", f"9123:{path}", "-p", "2222"]
        assert words[6].endswith("@" + os.uname().nodename)
        assert server.link.startswith("http://localhost:9123/?token=")
        connection = http.client.HTTPConnection("localhost:9123", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", f"/?token={server.token}")
        assert connection.getresponse().status == 303
        connection.close()
        assert server.end() == 0
        assert not path.exists()
    shutil.rmtree(session)


@pytest.mark.parametrize(
    "neighbour",
    ['prefs={"a": 1}', 'k=["x","y"]', "a=b c", "x", "=", "caf\u00e9=1".encode().decode("latin-1")],
)
def test_cookies_of_other_programs_on_this_host_lock_nobody_out(server: BoardServer, neighbour: str) -> None:
    """Cookies know no ports: a notebook's come along."""
    for cookies in (f"{neighbour}; {server.cookie}", f"{server.cookie}; {neighbour}"):
        assert server.request("/api/runs", cookie=cookies).status == 200, cookies


def test_a_session_folder_that_others_could_enter_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made = socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert made.parent == Path("/tmp") and stat.S_IMODE(made.stat().st_mode) == 0o700
    made.rmdir()
    deep = tmp_path / ("x" * MAX_SOCKET_PATH)
    deep.mkdir(mode=0o700)
    made = socket_folder({"XDG_RUNTIME_DIR": str(deep)})
    assert made.parent == Path("/tmp")
    made.rmdir()


def test_what_is_printed_can_be_pasted_whatever_the_names_are() -> None:
    command = tunnel_command(Path("/tmp/a b/$x.sock"), 80, "o'neil", "login 1", "a b c 22")
    assert shlex.split(command) == ["ssh", "-N", "-L", "80:/tmp/a b/$x.sock", "o'neil@login 1"]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tp")), "board", "--port", port],
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 1
    assert f"port {port} cannot be listened on" in done.stderr and "--port 0" in done.stderr
    assert done.stdout == ""


def test_an_installation_without_the_page_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OperationError) as raised:
        read_assets(tmp_path)
    (fault,) = raised.value.faults
    assert "was not built" in fault.what and "make board" in fault.remedy


def test_tokens_are_never_the_same() -> None:
    access = Access()
    first = access.token
    assert not access.use("") and not access.use(first + "x") and not access.use("é\udcff")
    assert access.use(first) and not access.use(first) and access.token != first
