// Stages on workers over time; what a worker trains at once is a pack.

import { Chart, axis, tooltip } from "../chart.js";
import { Panel, fill, h } from "../dom.js";
import { count, percent, plain, seconds, size, span as epochs, watch } from "../format.js";

const COLOURS = { failed: "#d64550", solo: "#4b8bd6", pack: "#8a5cf0" };

export function workersView({ root, reader, path, update }) {
  const chart = new Chart("Stages on workers over time");
  const note = h("p", { class: "note" });
  const usage = h("div", {});
  const span = { since: null, until: null };
  const closer = h(
    "button",
    { class: "plain", type: "button", onclick: () => look() },
    "Load all stages in view",
  );
  const whole = h(
    "button",
    {
      class: "plain",
      type: "button",
      onclick: () => {
        span.since = span.until = null;
        update();
      },
    },
    "Whole study",
  );
  let data = null;

  function look() {
    const zoom = chart.zoom[0];
    if (!zoom || !data) return;
    const [from, length] = [
      span.since ?? data.began,
      (span.until ?? data.ended) - (span.since ?? data.began),
    ];
    span.since = from + (length * zoom.start) / 100;
    span.until = from + (length * zoom.end) / 100;
    update();
  }

  function draw() {
    const items = data.workers.flatMap((worker, row) =>
      worker.stages.map((stage) => ({ row, worker, stage })),
    );
    const from = data.began;
    const kind = ({ stage }) => (stage.state === "done" ? (stage.pack > 1 ? "pack" : "solo") : "failed");
    chart.element.style.height = `${Math.min(760, 120 + data.workers.reduce((sum, w) => sum + Math.max(34, 15 * w.lanes), 0))}px`;
    return chart.draw((c) => ({
      animation: false,
      grid: { left: 16, right: 44, top: 12, bottom: 62, containLabel: true },
      xAxis: axis(c, {
        type: "value",
        min: (span.since ?? from) - from,
        max: Math.max((span.until ?? data.ended) - from, 1e-3),
        name: "since the first stage",
        nameLocation: "middle",
        nameGap: 26,
        axisLabel: { color: c.muted, formatter: watch, hideOverlap: true },
      }),
      yAxis: axis(c, {
        type: "category",
        inverse: true,
        data: data.workers.map((w) => w.name),
        splitLine: { show: true, lineStyle: { color: c.grid } },
        axisLabel: { color: c.ink, width: 160, overflow: "truncate" },
      }),
      dataZoom: [
        { type: "inside", filterMode: "none" },
        {
          type: "slider",
          filterMode: "none",
          height: 16,
          bottom: 8,
          showDetail: false,
          brushSelect: false,
          borderColor: c.line,
          fillerColor: c.grid,
        },
      ],
      tooltip: tooltip(c, ({ dataIndex }) => tell(items[dataIndex])),
      series: [
        {
          type: "custom",
          clip: true,
          encode: { x: [0, 1], y: 2 },
          data: items.map(({ row, stage }) => [stage.began - from, stage.began + stage.seconds - from, row]),
          renderItem: (params, api) => {
            const item = items[params.dataIndex];
            const [x0, y] = api.coord([api.value(0), item.row]);
            const [x1] = api.coord([api.value(1), item.row]);
            const band = api.size([0, 1])[1] * 0.78;
            const lane = band / item.worker.lanes;
            const gap = lane > 6 ? 1.5 : 0.3;
            return {
              type: "rect",
              shape: {
                x: x0,
                y: y - band / 2 + item.stage.lane * lane,
                width: Math.max(x1 - x0 - 0.5, 1),
                height: Math.max(lane - gap, 0.8),
                r: Math.min(3, lane / 4),
              },
              style: {
                fill: COLOURS[kind(item)],
                opacity: kind(item) === "pack" ? Math.min(0.55 + 0.1 * item.stage.pack, 1) : 0.9,
              },
            };
          },
        },
      ],
    }));
  }

  function tell({ worker, stage }) {
    const joint = stage.pack > 1 ? `\nin a pack of ${stage.pack}` : "";
    return plain(
      `${worker.name}\nnode ${stage.node}, epochs ${epochs(stage)}\n${seconds(stage.seconds)}, ${stage.state}${joint}${stage.error ? `\n${stage.error.slice(0, 200)}` : ""}`,
    );
  }

  const panel = new Panel(
    root,
    h(
      "section",
      { class: "card" },
      h("header", {}, h("h2", {}, "Workers"), note),
      h(
        "div",
        { class: "tools" },
        h(
          "span",
          { class: "legend" },
          h("span", {}, h("span", { class: "swatch solo", "aria-hidden": "true" }), "one stage"),
          h(
            "span",
            {},
            h("span", { class: "swatch pack", "aria-hidden": "true" }),
            "stages trained jointly",
          ),
          h("span", {}, h("span", { class: "swatch failed", "aria-hidden": "true" }), "failed or lost"),
        ),
        closer,
        whole,
      ),
      chart.element,
    ),
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Busy")), usage),
  );

  return {
    async update() {
      const { body, changed } = await reader.get("workers", `${path}/workers`, span);
      if (!changed) return;
      data = body;
      if (!body.workers.length) {
        panel.empty("No stage has ended yet", "Workers appear here with their first stages.");
        return;
      }
      panel.show();
      closer.hidden = body.shown >= body.total;
      whole.hidden = span.since === null;
      note.textContent =
        body.shown < body.total
          ? `The ${count(body.shown)} longest of ${count(body.total)} stages, of all studies of this plan` +
            (body.counted < body.total ? ` (busy: of the ${count(body.counted)} longest)` : "")
          : `${count(body.total)} stages, of all studies of this plan`;
      const length = Math.max((span.until ?? body.ended) - (span.since ?? body.began), 1e-9);
      fill(
        usage,
        h(
          "div",
          { class: "scroll" },
          h(
            "table",
            {},
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                h("th", { scope: "col" }, "Worker"),
                h("th", { class: "num", scope: "col" }, "Stages"),
                h("th", { class: "num", scope: "col" }, "Largest pack"),
                h("th", { class: "num", scope: "col" }, "Busy"),
                h("th", { class: "num", scope: "col" }, "Of the time"),
                h("th", { scope: "col" }, "Device"),
                h(
                  "th",
                  {
                    class: "num",
                    scope: "col",
                    title: "of its process so far: on a GPU what PyTorch has allocated there, else resident memory",
                  },
                  "Peak memory",
                ),
              ),
            ),
            h(
              "tbody",
              {},
              body.workers.map((w) =>
                h(
                  "tr",
                  {},
                  h("td", {}, w.name),
                  h("td", { class: "num" }, count(w.total)),
                  h("td", { class: "num" }, count(w.largest)),
                  h("td", { class: "num" }, seconds(w.busy)),
                  h("td", { class: "num" }, percent(w.busy / length)),
                  h("td", {}, w.device ?? "not measured"),
                  h("td", { class: "num" }, w.peak_bytes === null ? "not measured" : size(w.peak_bytes)),
                ),
              ),
            ),
          ),
        ),
      );
      await draw();
    },
    dispose: () => chart.dispose(),
  };
}
