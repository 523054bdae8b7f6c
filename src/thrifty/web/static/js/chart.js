// ECharts, loaded when the first chart is drawn, in the page's colours.

import { h } from "./dom.js";
import { colours } from "./theme.js";

let loading = null;

// Begun early, it is there when the first answer is.
export async function load() {
  loading ??= import("../vendor/echarts.min.js").then(() => globalThis.echarts);
  return loading;
}

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Chart {
  #instance = null;
  #option = null;
  #handlers = [];
  #sizes = new ResizeObserver(() => this.#instance?.resize());
  #recolour = () => this.#paint();
  #gone = false;

  constructor(label, size = "") {
    this.element = h("div", { class: `chart ${size}`, role: "img", "aria-label": label, tabindex: "0" });
    addEventListener("themechange", this.#recolour);
  }

  // `option` gets the colours and gives an ECharts option; it is asked again when the theme changes.
  async draw(option) {
    this.#option = option;
    const echarts = await load();
    if (this.#gone) return;
    if (!this.#instance) {
      this.#instance = echarts.init(this.element, null, { renderer: "canvas" });
      for (const [name, handler] of this.#handlers) this.#instance.on(name, handler);
      this.#sizes.observe(this.element);
    }
    this.#paint();
  }

  on(name, handler) {
    this.#handlers.push([name, handler]);
    this.#instance?.on(name, handler);
  }

  get zoom() {
    const zoom = this.#instance?.getOption()?.dataZoom ?? [];
    return zoom.map(({ start, end }) => ({ start, end }));
  }

  dispose() {
    this.#gone = true;
    removeEventListener("themechange", this.#recolour);
    this.#sizes.disconnect();
    this.#instance?.dispose();
  }

  #paint() {
    if (!this.#instance || !this.#option) return;
    const c = colours();
    const font = getComputedStyle(document.body).fontFamily;
    this.#instance.setOption(
      {
        animation: !still.matches,
        animationDuration: 250,
        backgroundColor: "transparent",
        textStyle: { fontFamily: font, color: c.ink },
        ...this.#option(c),
      },
      { notMerge: true },
    );
  }
}

export const axis = (c, extra = {}) => ({
  axisLine: { lineStyle: { color: c.line } },
  axisTick: { show: false },
  axisLabel: { color: c.muted, hideOverlap: true },
  splitLine: { lineStyle: { color: c.grid } },
  nameTextStyle: { color: c.muted },
  ...extra,
});

export const tooltip = (c, formatter, extra = {}) => ({
  renderMode: "richText",
  confine: true,
  backgroundColor: c.surface,
  borderColor: c.line,
  textStyle: { color: c.ink, fontSize: 12.5, lineHeight: 19 },
  formatter,
  ...extra,
});
