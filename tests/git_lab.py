"""A lab in a git repository of its own, made and changed as a user makes and changes one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MARKER_TEXT = "apiVersion: tuneplane/project/v1\nname: lab\n"


class GitLab:
    """A lab at `root`, below a repository at `repository` (the same folder by default)."""

    def __init__(self, root: Path, repository: Path | None = None) -> None:
        self.root = root
        self.repository = repository or root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main", str(self.repository))
        self.write("tuneplane.yaml", MARKER_TEXT)

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run git as the lab's user; nothing of the developer's own configuration applies."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environment |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_AUTHOR_NAME": "Ada",
            "GIT_AUTHOR_EMAIL": "ada@example.com",
            "GIT_COMMITTER_NAME": "Ada",
            "GIT_COMMITTER_EMAIL": "ada@example.com",
        }
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env=environment,
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        return done.stdout

    def write(self, path: str, content: str | bytes = "content\n", mode: int = 0o644) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        place.chmod(mode)
        return place

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def commit(self) -> str:
        """Commit all there is, ignored files too, and return the commit's id."""
        self.git("add", "-A", "-f")
        self.git("commit", "-q", "--allow-empty", "-m", "a commit")
        return self.git("rev-parse", "HEAD").decode().strip()
