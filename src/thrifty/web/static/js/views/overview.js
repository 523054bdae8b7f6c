// The study in figures, how the best value came about, and what it was made from.

import { Chart, axis, tooltip } from "../chart.js";
import { card, figure, fill, h, tile, written } from "../dom.js";
import { ago, axisOf, count, factor, number, seconds, trained } from "../format.js";
import { bars, basis } from "./importance.js";

export function overviewView({ root, reader, path, study: id }) {
  const chart = new Chart("Values of trials by number, and the best so far");
  const note = h("p", { class: "note" });
  const tiles = h("div", { class: "tiles" });
  const best = h("div", {});
  const shares = h("div", {});
  const compared = h("p", { class: "note" });
  const space = h("tbody", {});
  let drawn = false;

  chart.on("click", (event) => {
    const number = Array.isArray(event.value) ? event.value[0] : null;
    if (number !== null) location.hash = `#/studies/${id}/trials/${number}`;
  });

  function whyNone(study) {
    const failed = study.trials.failed ?? 0;
    const reported = study.epochs.reached > 0 && failed < study.num_trials;
    if (study.num_trials && failed === study.num_trials) return "all trials failed";
    return reported ? "no valid result yet" : "no trial has reported";
  }

  function figures({ study, best_epochs: epochs, num_seeds: seeds, best_interval: range, resume }) {
    const going = study.trials.running ?? 0;
    const failed = study.trials.failed ?? 0;
    const cut = study.stopped_in_training;
    const unit = study.unit.name[0].toUpperCase() + study.unit.name.slice(1);
    const { name: one, formatter: shown } = axisOf(study.unit);
    fill(
      tiles,
      tile(
        `Best ${study.metrics[0]}`,
        figure(study.best_value),
        study.best_trial === null
          ? whyNone(study)
          : [
              `trial ${study.best_trial} after ${trained(study.unit, epochs)}`,
              range && `, mean of ${count(seeds)} seeds, 95 % interval ${figure(range[0])} to ${figure(range[1])}`,
            ],
        study.best_trial === null ? "" : "hero",
      ),
      tile("Trials", study.num_trials ? count(study.num_trials) : "none yet", [
        going ? `${count(going)} running` : "none running",
        failed ? `, ${count(failed)} failed` : "",
        cut ? `, ${count(cut)} stopped in training` : "",
      ]),
      // what is 0 says nothing: a study that shares no epoch shows those that it trained
      study.epochs.saved > 0
        ? [
            tile(
              `${unit} saved`,
              shown(study.epochs.saved),
              `${shown(study.epochs.trained)} trained for ${shown(study.epochs.reached)} reached`,
            ),
            tile("Saved by sharing", factor(study.epochs.factor), `${study.unit.name} reached per ${one} trained`),
          ]
        : study.epochs.trained > 0 && tile(unit, shown(study.epochs.trained), "trained, none shared"),
      study.seconds > 0 && tile("Training", seconds(study.seconds), "by this study's own runs"),
      resume && tile("To go on", study.state, h("code", {}, resume)),
      tile("Last activity", ago(study.last_activity ?? study.created_at), `begun ${ago(study.created_at)}`),
    );
  }

  function about(detail) {
    const pairs = Object.entries(detail.best_config);
    fill(
      best,
      pairs.length
        ? [
            h(
              "dl",
              { class: "pairs" },
              pairs.map(([name, text]) => [h("dt", {}, name), h("dd", { class: "mono" }, written(text))]),
            ),
            h(
              "p",
              {},
              h(
                "a",
                { href: `#/studies/${id}/trials/${detail.study.best_trial}` },
                `Trial ${detail.study.best_trial}`,
              ),
            ),
          ]
        : h("p", { class: "note" }, `None: ${whyNone(detail.study)}.`),
    );
    fill(space, detail.space.map(row));
  }

  // a choice of schedules has a line for each; shorter options share one
  function row({ name, domain, kind, options, when }) {
    const apart = options.some((text) => text.includes("("));
    return h(
      "tr",
      { title: domain },
      h("td", {}, name),
      h("td", {}, kind),
      h(
        "td",
        { class: "mono" },
        apart ? options.map((text) => h("div", { class: "option" }, text)) : options.join(", "),
      ),
      h("td", { class: "note" }, when && `only if ${when}`),
    );
  }

  function history(data) {
    note.textContent =
      data.shown < data.total
        ? `${count(data.shown)} of ${count(data.total)} trials, and all that improved`
        : "";
    const line = data.best_trials.map((trial, i) => [trial, data.best_values[i]]);
    if (line.length && data.trials.length)
      line.push([Math.max(data.trials.at(-1), line.at(-1)[0]), line.at(-1)[1]]);
    return chart.draw((c) => ({
      animation: false,
      grid: { left: 12, right: 34, top: 28, bottom: 34, containLabel: true },
      xAxis: axis(c, {
        type: "value",
        name: "trial",
        nameLocation: "middle",
        nameGap: 26,
        minInterval: 1,
        splitLine: { show: false },
      }),
      yAxis: axis(c, {
        type: "value",
        scale: true,
        name: data.metric,
        nameTextStyle: { color: c.muted, align: "left" },
      }),
      tooltip: tooltip(c, (p) => `trial ${p.value[0]}\n${number(p.value[1])}`),
      aria: { enabled: true },
      series: [
        {
          type: "scatter",
          name: "trials",
          symbolSize: 5,
          itemStyle: { color: c.other, opacity: 0.75 },
          data: data.trials.map((t, i) => [t, data.values[i]]),
          large: data.trials.length > 2000,
        },
        {
          type: "line",
          name: "best so far",
          step: "end",
          showSymbol: line.length < 60,
          symbolSize: 6,
          lineStyle: { color: c.accent, width: 2.2 },
          itemStyle: { color: c.accent },
          data: line,
        },
      ],
    }));
  }

  return {
    // requested beside the study itself
    ask() {
      return {
        values: reader.get("history", `${path}/history`),
        matters: reader.get("importance", `${path}/importance`),
      };
    },
    async update(detail, changed, asked) {
      if (!drawn) {
        drawn = true;
        fill(
          root,
          tiles,
          h(
            "div",
            { class: "two" },
            card("Values and the best so far", "", note, chart.element),
            h(
              "div",
              {},
              card("Best configuration", "", best),
              card("What matters", "shares sum to 100 %", shares, compared),
            ),
          ),
          card(
            "Search space",
            "",
            h(
              "div",
              { class: "scroll", tabindex: "0", role: "region", "aria-label": "Search space" },
              h("table", { class: "space" }, h("caption", { class: "visually-hidden" }, "Search space"), space),
            ),
          ),
        );
      }
      if (changed) {
        figures(detail);
        about(detail);
      }
      const values = await asked.values;
      if (values.changed) {
        chart.element.hidden = !values.body.total;
        if (values.body.total) await history(values.body);
        else note.textContent = "No trial has reported yet.";
      }
      const matters = await asked.matters;
      if (matters.changed) {
        fill(shares, bars(matters.body, 6));
        fill(compared, basis(matters.body));
      }
    },
    dispose: () => chart.dispose(),
  };
}
