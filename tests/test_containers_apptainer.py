"""What really is inside a container that Apptainer starts for an ordinary user on a node of the testbed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from testbed_client import Testbed

from tuneplane.containers import Container, Launch, Mount, launch

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(300)]

START = """\
import json, os, sys
with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
    start = json.load(file)
for path, text in start["files"].items():
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
os.chdir(start["cwd"])
os.execvpe(start["argv"][0], start["argv"], start["environ"])
"""

SHOW_ENVIRONMENT = """\
import json, os, sys
json.dump({k.decode("utf-8", "surrogateescape"): v.hex() for k, v in os.environb.items()}, sys.stdout)
"""

AWKWARD = {
    "EMPTY": "",
    "SPACES": "  a  b ",
    "HOME_LIKE": "$HOME ${HOME} $$ $1 $",
    "COMMAND": "$(id) `id` $(touch /tmp/evaluated)",
    "SINGLE": "it's '' '",
    "DOUBLE": '"a" ""b',
    "BACKSLASH": "a\\b\\\\c\\n\\$HOME\\",
    "LINES": "a\nb\n\n c\n",
    "OTHER_CONTROL": "a\tb\rc\x01\x1b[31m",
    "UNICODE": "héé 中文 🎉 \u2028",
    "GLOB": "* ? [a] {a,b} ~ !x #y",
    "EQUALS": "a=b=c",
    "PERCENT": "100% %s",
    "JSON": '{"a": ["b", null]}',
    "LONG": "x" * 100_000,
    "LANG": "C.UTF-8",
    "http_proxy": "http://proxy.example:3128",
}


class Node:
    """One attempt's folders of alice's on the shared storage, and starts of containers on node n1."""

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        self.testbed = testbed
        self.folder = folder
        for name in ("work", "tmp", "home", "runtime"):
            (folder / name).mkdir(parents=True)
        self.path = testbed.exec(["sh", "-c", 'printf %s "$PATH"']).stdout
        self.container = Container(
            runtime="apptainer",
            image=str(testbed.image),
            workdir="/",
            tmp_dir=str(folder / "tmp"),
            home_dir=str(folder / "home"),
            state_dir=str(folder / "runtime"),
        )

    def build(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Mount] = (),
        **changed,
    ) -> Launch:
        return launch(replace(self.container, **changed), argv, env or {}, mounts, {"PATH": self.path})

    def start(self, started: Launch, prefix: Sequence[str] = (), **more) -> CompletedProcess[str]:
        self.testbed.give(self.folder)
        file = self.folder / f"{secrets.token_hex(4)}.json"
        file.write_text(json.dumps(asdict(started)), encoding="utf-8")
        file.chmod(0o644)
        argv = [*prefix, "/usr/bin/python3", "-I", "-c", START, file]
        return self.testbed.node_exec("n1", argv, user="alice", **more)

    def run(self, argv: Sequence[str], *given, check: bool = True, **changed) -> CompletedProcess[str]:
        return self.start(self.build(argv, *given, **changed), check=check)

    def environment(self, *given, **changed) -> dict[str, bytes]:
        done = self.run(["/usr/bin/python3", "-I", "-c", SHOW_ENVIRONMENT], *given, **changed)
        assert done.stderr == ""
        return {name: bytes.fromhex(value) for name, value in json.loads(done.stdout).items()}


@pytest.fixture
def node(testbed: Testbed) -> Iterator[Node]:
    folder = testbed.home() / f"containers-{secrets.token_hex(4)}"
    yield Node(testbed, folder)
    shutil.rmtree(folder, ignore_errors=True)


def hostile_image(node: Node, environment: str) -> list[Mount]:
    """Mounts that give the image this %environment section."""
    file = node.folder / "image-environment.sh"
    file.write_text("#!/bin/sh\n" + environment)
    return [Mount(str(file), "/.singularity.d/env/90-environment.sh", read_only=True)]


def test_every_value_arrives_byte_for_byte(node):
    found = node.environment(AWKWARD)
    assert {name: found.get(name) for name in AWKWARD} == {n: v.encode() for n, v in AWKWARD.items()}
    assert not (node.folder / "tmp" / "evaluated").exists()


def test_every_value_arrives_under_the_name_of_singularity_too(node):
    program = node.testbed.exec(["sh", "-c", "command -v apptainer"]).stdout.strip()
    link = node.folder / "singularity"
    link.symlink_to(os.path.realpath(program))
    found = node.environment({"A": "$HOME 'x'\n", "B": ""}, binary=str(link))
    assert (found["A"], found["B"]) == (b"$HOME 'x'\n", b"")


def test_values_given_win_over_the_images_own(node):
    names = ["TUNEPLANE_OUT_DIR", "HF_HOME", "HF_TOKEN", "TMPDIR", "HOME", "LANG", "EMPTY"]
    env = {name: "" if name == "EMPTY" else f"/given/{name}" for name in names}
    image = hostile_image(node, "".join(f"export {name}=/image\n" for name in names) + "unset GIVEN\n")
    found = node.environment({**env, "GIVEN": "1"}, image)
    expected = {**env, "TMPDIR": "/tmp", "HOME": str(node.folder / "home"), "GIVEN": "1"}
    assert {name: found.get(name) for name in expected} == {n: v.encode() for n, v in expected.items()}


@pytest.mark.contract("C24")
def test_the_folder_given_is_first_on_pythonpath_and_the_images_own_stays_behind_it(node):
    env = {"PYTHONPATH": "/w/.tuneplane/kernel"}
    image = hostile_image(node, "export PYTHONPATH='/opt/a b:/opt/c'\n")
    assert node.environment(env, image)["PYTHONPATH"] == b"/w/.tuneplane/kernel:/opt/a b:/opt/c"
    assert node.environment(env)["PYTHONPATH"] == b"/w/.tuneplane/kernel"
    assert node.environment({}, image)["PYTHONPATH"] == b"/opt/a b:/opt/c"


def test_values_of_the_testbeds_contradicting_image_lose_too(node):
    found = node.environment({"TUNEPLANE_OUT_DIR": "/o", "HF_TOKEN": "t"}, image=str(node.testbed.env_image))
    assert (found["TUNEPLANE_OUT_DIR"], found["HF_TOKEN"]) == (b"/o", b"t")


def test_nothing_of_the_starting_environment_is_inside(node):
    started = node.build(["/usr/bin/python3", "-I", "-c", SHOW_ENVIRONMENT], {"A": "1"})
    started.environ.update({"HTTPS_SECRET": "x", "PYTHONPATH": "/evil", "LD_LIBRARY_PATH": "/evil"})
    found = json.loads(node.start(started).stdout)
    assert not {"HTTPS_SECRET", "PYTHONPATH"} & set(found)
    assert "/evil" not in bytes.fromhex(found.get("LD_LIBRARY_PATH", "")).decode()


@pytest.mark.contract("C10")
def test_the_path_is_the_images(node):
    image = str(node.testbed.env_image)
    found = node.environment({"PATH": "/host/bin"}, image=image)
    assert found["PATH"].startswith(b"/opt/image/bin:") and b"/host/bin" not in found["PATH"]
    assert node.run(["image-tool"], image=image).stdout == "from the image\n"


def test_the_hosts_home_and_the_packages_in_it_are_not_inside(node):
    packages = node.testbed.home() / ".local" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    module = packages / f"planted_{secrets.token_hex(4)}.py"
    module.write_text("")
    node.testbed.give(node.testbed.home() / ".local")
    try:
        name = module.stem
        host = node.testbed.node_exec(
            "n1", ["/usr/bin/python3", "-c", f"import {name}"], user="alice", check=False
        )
        assert host.returncode == 0, "the trap is not set"
        done = node.run(["python3", "-c", f"import {name}"], check=False)
        assert f"No module named '{name}'" in done.stderr
        looked = node.run(["ls", "-A", str(node.testbed.home())]).stdout.split()
        assert looked == [node.folder.name], "only the way to the attempt's own folders"
    finally:
        module.unlink()


def test_the_home_is_a_writable_folder_of_the_attempt_and_passwd_agrees(node):
    home = str(node.folder / "home")
    program = "import os, pwd; print(os.path.expanduser('~')); print(pwd.getpwuid(os.getuid()).pw_dir)"
    assert node.run(["python3", "-c", program]).stdout.split() == [home, home]
    node.run(["bash", "-c", "mkdir -p ~/.cache && echo here > ~/.cache/x"])
    assert (node.folder / "home/.cache/x").read_text() == "here\n"


def test_a_home_below_tmp_is_not_hidden_by_the_tmp_of_the_attempt(node):
    """Where a site's node-local scratch is /tmp itself."""
    base = f"/tmp/containers-{secrets.token_hex(4)}"
    node.testbed.node_exec("n1", ["mkdir", "-p", f"{base}/tmp", f"{base}/home", f"{base}/work"], user="alice")
    try:
        folders = {"tmp_dir": f"{base}/tmp", "home_dir": f"{base}/home", "workdir": f"{base}/work"}
        work = [Mount(f"{base}/work", f"{base}/work", read_only=True)]
        node.run(["bash", "-c", "pwd > ~/x && echo > /tmp/y && ! echo > z 2>/dev/null"], {}, work, **folders)
        there = node.testbed.node_exec("n1", ["cat", f"{base}/home/x", f"{base}/tmp/y"]).stdout
        assert there == f"{base}/work\n\n"
    finally:
        node.testbed.node_exec("n1", ["rm", "-rf", base])


