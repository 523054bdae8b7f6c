"""What an exported task runs on the rented machines, and how thrifty gets there."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from thrifty.core import CloudError, UsageError


def script_of(file: Path, given: str | None) -> str:
    """Return the script and its arguments; the file itself if no script is given.

    Raises:
        UsageError: There is no such script, or it trains nothing when it runs.
    """
    words = shlex.split(given) if given else [file.name]
    if not words:
        raise UsageError("--script is blank; name a script, and its arguments")
    script = file.resolve().parent / words[0]
    if not script.is_file():
        raise UsageError(
            f"there is no file {words[0]} in {script.parent}, the folder that is copied to the "
            "machines; --script names a file in it"
        )
    if not _does_something(script):
        raise UsageError(
            f"{words[0]} only defines things, so the machines would train nothing: name the "
            "script that trains with --script, as torchrun takes it, or call your training under "
            'if __name__ == "__main__"'
        )
    return given or file.name


_DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Pass,
)


def _does_something(script: Path) -> bool:
    """Return whether a script does more than import, define and assign."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{script} cannot be read: {error}") from error
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    own = {each.name for each in ast.walk(tree) if isinstance(each, functions)}
    own |= {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return any(_is_done(each, own) for each in tree.body)


def _is_done(statement: ast.stmt, own: Collection[str]) -> bool:
    """Return whether a statement does something, rather than define it.

    Args:
        statement: A statement of the module.
        own: Functions and variables of the module. An assignment that calls one of them, such as
            ``best = study.run()``, does something.
    """
    if isinstance(statement, _DEFINITIONS):
        return False
    if isinstance(statement, ast.If | ast.Try):  # such as imports for type checkers
        below = [statement.body, statement.orelse]
        below += [each.body for each in getattr(statement, "handlers", [])]
        return any(_is_done(each, own) for part in below for each in part)
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        calls = (
            each.func
            for each in ast.walk(statement.value or statement)
            if isinstance(each, ast.Call)
        )
        names = (each.value if isinstance(each, ast.Attribute) else each for each in calls)
        return any(isinstance(each, ast.Name) and each.id in own for each in names)
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """How thrifty is installed on a rented machine.

    Attributes:
        setup: The command that installs it.
        mounts: Files that are copied there, local paths by remote ones.
    """

    setup: str
    mounts: Mapping[str, str] = field(default_factory=dict)


def installation(folder: Path) -> Installation:
    """Return how to install the thrifty that runs here.

    A version from a package index, a repository or another address is installed from there.
    Otherwise, a wheel is built from the checkout, or the wheel is taken that this one was installed
    from, and copied to the machines.

    Args:
        folder: Where to write a wheel.

    Raises:
        CloudError: thrifty is not installed, or the wheel cannot be built.
    """
    try:
        installed = distribution("thrifty")
    except PackageNotFoundError as error:
        raise CloudError(
            "thrifty runs from a folder that is not installed; install it, so that the rented "
            "machines can get it: pip install -e CHECKOUT"
        ) from error
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if not source:
        return Installation(setup=f"pip install thrifty=={installed.version}")
    url = urlsplit(source["url"])
    if url.scheme != "file":
        place, version = source["url"], source.get("vcs_info")
        if version:
            place = f"{version['vcs']}+{place}@{version['commit_id']}"
        return Installation(setup=f"pip install {shlex.quote(place)}")
    path = Path(unquote(url.path))
    wheel = path if path.suffix == ".whl" else _wheel(path, folder)
    if not wheel.is_file():
        raise CloudError(f"thrifty was installed from {wheel}, which is gone; install it again")
    remote = f"~/{wheel.name}"
    return Installation(setup=f"pip install {remote}", mounts={remote: str(wheel.resolve())})


def _wheel(source: Path, folder: Path) -> Path:
    """Build a wheel of a checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir"]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("thrifty-*.whl"):
        old.unlink()
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob("thrifty-*.whl"))
    if done.returncode or not found:
        raise CloudError(
            f"no wheel of {source} can be built for the rented machines: "
            f"{done.stderr.strip() or 'pip wrote none'}"
        )
    return found[-1]
