// One study: its head, its tabs, and the view that is open.

import { load } from "../chart.js";
import { badge, fill, h } from "../dom.js";
import { objective } from "../format.js";
import { Acts } from "../views/acts.js";
import { compareView } from "../views/compare.js";
import { curvesView } from "../views/curves.js";
import { forestView } from "../views/forest.js";
import { importanceView } from "../views/importance.js";
import { overviewView } from "../views/overview.js";
import { parallelView } from "../views/parallel.js";
import { paretoView } from "../views/pareto.js";
import { slicesView } from "../views/slices.js";
import { trialsView } from "../views/trials.js";
import { workersView } from "../views/workers.js";

const TABS = {
  overview: ["Overview", overviewView],
  forest: ["Stage forest", forestView],
  workers: ["Workers", workersView],
  curves: ["Learning curves", curvesView],
  parallel: ["Parallel coordinates", parallelView],
  slices: ["Slices, contours", slicesView],
  pareto: ["Pareto front", paretoView],
  importance: ["Importance", importanceView],
  trials: ["Trials", trialsView],
  compare: ["Compare", compareView],
};

export function studyPage({ root, reader, params, crumbs, update }) {
  const [, make] = TABS[params.tab] ?? TABS.overview;
  const open = params.tab in TABS ? params.tab : "overview";
  const place = h("div", {});
  const head = h("div", {});
  const path = `/studies/${params.study}`;
  const view = make({ root: place, reader, path, study: params.study, update });
  const acts = open === "overview" ? new Acts({ path, update }) : null;
  crumbs([{ text: "…" }]);
  load();

  function draw(detail) {
    const { study } = detail;
    const tabs = Object.entries(TABS).filter(([key]) => key !== "pareto" || study.metrics.length > 1);
    crumbs([{ text: study.name }]);
    fill(
      head,
      h("div", { class: "head" }, h("h1", {}, study.name), badge(study.state)),
      h(
        "p",
        { class: "sub" },
        objective(study),
        detail.algorithm && ` · ${detail.algorithm}`,
        detail.constraints.length > 0 && ` · with ${detail.constraints.join(", ")}`,
      ),
      h(
        "nav",
        { class: "tabs", "aria-label": "Views of the study" },
        tabs.map(([key, [label]]) =>
          h(
            "a",
            { href: `#/studies/${params.study}/${key}`, "aria-current": key === open ? "page" : null },
            label,
          ),
        ),
      ),
    );
    if (!head.isConnected) fill(root, head, place, acts?.element);
  }

  return {
    async update() {
      const asked = view.ask?.() ?? {};
      if (acts) asked.acts = reader.get("acts", `${path}/acts`);
      // whoever fails first is told; the others must not fail unheard
      for (const each of Object.values(asked)) each.catch(() => {});
      const { body, changed } = await reader.get("detail", path);
      if (changed) draw(body);
      await view.update(body, changed, asked);
      if (acts) acts.draw((await asked.acts).body, body.study.state, { name: body.study.name, maxEpochs: body.max_epochs });
    },
    dispose: () => view.dispose?.(),
  };
}