def test_tmp_is_the_attempts_and_the_hosts_is_not_inside(node):
    mark = f"/tmp/of-the-host-{secrets.token_hex(4)}"
    node.testbed.node_exec("n1", ["touch", mark], user="alice")
    try:
        done = node.run(["bash", "-c", f"ls -A /tmp /var/tmp; touch /tmp/a /var/tmp/b; [ ! -e {mark} ]"])
        assert done.stdout.split() == ["/tmp:", "/var/tmp:"]
        assert sorted(p.name for p in (node.folder / "tmp").iterdir()) == ["a", "b"]
    finally:
        node.testbed.node_exec("n1", ["rm", "-f", mark])


def test_the_folder_that_the_start_came_from_is_not_inside(node):
    other = node.folder / "elsewhere"
    other.mkdir()
    started = replace(node.build(["ls", str(other)]), cwd=str(other))
    assert "No such file" in node.start(started, check=False).stderr


def test_the_image_is_read_only_and_mounts_are_what_they_say(node):
    for name in ("rw", "ro"):
        (node.folder / name).mkdir()
    mounts = [
        Mount(str(node.folder / "rw"), "/data/rw"),
        Mount(str(node.folder / "ro"), "/data/ro", read_only=True),
    ]
    program = "for d in /data/rw /data/ro /opt; do touch $d/x 2>/dev/null && echo $d; done; true"
    assert node.run(["bash", "-c", program], {}, mounts).stdout == "/data/rw\n"
    assert (node.folder / "rw/x").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("a b", " lead", "trail ", "a:b", "a,b", "a=b", 'a"b', '"', "a'b", "a\nb", "a\tb", "a\\b", "$HOME"),
        *("`id`", "a;b&c|d", "*", "#h", "%j", "-x", "中文🎉", "all \"of\": it, 'x' $y\n%z"),
    ],
)
def test_paths_of_any_name_are_mounted_entered_and_run(node, name):
    folder = node.folder / name
    folder.mkdir()
    (folder / "in").write_text("here")
    mounts = [Mount(str(folder), str(folder)), Mount(str(folder), "/mnt/" + name, read_only=True)]
    program = (
        "import os, sys; print(repr([os.getcwd(), *map(lambda p: open(p + '/in').read(), sys.argv[1:])]))"
    )
    argv = ["python3", "-I", "-c", program, str(folder), "/mnt/" + name]
    image = node.folder / f"{name}.sif"
    os.link(node.testbed.image, image)
    done = node.run(argv, {}, mounts, workdir="/mnt/" + name, image=str(image))
    assert done.stdout == repr(["/mnt/" + name, "here", "here"]) + "\n"


