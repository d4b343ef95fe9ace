"""Accounting: MariaDB without network, slurmdbd, and the accounts of the testbed's users.

Called by ``up`` and ``accounting on``. Making the tables and accounts takes seconds, so the finished data folder
is kept in the cache and later testbeds start from a copy.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import hosts
import packages
from layout import ACCOUNT, CONTROLLER, USERS, Layout, TestbedError

import slurm

INSTALL_TIMEOUT_S = 120.0
SACCTMGR_TIMEOUT_S = 120.0
#: Made last, inside the data folder: without it the folder is half made.
MARKER = "accounts.done"

ACCOUNTS = (
    "add cluster testbed",
    f"add account {ACCOUNT} Description=research Organization=testbed Cluster=testbed",
    "add account teaching Description=teaching Organization=testbed Cluster=testbed",
    "add qos high Priority=100",
    "add qos debug MaxWall=00:30:00 MaxSubmitJobsPerUser=2",
    *(f"add user {user} Account={ACCOUNT} DefaultAccount={ACCOUNT} Cluster=testbed" for user in USERS),
    f"modify user {','.join(USERS)} set QOS=normal,high,debug DefaultQOS=normal",
)


def slurmdbd_conf(layout: Layout) -> str:
    """The text of slurmdbd.conf."""
    return f"""\
AuthType=auth/munge
DbdHost={CONTROLLER}
SlurmUser=root
LogFile={layout.log}/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def start_accounting(layout: Layout, controller: int) -> None:
    """Start MariaDB and slurmdbd with the accounts made, unless they run. Raises TestbedError."""
    slurm.write_text(layout.slurm / "slurmdbd.conf", slurmdbd_conf(layout), 0o600)
    data = layout.state / "mysql"
    if not (data / MARKER).exists():
        end_accounting(controller)
        shutil.rmtree(data, ignore_errors=True)
        manifest = packages.manifest_path(layout)
        key = hashlib.sha256(repr((manifest.read_text(encoding="utf-8"), ACCOUNTS)).encode()).hexdigest()[:12]
        kept = layout.cache / "database" / key
        if kept.exists():
            shutil.copytree(kept, data)
        else:
            make_accounts(layout, controller, data)
            shutil.rmtree(kept.parent, ignore_errors=True)
            work = kept.parent / "work"
            shutil.copytree(data, work)
            work.rename(kept)
    start_mariadb(layout, controller, data)
    start_slurmdbd(layout, controller)


def end_accounting(controller: int) -> None:
    for program in ("slurmdbd", "mariadbd"):
        slurm.end_daemon(controller, program)


def start_mariadb(layout: Layout, controller: int, data: Path) -> None:
    if slurm.is_running(controller, "mariadbd"):
        return
    log = layout.log / "mariadb.log"
    command = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        "--skip-networking",
        "--socket=/run/mysqld/mysqld.sock",
        "--pid-file=/run/mysqld/mysqld.pid",
        f"--log-error={log}",
        # Nothing here outlives a power cut anyway, and the machine may be small.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=8M",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
        "--skip-log-bin",
    ]
    socket = Path(f"/proc/{controller}/root/run/mysqld/mysqld.sock")
    hosts.run_inside(controller, ["mkdir", "-p", "/run/mysqld"])
    slurm.start_detached(controller, command, layout.log / "mariadb-start.log")
    slurm.wait_for("MariaDB did not open its socket", socket.is_socket, slurm.DAEMON_START_TIMEOUT_S, log)


def start_slurmdbd(layout: Layout, controller: int) -> None:
    if slurm.is_running(controller, "slurmdbd"):
        return
    hosts.run_inside(controller, ["slurmdbd"])
    slurm.wait_for(
        "slurmdbd does not answer",
        lambda: slurm.answers(controller, ["sacctmgr", "-n", "show", "cluster"]),
        slurm.DAEMON_START_TIMEOUT_S,
        layout.log / "slurmdbd.log",
    )


def make_accounts(layout: Layout, controller: int, data: Path) -> None:
    """Make the data folder with the cluster, its accounts, QOS and users; leaves both daemons ended."""
    command = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
    # Root reaches it by the socket alone, which lies in the testbed's own /run.
    command += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=8M"]
    done = hosts.run_inside(controller, command, timeout_s=INSTALL_TIMEOUT_S)
    slurm.write_text(layout.log / "mariadb-install.log", done.stdout + done.stderr)
    start_mariadb(layout, controller, data)
    start_slurmdbd(layout, controller)
    text = "\n".join([*ACCOUNTS, "quit", ""])
    done = hosts.run_inside(controller, ["sacctmgr", "-i"], text=text, timeout_s=SACCTMGR_TIMEOUT_S)
    show = ["sacctmgr", "-nP", "show", "assoc", "format=User,Account,DefaultQOS"]
    shown = hosts.run_inside(controller, show).stdout
    if not all(f"{user}|{ACCOUNT}|normal" in shown for user in USERS):
        raise TestbedError(f"the users' accounts were not made:\n{done.stdout}{done.stderr}{shown}")
    end_accounting(controller)
    (data / MARKER).touch()
