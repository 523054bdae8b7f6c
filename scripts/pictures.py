"""Draw the pictures of the dashboard in ``docs/images`` anew: ``python scripts/pictures.py``.

The script trains the demo into a temporary folder and opens the dashboard in a headless Chromium.
It needs the extras ``test`` and ``demo``, and a program named ``chromium``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

import thrifty as th
from thrifty.cli._demo import demo_study
from thrifty.web import serve


IMAGES = Path(__file__).parent.parent / "docs" / "images"
VIEWS = {
    "dashboard": ("overview", "light"),
    "dashboard-forest": ("forest", "light"),
    "dashboard-curves": ("curves", "light"),
    "dashboard-curves-dark": ("curves", "dark"),
    "dashboard-parallel": ("parallel", "light"),
}
"""The view and the colours of each picture."""


def main() -> None:
    """Train the demo and draw all pictures."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no program named chromium; install it and run this script again")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo_study(folder).run(executor=th.Local(threads=1), progress=False)
        server = serve(f"sqlite:///{folder / 'demo.db'}", port=0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox"]
                )
                for picture, (view, colours) in VIEWS.items():
                    draw(browser, server.address, picture=picture, view=view, colours=colours)
                browser.close()
        finally:
            server.stop()
            thread.join()


def draw(browser: Browser, address: str, *, picture: str, view: str, colours: str) -> None:
    """Take the picture of one view."""
    page = browser.new_page(
        viewport={"width": 1280, "height": 640},
        color_scheme="dark" if colours == "dark" else "light",
    )
    page.goto(f"{address}#/studies/1/{view}")
    page.wait_for_selector("canvas")
    wait_for_figures(page)
    page.screenshot(path=IMAGES / f"{picture}.png", full_page=True)
    page.close()


def wait_for_figures(page: Page) -> None:
    """Wait until the charts have been drawn and the page is known to be live."""
    page.wait_for_load_state("networkidle")
    page.wait_for_selector(".live[data-state='on']")
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
