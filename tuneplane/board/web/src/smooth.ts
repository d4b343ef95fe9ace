// Exponential moving average over the distance between points, without the pull of its start toward zero. Pure.

/** How many units the whole line is long: beyond so many points, smoothing does not depend on their number. */
const UNITS = 1000;

/**
 * A smoothed line. weight: 0 for none, toward 1 for more; what a point one unit back counts, against the newest.
 * A unit is the mean distance of two points, or a thousandth of the line where that is longer. Values that are
 * not finite stay gaps and count for nothing.
 */
export function smooth(xs: ArrayLike<number>, ys: ArrayLike<number>, weight: number): Float64Array {
  const n = xs.length;
  const out = new Float64Array(n);
  const range = n > 1 ? xs[n - 1]! - xs[0]! : 0;
  const unit = n > 1 ? range / Math.min(UNITS, n - 1) : 1;
  let sum = 0;
  let total = 0;
  let last = Number.NaN;
  for (let i = 0; i < n; i++) {
    const y = ys[i]!;
    if (!Number.isFinite(y)) {
      out[i] = Number.NaN;
      continue;
    }
    const decay = total && unit > 0 ? weight ** ((xs[i]! - last) / unit) : total ? weight : 0;
    sum = sum * decay + y;
    total = total * decay + 1;
    last = xs[i]!;
    out[i] = sum / total;
  }
  return out;
}
