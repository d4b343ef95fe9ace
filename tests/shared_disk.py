"""A small disk that every host of the testbed sees, as one filesystem, to be filled to its last byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed_client import Testbed

SIZE = "24M"


@contextmanager
def shared_disk(bed: Testbed, user: str = "alice") -> Iterator[Path]:
    """The folder of an ordinary user on such a disk; gone afterwards, with all jobs that are there.

    The hosts mount one block device, so that they share the filesystem's one superblock in the kernel.
    """
    image, place = bed.state / "small-disk.img", bed.shared / "small-disk"
    image.unlink(missing_ok=True)
    bed.exec(["mkfs.ext2", "-q", "-m", "0", str(image), SIZE], user="root")
    bed.exec(["mkdir", "-p", str(place)], user="root")
    device = bed.exec(["losetup", "--find", "--show", str(image)], user="root").stdout.strip()
    mounted = []
    try:
        mount = ["mount", "-t", "ext4", device, str(place)]
        bed.exec(mount, user="root")
        mounted.append("")
        for node in bed.nodes:
            bed.node_exec(node, mount)
            mounted.append(node)
        bed.exec(["install", "-d", "-o", user, str(place / user)], user="root")
        yield place / user
    finally:
        for node in reversed(mounted):
            unmount = ["umount", "--lazy", str(place)]
            bed.node_exec(node, unmount, check=False) if node else bed.exec(unmount, user="root", check=False)
        bed.exec(["losetup", "--detach", device], user="root", check=False)
        image.unlink(missing_ok=True)
