"""`make bench`: what TunePlane costs, as ratios to a floor or a peer measured in the same run.

Needs the testbed (slurm/testbed): submit and node agent are measured on its real Slurm, as an ordinary user.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from board import board_rows
from collect import collect_rows
from report import report_rows
from testbed_client import Testbed

REPEATS = 15
RUNS = 5
PROFILE = "h200:1"
URL = "https://tracker.example.org/bench"

IMAGE_PROFILE = """\
defaults:
  - /container@container: apptainer
scheduler: local
device: cpu
gpus_per_node: 1
"""

FIRST_LINE = """
t0=$(date +%s.%N)
srun --nodes=1 --ntasks=1 --gpus-per-node=1 apptainer --quiet exec {image} bash -c 'date +%s.%N' >{out}/bare
echo "$t0" >{out}/bare-start
"""


@dataclass(frozen=True)
class Row:
    """One line of the table; `ratio` is measured ÷ floor, or seconds where the target is a difference."""

    what: str
    measured: str
    floor: str
    figure: str
    target: str
    holds: bool


def median_s(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of a call, the first (cold) one left out."""
    call()
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def run(argv: list[str]) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)


def startup_rows() -> list[Row]:
    """`tp --help` and `tp job ls` beside a Python that does nothing."""
    python = sys.executable
    tp = str(Path(python).with_name("tp"))
    bare = median_s(lambda: run([python, "-c", "pass"]))
    rows = []
    for words in (["--help"], ["job", "ls"]):
        took = median_s(lambda words=words: run([tp, *words]))
        ratio = took / bare
        name = " ".join(["tp", *words])
        rows.append(Row(name, ms(took), f"python -c pass {ms(bare)}", f"{ratio:.1f} x", "<= 6 x", ratio <= 6))
    return rows


def submit_row(bed: Testbed, lab: Path, image: Path) -> Row:
    """The whole process of `tp submit`, sbatch included, beside importing Hydra and submitit and one compose."""
    floor_code = (
        "import submitit\nfrom hydra import compose, initialize_config_dir\n"
        f"with initialize_config_dir({str(lab / 'floor')!r}, version_base='1.3'):\n    compose('config')\n"
    )
    python = str(bed.shared / "venv/bin/python")
    floor = median_s(lambda: bed.exec([python, "-c", floor_code], cwd=str(lab)))
    submit = ["tp", "submit", "ring", "--profile", PROFILE, "--image", str(image), "--observability-url", URL]
    took = median_s(lambda: bed.exec(submit, cwd=str(lab)))
    ratio = took / floor
    return Row(
        "tp submit",
        ms(took),
        f"imports and a compose {ms(floor)}",
        f"{ratio:.2f} x",
        "<= 1.5 x",
        ratio <= 1.5,
    )


def agent_row(bed: Testbed, lab: Path, image: Path) -> Row:
    """From the batch script's start to the first line of the user's program, beside bare srun and Apptainer."""
    home = bed.home("alice") / "bench"
    bed.exec(["mkdir", "-p", str(home)])
    bare, ours = [], []
    for _ in range(RUNS):
        script = "#!/bin/bash\n" + FIRST_LINE.format(image=image, out=home)
        bed.exec(
            [
                "sbatch",
                "--wait",
                "--gpus-per-node=1",
                "--cpus-per-task=8",
                f"--output={home}/bare.out",
                "--wrap",
                script[12:],
            ]
        )
        bare.append(read_s(bed, home / "bare") - read_s(bed, home / "bare-start"))
        rendered = bed.exec(
            [
                "tp",
                "render",
                "ring",
                "--profile",
                PROFILE,
                "--image",
                str(image),
                "--observability-url",
                URL,
                "--json",
            ],
            cwd=str(lab),
        )
        folder = json.loads(rendered.stdout)["folder"]
        wrap = f"date +%s.%N >{home}/ours-start; exec bash '{folder}/job.sbatch'"
        bed.exec(
            [
                "sbatch",
                "--wait",
                "--gpus-per-node=1",
                "--cpus-per-task=8",
                f"--output={home}/ours.out",
                "--wrap",
                wrap,
            ]
        )
        ours.append(read_s(bed, Path(folder) / "out/first-line") - read_s(bed, home / "ours-start"))
    floor, took = statistics.median(bare), statistics.median(ours)
    more = took - floor
    return Row(
        "node agent to first line",
        ms(took),
        f"srun and container {ms(floor)}",
        f"+{ms(more)}",
        "<= +300 ms",
        more <= 0.3,
    )


