// A landscape: what trials near a place have reached, on a grid over two hyper-parameters.

export const SIZE = 60;
const LEVELS = 12;

// The mean of the values near each place of a grid in the unit square, row by row; null far from all points.
// A point is [x, y, value] with x and y from 0 to 1. Weights fall as a bell curve, narrower the more points there are.
export function landscape(points, size = SIZE) {
  const width = 0.28 * points.length ** -0.25;
  const line = Array.from({ length: size }, (_, i) => i / (size - 1));
  const bell = (at, dim) => points.map((point) => Math.exp(-0.5 * ((at - point[dim]) / width) ** 2));
  const across = line.map((at) => bell(at, 0));
  return line.map((up) => {
    const near = bell(up, 1);
    return across.map((weights) => {
      let total = 0;
      let sum = 0;
      for (let i = 0; i < points.length; i += 1) {
        const weight = near[i] * weights[i];
        total += weight;
        sum += weight * points[i][2];
      }
      return total < Math.exp(-2) ? null : sum / total; // two widths from the nearest point
    });
  });
}

// The middle of the level that a value from 0 to 1 lies in: equal colours make the contours visible.
export const level = (t) => (Math.min(Math.floor(t * LEVELS), LEVELS - 1) + 0.5) / LEVELS;

// A series that paints a landscape behind the points [x, y, value] of a chart, values from 0 (worst) to 1 (best).
export function contours(points, colour) {
  const range = (dim) => {
    const all = points.map((point) => point[dim]);
    return [Math.min(...all), Math.max(...all)];
  };
  const [[left, right], [low, high]] = [range(0), range(1)];
  const unit = ([x, y, value]) => [(x - left) / (right - left), (y - low) / (high - low), value];
  const [dx, dy] = [(right - left) / (SIZE - 1), (high - low) / (SIZE - 1)];
  const cells = landscape(points.map(unit)).flatMap((row, j) =>
    row.map((value, i) => [left + i * dx, low + j * dy, value]).filter(([, , value]) => value !== null),
  );
  return {
    type: "custom",
    silent: true,
    z: 1,
    clip: true,
    data: cells,
    tooltip: { show: false },
    renderItem: (_, api) => {
      const corner = (side) => api.coord([api.value(0) + (side * dx) / 2, api.value(1) - (side * dy) / 2]);
      // whole pixels: no gaps between neighbours, and no overlaps, which would be darker
      const [[x, y], [end, below]] = [corner(-1), corner(1)].map((place) => place.map(Math.round));
      const shape = { x, y, width: end - x, height: below - y };
      return { type: "rect", shape, style: { fill: colour(level(api.value(2))), opacity: 0.55 } };
    },
  };
}
