// Learning curves: the best trials in front, thick and strong, the others pale behind them.

import { Chart, axis } from "../chart.js";
import { Panel, fill, h } from "../dom.js";
import { axisOf, count, number, place } from "../format.js";
import { stroke } from "../theme.js";

export function curvesView({ root, reader, path, study: id, update }) {
  const chart = new Chart("Learning curves", "tall");
  const said = h(
    "p",
    { class: "said note", "aria-live": "polite" },
    "Point at a curve to see whose it is; click to open the trial.",
  );
  const metric = h("select", { "aria-label": "Metric", onchange: () => update() });
  const log = h("input", { type: "checkbox", onchange: () => data && draw() });
  const note = h("p", { class: "note" });
  let data = null;

  chart.on("mouseover", ({ seriesIndex }) => {
    const curve = data?.curves[seriesIndex];
    const last = curve?.points.at(-1);
    if (last)
      said.textContent = `Trial ${curve.trial} (${curve.state}): ${data.metric} ${number(last[1])} after ${place(data.unit, last[0])}`;
  });
  chart.on("click", ({ seriesIndex }) => {
    const curve = data?.curves[seriesIndex];
    if (curve) location.hash = `#/studies/${id}/trials/${curve.trial}`;
  });

  function draw() {
    // the server sends the best first
    const top = Math.max(data.curves.filter((k) => k.best).length - 1, 1);
    const positive = data.curves.every((k) => k.points.every(([, v]) => v === null || v > 0));
    log.disabled = !positive;
    return chart.draw((c) => ({
      animation: false,
      grid: { left: 12, right: 24, top: 28, bottom: 50, containLabel: true },
      xAxis: axis(c, {
        type: "value",
        name: axisOf(data.unit).name,
        axisLabel: { color: c.muted, formatter: axisOf(data.unit).formatter },
        nameLocation: "middle",
        nameGap: 26,
        minInterval: 1,
        min: "dataMin",
        max: "dataMax",
        splitLine: { show: false },
      }),
      yAxis: axis(c, {
        type: log.checked && positive ? "log" : "value",
        scale: true,
        name: data.metric,
        nameTextStyle: { color: c.muted, align: "left" },
        axisLabel: { color: c.muted, formatter: number },
      }),
      dataZoom: [
        { type: "inside", xAxisIndex: 0, filterMode: "none" },
        { type: "inside", yAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "shift" },
      ],
      series: data.curves.map((curve, rank) => ({
        ...line(curve.best ? 1 - rank / top : 0, c),
        type: "line",
        data: curve.points,
        triggerLineEvent: true,
        showSymbol: curve.points.length === 1,
        symbolSize: 5,
        emphasis: { lineStyle: { width: 3.5, opacity: 1 } },
      })),
    }));
  }

  function line(t, c) {
    const { z, style } = stroke(t, c);
    return { z, lineStyle: style, itemStyle: { color: style.color } };
  }

  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "Learning curves"), note),
      h(
        "div",
        { class: "tools" },
        h("label", {}, "Metric", metric),
        h("label", {}, log, "Logarithmic"),
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
      const { body, changed } = await reader.get("curves", `${path}/curves`, { metric: metric.value });
      if (!changed) return;
      data = body;
      if (!body.curves.some((curve) => curve.points.length)) {
        panel.empty("No curves yet", "They appear with the first epochs.");
        return;
      }
      panel.show();
      if (metric.options.length !== body.names.length)
        fill(
          metric,
          body.names.map((name) => h("option", { value: name }, name)),
        );
      metric.value = body.metric;
      const top = body.curves.filter((curve) => curve.best).length;
      note.textContent =
        body.curves.length < body.total || body.every > 1
          ? `The ${count(top)} best of ${count(body.total)} trials and ${count(body.curves.length - top)} others${body.every > 1 ? `, every ${body.every}th epoch` : ""}`
          : `All ${count(body.total)} trials that have reported`;
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}
