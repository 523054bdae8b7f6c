// Light and dark: what the system says, or what the reader chose.

const KEY = "thrifty-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be switched off
  }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

export function startTheme(button) {
  apply(chosen() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => chosen() ?? apply(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // it holds until the page is left
    }
    apply(next);
  });
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: of("ink"),
    muted: of("muted"),
    line: of("line"),
    grid: of("chart-grid"),
    accent: of("accent"),
    other: of("chart-other"),
    strong: of("chart-strong"),
    surface: of("surface"),
    raised: of("raised"),
    pending: of("pending"),
    bad: of("bad"),
    good: of("good"),
  };
}

const STOPS = [
  [59, 42, 122],
  [61, 90, 152],
  [43, 138, 147],
  [63, 181, 124],
  [165, 214, 69],
  [251, 227, 42],
];

// A colour from 0 (worst) to 1 (best); dark to bright, also for those who see no colours.
export function ramp(t) {
  const at = Math.min(Math.max(t, 0), 1) * (STOPS.length - 1);
  const i = Math.min(Math.floor(at), STOPS.length - 2);
  const mixed = STOPS[i].map((low, k) => Math.round(low + (at - i) * (STOPS[i + 1][k] - low)));
  return `rgb(${mixed.join(",")})`;
}

function mix(from, to, t) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((low, k) => Math.round(low + t * (b[k] - low))).join(",")})`;
}

// The line of a trial whose rank is from 0 (worst) to 1 (best): the better, the stronger, thicker and further in front.
// By the fourth power: only a few of many lines can stand out.
export function stroke(t, c) {
  const s = Math.min(Math.max(t, 0), 1) ** 4;
  return {
    z: 2 + Math.round(98 * s),
    style: { color: mix(c.other, c.strong, s), width: 1 + 1.8 * s, opacity: 0.4 + 0.6 * s },
  };
}

// From values to 0..1, the best at 1; the worst tenth are all at 0, else one that exploded would hide the rest.
export function grading(values, mode) {
  const known = values
    .filter((v) => v !== null && Number.isFinite(v))
    .map((v) => (mode === "min" ? -v : v))
    .sort((a, b) => a - b);
  if (!known.length) return { of: () => 0, worst: null, best: null };
  const low = known[Math.floor(known.length * 0.1)];
  const high = known[known.length - 1];
  const sign = mode === "min" ? -1 : 1;
  return {
    of: (v) => (high > low ? ((mode === "min" ? -v : v) - low) / (high - low) : 1),
    worst: sign * low,
    best: sign * high,
  };
}
