"""The reference has every public name, and no removed one."""

from __future__ import annotations

import importlib
import pkgutil
import re
import runpy

import pytest
from click.testing import CliRunner

import thrifty

from ._pages import DOCS


PAGES = DOCS / "reference"
BELOW = {"perf.steptime": "perf", "testing.graph": "testing", "testing.nn": "testing"}
"""Public modules whose reference is on the page of the package above them."""
PACKAGES = sorted(
    module.name
    for module in pkgutil.iter_modules(thrifty.__path__)
    if not module.name.startswith("_") and module.name != "cli"
)


def exported(name: str) -> set[str]:
    """Return what a package lists, or what a module without a list defines for others."""
    module = importlib.import_module(f"thrifty.{name}")
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (
            getattr(value, "__module__", None) == module.__name__
            or (isinstance(value, tuple) and key.isupper())
        )
    }


def shown(page: str) -> tuple[list[str], set[str]]:
    """Return what a page documents itself, and what it refers to."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE), set(
        re.findall(r"\]\[(thrifty\.\S+?)\]", text)
    )


def test_every_package_has_a_page_and_every_page_a_package():
    pages = {page.stem for page in PAGES.glob("*.md")} - {"index", "cli", "json"}
    assert pages == set(PACKAGES)


@pytest.mark.parametrize("name", [*PACKAGES, *BELOW])
def test_nothing_exported_is_missing(name):
    directives, links = shown(BELOW.get(name, name))
    public = importlib.import_module(f"thrifty.{name}")
    for key in sorted(exported(name)):
        if f"thrifty.{name}.{key}" in directives:
            continue
        elsewhere = [link for link in links if link.rsplit(".", 1)[1] == key]
        assert elsewhere, (
            f"add `::: thrifty.{name}.{key}` to docs/reference/{BELOW.get(name, name)}.md"
        )
        home, _, _ = elsewhere[0].rpartition(".")
        assert getattr(importlib.import_module(home), key) is getattr(public, key)


@pytest.mark.parametrize("page", PACKAGES)
def test_nothing_is_stale_or_twice(page):
    directives, _ = shown(page)
    assert len(directives) == len(set(directives))
    for path in directives:
        home, _, key = path.removeprefix("thrifty.").rpartition(".")
        assert BELOW.get(home, home) == page
        assert key in exported(home), (
            f"{path} is not exported; remove it from docs/reference/{page}.md"
        )


def test_the_face_is_a_list_of_links():
    _, links = shown("index")
    by_name = {link.rsplit(".", 1)[1]: link.rsplit(".", 1)[0] for link in links}
    listed = set(thrifty.__all__)
    assert listed <= set(by_name), (
        f"add to docs/reference/index.md: {sorted(listed - set(by_name))}"
    )
    for key in listed:
        assert getattr(importlib.import_module(by_name[key]), key) is getattr(thrifty, key)
    assert set(by_name) - {"pack"} <= listed, "docs/reference/index.md has names that are gone"


def test_the_site_shows_paths_from_which_names_are_imported():
    """Tooltips of signatures have the paths of the modules that define names."""
    hooks = runpy.run_path(str(DOCS.parent / "scripts" / "docs_hooks.py"))
    shown_as = {
        "thrifty.study._study.Study": "thrifty.Study",
        "thrifty.study._study.Study.run": "thrifty.Study.run",
        "thrifty.pack._backend.Member": "thrifty.pack.Member",
        "thrifty.graph._batch.Batch": "thrifty.graph.Batch",
        "thrifty.space._pieces.Gone": "",
        "thrifty.gone._gone.Gone": "",
    }
    for path, wanted in shown_as.items():
        assert hooks["public_path"](path) == wanted
    html = (
        '<a title="Study (thrifty.study._study.Study)">Study</a>'
        '<a title="x (thrifty.space._pieces.Gone)">'
    )
    assert hooks["on_post_page"](html) == '<a title="Study (thrifty.Study)">Study</a><a title="x">'


@pytest.mark.parametrize("name", PACKAGES)
def test_no_error_has_a_private_path(name):
    public = importlib.import_module(f"thrifty.{name}")
    for key in exported(name):
        kind = getattr(public, key)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            home = importlib.import_module(kind.__module__)
            assert "._" not in kind.__module__
            assert getattr(home, key) is kind


def test_the_page_of_commands_is_what_the_commands_say():
    doctor = importlib.import_module("thrifty.cli._doctor")
    CliRunner().invoke(
        doctor.doctor_command, ["--help"]
    )  # an earlier use by itself must not change how it looks
    made = runpy.run_path(str(DOCS.parent / "scripts" / "cli_page.py"))["page"]()
    committed = (PAGES / "cli.md").read_text(encoding="utf-8")
    assert committed == made, "run: python scripts/cli_page.py"


def test_the_page_of_documents_is_what_their_types_say():
    found = runpy.run_path(str(DOCS.parent / "scripts" / "json_page.py"))
    for name, made in (("json.md", found["page"]()), ("json-schemas.json", found["schemas"]())):
        committed = (PAGES / name).read_text(encoding="utf-8")
        assert committed == made, "run: python scripts/json_page.py"


def test_all_commands_are_on_it():
    text = (PAGES / "cli.md").read_text(encoding="utf-8")
    for command in importlib.import_module("thrifty.cli").COMMANDS:
        assert re.search(rf"^## thrifty {command}\b", text, re.MULTILINE)


def test_the_page_for_agents_links_all_guides():
    """``docs/llms.txt``, in the form of llmstxt.org."""
    links = re.findall(r"^- \[.+?\]\((\S+?)\)", (DOCS / "llms.txt").read_text(), re.MULTILINE)
    assert len(links) == len(set(links))
    assert all((DOCS / link).is_file() for link in links)
    guides = {f"how-to/{page.name}" for page in (DOCS / "how-to").glob("*.md")}
    assert guides <= set(links), f"add to docs/llms.txt: {sorted(guides - set(links))}"
