// One trial: its figures, its schedule drawn, its curves, and whom it shares its training with.

import { Chart, axis, tooltip } from "../chart.js";
import { badge, card, figure, fill, h, tile, written } from "../dom.js";
import { axisOf, count, number, place, plain, seconds, span, trained } from "../format.js";
import { Acts } from "../views/acts.js";

const ROW = 120;

export function trialPage({ root, reader, params, crumbs, update }) {
  const path = `/studies/${params.study}`;
  const acts = new Acts({ path, trial: Number(params.trial), update });
  const schedule = new Chart("Hyper-parameters over the epochs");
  const curves = new Chart("Metrics over the epochs");
  crumbs([{ text: "…" }, { text: `trial ${params.trial}` }]);

  // one chart below the other, epochs in common
  function stacked(chart, rows, epochs, unit) {
    chart.element.style.height = `${rows.length * ROW + 26}px`;
    return chart.draw((c) => ({
      animation: false,
      grid: rows.map((_, i) => ({ left: 76, right: 24, top: 30 + i * ROW, height: ROW - 50 })),
      xAxis: rows.map((_, i) =>
        axis(c, {
          gridIndex: i,
          type: "value",
          min: 0,
          max: epochs,
          minInterval: 1,
          axisLabel: { show: i === rows.length - 1, color: c.muted, formatter: axisOf(unit).formatter },
          splitLine: { show: false },
          name: i === rows.length - 1 ? axisOf(unit).name : "",
          nameLocation: "middle",
          nameGap: 24,
        }),
      ),
      yAxis: rows.map((row, i) =>
        axis(c, {
          gridIndex: i,
          type: row.labels ? "category" : "value",
          data: row.labels,
          scale: true,
          splitNumber: 2,
          name: row.name,
          nameTextStyle: { color: c.ink, fontWeight: 600, align: "left", padding: [0, 0, 0, -56] },
          nameGap: 15,
          axisLabel: {
            color: c.muted,
            hideOverlap: true,
            formatter: row.labels ? undefined : number,
            width: 66,
            overflow: "truncate",
          },
        }),
      ),
      tooltip: tooltip(
        c,
        (found) =>
          plain(
            [found]
              .flat()
              .map(
                (p) =>
                  `${rows[p.seriesIndex].name} after ${number(p.value[0])}: ${rows[p.seriesIndex].labels ? p.value[1] : number(p.value[1])}`,
              )
              .join("\n"),
          ),
        { trigger: "axis" },
      ),
      axisPointer: { link: [{ xAxisIndex: "all" }], lineStyle: { color: c.muted } },
      series: rows.map((row, i) => ({
        type: "line",
        xAxisIndex: i,
        yAxisIndex: i,
        data: row.points,
        step: row.step ? "end" : false,
        showSymbol: row.points.length < 40 && !row.step,
        symbolSize: 5,
        lineStyle: { color: c.accent, width: 2 },
        itemStyle: { color: c.accent },
        areaStyle: row.labels ? undefined : { color: c.accent, opacity: 0.07, origin: "start" },
      })),
    }));
  }

  function lines(trial, epochs) {
    return trial.schedule
      .filter((line) => line.moves)
      .map((line) => ({
        name: line.name,
        step: line.kind === "text" || new Set(line.values).size < line.values.length / 3,
        labels: line.kind === "text" ? [...new Set(line.values)] : null,
        points: [...line.epochs.map((epoch, i) => [epoch, line.values[i]]), [epochs, line.values.at(-1)]],
      }));
  }

  function shared(trial) {
    if (!trial.stages.length) return h("p", { class: "note" }, "Nothing is planned for it yet.");
    const strip = h(
      "div",
      { class: "path", "aria-hidden": "true" },
      trial.stages.map((stage) => {
        const part = h(
          "div",
          { class: stage.trials > 1 ? "" : "own", title: `epochs ${span(stage)}` },
          stage.trials > 1 ? `×${count(stage.trials)}` : "own",
        );
        part.style.flex = `${stage.stop - stage.start} 1 0`;
        return part;
      }),
    );
    const rows = trial.stages.map((stage) =>
      h(
        "tr",
        {},
        h("td", {}, span(stage)),
        h("td", { class: "num" }, count(stage.trials)),
        h(
          "td",
          {},
          stage.others.length
            ? [
                stage.others.map((n, i) => [
                  i > 0 && ", ",
                  h("a", { href: `#/studies/${params.study}/trials/${n}` }, n),
                ]),
                stage.trials - 1 > stage.others.length &&
                  ` and ${count(stage.trials - 1 - stage.others.length)} more`,
              ]
            : h("span", { class: "note" }, "trained for this trial alone"),
        ),
        h("td", { class: "num" }, stage.node),
      ),
    );
    return [
      strip,
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
              h("th", { scope: "col" }, "Epochs"),
              h("th", { class: "num", scope: "col" }, "Trials"),
              h("th", { scope: "col" }, "Shared with"),
              h("th", { class: "num", scope: "col" }, "Node"),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    ];
  }

  function files(trial) {
    return h(
      "dl",
      { class: "pairs" },
      trial.artifacts.map((file) => [
        h(
          "dt",
          {},
          file.error
            ? file.name
            : h(
                "a",
                { href: `api${path}/trials/${trial.number}/artifacts/${encodeURIComponent(file.digest)}`, download: "" },
                file.name,
              ),
        ),
        h("dd", {}, file.error ? `not stored: ${file.error}` : `${count(file.num_bytes)} bytes`),
      ]),
    );
  }

  function logged(trial) {
    const rows = trial.log_lines.map((line) =>
      h(
        "tr",
        {},
        h("td", { class: "num" }, count(line.epoch)),
        h("td", {}, new Date(line.at * 1000).toLocaleString()),
        h("td", {}, line.level),
        h("td", {}, line.logger),
        h("td", { class: "mono logged" }, line.text),
      ),
    );
    const heads = ["Epoch", "Time", "Level", "Logger", "Message"];
    return h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows),
      ),
    );
  }

  async function draw(trial, { study }) {
    const epochs = Math.max(trial.horizon ?? 0, trial.target, 1);
    const metric = study.metrics[0];
    const moving = lines(trial, epochs);
    const measured = Object.entries(trial.curves)
      .sort(([a], [b]) => (b === metric) - (a === metric))
      .map(([name, points]) => ({ name, points }));
    crumbs([{ text: study.name, href: `#/studies/${params.study}` }, { text: `trial ${trial.number}` }]);
    const own = trial.reached - Math.min(trial.shared_epochs, trial.reached);
    fill(
      root,
      h("div", { class: "head" }, h("h1", {}, `Trial ${trial.number}`), badge(trial.state)),
      h(
        "p",
        { class: "sub" },
        "of ",
        h("a", { href: `#/studies/${params.study}` }, study.name),
        trial.parent && [
          ", branched off ",
          h("a", { href: `#/studies/${params.study}/trials/${trial.parent[0]}` }, `trial ${trial.parent[0]}`),
          ` after ${place(study.unit, trial.parent[1])}`,
        ],
      ),
      trial.error &&
        h(
          "section",
          { class: "problem" },
          h("strong", {}, trial.error),
          trial.traceback && h("pre", { class: "trace" }, trial.traceback),
        ),
      h(
        "div",
        { class: "tiles" },
        trial.value !== null &&
          tile(
            metric,
            figure(trial.value),
            `after ${place(study.unit, trial.reached)}${trial.violation === 0 ? ", within the constraints" : ""}`,
            "hero",
          ),
        trial.interval !== null &&
          tile(
            "95 % interval of the mean",
            `${figure(trial.interval[0])} to ${figure(trial.interval[1])}`,
            `${count(trial.seed_values.length)} seeds, standard deviation ${figure(trial.sd)}`,
          ),
        trial.violation > 0 && tile("Violation", figure(trial.violation), "breaks a constraint"),
        tile("Trained", trial.reached ? trained(study.unit, trial.reached) : "nothing yet", `${trained(study.unit, trial.target)} requested`),
        tile(
          "Time",
          trial.seconds === null ? "not measured" : seconds(trial.seconds),
          "of training, its share of packs; shared epochs included",
        ),
        trial.shared_epochs > 0 &&
          tile("Shared", trained(study.unit, trial.shared_epochs), own && `${trained(study.unit, own)} trained for it alone`),
      ),
      card(
        "Hyper-parameters",
        "",
        h(
          "dl",
          { class: "pairs" },
          trial.schedule.map((line) => [h("dt", {}, line.name), h("dd", { class: "mono" }, written(line.text))]),
        ),
      ),
      Object.keys(trial.user_attrs).length > 0 &&
        card(
          "Attributes",
          "what the training code has set with set_user_attr",
          h(
            "dl",
            { class: "pairs" },
            Object.entries(trial.user_attrs).map(([key, text]) => [h("dt", {}, key), h("dd", { class: "mono text" }, text)]),
          ),
        ),
      trial.artifacts.length > 0 &&
        card("Files", "what the training code has logged with log_artifact", files(trial)),
      moving.length > 0 &&
        card("Schedule", "what changes over the epochs, as it is trained", schedule.element),
      measured.length > 0 && card("Curves", "what was measured after each epoch", curves.element),
      card("Stages", "what it shares, and with whom", shared(trial)),
      trial.log_lines.length > 0 &&
        card("Log", "the last lines that the training code has logged, shared epochs included", logged(trial)),
      acts.element,
    );
    await Promise.all([
      moving.length && stacked(schedule, moving, epochs, study.unit),
      measured.length && stacked(curves, measured, epochs, study.unit),
    ]);
  }

  return {
    async update() {
      const [trial, study, asked] = await Promise.all([
        reader.get("trial", `${path}/trials/${params.trial}`),
        reader.get("detail", path),
        reader.get("acts", `${path}/acts`),
      ]);
      const { state, horizon, schedule: lines } = trial.body;
      // what has a schedule can change; without one, the study says whether it can
      const numbers = lines.filter((line) => line.kind !== "text");
      const scheduled = numbers.filter((line) => line.epochs.length > 1);
      const names = (scheduled.length ? scheduled : numbers).map((line) => line.name);
      acts.draw(asked.body, state, { names, horizon, config: trial.body.config });
      if (trial.changed || (study.changed && !root.querySelector("h1"))) await draw(trial.body, study.body);
    },
    dispose: () => {
      schedule.dispose();
      curves.dispose();
    },
  };
}
