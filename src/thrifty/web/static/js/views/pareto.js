// The Pareto front of a study with several objectives: the trials that none is better than in all of them.

import { Chart, axis, tooltip } from "../chart.js";
import { Panel, h } from "../dom.js";
import { count, number, plain } from "../format.js";

export function paretoView({ root, reader, path, study: id }) {
  const chart = new Chart("Trials by two objectives, and the Pareto front", "tall");
  const choose = (label) => h("select", { "aria-label": label, onchange: () => draw() });
  const across = choose("Across");
  const up = choose("Upwards");
  const note = h("p", { class: "note" });
  let data = null;

  chart.on("click", ({ data: one }) => {
    if (one?.trial !== undefined) location.hash = `#/studies/${id}/trials/${one.trial}`;
  });

  const better = (dim) => (data.modes[dim] === "min" ? "lower" : "higher");

  // one that exploded would hide the others: an axis ends where the worst tenth begins, or the front
  function range(dim, front) {
    const sign = data.modes[dim] === "min" ? 1 : -1;
    const worse = (a, b) => sign * (a - b);
    const all = data.rows.map((row) => row[dim]).sort(worse);
    const best = front.map((row) => row[dim]).sort(worse);
    const end = [all[Math.floor(0.9 * (all.length - 1))], best.at(-1)].sort(worse).at(-1);
    const edge = Math.abs(end - all[0]) / 20;
    return sign > 0 ? { max: end + edge } : { min: end - edge };
  }

  function draw() {
    const [x, y] = [Number(across.value), Number(up.value)];
    const front = new Set(data.front);
    const points = data.trials.map((trial, i) => ({
      value: [data.rows[i][x], data.rows[i][y]],
      trial,
      row: data.rows[i],
    }));
    const best = points
      .filter((one) => front.has(one.trial))
      .sort((a, b) => a.value[0] - b.value[0]);
    const rows = best.map((one) => one.row);
    return chart.draw((c) => {
      const named = (dim) => ({
        type: "value",
        scale: true,
        ...range(dim, rows),
        name: `${data.metrics[dim]} (${better(dim)} is better)`,
        axisLine: { onZero: false, lineStyle: { color: c.line } },
        axisLabel: { color: c.muted, formatter: number },
      });
      return {
        animation: false,
        tooltip: tooltip(c, ({ data: one }) =>
          plain([`trial ${one.trial}`, ...data.metrics.map((m, dim) => `${m}: ${number(one.row[dim])}`)].join("\n")),
        ),
        grid: { left: 12, right: 24, top: 40, bottom: 44, containLabel: true },
        xAxis: axis(c, { ...named(x), nameLocation: "middle", nameGap: 28 }),
        yAxis: axis(c, { ...named(y), nameTextStyle: { color: c.muted, align: "left" } }),
        series: [
          {
            type: "scatter",
            symbolSize: 7,
            itemStyle: { color: c.other },
            data: points.filter((one) => !front.has(one.trial)),
          },
          // with two objectives the front is a staircase; with more, its projection is not
          {
            type: data.metrics.length === 2 ? "line" : "scatter",
            step: data.modes[x] === "min" ? "end" : "start",
            symbol: "circle",
            symbolSize: 11,
            showSymbol: true,
            itemStyle: { color: c.accent },
            lineStyle: { color: c.accent, width: 1.5 },
            data: best,
          },
        ],
      };
    });
  }

  function options(select, chosen) {
    const before = select.value;
    select.replaceChildren(...data.metrics.map((name, dim) => h("option", { value: dim }, name)));
    select.value = before === "" ? String(chosen) : before;
  }

  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "Pareto front"), note),
      h("div", { class: "tools" }, h("label", {}, "across ", across), h("label", {}, "upwards ", up)),
      chart.element,
    ),
  );

  return {
    async update() {
      const { body, changed } = await reader.get("pareto", `${path}/pareto`);
      if (!changed) return;
      data = body;
      if (body.metrics.length < 2) {
        panel.empty("One objective", "The front is that of studies with several objectives.");
        return;
      }
      if (!body.trials.length) {
        panel.empty("Nothing to compare yet", "Trials appear when they have reported.");
        return;
      }
      panel.show();
      note.textContent = `${count(body.front.length)} of ${count(body.total)} trials that keep the constraints are on it; the worst tenth may lie outside`;
      options(across, 0);
      options(up, 1);
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}
