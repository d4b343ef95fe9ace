"""What the pages say is so: commands run and print what is shown, flags exist, links lead somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from doc_pages import ANY, ROOT, Block, agrees, anchors, headings, links, pages, prose, read_blocks

from tuneplane.cli.main import cli
from tuneplane.kernel.env import VARIABLES

RUN_HERE = (
    "README.md",
    pytest.param("docs/users.md", marks=pytest.mark.contract("C47")),  # every command, without Slurm
    "docs/first-run.md",
)
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
NEEDS = ("install", "slurm", "root")
"""What a block may say that it needs; then it does not run here."""

RUN_TIMEOUT_S = 100

NOT_THERE_YET = {("sweep",)}
"""Commands that pages name as missing; the day one exists, its page must change."""


def blocks(*languages: str) -> list[Block]:
    found = [block for page in pages() for block in read_blocks(page)]
    return [block for block in found if not languages or block.language in languages]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A newcomer's environment: a home with a git identity and nothing else, `tp` on the PATH, no site."""
    programs, home, site = tmp_path / "bin", tmp_path / "home", tmp_path / "no-site"
    for folder in (programs, home, site):
        folder.mkdir()
    tp = programs / "tp"
    tp.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tuneplane.cli.main "$@"\n')
    tp.chmod(0o755)
    (home / ".gitconfig").write_text("[user]\nname = You\nemail = you@example.org\n")
    environ = {
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "USER": subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
        "LANG": "C.UTF-8",
        "TUNEPLANE_CONFIG_DIR": str(site),
        "TMPDIR": str(tmp_path),
    }
    yield environ
    said = subprocess.run(
        ["tp", "job", "ls", "--json"], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    for run in json.loads(said.stdout):
        subprocess.run(
            ["tp", "job", "stop", run["run_id"]], env=environ, capture_output=True, timeout=60, check=True
        )


def write_session(page: Path, folder: Path) -> tuple[str, list[tuple[str, int, tuple[str, ...]]]]:
    """One bash script of all commands of a page that run here; and for each its place, exit code, output."""
    lines = ["set -o pipefail", f"cd {shlex.quote(str(folder))}"]
    steps: list[tuple[str, int, tuple[str, ...]]] = []
    for block in read_blocks(page):
        if block.language not in ("bash", "console") or "needs" in block.notes:
            continue
        if block.notes.get("cwd") == "checkout":
            lines.append(f"cd {shlex.quote(str(ROOT))}")
        for command in block.commands:
            number = len(steps)
            steps.append((block.where, int(block.notes.get("exit", "0")), command.shown))
            # In this very shell, so that `cd` and `export` last; a bash block ends at its first failure.
            text = command.text.rstrip()
            if block.language == "bash":
                lines.append(f"false_at() {{ echo 99 >{number}.rc; exit; }}; trap false_at ERR")
            lines += [
                f"{{ {text}",
                f"}} >{folder}/{number}.out 2>&1",
                f"echo $? >{folder}/{number}.rc",
                "trap - ERR",
            ]
    return "\n".join(lines).replace("echo 99 >", f"echo 99 >{folder}/") + "\n", steps


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RUN_HERE)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    name: str, shell: dict[str, str], tmp_path: Path
) -> None:
    results, start = tmp_path / "results", tmp_path / "start"
    results.mkdir()
    start.mkdir()
    script, steps = write_session(ROOT / name, results)
    assert len(steps) > 4, "a page that shows nothing proves nothing"
    (results / "session.sh").write_text(script)
    done = subprocess.run(
        ["bash", str(results / "session.sh")],
        cwd=start,
        env=shell,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.stderr == ""
    for number, (where, code, shown) in enumerate(steps):
        assert (results / f"{number}.rc").exists(), f"{where}: the session ended before this command"
        printed = (results / f"{number}.out").read_text(encoding="utf-8")
        assert int((results / f"{number}.rc").read_text()) == code, f"{where}:\n{printed}"
        assert agrees(shown, printed), f"{where} shows\n" + "\n".join(shown) + f"\nand it printed\n{printed}"


@pytest.mark.slow
@pytest.mark.contract("C14")
def test_a_run_s_stdout_and_stderr_are_in_its_log_and_nothing_is_read_out_of_them(
    shell: dict[str, str], tmp_path: Path
) -> None:
    script = """
        tp init lab && cd lab && tp new talk --method custom/custom
        printf 'echo "step 1 loss=0.25"\\necho "loss=0.5" >&2\\n' > experiments/talk/train.sh
        git add -A && git commit -q -m talk
        tp submit talk --profile local --observability-url https://tracker.example.org --follow
    """
    run = {"cwd": tmp_path, "env": shell, "capture_output": True, "text": True, "timeout": 60}
    subprocess.run(["bash", "-ec", script], check=True, **run)
    logs = subprocess.run(["tp", "job", "logs", "talk"], check=True, **run)
    assert logs.stdout.splitlines()[1:] == ["step 1 loss=0.25", "loss=0.5"]
    metrics = subprocess.run(["tp", "job", "metrics", "talk", "--json"], check=True, **run)
    assert json.loads(metrics.stdout)["metrics"] == []


def tp_commands(text: str) -> list[list[str]]:
    """The `tp …` commands in a block's text, as words."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[\s(|;&])tp ((?:[^|;&)\n<>]|\$\([^)]*\))+)", joined, flags=re.MULTILINE)
    return [shlex.split(words, comments=True) for words in found]


def check_command(words: list[str], where: str) -> None:
    """Parse a command as tp would; unknown commands, unknown flags and wrong values fail."""
    command: click.Command = cli
    context = click.Context(cli, info_name="tp")
    rest = list(words)
    while isinstance(command, click.Group):
        assert rest, f"{where}: tp {' '.join(words)} names no command"
        if rest[0].startswith("-"):
            rest.pop(0)
            continue
        found = command.get_command(context, rest[0])
        assert found is not None, f"{where}: there is no command tp {' '.join(words)}"
        context = click.Context(found, info_name=rest.pop(0), parent=context)
        command = found
    try:
        command.parse_args(context, rest)
    except click.exceptions.Exit:  # --help
        pass
    except click.ClickException as error:
        raise AssertionError(f"{where}: tp {' '.join(words)}: {error.format_message()}") from None


@pytest.mark.parametrize(
    "block", [b for b in blocks("bash", "console") if tp_commands(b.text)], ids=lambda b: b.where
)
def test_every_tp_command_that_a_page_shows_exists_with_its_flags(block: Block) -> None:
    for words in tp_commands("\n".join(c.text for c in block.commands)):
        check_command(words, block.where)


def test_commands_named_in_the_text_exist_or_are_said_to_be_missing() -> None:
    for page in [*READMES, *(ROOT / "docs").glob("*.md")]:
        for words in re.findall(r"`tp ([a-z]+(?: [a-z]+(?:-[a-z]+)*)?)", prose(page)):
            name, *rest = words.split()
            if (name,) in NOT_THERE_YET or (name, *rest) in NOT_THERE_YET:
                continue
            command = cli.get_command(click.Context(cli), name)
            assert command is not None, f"{page.name}: `tp {words}`"
            if isinstance(command, click.Group) and rest:
                assert command.get_command(click.Context(command), rest[0]), f"{page.name}: `tp {words}`"


def test_what_pages_call_missing_is_missing() -> None:
    for words in NOT_THERE_YET:
        command: click.Command | None = cli
        for word in words:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word)
        assert command is None, f"tp {' '.join(words)} exists: take it out of README.md and docs/contract.md"


def every_command(group: click.Group, prefix: str = "tp") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_command(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


def test_the_guide_for_users_lists_every_command() -> None:
    text = (ROOT / "docs" / "users.md").read_text(encoding="utf-8")
    listed = text.partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert [c for c in every_command(cli) if f"`{c}" not in listed] == []


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}"


@pytest.mark.parametrize("block", blocks(), ids=lambda b: b.where)
def test_blocks_are_well_formed(block: Block) -> None:
    assert block.language, f"{block.where}: a block needs its language"
    assert set(block.notes) <= {"needs", "exit", "cwd", "file"}
    assert block.notes.get("needs", NEEDS[0]) in NEEDS
    if block.language == "python":
        ast.parse(block.text)
    if block.language == "yaml":
        yaml.safe_load(block.text)
    if block.language in ("bash", "console"):
        text = "\n".join(command.text for command in block.commands)
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False
        )
        assert done.returncode == 0, f"{block.where}: {done.stderr}"


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    for page in pages():
        named = re.findall(
            r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        assert set(named) <= targets, page.name


def test_the_tutorial_says_the_commands_of_the_demo() -> None:
    script = (ROOT / "docs" / "first-run" / "demo.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    demo = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("say ")]
    demo = [["local:2" if w == "$profile" else w for w in words if w != "$@"] for words in demo]
    told = [
        shlex.split(command.text)
        for block in read_blocks(ROOT / "docs" / "first-run.md")
        for command in block.commands
        if block.language == "console" and command.text.startswith(("tp ", "git "))
    ]
    assert told == demo


def test_the_chinese_readme_keeps_step() -> None:
    english, chinese = READMES
    assert [depth for depth, _ in headings(english)] == [depth for depth, _ in headings(chinese)]
    shapes = [[(b.language, b.text, b.notes) for b in read_blocks(page)] for page in READMES]
    assert shapes[0] == shapes[1]
    kept = [[link.partition("#")[0] for link in links(page) if "README" not in link] for page in READMES]
    assert kept[0] == kept[1]
    rows = [sum(line.startswith("|") for line in prose(page).splitlines()) for page in READMES]
    assert rows[0] == rows[1]


def test_the_page_of_variables_is_the_table_that_the_agent_obeys() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", text.partition("\n## ")[0], flags=re.MULTILINE
    )
    assert rows == [(v.name, v.when, v.meaning) for v in VARIABLES]


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_hold_no_path_of_a_developers_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert not re.search(r"/root/|TODO|FIXME", text)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a",), "a\nb\n", False),
        (("a", ANY), "a\n", True),
        (("a", ANY, "d"), "a\nb\nc\nd\n", True),
        (("run … [0]",), "run x-1 [0]\n", True),
        (("run … [0]",), "run x-1 [1]\n", False),
        (("run …",), "run a\nb\n", False),
        ((), "", True),
        ((), "said\n", False),
    ],
)
def test_what_a_page_shows_is_compared_line_by_line(shown: tuple[str, ...], printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same


@pytest.mark.parametrize(
    "words",
    [["submit", "x", "--profil", "h200"], ["sweep"], ["job", "wy", "x"], ["submit", "x", "--nodes", "two"]],
)
def test_a_command_that_does_not_exist_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(AssertionError, match="made-up"):
        check_command(words, "made-up")


def test_the_shell_of_these_tests_knows_nothing_of_the_developer(shell: dict[str, str]) -> None:
    assert not [
        name for name in shell if name in os.environ and shell[name] == os.environ[name] and "HOME" in name
    ]
