"""A fake NVML for tests: tests/fakes/nvml.c compiled on the spot, and the file that it answers from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fakes" / "nvml.c"
NAME = "libnvidia-ml.so.1"

H200 = {
    "utilization": 97,
    "total": 150_754_820_096,
    "used": 75_377_410_048,
    "power": 612_345,
    "temperature": 58,
    "mig": 0,
}
"""What one GPU tells, in NVML's own units."""


class FakeNvml:
    """A folder with the library, to be put first by LD_LIBRARY_PATH, and its state."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.library = folder / NAME
        self.state = folder / "state"
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("gcc")
        if compiler is None:
            if os.environ.get("CI"):
                pytest.fail("gcc is missing, and this is a CI run: it must not be skipped")
            pytest.skip("gcc is missing: `make test` installs it")
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", *flags, "-o", self.library, SOURCE],
            check=True,
            timeout=60,
        )
        self.gpus([H200])

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML": str(self.state)}

    def gpus(self, gpus: list[dict[str, object]], *, init: int = 0, hang_s: int = 0) -> None:
        """These GPUs are there from now on. init: what the library's first call answers, after `hang_s`."""
        rows: list[tuple[int, str, object]] = [(-1, "init", init), (-1, "count", len(gpus))]
        rows += [(-1, "hang", hang_s)] if hang_s else []
        rows += [(index, field, value) for index, gpu in enumerate(gpus) for field, value in gpu.items()]
        text = "".join(f"{gpu} {field} {value}\n" for gpu, field, value in rows)
        (self.folder / "new").write_text(text)
        (self.folder / "new").replace(self.state)
