"""Debian packages that the testbed needs and the machine lacks, unpacked into the cache folder.

Called by ``up`` and ``image``. Nothing is installed on the machine: the hosts of the testbed see the unpacked
packages as a layer over their ``/usr`` and ``/etc`` (``hosts.py``), and apt keeps its lists in the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layout import Layout, TestbedError

CODENAME = "bookworm"
ARCHIVE_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

#: Slurm and what it stands on; then what building and running images needs.
WANTED = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurmdbd",
    "munge",
    "mariadb-server-core",
    "mariadb-client-core",
    "iproute2",
    "patchelf",
    "squashfs-tools",
    "squashfuse",
    "fuse3",
    "uidmap",
    "libseccomp2",
    "libsqlite3-0",
)

APT_TIMEOUT_S = 600

#: Raised when the way of unpacking changes, so that what an older way unpacked is not taken.
RECIPE = 1


@dataclass(frozen=True)
class Source:
    """One archive and suite of the machine's own apt configuration."""

    uri: str
    suite: str
    signed_by: str

    def line(self, suite: str | None = None) -> str:
        """The line of sources.list for this archive, or for another suite of it."""
        return f"deb [signed-by={self.signed_by}] {self.uri} {suite or self.suite} main\n"


def parse_deb822(text: str) -> Iterator[Source]:
    """The sources of a ``*.sources`` file (sources.list(5), "DEB822-style format")."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[name] = fields.get(name, "") + " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or "main" not in fields.get("components", "").split():
            continue
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        key = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, key if key.startswith("/") else ARCHIVE_KEYRING)


def parse_one_line(text: str) -> Iterator[Source]:
    """The sources of a ``sources.list`` file (sources.list(5), "one-line-style format")."""
    for line in text.splitlines():
        found = re.match(
            r"deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<rest>.*)", line.strip()
        )
        if found is None or "main" not in found["rest"].split():
            continue
        key = re.search(r"signed-by=(/\S+)", found["options"] or "")
        yield Source(found["uri"], found["suite"], key[1] if key else ARCHIVE_KEYRING)


def read_sources(apt: Path = Path("/etc/apt")) -> list[Source]:
    """Debian's own archives in the machine's apt configuration, the main one first.

    Raises TestbedError where the machine is no Debian 12 or names no archive of it.
    """
    release = Path("/etc/os-release")
    if not release.exists() or f"VERSION_CODENAME={CODENAME}" not in release.read_text(encoding="utf-8"):
        raise TestbedError("the testbed runs on Debian 12 (bookworm) alone")
    sources: list[Source] = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            sources.extend(parse_deb822(path.read_text(encoding="utf-8")))
        elif path.suffix == ".list" and path.exists():
            sources.extend(parse_one_line(path.read_text(encoding="utf-8")))
    wanted = [s for s in sources if s.suite in (CODENAME, f"{CODENAME}-updates", f"{CODENAME}-security")]
    wanted.sort(key=lambda source: source.suite)
    if not wanted or wanted[0].suite != CODENAME:
        raise TestbedError(
            f"no archive with the suite {CODENAME} and the component main in /etc/apt: add one"
        )
    return wanted


def base_status(status: str) -> str:
    """The stanzas of dpkg's status that every Debian has: required packages and what they depend on.

    What else the machine happens to have may be gone, or be another version, when the cache is used again.
    """
    stanzas: dict[str, str] = {}
    depends: dict[str, list[str]] = {}
    provided: dict[str, list[str]] = {}
    needed: list[str] = []
    for stanza in status.split("\n\n"):
        fields = dict(re.findall(r"(?m)^([A-Za-z-]+): (.*)$", stanza))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name = fields["Package"]
        stanzas[name] = stanza.strip()
        for virtual in re.findall(
            r"[a-z0-9][a-z0-9+.-]+", re.sub(r"\(.*?\)", "", fields.get("Provides", ""))
        ):
            provided.setdefault(virtual, []).append(name)
        relations = re.sub(
            r"\(.*?\)|:any", "", f"{fields.get('Pre-Depends', '')}, {fields.get('Depends', '')}"
        )
        depends[name] = re.findall(r"[a-z0-9][a-z0-9+.-]+", relations)
        if fields.get("Priority") == "required" or fields.get("Essential") == "yes":
            needed.append(name)
    base: set[str] = set()
    while needed:
        name = needed.pop()
        for real in [name] if name in stanzas else provided.get(name, []):
            if real not in base:
                base.add(real)
                needed.extend(depends[real])
    return "".join(f"{stanzas[name]}\n\n" for name in sorted(base))


class Apt:
    """apt-get with lists, cache, sources and status of its own, so that the machine's stay as they are."""

    def __init__(self, folder: Path, lines: list[str], status: str) -> None:
        self.folder = folder
        self.archives = folder / "cache" / "archives"
        for needed in (folder / "lists" / "partial", self.archives / "partial"):
            needed.mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text(status, encoding="utf-8")
        (folder / "sources.list").write_text("".join(dict.fromkeys(lines)), encoding="utf-8")

    def download(self, *names: str) -> list[Path]:
        """Fetch packages and whatever they need beyond the given status; returns the files."""
        self.run("update")
        self.run("install", "--download-only", "--no-install-recommends", *names)
        return sorted(self.archives.glob("*.deb"))

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run apt-get and return what it printed; TestbedError with its last lines where it failed."""
        options = {
            "Dir::Etc::SourceList": str(self.folder / "sources.list"),
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::status": str(self.folder / "status"),
            "Dir::State::Lists": str(self.folder / "lists"),
            "Dir::Cache": str(self.folder / "cache"),
            "Debug::NoLocking": "1",
            "APT::Sandbox::User": "root",
            "APT::Update::Post-Invoke-Success::": "true",
            "Acquire::Languages": "none",
        }
        command = ["apt-get", "-q", "-y"]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise TestbedError(f"apt-get {' '.join(arguments)} failed:\n{tail}")
        return done.stdout


def unpack(debs: list[Path], root: Path) -> None:
    """Unpack packages into ``root``, with /bin, /sbin and /lib merged into /usr as on the machine.

    Maintainer scripts do not run: the alternatives that Slurm's would set are made as plain links.
    """
    for deb in debs:
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(root)], check=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (root / name).exists():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
    for program in [*root.glob("usr/bin/*-wlm"), *root.glob("usr/sbin/*-wlm")]:
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)


def manifest_path(layout: Layout) -> Path:
    """The file that lists what was unpacked; written last. A changed wish has a folder of its own."""
    key = hashlib.sha256(repr((RECIPE, WANTED)).encode()).hexdigest()[:12]
    return layout.cache / "packages" / key / "manifest.json"


def read_layers(layout: Layout) -> Path:
    """The root of the unpacked packages, which are fetched first where the cache has none.

    Raises TestbedError where apt cannot deliver them.
    """
    manifest = manifest_path(layout)
    root = manifest.parent / "root"
    if manifest.exists():
        return root
    shutil.rmtree(manifest.parent, ignore_errors=True)
    status = base_status(Path("/var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace"))
    apt = Apt(layout.cache / "apt" / "stable", [source.line() for source in read_sources()], status)
    debs = apt.download(*WANTED)
    root.mkdir(parents=True)
    unpack(debs, root)
    manifest.write_text(json.dumps([deb.name for deb in debs], indent=1), encoding="utf-8")
    shutil.rmtree(apt.folder)
    return root


def layered(root: Path, argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` as root on this machine, with the unpacked packages over its /usr."""
    script = (
        'mount -t overlay overlay -o "ro,lowerdir=$1/usr:/usr" /usr'
        ' && mount -t overlay overlay -o "ro,lowerdir=$1/etc:/etc" /etc && shift && exec "$@"'
    )
    return ["unshare", "--mount", "--", "/bin/sh", "-c", script, "sh", str(root), *argv]
