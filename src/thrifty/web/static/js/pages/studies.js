// All studies: sorted and filtered here, for there are few of them beside trials.

import { act } from "../api.js";
import { badge, empty, figure, fill, h, sortable } from "../dom.js";
import { ago, count, factor, moment, seconds, trained } from "../format.js";

const KEYS = {
  name: (s) => s.name.toLowerCase(),
  state: (s) => s.state,
  best: (s) => s.best_value,
  trials: (s) => s.num_trials,
  saved: (s) => s.epochs.saved,
  seconds: (s) => s.seconds,
  active: (s) => s.last_activity ?? s.created_at,
};

export function studiesPage({ root, reader, crumbs }) {
  const state = { key: "active", down: true, text: "", only: "" };
  let studies = null;
  crumbs([]);

  const search = h("input", {
    type: "search",
    placeholder: "Find by name, task or metric",
    "aria-label": "Find studies",
    oninput: () => {
      state.text = search.value.toLowerCase();
      rows();
    },
  });
  const only = h(
    "select",
    {
      "aria-label": "State",
      onchange: () => {
        state.only = only.value;
        rows();
      },
    },
    h("option", { value: "" }, "Any state"),
    ["running", "paused", "done", "stopped", "interrupted"].map((s) => h("option", { value: s }, s)),
  );
  const said = h("p", { class: "note", role: "status" });
  const table = h("table", {});
  const tools = h("div", { class: "tools" }, search, only, said);

  const trash = h("section", { class: "card", "aria-label": "Deleted studies" });

  // studies that were deleted and can be restored; nothing if there are none
  function drawTrash({ studies: deleted, can_act: canAct }) {
    const problem = h("p", { class: "note", role: "status" });
    const restore = async (each, button) => {
      button.disabled = true;
      try {
        await act(`/deleted/${each.id}`, {}, "restore");
        await page.update();
      } catch (error) {
        fill(problem, error.message);
        button.disabled = false;
      }
    };
    const line = (each) => {
      const button = h("button", { type: "button", onclick: () => restore(each, button) }, `Restore ${each.name}`);
      const said = `${each.name}, ${count(each.num_trials)} trials, deleted by ${each.who} ${moment(each.at)} `;
      return h("li", {}, said, canAct && button);
    };
    fill(trash, deleted.length > 0 && [h("h2", {}, "Deleted studies"), h("ul", { class: "acts" }, deleted.map(line)), problem]);
    trash.hidden = deleted.length === 0;
  }

  function passes(s) {
    const where = `${s.name} ${s.task} ${s.metrics.join(" ")}`.toLowerCase();
    return where.includes(state.text) && (!state.only || s.state === state.only);
  }

  function sorted(list) {
    const of = KEYS[state.key];
    const missing = (x) => x === null || x === undefined;
    return [...list].sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      const order = x < y ? -1 : x > y ? 1 : a.id - b.id;
      return state.down ? -order : order;
    });
  }

  function rows() {
    const change = ({ key, down }) => {
      Object.assign(state, { key, down });
      rows();
      table.querySelector(`[aria-sort="${down ? "descending" : "ascending"}"] button`)?.focus();
    };
    const head = (label, key, numeric) => sortable(label, { key, state, change, numeric });
    const shown = sorted(studies.filter(passes));
    said.textContent =
      shown.length === studies.length ? "" : `${count(shown.length)} of ${count(studies.length)} studies`;
    fill(
      table,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head("Study", "name"),
          head("State", "state"),
          head("Best", "best", true),
          head("Trials", "trials", true),
          head("Epochs saved", "saved", true),
          head("Training", "seconds", true),
          head("Last activity", "active", true),
        ),
      ),
      h(
        "tbody",
        {},
        shown.map((s) =>
          h(
            "tr",
            {},
            h(
              "td",
              { class: "name" },
              h("a", { href: `#/studies/${s.id}` }, s.name),
              h("br"),
              h("small", {}, s.task),
            ),
            h("td", {}, badge(s.state)),
            h(
              "td",
              { class: "num" },
              figure(s.best_value),
              h("br"),
              h("small", {}, `${s.metrics[0]} ${s.modes[0] === "min" ? "↓" : "↑"}`),
            ),
            h(
              "td",
              { class: "num" },
              count(s.num_trials),
              s.trials.failed ? h("small", {}, h("br"), `${count(s.trials.failed)} failed`) : null,
              s.stopped_in_training
                ? h("small", {}, h("br"), `${count(s.stopped_in_training)} stopped in training`)
                : null,
            ),
            h(
              "td",
              { class: "num" },
              s.epochs.saved ? [trained(s.unit, s.epochs.saved), h("br"), h("small", {}, factor(s.epochs.factor))] : "–",
            ),
            h("td", { class: "num" }, seconds(s.seconds)),
            h("td", { class: "num" }, ago(s.last_activity ?? s.created_at)),
          ),
        ),
      ),
    );
  }

  const page = {
    async update() {
      const [listed, deleted] = await Promise.all([
        reader.get("studies", "/studies"),
        reader.get("deleted", "/deleted"),
      ]);
      if (deleted.changed) drawTrash(deleted.body);
      if (!listed.changed) return;
      studies = listed.body.studies;
      if (!studies.length) {
        fill(
          root,
          h("h1", {}, "Studies"),
          empty("No studies yet", "They appear here as soon as the first one runs."),
          trash,
        );
        return;
      }
      if (!table.isConnected) {
        fill(
          root,
          h("div", { class: "head" }, h("h1", {}, "Studies")),
          h("p", { class: "sub" }, "Everything trained in this database."),
          tools,
          h("section", { class: "card", "aria-label": "Studies" }, h("div", { class: "scroll" }, table)),
          trash,
        );
      }
      rows();
    },
  };
  return page;
}