def image_row(bed: Testbed, lab: Path, image: Path) -> Row:
    """A prepared image on a node: from the run's own script to its trainer's first line, beside bare Apptainer."""
    home = bed.home("alice") / "bench"
    bed.exec(["mkdir", "-p", str(home), ".config/tuneplane/cluster"], cwd=str(bed.home("alice")))
    bed.exec(
        ["bash", "-c", f"printf '%s' '{IMAGE_PROFILE}' >.config/tuneplane/cluster/bench.yaml"],
        cwd=str(bed.home("alice")),
    )
    bare, ours = [], []
    for _ in range(RUNS + 1):
        script = (
            f"date +%s.%N >{home}/image-start; exec apptainer --quiet exec {image} date +%s.%N >{home}/image"
        )
        bed.node_exec("n1", ["bash", "-c", script], user="alice", env={"LANG": "C.UTF-8"})
        bare.append(read_s(bed, home / "image") - read_s(bed, home / "image-start"))
        words = [
            "tp",
            "render",
            "ring",
            "--profile",
            "bench",
            "--image",
            str(image),
            "--observability-url",
            URL,
        ]
        folder = json.loads(bed.exec([*words, "--json"], cwd=str(lab)).stdout)["folder"]
        script = f"date +%s.%N >{home}/image-start; exec bash '{folder}/job.sbatch'"
        bed.node_exec("n1", ["bash", "-c", script], user="alice")
        ours.append(read_s(bed, Path(folder) / "out/first-line") - read_s(bed, home / "image-start"))
    floor, took = statistics.median(bare[1:]), statistics.median(ours[1:])
    more = took - floor
    return Row(
        "start of a prepared image",
        ms(took),
        f"bare apptainer exec {ms(floor)}",
        f"+{ms(more)}",
        "<= +300 ms",
        more <= 0.3,
    )


def read_s(bed: Testbed, path: Path) -> float:
    return float(bed.exec(["cat", str(path)]).stdout)


def make_lab(bed: Testbed) -> Path:
    """A lab of alice's whose trainer notes when it began, and the floor's own small configuration."""
    lab = bed.home("alice") / "bench-lab"
    bed.exec(["rm", "-rf", str(lab)])
    bed.exec(["tp", "init", str(lab)])
    bed.exec(["tp", "new", "ring", "--method", "custom/custom"], cwd=str(lab))
    line = 'date +%s.%N >"$TUNEPLANE_OUT_DIR/first-line"'
    bed.exec(
        ["bash", "-c", f"printf '%s\\n' '#!/bin/bash' '{line}' >experiments/ring/train.sh"], cwd=str(lab)
    )
    bed.exec(["bash", "-c", "mkdir floor && printf 'a: 1\\n' >floor/config.yaml"], cwd=str(lab))
    bed.exec(["git", "add", "-A"], cwd=str(lab))
    bed.exec(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "bench"], cwd=str(lab)
    )
    return lab


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def main() -> int:
    """Print the table; exit 1 where a target does not hold."""
    rows = startup_rows()
    rows += [Row(*row) for row in (*report_rows(), *collect_rows(), *board_rows())]
    bed = Testbed()
    bed.start()
    lab, image = make_lab(bed), bed.image
    rows += [submit_row(bed, lab, image), agent_row(bed, lab, image), image_row(bed, lab, image)]
    for row in rows:
        word = ("holds" if row.holds else "MISSED") if row.target else ""
        print(f"{row.what:<26} {row.measured:>9}   {row.floor:<34} {row.figure:>9}   {row.target:<10} {word}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
