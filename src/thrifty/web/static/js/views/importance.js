// Which hyper-parameters matter.

import { card, fill, h } from "../dom.js";
import { count, percent, place } from "../format.js";

// The trials that were compared, and the epoch at which.
export function basis(data) {
  return data.trials ? `${data.metric} of ${count(data.trials)} trials after ${place(data.unit, data.epoch)}` : "";
}

export function bars(data, limit = Infinity) {
  if (!data.shares.length) return h("p", { class: "note" }, data.note || "Nothing varies yet.");
  const shown = data.shares.slice(0, limit);
  return [
    h(
      "div",
      { class: "bars", role: "list" },
      shown.map(({ name, share }) => {
        const bar = h("div", { class: "fill" });
        bar.style.width = `${100 * share}%`; // a full bar is 100 %
        return [
          h("span", { class: "label", role: "listitem" }, name),
          h("div", { class: "track", "aria-hidden": "true" }, bar),
          h("span", { class: "figure" }, percent(share)),
        ];
      }),
    ),
    data.shares.length > shown.length &&
      h("p", { class: "note" }, `and ${count(data.shares.length - shown.length)} more`),
    data.one_value.length > 0 &&
      h("p", { class: "note" }, `one value among these trials: ${data.one_value.join(", ")}`),
  ];
}

export function importanceView({ root, reader, path }) {
  return {
    async update() {
      const { body, changed } = await reader.get("importance", `${path}/importance`);
      if (!changed) return;
      fill(
        root,
        card(
          "What makes trials differ",
          basis(body),
          bars(body),
          h(
            "p",
            { class: "note" },
            "The shares sum to 100 %. They say how much of the metric's variance each coordinate explains alone, compared with the others: one-way analysis of variance over eight equal groups, less what chance would give (epsilon squared). Values far worse than most count as the worst of the rest. For fANOVA, run: thrifty importance NAME --level coordinate.",
          ),
        ),
      );
    },
  };
}
