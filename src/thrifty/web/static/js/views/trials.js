// The table of trials: sorted, filtered and cut into pages by the server.

import { badge, figure, fill, h, sortable, written } from "../dom.js";
import { count } from "../format.js";

const PAGE = 50;

export function trialsView({ root, reader, path, study: id, update }) {
  const state = { key: "number", down: false, offset: 0 };
  const query = { text: "", low: "", high: "", state: "" };
  const table = h("table", {});
  const said = h("span", { role: "status" });
  const back = h("button", { type: "button", onclick: () => move(-PAGE) }, "Previous");
  const on = h("button", { type: "button", onclick: () => move(PAGE) }, "Next");
  let timer = null;
  let drawn = false;
  let total = 0;

  function changed(name) {
    return (event) => {
      query[name] = event.target.value;
      state.offset = 0;
      clearTimeout(timer);
      timer = setTimeout(update, 200);
    };
  }

  function move(by) {
    state.offset = Math.max(0, state.offset + by);
    update();
  }

  function tools() {
    return h(
      "div",
      { class: "tools" },
      h("input", {
        type: "search",
        placeholder: "Find in hyper-parameters",
        "aria-label": "Find in hyper-parameters",
        maxlength: 200,
        oninput: changed("text"),
      }),
      h(
        "select",
        { "aria-label": "State", onchange: changed("state") },
        h("option", { value: "" }, "Any state"),
        ["running", "done", "paused", "stopped", "failed"].map((s) => h("option", { value: s }, s)),
      ),
      h("label", {}, "value from", h("input", { type: "number", step: "any", oninput: changed("low") })),
      h("label", {}, "to", h("input", { type: "number", step: "any", oninput: changed("high") })),
    );
  }

  function rows(body, metrics) {
    const change = async ({ key, down }) => {
      Object.assign(state, { key, down, offset: 0 });
      await update();
      table.querySelector(`[aria-sort="${down ? "descending" : "ascending"}"] button`)?.focus();
    };
    const head = (label, key, numeric) => sortable(label, { key, state, change, numeric });
    fill(
      table,
      h("caption", { class: "visually-hidden" }, "Trials"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head("Trial", "number"),
          head("State", "state"),
          head(metrics[0], "value", true),
          metrics.slice(1).map((name) => h("th", { class: "num", scope: "col" }, name)),
          head("Epochs", "reached", true),
          head("Asked for", "target", true),
          body.names.map((name) => head(name, `param:${name}`)),
        ),
      ),
      h(
        "tbody",
        {},
        body.trials.map((trial) =>
          h(
            "tr",
            {},
            h("td", {}, h("a", { href: `#/studies/${id}/trials/${trial.number}` }, trial.number)),
            h("td", {}, badge(trial.state)),
            h("td", { class: "num" }, figure(trial.value)),
            metrics.slice(1).map((name) => h("td", { class: "num" }, figure(trial.values[name]))),
            h("td", { class: "num" }, count(trial.reached)),
            h("td", { class: "num" }, count(trial.target)),
            body.names.map((name) =>
              h("td", { class: "text mono" }, written(trial.config[name])),
            ),
          ),
        ),
      ),
    );
    const last = Math.min(state.offset + body.trials.length, total);
    said.textContent = total
      ? `${count(last ? state.offset + 1 : 0)}–${count(last)} of ${count(total)}`
      : "No trial is like that";
    back.disabled = state.offset === 0;
    on.disabled = last >= total;
  }

  return {
    async update() {
      const { body, changed: fresh } = await reader.get("trials", `${path}/trials`, {
        ...query,
        sort: state.key,
        order: state.down ? "desc" : "asc",
        offset: state.offset,
        limit: PAGE,
      });
      if (!drawn) {
        drawn = true;
        fill(
          root,
          h(
            "section",
            { class: "card", "aria-label": "Trials" },
            tools(),
            h(
              "div",
              { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of trials" },
              table,
            ),
            h("div", { class: "pager" }, back, on, said),
          ),
        );
      }
      total = body.total;
      if (fresh) rows(body, body.metrics);
    },
    dispose: () => clearTimeout(timer),
  };
}
