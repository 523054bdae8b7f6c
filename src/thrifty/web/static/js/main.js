// Which page is shown, and keeping it up to date.

import { Problem, Reader, revision } from "./api.js";
import { add, fill, h } from "./dom.js";
import { startTheme } from "./theme.js";
import { studiesPage } from "./pages/studies.js";
import { studyPage } from "./pages/study.js";
import { trialPage } from "./pages/trial.js";

const POLL_MS = 2000;
const main = document.getElementById("main");
const light = document.getElementById("live");
let current = null;

const routes = [
  [/^\/?$/, () => ({ make: studiesPage, watch: "/revision", params: {} })],
  [
    /^\/studies\/(\d+)(?:\/([a-z]+))?$/,
    (m) => ({
      make: studyPage,
      watch: `/studies/${m[1]}/revision`,
      params: { study: m[1], tab: m[2] ?? "overview" },
    }),
  ],
  [
    /^\/studies\/(\d+)\/trials\/(\d+)$/,
    (m) => ({ make: trialPage, watch: `/studies/${m[1]}/revision`, params: { study: m[1], trial: m[2] } }),
  ],
];

function say(state, text) {
  if (light.dataset.state !== state || light.textContent !== text) {
    light.dataset.state = state;
    light.textContent = text;
  }
}

function crumbs(parts) {
  fill(document.getElementById("crumbs"));
  document.title = [...parts.map((part) => part.text), "thrifty"].reverse().join(" – ");
  for (const part of parts) {
    add(document.getElementById("crumbs"), [
      h("span", { "aria-hidden": "true" }, "/"),
      part.href ? h("a", { href: part.href }, part.text) : h("span", {}, part.text),
    ]);
  }
}

function explain(shown, error) {
  // a page may show a problem of its own: a failed trial does
  shown.root.querySelector(":scope > .problem[role=alert]")?.remove();
  if (!error) return;
  const lost = error instanceof Problem && error.status === 404;
  const box = h(
    "div",
    { class: "problem", role: "alert" },
    error.message,
    lost && [" ", h("a", { href: "#/" }, "All studies")],
  );
  if (shown.root.querySelector(".empty")?.textContent === "Loading") fill(shown.root);
  shown.root.prepend(box);
}

async function update(shown) {
  if (shown.busy) {
    shown.again = true;
    return;
  }
  shown.busy = true;
  try {
    await shown.page.update();
    explain(shown, null);
  } catch (error) {
    if (error.name !== "AbortError" && shown === current) explain(shown, error);
    if (!(error instanceof Problem) && error.name !== "AbortError") console.error(error);
  } finally {
    shown.busy = false;
  }
  if (shown.again && shown === current) {
    shown.again = false;
    await update(shown);
  }
}

function show() {
  const path = location.hash.replace(/^#/, "");
  const found = routes.map(([pattern, make]) => [path.match(pattern), make]).find(([match]) => match);
  current?.reader.close();
  current?.page.dispose?.();
  const root = h("div", {}, h("p", { class: "empty" }, "Loading"));
  fill(main, root);
  if (!found) {
    current = null;
    crumbs([]);
    fill(
      root,
      h(
        "p",
        { class: "empty" },
        h("strong", {}, "There is no such page"),
        h("a", { href: "#/" }, "All studies"),
      ),
    );
    return;
  }
  const { make, watch, params } = found[1](found[0]);
  const reader = new Reader();
  const shown = { root, reader, watch, busy: false, again: false };
  current = shown;
  shown.page = make({ root, reader, params, crumbs, update: () => update(shown) });
  update(shown);
}

async function poll() {
  const shown = current;
  let pause = POLL_MS;
  if (document.visibilityState === "visible" && shown) {
    try {
      const { now, again } = await revision(shown.watch);
      pause = Math.max(pause, 1000 * again);
      say("on", "live");
      if (shown === current && (shown.failed || shown.reader.isBehind(now))) await update(shown);
      shown.failed = false;
    } catch (error) {
      shown.failed = true;
      if (error instanceof Problem) say("off", error.status === 404 ? "gone" : "no connection");
      else console.error(error);
    }
  }
  setTimeout(poll, pause);
}

startTheme(document.getElementById("theme"));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
document.addEventListener(
  "visibilitychange",
  () => current && document.visibilityState === "visible" && update(current),
);
show();
poll();
