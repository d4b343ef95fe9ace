"""Node 0's address and port as the other nodes need them: real names and sockets in networks of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_fixture import PYTHON

import tuneplane
from tuneplane.kernel.errors import OperationError
from tuneplane.node.address import (
    FEWEST_PORTS,
    FIRST_PORT,
    LAST_PORT,
    LOWEST_PORT,
    head_address,
    is_reachable,
    pick_port,
    port_range,
)

PACKAGE = str(Path(tuneplane.__file__).parent.parent)
NETWORK = """
ip link set lo up
ip link add e0 type veth peer name cable || exit 99
ip link set cable up
ip link set e0 up
ip addr add 10.9.0.1/24 dev e0
ip -6 addr add fd09::1/64 dev e0 nodad
"""


def in_network(tmp_path: Path, hosts: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as host n1 of a network of its own, whose /etc/hosts is `hosts` and which has no DNS."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
    (tmp_path / "resolv.conf").write_text("")
    (tmp_path / "nsswitch.conf").write_text("hosts: files\n")
    unshare = ["unshare", "--net", "--mount", "--uts"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    binds = "".join(
        f'mount --bind "$PWD/{name}" "$(readlink -f /etc/{name})" || exit 99\n'
        for name in ("hosts", "resolv.conf", "nsswitch.conf")
    )
    if shutil.which("ip") is None:
        unusable("there is no ip program")
    done = subprocess.run(
        [*unshare, "bash", "-c", f"hostname n1\n{binds}{NETWORK}{script}", "bash", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        unusable(f"no network can be made here: {done.stderr}")
    return done


def unusable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def head_of(tmp_path: Path, hosts: str, *names: str) -> str:
    """What node 0 finds to be its address: the address, or what is told."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tuneplane.node.address import head_address\n"
        "from tuneplane.kernel.errors import OperationError\n"
        "try: print(head_address(sys.argv[2:]))\n"
        "except OperationError as error: print(error)\n"
    )
    (tmp_path / "head.py").write_text(code)
    done = in_network(tmp_path, hosts, f'{PYTHON} -I -S head.py "$@"', PACKAGE, *names)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.contract("C9")
def test_a_debian_host_that_calls_itself_127_0_1_1_is_found_by_its_real_address(tmp_path: Path) -> None:
    assert head_of(tmp_path, "127.0.1.1 n1\n10.9.0.2 n2\n", "n1", "n2") == "10.9.0.1"


def test_a_name_that_resolves_well_is_taken_as_it_is(tmp_path: Path) -> None:
    assert head_of(tmp_path, "127.0.1.1 n1\n10.9.0.1 n1\n", "n1", "n2") == "10.9.0.1"
    assert head_of(tmp_path, "10.9.0.1 n1\n", "n1", "n2-that-nobody-knows") == "10.9.0.1"


def test_a_network_of_ipv6_alone_works(tmp_path: Path) -> None:
    assert head_of(tmp_path, "::1 n1\nfd09::2 n2\n", "n1", "n2") == "fd09::1"
    assert head_of(tmp_path, "fd09::1 n1\n", "n1", "n2") == "fd09::1"


def test_ipv4_comes_before_ipv6(tmp_path: Path) -> None:
    assert head_of(tmp_path, "fd09::1 n1\n10.9.0.1 n1\n", "n1", "n2") == "10.9.0.1"


def test_an_address_of_one_link_alone_is_not_taken(tmp_path: Path) -> None:
    assert head_of(tmp_path, "fe80::1 n1\n169.254.1.1 n1\n10.9.0.2 n3\n", "n1", "n2", "n3") == "10.9.0.1"


@pytest.mark.contract("C9")
@pytest.mark.parametrize("hosts", ["127.0.1.1 n1\n", "127.0.1.1 n1\n127.0.1.1 n2\n::1 n2\n", ""])
def test_where_only_loopback_is_found_the_job_stops_and_says_so(tmp_path: Path, hosts: str) -> None:
    assert head_of(tmp_path, hosts, "n1", "n2", "n3") == (
        "node agent: no address of n1 that n2, n3 could reach: only loopback was found\n"
        "  → the cluster's nodes must resolve each other's names; tell its administrators"
    )


def test_a_peer_without_a_route_is_passed_over(tmp_path: Path) -> None:
    assert head_of(tmp_path, "127.0.1.1 n1\n192.0.2.7 n2\n10.9.0.3 n3\n", "n1", "n2", "n3") == "10.9.0.1"


