"""The site builds without a warning, has every page, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml
from playwright.sync_api import sync_playwright

from ._pages import DOCS


pytestmark = [pytest.mark.slow, pytest.mark.site]


ROOT = DOCS.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FETCHED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
}


class _Loader(yaml.SafeLoader):
    """YAML loader that reads tags such as ``!!python/name`` as their names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


def settings():
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def pages_of(nav):
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once():
    listed = pages_of(settings()["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


class _Addresses(HTMLParser):
    """Parser that collects what a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        value = dict(attrs).get(FETCHED.get(tag, ""))
        if value and dict(attrs).get("rel") not in {"canonical", "prev", "next"}:
            self.found.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds_and_reads_offline(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(pages_of(settings()["nav"]))
    for page in pages:
        addresses = _Addresses()
        addresses.feed(page.read_text(encoding="utf-8"))
        outside = [a for a in addresses.found if re.match(r"(https?:)?//", a)]
        assert not outside, f"{page.relative_to(site)} fetches {outside}"


def test_styles_fetch_nothing_from_elsewhere(site):
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", text), sheet


def test_included_scripts_are_shown(site):
    text = (site / "how-to" / "port-your-script.html").read_text(encoding="utf-8")
    assert "NanoGPT" in text
    assert "--8" not in text


def test_examples_of_docstrings_are_sessions(site):
    text = (site / "reference" / "space.html").read_text(encoding="utf-8")
    assert 'class="gp"' in text
    assert "<blockquote>" not in text


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_search_works_from_a_folder_and_nothing_is_fetched(site):
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        outside = []
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or outside.append(r.url))
        page.goto((site / "reference" / "space.html").as_uri())
        page.fill(".md-search__input", "Hyperband")
        page.locator(".md-search-result__item").first.wait_for(timeout=600_000)
        assert "Hyperband" in page.locator(".md-search-result__list").inner_text()
        browser.close()
    assert not outside


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sessions_and_raw_results_of_pages():
    page = "[table](../../bench/results)\n```python\n>>> 1 + 1\n2\n```\n```python\nx = 1\n```"
    assert script("docs_hooks").on_page_markdown(page) == (
        "[table](../benchmarks.md)\n```pycon\n>>> 1 + 1\n2\n```\n```python\nx = 1\n```"
    )


def test_a_list_of_links_to_scripts_is_a_row_of_tabs():
    page = "".join(
        f"- {title}: [`{name}.py`](../../examples/port/{name}.py)\n"
        for title, name in (("Plain", "a"), ("thrifty", "b"))
    )
    made = script("docs_hooks").on_page_markdown(page)
    assert re.findall(r'^=== "(\w+)"$', made, re.MULTILINE) == ["Plain", "thrifty"]
    assert "    --8<--\n    examples/port/b.py\n    --8<--\n" in made
    assert "](" not in made


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Adds.\n>>> 1 + 1\n2\n\nAll.", "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAll."),
        ("Adds.\n\n>>> 1 + 1\n2", "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```"),
        ("```\n>>> 1\n```", "```\n>>> 1\n```"),
        ("Nothing.", "Nothing."),
    ],
)
def test_doctests_get_a_fence(text, wanted):
    assert script("docs_doctests").fenced(text) == wanted
