// The stage forest: epochs to the right, a row for each branch; a stage spans the rows of its branches.

import { Chart, axis, tooltip } from "../chart.js";
import { Panel, badge, fill, h } from "../dom.js";
import { axisOf, count, number, plain, span, trained } from "../format.js";
import { grading, ramp } from "../theme.js";

export function forestView({ root, reader, path, study: id }) {
  const chart = new Chart("Stage forest", "tall");
  const note = h("p", { class: "note" });
  const picked = h(
    "div",
    { class: "said", "aria-live": "polite" },
    h("p", { class: "note" }, "Scroll to zoom, drag to move, click a stage to see who shares it."),
  );
  const legend = h("span", { class: "legend" });
  const early = h("input", { type: "checkbox", onchange: () => data && draw() });
  let data = null;

  chart.on("click", ({ dataIndex }) => {
    const stage = data?.stages[dataIndex];
    if (!stage) return;
    fill(
      picked,
      h(
        "p",
        {},
        badge(stage.state),
        ` Epochs ${span(stage)} of node ${stage.node}: ${count(stage.trials)} trial${stage.trials === 1 ? "" : "s"}, ${count(stage.saved)} epochs saved`,
        stage.best !== null && `, best ${data.metric} ${number(stage.best)}`,
        ". Trials: ",
        stage.some.map((n, i) => [i > 0 && ", ", h("a", { href: `#/studies/${id}/trials/${n}` }, n)]),
        stage.trials > stage.some.length && ` and ${count(stage.trials - stage.some.length)} more`,
      ),
    );
  });

  const FAILED = "#d64550";

  function draw() {
    const zoom = chart.zoom;
    const grade = grading(
      data.stages.map((s) => s.best),
      data.mode,
    );
    const colour = (s, c) =>
      s.state === "failed"
        ? FAILED
        : s.state === "pending" || s.best === null
          ? c.pending
          : ramp(grade.of(s.best));
    fill(
      legend,
      `best ${data.metric}: `,
      number(grade.worst),
      h("span", { class: "ramp", "aria-hidden": "true" }),
      number(grade.best),
      h("span", {}, h("span", { class: "swatch pending", "aria-hidden": "true" }), "not trained yet"),
      h("span", {}, h("span", { class: "swatch failed", "aria-hidden": "true" }), "failed"),
    );
    const items = [
      ...data.stages.map((s) => [s.start, s.stop, s.top, s.bottom]),
      ...data.more.map((m) => [m.start, m.stop, m.top, m.bottom]),
    ];
    const num = data.stages.length;
    // by the square root: bandits train most trials for the first few epochs only
    const bend = early.checked ? Math.sqrt : (epoch) => epoch;
    const shown = axisOf(data.unit).formatter;
    const straight = early.checked ? (x) => shown(Math.round(x * x)) : shown;
    const stub = bend(Math.max(data.epochs, 1)) / 16;
    for (const [i, item] of items.entries()) {
      const from = bend(item[0]);
      // what is left out is a short mark, however far it goes
      [item[0], item[1]] = [from, i < num ? bend(item[1]) : from + stub];
    }
    chart.element.style.height = `${Math.min(820, Math.max(260, 110 + 9 * data.rows))}px`;
    return chart.draw((c) => ({
      animation: false,
      grid: { left: 20, right: 46, top: 12, bottom: 48 },
      xAxis: axis(c, {
        type: "value",
        min: 0,
        max: bend(Math.max(data.epochs, 1)),
        name: axisOf(data.unit).name,
        nameLocation: "middle",
        nameGap: 24,
        minInterval: 1,
        axisLabel: { color: c.muted, hideOverlap: true, formatter: straight },
      }),
      yAxis: axis(c, {
        type: "value",
        min: 0,
        max: Math.max(data.rows, 1),
        inverse: true,
        axisLabel: { show: false },
        splitLine: { show: false },
        axisLine: { show: false },
      }),
      dataZoom: ["x", "y"]
        .map((way, i) => ({
          type: "inside",
          [`${way}AxisIndex`]: 0,
          filterMode: "none",
          start: zoom[i]?.start ?? 0,
          end: zoom[i]?.end ?? 100,
        }))
        .concat([
          {
            type: "slider",
            yAxisIndex: 0,
            filterMode: "none",
            width: 14,
            right: 12,
            showDetail: false,
            brushSelect: false,
            borderColor: c.line,
            fillerColor: c.grid,
            start: zoom[1]?.start ?? 0,
            end: zoom[1]?.end ?? 100,
          },
        ]),
      tooltip: tooltip(c, ({ dataIndex: i }) => tell(i)),
      series: [
        {
          type: "custom",
          data: items,
          encode: { x: [0, 1], y: [2, 3] },
          clip: true,
          renderItem: (params, api) => stageShape(api, params.dataIndex, { c, num, colour }),
        },
      ],
    }));
  }

  function stageShape(api, i, { c, num, colour }) {
    const [x0, y0] = api.coord([api.value(0), api.value(2)]);
    const [x1, y1] = api.coord([api.value(1), api.value(3)]);
    const gap = y1 - y0 > 5 ? 1.5 : y1 - y0 > 2 ? 0.5 : 0;
    const shape = {
      x: x0 + 0.75,
      y: y0 + gap / 2,
      width: Math.max(x1 - x0 - 1.5, 1),
      height: Math.max(y1 - y0 - gap, 0.7),
      r: Math.min(4, (y1 - y0) / 4),
    };
    const stage = data.stages[i];
    const style = i < num ? { fill: colour(stage, c) } : { fill: c.pending, opacity: 0.55 };
    const text =
      i < num
        ? stage.trials > 1
          ? `×${count(stage.trials)}`
          : ""
        : `${count(data.more[i - num].stages)} more`;
    const room = shape.height >= 15 && shape.width >= 9 * text.length + 8;
    const pale = i >= num || stage.state === "pending" || stage.best === null;
    return {
      type: "rect",
      shape,
      style,
      textConfig: { position: "inside" },
      textContent:
        room && text
          ? { style: { text, fill: pale ? c.ink : contrast(style.fill), fontSize: 12, fontWeight: 600 } }
          : undefined,
    };
  }

  function contrast(rgb) {
    const parts = rgb.match(/\d+/g)?.map(Number);
    return parts && parts.length === 3 && 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2] > 140
      ? "#16181d"
      : "#fff";
  }

  function tell(i) {
    const stage = data.stages[i];
    if (!stage) {
      const more = data.more[i - data.stages.length];
      return `${count(more.stages)} more stages\nof ${count(more.trials)} trials`;
    }
    return plain(
      `epochs ${span(stage)} (${stage.state})\n${count(stage.trials)} trial${stage.trials === 1 ? "" : "s"}, ${count(stage.saved)} epochs saved${stage.best === null ? "" : `\nbest ${data.metric}: ${number(stage.best)}`}`,
    );
  }

  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "Stage forest"), note),
      h("div", { class: "tools" }, h("label", {}, early, "Stretch early epochs"), legend),
      chart.element,
      picked,
    ),
  );

  return {
    async update() {
      const { body, changed } = await reader.get("forest", `${path}/forest`);
      if (!changed) return;
      data = body;
      if (!body.stages.length) {
        panel.empty("No stages yet", "The forest grows with the first trials.");
        return;
      }
      if (panel.show())
        early.checked = body.stages.filter((s) => s.stop * 8 <= body.epochs).length * 2 > body.stages.length;
      note.textContent =
        `${trained(body.unit, body.saved)} shared instead of trained again` +
        (body.stages.length < body.total
          ? ` · the ${count(body.stages.length)} stages with the most trials of ${count(body.total)}`
          : ` · ${count(body.total)} stages`);
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}
