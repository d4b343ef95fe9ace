"""Apptainer for Debian 12: sid's package and trixie's libc, made to work beside the machine's own libc.

Called by ``up`` and ``image``. Versions and digests stand in apptainer.lock; the packages stay in the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import packages
from layout import HERE, Layout, TestbedError

LOCK = HERE / "apptainer.lock"
#: Raised when the way of building changes, so that a cached build of an older way is not taken.
RECIPE = 3
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PATCHED = ("usr/bin/apptainer", f"{LIBRARIES}/apptainer/bin/starter")
#: What the patched programs take from the machine or the unpacked packages beside the newer libc.
BORROWED = ("libseccomp.so.2", "libsqlite3.so.0")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(layout: Layout, lock: dict[str, dict[str, str]]) -> dict[str, Path]:
    """The locked packages, from the cache or by apt.

    Where the archive has moved on from a locked version, its present one is taken and a warning printed: apt
    has checked its signature. Raises TestbedError on a locked version whose digest differs.
    """
    folder = layout.cache / "debs"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    for name, pin in lock.items():
        path = folder / f"{name}_{pin['version']}_{pin['sha256'][:12]}.deb"
        if path.exists():
            found[name] = path
    missing = [name for name in lock if name not in found]
    if not missing:
        return found
    main = packages.read_sources()[0]
    apt = packages.Apt(
        layout.cache / "apt" / "newer", [main.line(lock[name]["suite"]) for name in missing], ""
    )
    apt.run("update")
    for name in missing:
        pin = lock[name]
        target = folder / f"{name}_{pin['version']}_{pin['sha256'][:12]}.deb"
        work = folder / f"{name}.part"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            apt.run("download", f"{name}={pin['version']}", cwd=work)
        except TestbedError:
            apt.run("download", f"{name}/{pin['suite']}", cwd=work)
            deb = next(work.glob("*.deb"))
            print(
                f"testbed: {name} {pin['version']} is gone from the archive; took {deb.name}: renew {LOCK.name}",
                file=sys.stderr,
            )
            target = deb
        else:
            deb = next(work.glob("*.deb"))
            if sha256(deb) != pin["sha256"]:
                raise TestbedError(f"{deb.name} is not the one of {LOCK.name}: sha256 {sha256(deb)}")
            deb.replace(target)
            work.rmdir()
        found[name] = target
    # The package lists of two suites are far larger than what they were needed for.
    shutil.rmtree(apt.folder)
    return found


def read_apptainer(layout: Layout, root: Path) -> Path:
    """The ready ``apptainer`` program, built first where the cache has none. ``root``: the unpacked packages."""
    text = LOCK.read_text(encoding="utf-8")
    key = hashlib.sha256(f"{RECIPE}{text}".encode()).hexdigest()[:12]
    built = layout.apptainer / key
    program = built / PATCHED[0]
    if program.exists():
        return program
    debs = fetch(layout, json.loads(text))
    work = layout.apptainer / "work"
    shutil.rmtree(work, ignore_errors=True)
    libc = work / "libc"
    for folder, deb in ((work, debs["apptainer"]), (libc, debs["libc6"])):
        folder.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(folder)], check=True)
    private = work / "usr/lib/tuneplane-testbed"
    private.mkdir()
    for library in sorted((libc / LIBRARIES).glob("*.so*")):
        shutil.copy2(library, private / library.name)
    shutil.rmtree(libc)
    for name in BORROWED:
        source = next(path for path in (root / LIBRARIES / name, Path("/", LIBRARIES, name)) if path.exists())
        shutil.copy2(source, private / name)
    # The paths stand in the programs: they must name the final folder.
    final = built / "usr/lib/tuneplane-testbed"
    for name in PATCHED:
        patch = [
            "--set-interpreter",
            f"{final}/ld-linux-x86-64.so.2",
            "--force-rpath",
            "--set-rpath",
            str(final),
        ]
        subprocess.run(packages.layered(root, ["patchelf", *patch, str(work / name)]), check=True)
    conf = work / "etc/apptainer/apptainer.conf"
    changed = conf.read_text(encoding="utf-8").replace(
        "root default capabilities = full", "root default capabilities = no"
    )
    conf.write_text(changed, encoding="utf-8")
    (work / "var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)
    # Away from /usr/bin, both programs look for configuration and session folder relative to their own place.
    for name in ("etc", "var"):
        (work / "usr" / name).symlink_to(f"../{name}")
        (work / "usr" / "lib" / name).symlink_to(f"../../{name}")
    work.rename(built)
    return program
