"""What is known of a run's metrics without its points. Made by `store`, shown by whoever shows metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tuneplane.collect.lines import LastValue


@dataclass(frozen=True)
class Overview:
    """What a run has reported by now, without its points.

    metrics: by name; where several ranks report one metric, those above the lowest are named `loss@rank3`.
    hparams: of all attempts, later ones win.
    dropped_points, dropped_values: what the job says it could not report (a full queue; a value without a mean).
    gaps: points that were numbered but are not in the files; torn_lines: lines there that are none.
    torn: by file, how many of those. refused, skipped, unreadable: files that were not read, and why.
    attempts: those that reported anything. newest_s: wall time of the newest point, None without points.
    fault: why the run could not be read at all; empty where it could.
    """

    metrics: Mapping[str, LastValue] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    dropped_points: int = 0
    dropped_values: int = 0
    gaps: int = 0
    torn_lines: int = 0
    torn: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    attempts: tuple[int, ...] = ()
    newest_s: float | None = None
    fault: str = ""

    def losses(self, *, counted: bool = True, most_files: int | None = None) -> list[str]:
        """What of the run could not be kept or read, in words (C16, C21). Names of files are as they were found.

        counted: and how many. most_files: how many files are named of each kind; None: all.
        """
        counts = (
            (
                self.dropped_points,
                "points were dropped by the job; its log says why",
            ),
            (self.dropped_values, "values were no numbers and were dropped"),
            (self.gaps, "points are missing: numbered, but not in the files"),
            (self.torn_lines, f"lines are torn and were passed over{self._torn_where()}"),
        )
        told = [f"{count} {words}" if counted else words for count, words in counts if count]
        for word, files in (
            ("refused", self.refused),
            ("passed over", self.skipped),
            ("not readable", self.unreadable),
        ):
            told += [f"{name} was {word}: {why}" for name, why in islice(files.items(), most_files)]
            if most_files is not None and len(files) > most_files:
                told.append(f"{len(files) - most_files} more files were {word}")
        return told

    def _torn_where(self) -> str:
        """In which file, of several the one with most of them."""
        if not self.torn:
            return ""
        most = max(sorted(self.torn), key=lambda name: self.torn[name])
        others = len(self.torn) - 1
        return f", in {most}" + (f" and {others} more file{'s' if others > 1 else ''}" if others else "")
