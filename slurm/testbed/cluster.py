"""What the commands do to the cluster as a whole: start it, change it, end it, describe it.

Called by ``commands.py``, which holds the lock while any of these changes something.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import apptainer
import database
import hosts
import packages
import view
from layout import ADDRESSES, CONTROLLER, NODES, USERS, Layout, TestbedError

import slurm

#: Set by ``accounting`` and by the layout; ``set`` must not pull them apart from the rest.
FIXED_KEYS = (
    "AccountingStorageType",
    "ClusterName",
    "SlurmctldHost",
    "SlurmUser",
    "StateSaveLocation",
    "NodeName",
    "PartitionName",
)


def up(layout: Layout, accounting: bool | None) -> None:
    """Start whatever does not run yet. ``accounting``: whether slurmctld uses slurmdbd; None leaves it as it is.

    Raises TestbedError with what a part that did not start said.
    """
    root = packages.read_layers(layout)
    program = apptainer.read_apptainer(layout, root)
    for folder in (layout.state, layout.log):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    made_of = layout.state / "made-of"
    running = hosts.find_hosts(layout)
    if running and not (layout.host(CONTROLLER) / "spec.json").exists():
        # Someone removed the state folder below running hosts, which still hold the deleted files.
        hosts.end_all(layout)
        running = {}
    if CONTROLLER not in running:
        # Nodes live inside the controller's PID namespace: none can be left.
        running.clear()
        view.write_homes(layout)
        view.write_view(layout, program)
        slurm.write_devices(layout)
        layout.slurm.mkdir(exist_ok=True)
        made_of.write_text(f"{root}\n{program}\n", encoding="utf-8")
        running[CONTROLLER] = hosts.start_host(layout, CONTROLLER, root)
    elif not made_of.exists() or made_of.read_text(encoding="utf-8") != f"{root}\n{program}\n":
        raise TestbedError(
            "it runs with other packages than this checkout asks for: `testbed down`, then `up`"
        )
    controller = running[CONTROLLER]
    hosts.wire_controller(controller)
    settings = slurm.read_settings(layout)
    changed = accounting is not None and accounting != settings.accounting
    if accounting is not None:
        settings.accounting = accounting
    slurm.write_settings(layout, settings)
    slurm.write_configuration(layout, cgroup=slurm.has_freezer(controller))
    slurm.start_munge(layout, controller)
    for name in NODES:
        if name not in running:
            running[name] = hosts.start_host(layout, name, root)
        hosts.wire_node(controller, name, running[name])
    if settings.accounting:
        database.start_accounting(layout, controller)
    if changed:
        slurm.end_daemon(controller, "slurmctld")
    slurm.start_controller(layout, controller)
    for name in NODES:
        slurm.start_node(layout, name, running[name])
    slurm.wait_for_nodes(layout, controller)


def down(layout: Layout) -> None:
    """End everything and remove the state folder; the cache stays."""
    hosts.end_all(layout)
    if layout.state.exists():
        shutil.rmtree(layout.state)


def set_accounting(layout: Layout, on: bool) -> None:
    """Restart slurmctld with or without slurmdbd; running jobs go on."""
    controller = hosts.find_host(layout, CONTROLLER)
    settings = slurm.read_settings(layout)
    settings.accounting = on
    slurm.write_settings(layout, settings)
    if on:
        database.start_accounting(layout, controller)
    restart_controller(layout)


def restart_controller(layout: Layout) -> None:
    """End slurmctld, which saves its state, and start it again with the present configuration."""
    controller = hosts.find_host(layout, CONTROLLER)
    renew_controller(layout, controller)
    slurm.announce_nodes(hosts.find_hosts(layout))
    slurm.wait_for_nodes(layout, controller)


def change_conf(layout: Layout, changes: Mapping[str, str] | None) -> None:
    """Put ``changes`` into slurm.conf (None: back to the default) and have every daemon follow.

    Raises TestbedError, with the former configuration back in place, where Slurm does not take them.
    """
    for key in changes or {}:
        if key in FIXED_KEYS:
            raise TestbedError(f"{key} is the testbed's own; `accounting on|off` switches accounting")
    former = slurm.read_settings(layout)
    settings = slurm.read_settings(layout)
    settings.conf = {} if changes is None else {**former.conf, **changes}
    if settings.conf == former.conf:
        return
    touched = {
        key for key in {*settings.conf, *former.conf} if settings.conf.get(key) != former.conf.get(key)
    }
    try:
        apply_conf(layout, settings, touched)
    except TestbedError:
        apply_conf(layout, former, touched)
        raise


def reset(layout: Layout) -> None:
    """The default slurm.conf, with accounting, and every node on the network."""
    for name in NODES:
        hosts.set_link(layout, name, up=True)
    change_conf(layout, None)
    if not slurm.read_settings(layout).accounting:
        set_accounting(layout, True)


def apply_conf(layout: Layout, settings: slurm.Settings, touched: set[str]) -> None:
    slurm.write_settings(layout, settings)
    restart_nodes = any(key in slurm.SLURMD_KEYS for key in touched)
    running = hosts.find_hosts(layout)
    if restart_nodes:
        for name in NODES:
            slurm.end_daemon(running[name], "slurmd")
    renew_controller(layout, running[CONTROLLER])
    for name in NODES:
        slurm.start_node(layout, name, running[name])
    if not restart_nodes:
        hosts.run_inside(running[CONTROLLER], ["scontrol", "reconfigure"])
    slurm.wait_for_nodes(layout, running[CONTROLLER])


def notice_nodes(layout: Layout) -> None:
    """Have the controller ask all nodes now; by itself it asks each third of SlurmdTimeout, 100 s."""
    controller = hosts.find_hosts(layout).get(CONTROLLER)
    if controller is not None:
        hosts.run_inside(controller, ["scontrol", "reconfigure"])


def renew_controller(layout: Layout, controller: int) -> None:
    slurm.write_configuration(layout, cgroup=slurm.has_freezer(controller))
    slurm.end_daemon(controller, "slurmctld")
    slurm.start_controller(layout, controller)


def describe(layout: Layout) -> tuple[str, bool]:
    """What runs and how to reach it, and whether all of it runs."""
    running = hosts.find_hosts(layout)
    if CONTROLLER not in running:
        return f"down (state folder {layout.state}); start it with `testbed up`", False
    settings = slurm.read_settings(layout)
    wanted = ["munged", "slurmctld", *(["mariadbd", "slurmdbd"] if settings.accounting else [])]
    processes = hosts.find_processes(running[CONTROLLER])
    missing = [name for name in wanted if name not in processes]
    states = slurm.read_node_states(running[CONTROLLER]) if "slurmctld" not in missing else {}
    present = ", ".join(name for name in wanted if name in processes)
    lines = [f"{CONTROLLER:4} {ADDRESSES[CONTROLLER]:11} controller and login host: {present}"]
    for name in NODES:
        if name not in running:
            state = "not running"
        elif not slurm.is_running(running[name], "slurmd"):
            state = "slurmd not running"
        else:
            state = states.get(name, "unknown to slurmctld")
            missing += [name] if state.endswith("*") else []
        missing += [name] if state.endswith("running") or state.startswith("unknown") else []
        lines.append(f"{name:4} {ADDRESSES[name]:11} {state}")
    lines += [
        f"accounting {'on' if settings.accounting else 'off'}"
        + "".join(f", {key}={value}" for key, value in settings.conf.items()),
        f"process tracking by {'cgroup' if slurm.has_freezer(running[CONTROLLER]) else 'linuxproc'}",
        f"users {', '.join(USERS)}; shared folder {layout.shared}; site configuration {layout.config}",
        "a shell on the login host: testbed shell; one command: testbed exec -- sinfo",
    ]
    if missing:
        lines.append(f"missing: {', '.join(missing)}; `testbed up` starts what is missing")
    return "\n".join(lines), not missing
