// How numbers, times and durations look.

const whole = new Intl.NumberFormat("en-GB");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));

export function number(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return whole.format(x);
  // four digits, and all those before the decimal point: 12346, not 12350
  const digits = Math.max(4, Math.floor(Math.log10(Math.abs(x))) + 1);
  const rounded = Math.abs(x) < 1e7 ? Number(x.toPrecision(digits)) : Number(x.toPrecision(4));
  const size = Math.abs(rounded);
  if (Number.isInteger(rounded) && size < 1e7) return whole.format(rounded);
  return size >= 1e5 || size < 1e-4 ? rounded.toExponential() : String(rounded);
}

// A text with its long decimals rounded, and a list of one as one writes it: [3] instead of (3,).
export const brief = (text) =>
  text
    .replace(/(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])/gi, (found) =>
      found.replace(/e.*/i, "").replace(/^0*\.?0*|\./g, "").length > 4 && /[.e]/i.test(found)
        ? number(Number(found))
        : found,
    )
    .replace(/\(([^(),]+),\)/g, "[$1]");

/** A number of bytes in MiB or GiB. */
export const size = (bytes) =>
  bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${whole.format(Math.round(bytes / 2 ** 20))} MiB`;

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 59.95) return `${s.toFixed(1)} s`;
  const rounded = Math.round(s);
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${(minutes / 1440).toFixed(1)} days`;
}

// A time since the beginning, as on a watch.
export function watch(s) {
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (s < 60) return `${Number(s.toFixed(s < 10 ? 2 : 1))} s`;
  const hours = Math.floor(s / 3600);
  return hours ? `${hours}:${two((s % 3600) / 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}

// A number of epochs in the unit of a study, where that is not epochs also in epochs.
export const trained = (unit, epochs) => {
  const in_epochs = `${count(epochs)} epoch${epochs === 1 ? "" : "s"}`;
  if (unit.name === "epochs") return in_epochs;
  const n = epochs * unit.per_epoch;
  return `${count(n)} ${n === 1 ? unit.name.slice(0, -1) : unit.name} (${in_epochs})`;
};

// A time in training, as in "after epoch 10" or "after 5,000 steps (10 epochs)".
export const place = (unit, epochs) =>
  unit.name === "epochs" ? `epoch ${count(epochs)}` : trained(unit, epochs);

// What an axis of epochs says: its name, and a function that formats a number of epochs.
export const axisOf = (unit) => ({
  name: unit.name.slice(0, -1),
  formatter: (epochs) => count(Math.round(epochs * unit.per_epoch * 1e6) / 1e6),
});

// The epochs of a stage, counted from 1.
export const span = ({ start, stop }) => (stop - start > 1 ? `${start + 1}–${stop}` : String(stop));

export function ago(at) {
  if (!at) return "–";
  const s = Math.max(0, Date.now() / 1000 - at);
  if (s < 5) return "just now";
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

// A date with its time, in the reader's time zone.
export const moment = (at) =>
  new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

export const factor = (x) => (x === null || x === undefined ? "–" : `${x.toFixed(2)}×`);
export const percent = (x) => `${(100 * x).toFixed(1)} %`;

export function objective(study) {
  return study.metrics
    .map((name, i) => `${name} (${study.modes[i] === "min" ? "lower" : "higher"} is better)`)
    .join(", ");
}

// ECharts reads {style|text} in tooltips: a zero-width space keeps it from seeing any
export const plain = (text) => String(text).replaceAll("{", "{\u200b");
