"""The pages in a real Chromium, without a network."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

from tests.study.helpers import SOLO, WIDE, Sized, make_study
from tests.web.conftest import SCRIPT, halving, serving
from thrifty.core import EpochDone
from thrifty.integrations import trainable
from thrifty.search import GridSearch, RandomSearch
from thrifty.space import Choice, Float, Space
from thrifty.store import Store
from thrifty.study import StopWhen, Study
from thrifty.testing import FaultyTask


CHROMIUM = shutil.which("chromium")
LIMIT_MS = 600_000
"""Limit of each wait: pages are slow on a busy machine."""
expect.set_options(timeout=LIMIT_MS)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"), pytest.mark.slow]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """Return a page that reports every error, blocked resource and request elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    wrong, under_way = [], set()
    page.on("request", lambda asked: under_way.add(asked))
    page.on("requestfinished", lambda asked: under_way.discard(asked))
    page.on("requestfailed", lambda asked: under_way.discard(asked))
    page.under_way = under_way
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.gone = ""

    def note(said):
        is_gone = page.gone and "(Not Found)" in said.text and page.gone in said.location["url"]
        if said.type in ("error", "warning") and not is_gone:
            wrong.append(said.text)

    page.on("console", note)
    page.on(
        "request",
        lambda asked: "//127.0.0.1:" in asked.url or asked.url.startswith(("data:", "blob:"))
        or wrong.append(asked.url)
    )  # fmt: skip
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def address(trained):
    with serving(trained) as found:
        yield found


@contextmanager
def shown_to(page, path):
    """Serve a dashboard; the page, which keeps polling, leaves it before the server stops."""
    with serving(path) as found:
        yield found
        page.goto("about:blank")


def open_study(page, address, tab="overview", study=1):
    page.goto(f"{address}#/studies/{study}/{tab}")
    page.wait_for_selector("h1")


def wait_until_settled(page):
    """Wait until all requests have been answered and shown."""
    while page.under_way:
        page.wait_for_timeout(10)
    page.evaluate("() => new Promise((go) => requestAnimationFrame(() => setTimeout(go)))")


def wait_until_drawn(page):
    """Wait until each canvas has several colours."""
    page.wait_for_function(
        """() => [...document.querySelectorAll("canvas")].every((canvas) => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return new Set(new Uint32Array(data.buffer)).size > 3;
        }) && document.querySelectorAll("canvas").length > 0"""
    )


def test_the_list_leads_to_a_study(page, address):
    page.goto(address)
    page.get_by_role("link", name="line", exact=True).click()
    page.wait_for_selector("h1:text('line')")
    assert page.get_by_text("Epochs saved").is_visible()
    assert page.title().startswith("thrifty")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "tab", ["overview", "forest", "workers", "curves", "parallel", "slices", "compare"]
)
def test_charts_are_drawn(page, address, tab):
    open_study(page, address, tab)
    page.wait_for_selector("canvas")
    wait_until_drawn(page)


@pytest.mark.parametrize("tab", ["overview", "importance"])
def test_importance_is_shown(page, address, tab):
    open_study(page, address, tab)
    page.wait_for_selector(".bars .label:text('lr')")
    expect(page.get_by_text(re.compile(r" of \d+ trials after epoch \d+")).first).to_be_visible()
    shown = page.evaluate(
        "[...document.querySelectorAll('.bars .fill')].map(each => parseFloat(each.style.width))"
    )
    said = page.locator(".bars .figure").all_inner_texts()
    assert [f"{each:.1f} %" for each in shown] == said, "a full bar is 100 %"


def test_a_trial_and_whom_it_shares_with(page, address):
    open_study(page, address, "trials/4")
    page.wait_for_selector("h1:text('Trial 4')")
    page.wait_for_selector("canvas")
    assert page.get_by_role("heading", name="Schedule").is_visible()
    page.locator("section:has(h2:text('Stages')) a").first.click()
    expect(page.locator("h1")).not_to_have_text("Trial 4")
    expect(page.locator("h1")).to_contain_text("Trial")


