// A few trials side by side: what differs, and their curves.

import { Chart, axis } from "../chart.js";
import { badge, figure, fill, h, written } from "../dom.js";
import { axisOf, count, number } from "../format.js";

const MOST = 8;
const DASHES = ["solid", "dashed", "dotted"];

export function compareView({ root, reader, path, study: id, update }) {
  const chart = new Chart("Curves of the compared trials", "tall");
  const field = h("input", {
    type: "text",
    "aria-label": "Numbers of trials",
    placeholder: "0, 3, 7",
    maxlength: 100,
  });
  const metric = h("select", { "aria-label": "Metric", onchange: () => trials.length && draw() });
  const said = h("p", { class: "note", role: "status" });
  const table = h("table", {});
  const found = h("div", {});
  let numbers = null;
  let trials = [];
  let unit = null;

  const form = h(
    "form",
    {
      class: "tools",
      onsubmit: (event) => {
        event.preventDefault();
        const given = field.value.split(/[\s,;]+/).filter(Boolean);
        numbers = [...new Set(given.map(Number))];
        if (numbers.some((n) => !Number.isInteger(n) || n < 0) || numbers.length > MOST) {
          said.textContent = `Give at most ${MOST} numbers of trials, such as 0, 3, 7.`;
          numbers = [];
        }
        update();
      },
    },
    h("label", {}, "trials ", field),
    h("button", { type: "submit", class: "plain" }, "Compare"),
  );

  // those that differ first: they are what one looks for
  function rows() {
    const names = [...new Set(trials.flatMap((trial) => trial.schedule.map((line) => line.name)))];
    const text = (trial, name) => trial.schedule.find((line) => line.name === name)?.text ?? null;
    return names
      .map((name) => ({ name, texts: trials.map((trial) => text(trial, name)) }))
      .map((row) => ({ ...row, differs: new Set(row.texts).size > 1 }))
      .sort((a, b) => b.differs - a.differs);
  }

  function line(label, cells, extra = {}) {
    return h("tr", extra, h("th", { scope: "row" }, label), cells.map((cell) => h("td", {}, cell)));
  }

  function drawTable(first) {
    fill(
      table,
      h("caption", { class: "visually-hidden" }, "Compared trials"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td", {}),
          trials.map((trial) =>
            h(
              "th",
              { scope: "col" },
              h("a", { href: `#/studies/${id}/trials/${trial.number}` }, `trial ${trial.number}`),
            ),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        line("State", trials.map((trial) => badge(trial.state))),
        line(first, trials.map((trial) => figure(trial.value))),
        line("Epochs", trials.map((trial) => count(trial.reached))),
        rows().map(({ name, texts, differs }) =>
          line(name, texts.map((text) => h("span", { class: "mono" }, written(text))), {
            class: differs ? "differs" : "",
          }),
        ),
      ),
    );
  }

  function draw() {
    const name = metric.value;
    return chart.draw((c) => ({
      animation: false,
      color: [c.accent, c.bad, c.good, c.pending],
      legend: { top: 0, textStyle: { color: c.ink } },
      grid: { left: 12, right: 24, top: 40, bottom: 50, containLabel: true },
      xAxis: axis(c, {
        type: "value",
        name: axisOf(unit).name,
        nameLocation: "middle",
        nameGap: 26,
        min: "dataMin",
        max: "dataMax",
        minInterval: 1,
        axisLabel: { color: c.muted, formatter: axisOf(unit).formatter },
      }),
      yAxis: axis(c, {
        type: "value",
        scale: true,
        name,
        nameTextStyle: { color: c.muted, align: "left" },
        axisLabel: { color: c.muted, formatter: number },
      }),
      series: trials.map((trial, i) => ({
        name: `trial ${trial.number}`,
        type: "line",
        data: trial.curves[name] ?? [],
        showSymbol: (trial.curves[name] ?? []).length === 1,
        lineStyle: { width: 2, type: DASHES[Math.floor(i / 4) % DASHES.length] },
      })),
    }));
  }

  function metrics(first) {
    const names = [...new Set([first, ...trials.flatMap((trial) => Object.keys(trial.curves))])];
    const before = metric.value;
    metric.replaceChildren(...names.map((name) => h("option", {}, name)));
    metric.value = names.includes(before) ? before : first;
  }

  return {
    async update(detail) {
      if (!form.isConnected) fill(root, h("section", { class: "card" }, form, said, found));
      unit = detail.study.unit;
      if (numbers === null) {
        const { body } = await reader.get("best", `${path}/trials`, { sort: "value", order: worst(detail), limit: 3 });
        numbers = body.trials.filter((trial) => trial.value !== null).map((trial) => trial.number);
        field.value = numbers.join(", ");
      }
      if (!numbers.length) {
        fill(found);
        return;
      }
      const missing = numbers.find((n) => n >= detail.study.num_trials);
      if (missing !== undefined) {
        said.textContent = `There is no trial ${missing}; the study has ${count(detail.study.num_trials)}, counted from 0.`;
        return;
      }
      const answers = await Promise.all(
        numbers.map((n) => reader.get(`trial ${n}`, `${path}/trials/${n}`)),
      );
      trials = answers.map((answer) => answer.body);
      said.textContent = "Hyper-parameters that differ come first.";
      drawTable(detail.study.metrics[0]);
      metrics(detail.study.metrics[0]);
      if (!table.isConnected) {
        fill(
          found,
          h("div", { class: "scroll" }, table),
          h("div", { class: "tools" }, h("label", {}, "metric ", metric)),
          chart.element,
        );
      }
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}

// the order in which the best trials come first
const worst = (detail) => (detail.study.modes[0] === "min" ? "asc" : "desc");