def test_arguments_arrive_as_they_are(node):
    given = [value for name, value in AWKWARD.items() if name != "LONG"] + ["-x", "--env", "--", "A=b"]
    done = node.run(["python3", "-I", "-c", "import json, sys; json.dump(sys.argv[1:], sys.stdout)", *given])
    assert json.loads(done.stdout) == given


def test_the_container_shares_the_nodes_network_processes_and_shared_memory(node):
    program = (
        "readlink /proc/self/ns/net /proc/self/ns/pid /proc/self/ns/ipc; stat -f -c %b /dev/shm; hostname"
    )
    on_host = node.testbed.node_exec("n1", ["bash", "-c", program], user="alice").stdout
    assert node.run(["bash", "-c", program]).stdout == on_host
    node.run(["bash", "-c", "f=$(mktemp /dev/shm/x.XXXX) && rm $f && [ -e /dev/fuse ]"])


def test_gpus_are_asked_for_without_noise_where_a_node_has_none(node):
    done = node.run(["true"], gpus=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(("program", "code"), [("exit 37", 37), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_exit_code_is_the_programs(node, program, code):
    done = node.run(["bash", "-c", program], check=False)
    assert done.returncode in (code, 128 - code)


def test_an_image_that_is_none_is_said_so(node):
    bad = node.folder / "bad.sif"
    bad.write_text("no image")
    done = node.run(["true"], check=False, image=str(bad))
    assert done.returncode != 0 and "bad.sif" in done.stderr


WATCH = r"""
import json, os, signal, subprocess, sys, time
with open(sys.argv[1], encoding="utf-8") as file:
    start = json.load(file)
for path, text in start["files"].items():
    with open(path, "w") as file:
        file.write(text)
os.chdir(start["cwd"])
run = subprocess.Popen(
    start["argv"], env=start["environ"], stdout=subprocess.PIPE, text=True, start_new_session=True
)
assert run.stdout.readline() == "ready\n"
seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
children = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        continue
    children.setdefault(int(rest.split()[1]), []).append((int(pid), name))
family, queue = [], [run.pid]
while queue:
    for pid, name in children.get(queue.pop(), ()):
        family.append((pid, name))
        queue.append(pid)
for pid, name in family:
    if name not in sys.argv[2].split(","):
        os.kill(pid, signal.SIGTERM)
print(json.dumps({"said": run.communicate(timeout=30)[0], "code": run.returncode, "ps": seen,
                  "names": [name for _, name in family]}))
"""

SAVES_WHEN_TOLD_TO_END = """\
import signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # runtimes pass it on once more, into an import
    import wsgiref.handlers, xml.dom.minidom  # read from the image only now
    print("saved", flush=True)
    sys.exit(4)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("shell", "code"), [([], 4), (["bash", "-c", '"$@"; exit 9', "sh"], 128 + signal.SIGTERM)]
)
def test_a_trainer_told_to_end_still_has_its_image_and_its_secrets_stand_in_no_argument(node, shell, code):
    """All are told at once; a shell dies of it, and what it started still saves."""
    argv = [*shell, "python3", "-c", SAVES_WHEN_TOLD_TO_END]
    started = node.build(argv, {"HF_TOKEN": "s3cret-of-alice"})
    node.testbed.give(node.folder)
    file = node.folder / "start.json"
    file.write_text(json.dumps(asdict(started)))
    file.chmod(0o644)
    servers = "squashfuse_ll,squashfuse,fuse-overlayfs"
    done = node.testbed.node_exec("n1", ["/usr/bin/python3", "-c", WATCH, file, servers], user="alice")
    seen = json.loads(done.stdout)
    assert (seen["said"], seen["code"]) == ("saved\n", code)
    assert "signal.signal" in seen["ps"]
    assert "s3cret-of-alice" not in seen["ps"]