def test_a_trial_that_failed_says_why(page, tmp_path):
    """A failed trial shows its error and traceback as text."""
    config = {"lr": Choice([0.1]), "fault": Choice(["raise", "odd text"])}
    study = make_study(
        tmp_path, task=FaultyTask(), space=Space(**config), algorithm=GridSearch(max_epochs=2)
    )
    study.run(progress=False, executor=SOLO)
    with Store.open(study.storage.url) as store, store._engine.begin() as connection:
        error = json.dumps(["error", SCRIPT, f"Traceback\n  {SCRIPT}"])
        connection.exec_driver_sql("UPDATE trials SET error = ? WHERE number = 1", (error,))
    with shown_to(page, tmp_path / "t.db") as address:
        open_study(page, address, "trials/0")
        page.get_by_text("error: RuntimeError: the task's own error").wait_for()
        trace = page.locator("pre.trace").inner_text()
        assert "Traceback (most recent call last)" in trace
        assert "in loss" in trace
        open_study(page, address, "trials/1")
        page.get_by_text(f"error: {SCRIPT}").wait_for()
        assert page.locator("pre.trace").inner_text() == f"Traceback\n  {SCRIPT}"
        assert page.evaluate("window.hurt") is None


def test_the_list_is_sorted_and_filtered(page, address):
    page.goto(address)
    page.wait_for_selector("td.name")
    page.get_by_role("button", name="Trials").click()
    assert page.locator("th[aria-sort='descending']").inner_text() == "Trials"
    assert page.locator("td.name a").first.inner_text() == "line"
    page.get_by_role("button", name="Trials").click()
    assert page.locator("td.name a").last.inner_text() == "line"
    page.get_by_role("searchbox").fill("line")
    assert page.locator("td.name").count() == 1
    assert page.get_by_text("1 of 2 studies").is_visible()


