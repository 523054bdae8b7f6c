// Parallel coordinates: a line for each trial, the best in front; ranges are marked by dragging along an axis.

import { Chart } from "../chart.js";
import { Panel, h } from "../dom.js";
import { count, number } from "../format.js";
import { grading, stroke } from "../theme.js";

export function parallelView({ root, reader, path, study: id }) {
  const chart = new Chart("Parallel coordinates of hyper-parameters and the metric", "tall");
  const said = h(
    "p",
    { class: "said note", "aria-live": "polite" },
    "Drag along an axis to mark a range; click on an axis to clear it.",
  );
  const note = h("p", { class: "note" });
  let data = null;

  function draw() {
    const last = data.axes.length;
    const grade = grading(
      data.rows.map((row) => row[last]),
      data.mode,
    );
    return chart.draw((c) => ({
      animation: false,
      parallel: {
        left: 70,
        right: 90,
        top: 56,
        bottom: 34,
        axisExpandable: last > 14,
        axisExpandCount: 10,
        axisExpandWidth: 110,
        parallelAxisDefault: {
          axisLine: { lineStyle: { color: c.muted } },
          axisLabel: {
            color: c.ink,
            hideOverlap: true,
            backgroundColor: c.surface,
            padding: [2, 4],
            borderRadius: 4,
            margin: 6,
          },
          axisTick: { show: false },
          nameTextStyle: { color: c.ink, fontWeight: 600, width: 120, overflow: "truncate" },
          nameGap: 16,
          areaSelectStyle: { width: 16, borderColor: c.accent, color: c.accent, opacity: 0.25 },
        },
      },
      parallelAxis: [
        ...data.axes.map((axis, dim) => ({
          dim,
          name: axis.name,
          type: axis.kind === "category" ? "category" : "value",
          data: axis.kind === "category" ? axis.labels.map(short) : undefined,
          scale: true,
          ...bounds(axis, dim),
        })),
        {
          dim: last,
          name: data.metric,
          type: "value",
          scale: true,
          inverse: data.mode === "min",
          axisLabel: { formatter: number },
        },
      ],
      series: [
        {
          type: "parallel",
          progressive: 500,
          smooth: 0.08,
          inactiveOpacity: 0.03,
          activeOpacity: 0.9,
          // the best are drawn last
          data: order(data.rows, grade, last).map((i, rank, all) => ({
            value: data.rows[i].map((v, dim) => (v === null ? "-" : place(v, dim))),
            name: String(data.trials[i]),
            lineStyle: stroke(rank / Math.max(all.length - 1, 1), c).style,
          })),
        },
      ],
    }));
  }

  const short = (text) => (text.length > 18 ? `${text.slice(0, 17)}…` : text);

  // Logarithms are taken here: ECharts labels only powers of ten, and options lie between them.
  const place = (v, dim) => (data.axes[dim]?.log ? Math.log10(v) : v);

  // an axis ends where the values do
  function bounds(axis, dim) {
    if (axis.kind === "category") return {};
    const known = data.rows.map((row) => row[dim]).filter((v) => v !== null);
    return {
      min: place(Math.min(...known), dim),
      max: place(Math.max(...known), dim),
      axisLabel: {
        formatter: (at) => number(axis.log ? Number((10 ** at).toPrecision(12)) : at),
        customValues: axis.ticks.length ? axis.ticks.map((v) => place(v, dim)) : undefined,
        showMinLabel: true,
        showMaxLabel: true,
      },
    };
  }

  function order(rows, grade, last) {
    return rows.map((_, i) => i).sort((a, b) => grade.of(rows[a][last]) - grade.of(rows[b][last]));
  }

  chart.on("click", ({ name }) => {
    if (/^\d+$/.test(name ?? "")) location.hash = `#/studies/${id}/trials/${name}`;
  });

  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "Parallel coordinates"), note),
      h(
        "div",
        { class: "tools" },
        h(
          "span",
          { class: "legend" },
          "worse",
          h("span", { class: "ramp strong", "aria-hidden": "true" }),
          "better",
        ),
      ),
      chart.element,
      said,
    ),
  );

  return {
    async update() {
      const { body, changed } = await reader.get("parallel", `${path}/parallel`);
      if (!changed) return;
      data = body;
      if (!body.rows.length || !body.axes.length) {
        panel.empty("Nothing to compare yet", "Lines appear when trials that differ have reported.");
        return;
      }
      panel.show();
      note.textContent =
        body.rows.length < body.total
          ? `${count(body.rows.length)} of ${count(body.total)} trials, evenly over the ranks of their values`
          : `All ${count(body.total)} trials that have reported`;
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}
