"""What the job's GPUs tell through NVIDIA's management library, by ctypes. For Sampler, in its thread alone.

Every value stands for itself: what a GPU, a driver or a MIG instance does not tell is left out.
"""

from __future__ import annotations

import ctypes
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LIBRARY = "libnvidia-ml.so.1"

RETRY_S = 60.0
"""How long a library that says nothing is left alone: a driver may be loaded anew, and to ask it takes long."""

# Source: nvml.h of CUDA 12. The version of a structure is its size and, in the highest byte, its number.
_SUCCESS = 0
_TEMPERATURE_GPU = 0
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _MemoryV2(ctypes.Structure):
    """Of drivers from 510 on: `used` is without what the driver keeps for itself, as nvidia-smi shows it."""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


def visible_devices(value: str | None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES that CUDA would take; None: it is not set, and all are visible.

    Indices, UUIDs, also abbreviated ones, and MIG instances; the list ends at the first that is none of these.
    Source: CUDA C++ Programming Guide, environment variables.
    """
    if value is None:
        return None
    found = []
    for word in value.split(","):
        name = word.strip()
        if not (name.isascii() and name.isdecimal()) and not name.startswith(("GPU-", "MIG-")):
            break
        found.append(name)
    return found


class Gpus:
    """The GPUs of one job on this node, in the order in which CUDA numbers them.

    visible: entries as of `visible_devices`. library: another name only for tests.
    """

    def __init__(self, visible: list[str] | None, library: str = LIBRARY) -> None:
        self._visible = visible
        self._name = library
        self._library: Any = None
        self._devices: dict[int, ctypes.c_void_p] = {}
        self._again_at = 0.0

    def read(self) -> dict[str, float]:
        """`gpu<i>/<what>` of all that could be had just now."""
        if self._visible == [] or time.monotonic() < self._again_at:
            return {}
        if not self._devices:
            self._open()
        found = {
            f"gpu{index}/{what}": value
            for index, handle in self._devices.items()
            for what, value in self._values(handle)
        }
        if not found:
            self.close()
            self._again_at = time.monotonic() + RETRY_S
        return found

    def close(self) -> None:
        """Let the library go; the next `read` asks it anew."""
        if self._devices:
            self._devices = {}
            self._call("nvmlShutdown")

    def _open(self) -> None:
        if self._library is None:
            try:
                self._library = ctypes.CDLL(self._name)
            except OSError:  # no NVIDIA driver on this node
                return
        if not self._call("nvmlInit_v2"):
            return
        names = self._visible
        if names is None:
            count = ctypes.c_uint()
            names = (
                [str(index) for index in range(count.value)]
                if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
                else []
            )
        for index, name in enumerate(names):
            handle = self._by_index(int(name)) if name.isdecimal() else self._by_uuid(name)
            if handle is not None:
                self._devices[index] = handle
        if not self._devices:
            self._call("nvmlShutdown")

    def _by_index(self, index: int) -> ctypes.c_void_p | None:
        handle, mode, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if not self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
            return None
        self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending))
        # Of a GPU that is cut into MIG instances the job has one, and its whole would tell of the others' too.
        return None if mode.value else handle

    def _by_uuid(self, uuid: str) -> ctypes.c_void_p | None:
        handle, wanted = ctypes.c_void_p(), uuid.encode("ascii", "replace")
        if self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(wanted), ctypes.byref(handle)):
            return handle
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):  # CUDA takes the beginning of a UUID, NVML does not
            text = ctypes.create_string_buffer(_UUID_BYTES)
            size = ctypes.c_uint(_UUID_BYTES)
            if (
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
                and self._call("nvmlDeviceGetUUID", handle, text, size)
                and text.value.startswith(wanted)
            ):
                return handle
        return None

    def _values(self, handle: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        utilization, number = _Utilization(), ctypes.c_uint()
        if self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilization)):
            yield "utilization_percent", float(utilization.gpu)
        yield from self._memory(handle)
        if self._call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(number)):
            yield "power_watts", number.value / 1000
        sensor = ctypes.c_int(_TEMPERATURE_GPU)
        if self._call("nvmlDeviceGetTemperature", handle, sensor, ctypes.byref(number)):
            yield "temperature_celsius", float(number.value)

    def _memory(self, handle: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        newer, memory = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24), _Memory()
        if self._call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(newer)):
            total, used = newer.total, newer.used
        elif self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            total, used = memory.total, memory.used
        else:
            return
        yield "memory_used_bytes", float(used)
        if total:
            yield "memory_percent", 100 * used / total

    def _call(self, name: str, *arguments: Any) -> bool:
        """Whether the library has this function and it succeeded."""
        try:
            return int(getattr(self._library, name)(*arguments)) == _SUCCESS
        except AttributeError:  # an older driver's library
            return False