def test_trials_are_sorted_by_the_keyboard_and_filtered(page, address):
    open_study(page, address, "trials")
    head = page.get_by_role("button", name="mse")
    head.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("th[aria-sort='descending']:has-text('mse')")
    page.keyboard.press("Enter")  # the focus stays where it was
    page.wait_for_selector("th[aria-sort='ascending']:has-text('mse')")
    values = [float(v) for v in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert values == sorted(values)
    page.get_by_label("Find in hyper-parameters").fill("warmup")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_label("State").select_option("failed")
    page.get_by_text("No trial is like that").wait_for()


def test_markup_in_the_database_stays_text(page, address):
    page.goto(address)
    page.get_by_role("link", name=SCRIPT).click()
    page.wait_for_selector("h1")
    assert page.locator("h1").inner_text() == SCRIPT
    for tab in (
        "overview", "forest", "workers", "curves", "parallel", "importance", "trials", "trials/0"
    ):  # fmt: skip
        open_study(page, address, tab, study=2)
        wait_until_settled(page)
        assert page.evaluate("window.hurt") is None
        assert page.locator("main script, main img").count() == 0
    assert page.get_by_text(SCRIPT).count() >= 2


def test_files_and_attributes_of_a_trial(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = Study(
        describing,
        algorithm=GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="described",
    )
    study.run(progress=False, executor=SOLO)
    with serving(tmp_path / "t.db") as address:
        page.goto(f"{address}#/studies/1/trials/0")
        page.get_by_text(f"note: {SCRIPT}").wait_for()
        with page.expect_download() as started:
            page.get_by_role("link", name="page.html").click()
        assert started.value.suggested_filename == "page.html"
        assert started.value.path().read_text() == SCRIPT
        assert page.evaluate("window.hurt") is None
        page.close()  # it asks again and again, and the server ends here


@trainable
def describing(trial):
    trial.suggest_int("width", 1, 2)
    for _epoch in trial.epochs({}):
        trial.set_user_attr(SCRIPT, f"note: {SCRIPT}")
        Path("page.html").write_text(SCRIPT)
        trial.log_artifact("page.html")
        yield {"loss": 1.0}


def test_live_while_a_study_writes(page, tmp_path):
    study = halving(tmp_path, name="living")
    with Store.open(study.storage.url):
        pass
    with shown_to(page, tmp_path / "t.db") as address:
        page.goto(address)
        page.get_by_text("No studies yet").wait_for()
        runner = threading.Thread(target=lambda: study.run(progress=False, executor=SOLO))
        runner.start()
        page.get_by_role("link", name="living").click()
        page.wait_for_selector("h1:text('living')")
        runner.join()
        page.wait_for_selector(".badge:text('done')")
        trials = page.locator(".tile:has-text('Trials') dd").first
        assert trials.inner_text() == "9"


def test_a_server_that_is_gone_is_told_and_does_not_empty_the_page(browser, database):
    with serving(database) as address:
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        open_study(page, address)
        page.wait_for_selector(".live[data-state='on']")
    page.wait_for_selector(".live[data-state='off']")
    assert page.locator("h1").inner_text() == "line"
    page.close()


def test_what_is_not_there(page, address):
    page.goto(f"{address}#/nowhere")
    page.get_by_text("There is no such page").wait_for()


def test_the_theme_is_kept(page, address):
    page.goto(address)
    page.wait_for_selector("td.name")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.get_by_role("button", name="Change between light and dark").click()
    after = page.evaluate("document.documentElement.dataset.theme")
    page.reload()
    assert before != after == page.evaluate("document.documentElement.dataset.theme")


def test_headings_labels_and_landmarks(page, address):
    for path in ("", "#/studies/1/overview", "#/studies/1/trials", "#/studies/1/trials/0"):
        page.goto(f"{address}{path}")
        page.wait_for_selector("h1")
        wait_until_settled(page)
        assert page.locator("h1").count() == 1
        assert page.locator("main").count() == 1
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, [role=img]")].filter(
                (e) =>
                !(e.textContent.trim() || e.getAttribute("aria-label") || e.closest("label"))
            ).length"""
        )
        assert unnamed == 0


def test_durations_are_rounded_before_they_are_cut_into_parts(page, address):
    page.goto(address)
    told = page.evaluate(
        """async () => {
            const { seconds } = await import(new URL("static/js/format.js", document.baseURI));
            return [0.25, 59.94, 59.97, 3599.4, 3599.6, 7199.9, 172799, 200000].map(seconds);
        }"""
    )
    assert told == [
        "250 ms", "59.9 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 0 min", "2.0 days",
        "2.3 days",
    ]  # fmt: skip


def test_numbers_have_four_digits_or_all_of_the_integer_part_and_a_title_with_all(page, address):
    page.goto(address)
    told = page.evaluate(
        """async () => {
            const at = (name) => import(new URL(`static/js/${name}.js`, document.baseURI));
            const { number, brief } = await at("format");
            const { figure } = await at("dom");
            return {
                numbers: [0.983333333, 12, 1234567, 0.1 + 0.2, 0.0000123456, 123456.789, 99999.9,
                          -2.5, null].map(number),
                texts: ["Step(0.0123456789, (27,), gamma=0.3)", "v1.23456", "1.23456789e-07",
                        "0.1"].map(brief),
                title: figure(0.983333333).title,
            };
        }"""
    )
    assert told == {
        "numbers": [
            "0.9833", "12", "1,234,567", "0.3", "1.235e-5", "123,457", "100,000", "-2.5", "\u2013",
        ],
        "texts": ["Step(0.01235, [27], gamma=0.3)", "v1.23456", "1.235e-7", "0.1"],
        "title": "0.983333333",
    }  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_best_line_is_the_strongest(page, address, theme):
    page.emulate_media(color_scheme=theme)
    page.goto(address)
    page.wait_for_selector("td.name")
    lines = page.evaluate(
        """async () => {
            const at = (name) => import(new URL(`static/js/${name}.js`, document.baseURI));
            const { colours, stroke } = await at("theme");
            const c = colours();
            const bright = (colour) => {
                const probe = document.createElement("canvas").getContext("2d");
                probe.fillStyle = colour;
                probe.fillRect(0, 0, 1, 1);
                const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
                return 0.3 * r + 0.59 * g + 0.11 * b;
            };
            return [0, 0.5, 1].map((t) => {
                const { z, style } = stroke(t, c);
                const contrast = Math.abs(bright(style.color) - bright(c.surface));
                return [z, style.width, style.opacity, contrast];
            });
        }"""
    )
    for weaker, stronger in itertools.pairwise(lines):
        assert all(a < b for a, b in zip(weaker, stronger, strict=True))


def test_no_tile_says_zero(page, tmp_path):
    space = Space(lr=Choice([0.1, 0.05]), width=Choice([0]), dropout=Choice([0.0]))
    study = make_study(tmp_path, space=space, algorithm=GridSearch(max_epochs=2), name="apart")
    study.run(progress=False, executor=SOLO)
    with shown_to(page, tmp_path / "t.db") as address:
        for tab in ("overview", "trials/0"):
            open_study(page, address, tab)
            page.wait_for_selector(".tile.hero")
            wait_until_settled(page)
            figures = page.locator(".tile dd:not(.hint)").all_inner_texts()
            assert figures
            assert not {"0", "0 ms", "1.00\u00d7"} & set(figures)
        assert page.locator(".tile.hero").count() == 1


def test_the_search_space_is_shown_in_words(page, address):
    open_study(page, address)
    table = page.get_by_role("region", name="Search space")
    table.get_by_text("choice", exact=True).first.wait_for()
    text = table.inner_text()
    assert "width" in text
    assert not {"Choice(", "options=", "conditions="} & set(text.split())
    assert "conditions=" not in text


@pytest.mark.thorough
def test_a_hundred_thousand_trials(page, big):
    with shown_to(page, big) as address:
        page.goto(f"{address}#/")
        page.wait_for_selector("td.name")
        sizes = []
        page.on(
            "response", lambda said: sizes.append(int(said.header_value("content-length") or 0))
        )
        open_study(page, address)
        page.wait_for_selector("canvas")
        wait_until_settled(page)
        # The amount of data depends on the page and not on the number of trials.
        assert 0 < sum(sizes) < 2_000_000
        assert page.get_by_text("100,000").first.is_visible()
        for tab in ("forest", "workers", "curves", "parallel"):
            open_study(page, address, tab)
            page.wait_for_selector("canvas")
        page.get_by_text("of 100,000 trials, evenly over the ranks").wait_for()
        open_study(page, address, "trials")
        page.get_by_text("50 of 100,000").wait_for()


def steer_a_trial(page, home):
    page.goto(f"{home}#/studies/1/trials/1")
    page.get_by_label("a note").fill(SCRIPT)
    page.get_by_role("button", name="Add note").click()
    expect(page.locator(".acts")).to_contain_text(SCRIPT)
    page.get_by_label("a tag").fill("odd")
    page.get_by_role("button", name="Add tag").click()
    expect(page.locator(".tags")).to_contain_text("odd")
    page.get_by_role("button", name="Stop this trial").click()
    page.get_by_role("button", name="click again to confirm").click()
    expect(page.locator(".acts")).to_contain_text("stop trial 1")
    page.get_by_label("epoch").fill("1")
    page.get_by_role("button", name="What would it cost?").click()
    expect(page.get_by_text(re.compile(r"factor=0\.3.*to train"))).to_be_visible()
    page.get_by_role("button", name="Enqueue this branch").click()
    expect(page.locator(".acts")).to_contain_text("branch of trial 1 after epoch 1: lr times")
    page.get_by_label("how it changes").select_option("becomes")
    page.get_by_label("new value").fill("0.0125")
    page.get_by_role("button", name="What would it cost?").click()
    expect(page.get_by_text(re.compile(r"0\.0125.*to train"))).to_be_visible()
    page.get_by_role("button", name="Enqueue this branch").click()
    expect(page.locator(".acts")).to_contain_text("after epoch 1: lr = 0.0125")
    page.get_by_text("Try other values").click()
    field = page.get_by_label("a configuration")
    config = json.loads(field.input_value())
    field.fill("{")
    page.get_by_role("button", name="Enqueue this configuration").click()
    expect(page.get_by_text("this is not JSON")).to_be_visible()
    field.fill(json.dumps(config))
    page.get_by_role("button", name="Enqueue this configuration").click()
    expect(page.locator(".acts")).to_contain_text("trial 1 with nothing changed")
    page.get_by_role("button", name="remove the tag odd").click()
    expect(page.locator(".tags")).to_be_empty()


def stop_a_study(page, home):
    page.goto(f"{home}#/studies/1/overview")
    expect(page.locator(".acts")).to_contain_text("trial 1: ")
    epochs = page.get_by_label("new number of epochs")
    expect(epochs).to_have_value("12")
    epochs.fill("8")
    page.get_by_role("button", name="Train longer").click()
    expect(page.get_by_text("Trials train for 8 epochs instead of 6")).to_be_visible()
    page.get_by_role("button", name="Train longer: click again to confirm").click()
    request = page.locator(".acts li", has_text="train the study's trials for 8 epochs")
    expect(request).to_contain_text("queued")
    page.get_by_role("button", name="Pause the study").click()
    expect(page.locator(".acts")).to_contain_text("pause the study")
    page.get_by_role("button", name="Stop the study").click()
    page.get_by_role("button", name="click again to confirm").click()
    expect(page.get_by_text("asked; it is done at the end of an epoch")).to_be_visible()


def test_a_study_is_steered_from_its_page(page, tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.study._loop.LOOK_S", 0.0)
    monkeypatch.setattr("thrifty.study._loop.GROUP_S", 0.0)
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Waits:
        """Waits after the third epoch, so that the page can act while the study runs."""

        num = 0

        def on_event(self, event):
            self.num += isinstance(event, EpochDone)
            if self.num == 3:
                has_begun.set()
                may_go_on.wait()

    study = make_study(tmp_path, space=WIDE, algorithm=GridSearch(max_epochs=6))
    running = threading.Thread(
        target=lambda: study.run(progress=False, executor=SOLO, observers=[Waits()])
    )
    running.start()
    has_begun.wait()
    try:
        with serving(tmp_path / "t.db", steer=True) as found:
            page.goto(found)
            home = found.partition("?")[0]
            steer_a_trial(page, home)
            stop_a_study(page, home)
            may_go_on.set()
            running.join()
            expect(page.locator("h1 + .badge")).to_have_text("stopped")
            assert page.evaluate("window.hurt") is None
            page.goto("about:blank")
    finally:
        may_go_on.set()
        running.join()
    assert study.trials[1].state == "stopped"
    *_, branch, again = study.run(progress=False, executor=SOLO).trials
    assert branch.config["lr"].at == 1
    assert again.config == study.trials[1].config
    assert {trial.state for trial in study.trials} > {"stopped"}
    (request,) = [act for act in study.acts if act.kind == "lengthen"]
    assert "depends on max_epochs" in request.answer


def test_a_stopped_study_is_held_and_let_go_from_its_page(page, tmp_path):
    study = make_study(tmp_path, space=WIDE, algorithm=GridSearch(max_epochs=6))
    study.run(progress=False, executor=SOLO, stop=StopWhen(epochs=2))
    with serving(tmp_path / "t.db", steer=True) as found:
        page.goto(found)
        page.goto(f"{found.partition('?')[0]}#/studies/1/overview")
        page.get_by_role("button", name="Pause the study").click()
        badges = page.locator(".acts .badge")
        expect(badges).to_have_text(["queued"])
        page.get_by_role("button", name="Go on").click()
        expect(badges).to_have_text(["queued", "queued"])
        expect(page.get_by_role("button", name="Pause the study")).to_be_visible()
        page.goto("about:blank")
    assert {t.state for t in study.run(progress=False, executor=SOLO).trials} == {"done"}
    assert [(a.kind, a.is_queued) for a in study.acts] == [("pause", False), ("resume", False)]


def test_a_study_is_deleted_and_restored_from_its_page(page, database):
    with serving(database, steer=True) as found:
        page.goto(found)
        home = found.partition("?")[0]
        page.goto(f"{home}#/studies/1/overview")
        button = page.get_by_role("button", name="Delete the study")
        expect(button).to_be_disabled()
        page.get_by_label("the name of the study").fill("lin")
        expect(button).to_be_disabled()
        page.get_by_label("the name of the study").fill("line")
        page.gone = "/studies/1"  # what the page asks for meanwhile may come too late
        button.click()
        trash = page.get_by_role("region", name="Deleted studies")
        expect(trash).to_contain_text("line, ")
        expect(page.get_by_role("link", name="line", exact=True)).to_have_count(0)
        page.reload()
        trash.get_by_role("button", name="Restore line").click()
        expect(page.get_by_role("link", name="line", exact=True)).to_be_visible()
        expect(trash).to_be_hidden()
        assert page.evaluate("window.hurt") is None
        page.goto("about:blank")


def test_hostile_names_of_deleted_studies_are_text(page, database):
    with Store.open(f"sqlite:///{database}") as store:
        for study in store.studies.list():
            store.trash.put(store.studies.get(study.name), who=SCRIPT)
    with serving(database) as found:
        page.goto(found)
        expect(page.get_by_text("No studies yet")).to_be_visible()
        trash = page.get_by_role("region", name="Deleted studies")
        expect(trash).to_contain_text(SCRIPT)
        expect(trash.get_by_role("button")).to_have_count(0)
        assert page.evaluate("window.hurt") is None
        page.goto("about:blank")


def test_an_answer_that_breaks_off_is_said(page, address):
    page.route("**/api/studies", lambda asked: asked.fulfill(status=200, body='{"studies": ['))
    page.goto(f"{address}#/")
    expect(page.get_by_role("alert")).to_contain_text("the dashboard's answer broke off")
    page.unroute("**/api/studies")
    page.reload()
    expect(page.locator("td.name").first).to_be_visible()


def test_a_page_that_is_left_while_an_answer_arrives_says_nothing(page, address):
    page.add_init_script("""
        const json = Response.prototype.json;
        Response.prototype.json = function () {
          if (!this.url.endsWith("/api/studies")) return json.call(this);
          return Promise.reject(new DOMException("the page was left", "AbortError"));
        };
    """)
    page.goto(f"{address}#/")
    wait_until_settled(page)
    assert page.get_by_role("alert").count() == 0
    expect(page.locator(".empty")).to_have_text("Loading")


def test_two_trials_are_compared(page, address):
    open_study(page, address, "compare")
    page.get_by_label("Numbers of trials").fill("0, 4")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("thead th")).to_have_text(["trial 0", "trial 4"])
    expect(page.locator("tr.differs th").first).to_have_text("lr")
    wait_until_drawn(page)
    page.get_by_label("Numbers of trials").fill("0, 9999")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".card p[role=status]")).to_contain_text("no trial 9999")
    page.get_by_label("Numbers of trials").fill("best")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".card p[role=status]")).to_contain_text("at most 8 numbers")


def test_the_pareto_front_is_shown_of_several_objectives_only(page, address, tmp_path):
    open_study(page, address)
    assert page.get_by_role("link", name="Pareto front").count() == 0
    space = Space(lr=Choice([0.02, 0.05, 0.1]), width=Choice([2, 4]), dropout=0.2)
    make_study(
        tmp_path,
        task=Sized(),
        space=space,
        metric=["mse", "size"],
        mode=["min", "min"],
        algorithm=GridSearch(max_epochs=2),
    ).run(progress=False, executor=SOLO)
    with shown_to(page, tmp_path / "t.db") as found:
        open_study(page, found)
        page.get_by_role("link", name="Pareto front").click()
        expect(
            page.get_by_text(re.compile(r"of 6 trials that keep the constraints"))
        ).to_be_visible()
        wait_until_drawn(page)


def test_two_hyper_parameters_at_a_time(page, tmp_path):
    space = Space(lr=Choice([0.02, 0.05, 0.1]), width=Choice([2, 4]), dropout=0.2)
    make_study(tmp_path, space=space, algorithm=GridSearch(max_epochs=2)).run(
        progress=False, executor=SOLO
    )
    with shown_to(page, tmp_path / "t.db") as found:
        open_study(page, found, "slices")
        expect(page.get_by_role("heading", name="Two at a time")).to_be_visible()
        page.get_by_label("Across").select_option(label="width")
        page.get_by_label("Upwards").select_option(label="lr")
        wait_until_drawn(page)


def test_contours_are_those_of_the_trials_nearby(page, tmp_path):
    space = Space(lr=Float(1e-3, 0.1, log=True), momentum=Float(0.0, 0.9))
    algorithm = RandomSearch(max_epochs=1, num_trials=16)
    make_study(tmp_path, space=space, algorithm=algorithm).run(progress=False, executor=SOLO)
    rng = np.random.default_rng(0)
    points = rng.uniform(size=(10, 3))
    with shown_to(page, tmp_path / "t.db") as found:
        open_study(page, found, "slices")
        expect(page.get_by_text("behind the points, the mean of trials nearby")).to_be_visible()
        wait_until_drawn(page)
        page.get_by_label("Upwards").select_option(label="lr")
        expect(page.get_by_text("behind the points")).to_be_hidden()
        rows = page.evaluate(
            "async (p) => (await import('./static/js/landscape.js')).landscape(p, 7)",
            points.tolist(),
        )
    assert any(each is None for row in rows for each in row)
    width = 0.28 / 10**0.25
    for y, row in zip(np.linspace(0, 1, 7), rows, strict=True):
        for x, shown in zip(np.linspace(0, 1, 7), row, strict=True):
            distances_N = np.hypot(points[:, 0] - x, points[:, 1] - y)
            weights_N = np.exp(-((distances_N / width) ** 2) / 2)
            if weights_N.sum() < np.exp(-2):
                assert shown is None
            else:
                assert shown == pytest.approx(np.average(points[:, 2], weights=weights_N))


def test_a_dashboard_that_only_shows_has_no_buttons_to_act(page, address):
    open_study(page, address, "trials/4")
    page.wait_for_selector("canvas")
    assert page.get_by_role("button", name=re.compile("Stop|Add")).count() == 0


class Chatty(Sized):
    """A task that logs markup."""

    def metrics(self, model, batch):
        logging.getLogger("tests.browser").warning("<b>rate</b>\n%s", SCRIPT)
        return super().metrics(model, batch)


def test_log_lines_are_text_and_workers_have_what_was_measured(page, tmp_path):
    make_study(tmp_path, task=Chatty(), space=Space(lr=0.1)).run(progress=False, executor=SOLO)
    with shown_to(page, tmp_path / "t.db") as address:
        open_study(page, address, "trials/0")
        line = page.locator("td.logged").first
        line.wait_for()
        assert line.text_content() == f"<b>rate</b>\n{SCRIPT}"
        assert page.locator("td.logged b").count() == 0
        assert page.get_by_text("of training, its share of packs").is_visible()
        open_study(page, address, "workers")
        row = page.locator("table tbody tr").first
        row.wait_for()
        assert re.search(r"cpu[\d,.]+ [MG]iB$", row.text_content())


def test_trials_that_were_stopped_in_training_are_counted(page, tmp_path):
    study = make_study(tmp_path, algorithm=GridSearch(max_epochs=6))
    study.run(progress=False, executor=SOLO, stop=StopWhen(epochs=2))
    with shown_to(page, tmp_path / "t.db") as address:
        page.goto(address)
        expect(page.locator("table")).to_contain_text(re.compile(r"\d+ stopped in training"))
        open_study(page, address)
        tile = page.locator(".tile", has_text="Trials")
        expect(tile).to_contain_text(re.compile(r"none running, \d+ stopped in training"))
