// Slices and contours: the metric against each hyper-parameter, and against two at a time.

import { Chart, axis, tooltip } from "../chart.js";
import { Panel, h } from "../dom.js";
import { count, number, plain } from "../format.js";
import { contours } from "../landscape.js";
import { grading, ramp } from "../theme.js";

const HEIGHT = 190;
const MOST = 12;
const FEWEST = 4;

export function slicesView({ root, reader, path, study: id }) {
  const chart = new Chart("The metric against each hyper-parameter");
  const pair = new Chart("The metric by two hyper-parameters", "tall");
  const choose = (label) => h("select", { "aria-label": label, onchange: () => drawPair() });
  const across = choose("Across");
  const up = choose("Upwards");
  const two = h("div", {});
  const shown = h("p", { class: "note" });
  const note = h("p", { class: "note" });
  let data = null;

  const grade = () => {
    const last = data.axes.length;
    return grading(data.rows.map((row) => row[last]), data.mode);
  };

  // logarithms are negative, and an axis must not lie where they are 0
  const aside = (c) => ({ axisLine: { onZero: false, lineStyle: { color: c.line } } });

  // an axis of a hyper-parameter; on a logarithmic one, the values are its logarithms
  function of(c, which, extra) {
    if (which.kind === "category") {
      return axis(c, {
        type: "category",
        data: which.labels,
        splitLine: { show: false },
        ...aside(c),
        ...extra,
      });
    }
    const shown = (at) => number(which.log ? Number((10 ** at).toPrecision(4)) : at);
    return axis(c, {
      type: "value",
      scale: true,
      splitNumber: 3,
      splitLine: { show: false },
      ...aside(c),
      ...extra,
      axisLabel: { color: c.muted, hideOverlap: true, formatter: shown },
    });
  }

  const place = (v, which) => (v !== null && which.log && which.kind !== "category" ? Math.log10(v) : v);

  const point = (i, x, y, of_) => ({
    value: [x, y],
    trial: data.trials[i],
    itemStyle: { color: ramp(of_) },
  });

  function say(c) {
    const last = data.axes.length;
    return tooltip(c, ({ data: one }) => {
      const row = data.rows[data.trials.indexOf(one.trial)];
      const lines = data.axes.map((each, dim) => {
        const v = row[dim];
        return `${each.name}: ${v === null ? "–" : each.kind === "category" ? each.labels[v] : number(v)}`;
      });
      return plain([`trial ${one.trial}`, `${data.metric}: ${number(row[last])}`, ...lines].join("\n"));
    });
  }

  // one that exploded would hide the others: the axis ends where the worst tenth begins
  function range({ worst, best }) {
    if (worst === null || worst === best) return {};
    const [low, high] = [Math.min(worst, best), Math.max(worst, best)];
    const edge = (high - low) / 20;
    return data.mode === "min" ? { max: high + edge } : { min: low - edge };
  }

  function draw() {
    const panels = data.axes.slice(0, MOST);
    const columns = Math.min(3, panels.length);
    const rows = Math.ceil(panels.length / columns);
    const last = data.axes.length;
    const graded = grade();
    chart.element.style.height = `${rows * HEIGHT + 10}px`;
    return chart.draw((c) => ({
      animation: false,
      tooltip: say(c),
      grid: panels.map((_, i) => ({
        left: `${(100 / columns) * (i % columns) + 5}%`,
        width: `${100 / columns - 7}%`,
        top: Math.floor(i / columns) * HEIGHT + 26,
        height: HEIGHT - 70,
      })),
      xAxis: panels.map((each, i) =>
        of(c, each, { gridIndex: i, name: each.name, nameLocation: "middle", nameGap: 26 }),
      ),
      yAxis: panels.map((_, i) =>
        axis(c, {
          gridIndex: i,
          type: "value",
          scale: true,
          splitNumber: 3,
          ...aside(c),
          ...range(graded),
          name: i % columns ? "" : data.metric,
          nameTextStyle: { color: c.muted, align: "left" },
          axisLabel: { color: c.muted, formatter: number },
        }),
      ),
      series: panels.map((each, dim) => ({
        type: "scatter",
        xAxisIndex: dim,
        yAxisIndex: dim,
        symbolSize: 7,
        data: data.rows.flatMap((row, i) =>
          row[dim] === null ? [] : [point(i, place(row[dim], each), row[last], graded.of(row[last]))],
        ),
      })),
    }));
  }

  // between options, and between a few values, there is nothing to paint
  const isContinuous = (which) => which.kind === "number" && !which.ticks.length;

  function drawPair() {
    const [x, y] = [Number(across.value), Number(up.value)];
    const last = data.axes.length;
    const graded = grade();
    const [one, other] = [data.axes[x], data.axes[y]];
    // the best are drawn last
    const both = data.rows
      .map((row, i) => ({ row, i, t: graded.of(row[last]) }))
      .filter(({ row }) => row[x] !== null && row[y] !== null)
      .sort((a, b) => a.t - b.t);
    const points = both.map(({ row, t }) => [place(row[x], one), place(row[y], other), Math.min(Math.max(t, 0), 1)]);
    const painted =
      x !== y &&
      points.length >= FEWEST &&
      [one, other].every((which, dim) => isContinuous(which) && points.some((p) => p[dim] !== points[0][dim]));
    shown.textContent = `the colour is the metric${painted ? "; behind the points, the mean of trials nearby" : ""}`;
    return pair.draw((c) => ({
      animation: false,
      tooltip: say(c),
      grid: { left: 12, right: 24, top: 34, bottom: 44, containLabel: true },
      xAxis: of(c, one, { name: one.name, nameLocation: "middle", nameGap: 28 }),
      yAxis: of(c, other, { name: other.name, nameTextStyle: { color: c.muted, align: "left" } }),
      series: [
        ...(painted ? [contours(points, ramp)] : []),
        {
          type: "scatter",
          symbolSize: painted ? 9 : 13,
          z: 3,
          data: both.map(({ i, t }, at) => {
            const one = point(i, points[at][0], points[at][1], t);
            return painted ? { ...one, itemStyle: { ...one.itemStyle, borderColor: c.surface, borderWidth: 1 } } : one;
          }),
        },
      ],
    }));
  }

  for (const each of [chart, pair]) {
    each.on("click", ({ data: one }) => {
      if (one?.trial !== undefined) location.hash = `#/studies/${id}/trials/${one.trial}`;
    });
  }

  const legend = h(
    "span",
    { class: "legend" },
    "worse",
    h("span", { class: "ramp", "aria-hidden": "true" }),
    "better",
  );
  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "One at a time"), note),
      h("div", { class: "tools" }, legend),
      chart.element,
    ),
    two,
  );
  const card = h(
    "section",
    { class: "card" },
    h("header", {}, h("h2", {}, "Two at a time"), shown),
    h("div", { class: "tools" }, h("label", {}, "across ", across), h("label", {}, "upwards ", up)),
    pair.element,
  );

  function options(select, chosen) {
    const before = select.value;
    select.replaceChildren(...data.axes.map((each, i) => h("option", { value: i }, each.name)));
    const known = before !== "" && Number(before) < data.axes.length;
    select.value = known ? before : String(chosen);
  }

  return {
    async update() {
      const { body, changed } = await reader.get("parallel", `${path}/parallel`);
      if (!changed) return;
      data = body;
      if (!body.rows.length || !body.axes.length) {
        panel.empty("Nothing to compare yet", "Points appear when trials that differ have reported.");
        return;
      }
      panel.show();
      const hidden = body.axes.length - MOST;
      note.textContent =
        (body.rows.length < body.total
          ? `${count(body.rows.length)} of ${count(body.total)} trials, evenly over the ranks of their values`
          : `All ${count(body.total)} trials that have reported`) +
        "; the worst tenth may lie outside" +
        (hidden > 0 ? `; ${hidden} more hyper-parameters can be chosen below` : "");
      await draw();
      if (body.axes.length < 2) return;
      if (!card.isConnected) two.append(card);
      options(across, 0);
      options(up, 1);
      await drawPair();
    },
    dispose: () => {
      chart.dispose();
      pair.dispose();
    },
  };
}
