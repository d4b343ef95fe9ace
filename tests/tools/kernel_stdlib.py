"""The kernel runs with nothing but the standard library: import every module of it with `python -I -S`.

Part of `make lint`. Under every Python from 3.9 on that this machine has.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from interpreters import pythons

from tuneplane.capsule.kernel import kernel_files, write_kernel_application

CHECK = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
third = sorted({m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"tuneplane", "__main__"}
               if hasattr(sys, "stdlib_module_names") else set())
third = [m for m in third if not m.startswith("_")]
assert not third, f"imported beyond the standard library: {third}"
"""


def main() -> int:
    """Import all of the kernel from its zip application; exit code 1 where it needs more."""
    modules = [
        file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in kernel_files()
    ]
    with tempfile.TemporaryDirectory() as folder:
        application = Path(folder) / "kernel.pyz"
        write_kernel_application(application)
        for python in pythons((3, 9)).values():
            argv = [python, "-I", "-S", "-c", CHECK, str(application), *modules]
            result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
            if result.returncode:
                print(f"{python}: the kernel does not run on the standard library alone\n{result.stderr}")
                return 1
            print(f"kernel: {len(modules)} modules import with the standard library alone ({python})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
