// One line of a chart in the chart's own coordinates, and what is found on it. Pure.

import type { Line } from "./api";
import { smooth } from "./smooth";
import type { XAxis } from "./state";
import type { Stroke } from "./colors";

export interface Curve {
  line: Line;
  label: string;
  stroke: Stroke;
  className: string;
  xs: Float64Array; // in the units of the axis
  ys: Float64Array;
  smoothX: Float64Array; // empty without smoothing
  smoothY: Float64Array;
}

export interface Label {
  text: string;
  stroke: Stroke;
  className: string;
}

/** origin: when the run started, unix seconds. */
export function curveOf(line: Line, label: Label, x: XAxis, weight: number, origin: number): Curve {
  const shift = x === "relative" ? origin : 0;
  const moved = (column: Float64Array): Float64Array => (shift ? column.map((value) => value - shift) : column);
  const xs = x === "step" ? line.steps : moved(line.times);
  const thinned = line.meanX.length > 0;
  const smoothX = weight > 0 && line.attempt === null ? (thinned ? moved(line.meanX) : xs) : new Float64Array(0);
  return {
    line,
    label: label.text,
    stroke: label.stroke,
    className: label.className,
    xs,
    ys: line.values,
    smoothX,
    smoothY: smoothX.length ? smooth(smoothX, thinned ? line.meanY : line.values, weight) : new Float64Array(0),
  };
}

/** Index of the point nearest to x; -1 of none. */
export function nearest(xs: ArrayLike<number>, x: number): number {
  if (xs.length === 0) return -1;
  const right = firstFrom(xs, x);
  if (right === 0) return 0;
  if (right === xs.length) return xs.length - 1;
  return x - xs[right - 1]! <= xs[right]! - x ? right - 1 : right;
}

/** Index of the first value that is at least x. */
export function firstFrom(xs: ArrayLike<number>, x: number): number {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle]! < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Which attempt a point of the line that counts is of. */
export function attemptOf(line: Line, index: number): number {
  let attempt = line.attempt ?? 0;
  for (const [start, number] of line.starts) if (start <= index) attempt = number;
  return attempt;
}

export interface Extent {
  x: [number, number];
  y: [number, number];
  empty: boolean;
  left: number; // values that a logarithmic axis has no place for
}

/** What the axes must hold. zoom: the part of x that is shown. */
export function extentOf(curves: Curve[], zoom: [number, number] | null, log: boolean): Extent {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity, left = 0;
  for (const { xs } of curves) {
    if (xs.length === 0) continue;
    x0 = Math.min(x0, xs[0]!);
    x1 = Math.max(x1, xs[xs.length - 1]!);
  }
  const [low, high] = zoom ?? [x0, x1];
  for (const { xs, ys } of curves) {
    for (let i = firstFrom(xs, low), n = xs.length; i < n && xs[i]! <= high; i++) {
      const y = ys[i]!;
      if (!Number.isFinite(y)) continue;
      if (log && y <= 0) {
        left += 1;
        continue;
      }
      if (y < y0) y0 = y;
      if (y > y1) y1 = y;
    }
  }
  const empty = y0 > y1;
  return { x: widened(low, high), y: empty ? (log ? [0.1, 1] : [0, 1]) : padded(y0, y1, log), empty, left };
}

function widened(low: number, high: number): [number, number] {
  if (!(low <= high)) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function padded(low: number, high: number, log: boolean): [number, number] {
  if (log) {
    const margin = Math.max((Math.log10(high) - Math.log10(low)) * 0.05, low === high ? 0.3 : 0.02);
    return [Math.max(10 ** (Math.log10(low) - margin), Number.MIN_VALUE), 10 ** (Math.log10(high) + margin)];
  }
  if (low === high) {
    const margin = Math.abs(low) * 0.1 || 1;
    return [low - margin, high + margin];
  }
  const margin = (high / 2 - low / 2) * 0.12;
  return [low - margin, high + margin];
}
