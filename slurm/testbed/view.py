"""Files that the testbed's hosts see in /etc and /usr/local/bin in place of the machine's, or beside them.

Written by ``up`` before the first host starts; they are layers of read-only overlays afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path

from layout import ADDRESSES, CONTROLLER, GROUP, GROUP_ID, USERS, Layout


def passwd(machine: str, layout: Layout) -> str:
    """/etc/passwd: the machine's users and the testbed's own, whose ``*`` needs no line in /etc/shadow."""
    kept = [line for line in machine.splitlines() if line.split(":")[0] not in USERS]
    made = [
        f"{user}:*:{uid}:{uid}:{user.title()}:{layout.home / user}:/bin/bash" for user, uid in USERS.items()
    ]
    return "\n".join([*kept, *made]) + "\n"


def group(machine: str) -> str:
    """/etc/group: the machine's groups, one for each user and the one that all share."""
    names = {GROUP, *USERS}
    kept = [line for line in machine.splitlines() if line.split(":")[0] not in names]
    made = [f"{GROUP}:x:{GROUP_ID}:{','.join(USERS)}", *(f"{user}:x:{uid}:" for user, uid in USERS.items())]
    return "\n".join([*kept, *made]) + "\n"


def etc_hosts() -> str:
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())


def write_view(layout: Layout, apptainer: Path) -> None:
    """Write the layers below ``overlay``."""
    etc = layout.overlay / "etc"
    programs = layout.overlay / "usr" / "local" / "bin"
    for folder in (etc / "slurm", etc / "tuneplane", programs):
        folder.mkdir(parents=True, exist_ok=True)
    files = {
        "passwd": passwd(Path("/etc/passwd").read_text(encoding="utf-8"), layout),
        "group": group(Path("/etc/group").read_text(encoding="utf-8")),
        "hosts": etc_hosts(),
        "hostname": f"{CONTROLLER}\n",
        # There is no name server: an empty file makes look-ups of unknown names fail at once.
        "resolv.conf": "",
    }
    for name, text in files.items():
        (etc / name).write_text(text, encoding="utf-8")
    for name, target in {"apptainer": apptainer, "tp": layout.venv / "bin" / "tp"}.items():
        link = programs / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def write_homes(layout: Layout) -> None:
    """Make the shared folders and a home for each user."""
    for folder in (layout.shared, layout.home, layout.images, layout.config):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    for user, uid in USERS.items():
        home = layout.home / user
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, uid, uid)