@pytest.mark.parametrize("name", ["n" * 300, "实验", "n1\nn2", "a..b", ""])
def test_a_name_that_is_none_is_no_traceback(tmp_path: Path, name: str) -> None:
    assert "only loopback was found" in head_of(tmp_path, "127.0.1.1 n1\n", name, "n2")


def test_one_node_alone_talks_to_itself() -> None:
    assert head_address(["a-name-that-nobody-knows"]) == "127.0.0.1"
    assert head_address([]) == "127.0.0.1"


def test_another_host_reaches_the_address_and_port(tmp_path: Path) -> None:
    """Two hosts joined by a cable: one listens where the claim says, the other connects."""
    (tmp_path / "listen.py").write_text(
        "import socket, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tuneplane.node.address import head_address, pick_port\n"
        "address = head_address(['n1', 'n2']); port = pick_port(4242, address)\n"
        "with socket.create_server((address, port)) as server:\n"
        "    print(address, port, flush=True)\n"
        "    server.settimeout(20); connection, peer = server.accept()\n"
        "    print(peer[0], connection.recv(100).decode())\n"
    )
    (tmp_path / "connect.py").write_text(
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as s: s.sendall(b'hello')\n"
    )
    script = f"""
    ip link del e0
    unshare --net sleep 60 & other=$!
    until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
    ip link add v1 type veth peer name v2 netns $other
    ip addr add 10.9.0.1/24 dev v1; ip link set v1 up
    nsenter -t $other -n sh -c 'ip addr add 10.9.0.2/24 dev v2; ip link set v2 up'
    coproc listener {{ exec {PYTHON} -I -S listen.py "$1"; }}
    exec 3<&"${{listener[0]}}"  # bash forgets its own as soon as the listener has ended
    read -r -u 3 address port
    echo "$address $port"
    nsenter -t $other -n {PYTHON} -I -S connect.py "$address" "$port"
    read -r -u 3 said; echo "$said"
    kill $other
    """
    done = in_network(tmp_path, "127.0.1.1 n1\n10.9.0.2 n2\n", script, PACKAGE)
    assert done.stdout.splitlines() == ["10.9.0.1 24242", "10.9.0.2 hello"], done.stderr


@pytest.mark.parametrize(
    ("address", "reachable"),
    [
        ("10.77.0.11", True),
        ("fd00::1", True),
        ("2001:db8::1", True),
        ("127.0.0.1", False),
        ("127.8.9.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1", False),
        ("169.254.0.5", False),
        ("224.0.0.1", False),
        ("", False),
        ("n1", False),
    ],
)
def test_which_addresses_other_hosts_could_reach(address: str, reachable: bool) -> None:
    assert is_reachable(address) is reachable


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    seed = 6_789
    first = pick_port(seed)
    assert pick_port(seed) == first
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, first)):
            assert pick_port(seed) == first + 131
    with socket.create_server(("::", first), family=socket.AF_INET6, dualstack_ipv6=True):
        assert pick_port(seed) == first + 131
        assert pick_port(seed, "fd00::1") == first + 131
    assert pick_port(seed) == first


def test_a_connection_that_has_just_closed_holds_no_port() -> None:
    port = pick_port(31)
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server closes first, and waits for stray packets at this port
        client.close()
    assert pick_port(31) == port


def test_the_port_is_below_what_the_kernel_gives_to_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(pick_port(seed) < lowest for seed in range(0, 2_000_000, 50_021))


def test_a_node_whose_ports_are_all_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneplane.node.address._is_free", lambda family, port: False)
    with pytest.raises(OperationError, match=f"none of 64 ports from {FIRST_PORT} up is free on this node"):
        pick_port(1)


@given(st.integers(1, 65_536))
def test_a_range_of_ports_is_a_users_own_and_below_the_ephemeral_one(ephemeral_start: int) -> None:
    first, last = port_range(ephemeral_start)
    assert LOWEST_PORT <= first < last <= LAST_PORT
    assert last - first + 1 >= FEWEST_PORTS
    if ephemeral_start >= LOWEST_PORT + FEWEST_PORTS:
        assert last < ephemeral_start


@pytest.mark.parametrize(
    ("ephemeral_start", "expected"),
    [
        (32_768, (20_000, 29_999)),
        (25_000, (20_000, 24_999)),
        (10_000, (9_000, 9_999)),
        (1_024, (20_000, 29_999)),
    ],
)
def test_which_ports_are_chosen_from(ephemeral_start: int, expected: tuple[int, int]) -> None:
    assert port_range(ephemeral_start) == expected
