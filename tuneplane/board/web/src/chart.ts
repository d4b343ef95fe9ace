// One chart: axes, zoom and cursor are uPlot's; the lines are drawn here, since each has its own x.

import uPlot from "uplot";
import { type Curve, type Extent, attemptOf, extentOf, nearest } from "./curve";
import { h, put } from "./dom";
import { type Unit, bytes, duration, moment, number, withUnit } from "./format";
import type { XAxis } from "./state";

export interface Look {
  x: XAxis;
  log: boolean;
  unit: Unit;
  zoom: [number, number] | null;
}

export interface Events {
  zoom: (range: [number, number] | null) => void;
}

const HEIGHT = 220;
const WIDE_HEIGHT = 460;
const TOLD = 9;
/** Seconds between two ticks of an axis of durations. */
const DURATIONS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600,
  7200, 10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000, 2_592_000,
];
const DOT_BELOW = 40;

let tip: HTMLElement | null = null;

/** The one box that shows values under the pointer. */
function tooltip(): HTMLElement {
  if (!tip) {
    tip = h("div", { class: "tooltip", role: "status", hidden: true });
    document.body.append(tip);
  }
  return tip;
}

export function hideTooltip(): void {
  if (tip) tip.hidden = true;
}

interface Hit {
  curve: Curve;
  index: number;
  y: number;
  distance: number;
}

export class Chart {
  private plot: uPlot | null = null;
  private curves: Curve[] = [];
  private extent: Extent = { x: [0, 1], y: [0, 1], empty: true, left: 0 };
  private look: Look = { x: "step", log: false, unit: "", zoom: null };
  private width = 0;
  private wide = false;
  private key = 0; // index of the point that the keyboard reads
  private readonly over = h("canvas", { class: "chart-over", "aria-hidden": "true" });
  private drawn: (() => void) | null = null;

  constructor(
    private readonly place: HTMLElement,
    private readonly events: Events,
  ) {
    place.addEventListener("keydown", (event) => this.onKey(event));
    place.addEventListener("blur", () => this.leave());
  }

  /** Show these lines. drawn: called once they are on the canvas. */
  show(curves: Curve[], look: Look, drawn: (() => void) | null = null): Extent {
    const rebuilt = !this.plot || look.log !== this.look.log || look.x !== this.look.x || look.unit !== this.look.unit;
    this.curves = curves;
    this.look = look;
    this.drawn = drawn;
    this.extent = extentOf(curves, look.zoom, look.log);
    if (look.unit === "percent" && !look.log) {
      const [low, high] = this.extent.y;
      if (low >= -12 && high <= 112) this.extent.y = [0, 100];
    }
    if (rebuilt) this.build();
    else this.plot!.setData(this.frame(), true);
    return this.extent;
  }

  resize(width: number, wide: boolean): void {
    if (width === this.width && wide === this.wide) return;
    this.width = width;
    this.wide = wide;
    this.plot?.setSize({ width, height: this.height });
  }

  redraw(): void {
    this.plot?.redraw(false, true);
  }

  destroy(): void {
    this.leave();
    this.plot?.destroy();
    this.plot = null;
  }

  get canvas(): HTMLCanvasElement | null {
    return this.plot ? this.plot.ctx.canvas : null;
  }

  private get height(): number {
    return this.wide ? WIDE_HEIGHT : HEIGHT;
  }

  /** Corners of what is shown: uPlot makes its scales of them. */
  private frame(): uPlot.AlignedData {
    return [this.extent.x, this.extent.y];
  }

  private build(): void {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const css = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const font = `11px ${style.getPropertyValue("--font")}`;
    const axis: uPlot.Axis = {
      stroke: () => css("--muted"),
      grid: { stroke: () => css("--grid"), width: 1 },
      ticks: { show: false },
      font,
    };
    const { x, log } = this.look;
    const options: uPlot.Options = {
      width: this.width || 300,
      height: this.height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        bind: {
          dblclick: () => () => {
            this.events.zoom(null);
            return null;
          },
        },
      },
      select: { show: true, left: 0, top: 0, width: 0, height: 0 },
      scales: {
        x: { time: x === "wall", range: () => this.extent.x },
        y: { distr: log ? 3 : 1, range: () => this.extent.y },
      },
      series: [{}, { scale: "y", paths: () => null, points: { show: false } }],
      axes: [
        {
          ...axis,
          size: 30,
          space: x === "step" ? 60 : 76,
          ...(x === "step" ? { values: (_u: uPlot, splits: number[]) => splits.map((v) => this.step(v)) } : {}),
          ...(x === "relative"
            ? { incrs: DURATIONS, values: (_u: uPlot, splits: number[]) => splits.map((v) => duration(v)) }
            : {}),
        },
        {
          ...axis,
          space: 32,
          size: (_u, values) => 18 + 6.3 * Math.max(3, ...(values ?? []).map((text) => (text ?? "").length)),
          values: (_u, splits) => splits.map((value) => (value === null ? "" : this.tick(value))),
        },
      ],
      hooks: {
        draw: [(u) => this.draw(u)],
        setSelect: [(u) => this.select(u)],
        setCursor: [(u) => this.point(u)],
      },
    };
    this.plot = new uPlot(options, this.frame(), this.place);
    this.plot.over.append(this.over);
  }

  private step(value: number): string {
    if (!Number.isInteger(value)) return number(value, 4);
    return Math.abs(value) >= 100_000 ? `${number(value / 1000, 6)}k` : number(value);
  }

  private tick(value: number): string {
    const { unit } = this.look;
    if (unit === "bytes" || unit === "bytes_per_s") return bytes(value, 3);
    return this.look.log && !this.isRound(value) ? "" : number(value, 4);
  }

  /** Of a logarithmic axis: 1, 2 and 5 of each decade; where it has many decades, 1 alone. */
  private isRound(value: number): boolean {
    const [low, high] = this.extent.y;
    const digit = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    return (Math.log10(high / low) > 3 ? [1] : [1, 2, 5]).some((wanted) => Math.abs(digit - wanted) < 1e-6);
  }

  private draw(u: uPlot): void {
    const { ctx, bbox } = u;
    const many = this.curves.length > 24;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const dots = this.curves.length <= 12 && this.curves.every((curve) => curve.xs.length < DOT_BELOW);
    for (const curve of this.curves) {
      if (curve.line.attempt !== null) this.trace(u, curve.xs, curve.ys, curve, 0.45, 1, [4, 3], false);
    }
    for (const curve of this.curves) {
      if (curve.line.attempt !== null) continue;
      const smooth = curve.smoothX.length > 0;
      if (smooth) this.trace(u, curve.xs, curve.ys, curve, many ? 0.1 : 0.22, 1, [], false);
      const [xs, ys] = smooth ? [curve.smoothX, curve.smoothY] : [curve.xs, curve.ys];
      this.trace(u, xs, ys, curve, many ? 0.8 : 1, many ? 1 : 1.6, curve.stroke.dash, dots);
      if (!many) this.marks(u, curve);
    }
    ctx.restore();
    const drawn = this.drawn;
    this.drawn = null;
    drawn?.();
  }

  private scaled(u: uPlot): { x: (value: number) => number; y: (value: number) => number } {
    const { bbox } = u;
    const [x0, x1] = this.extent.x;
    const log = this.look.log;
    const [y0, y1] = log ? this.extent.y.map(Math.log10) as [number, number] : this.extent.y;
    const kx = bbox.width / (x1 - x0);
    const ky = bbox.height / (y1 - y0);
    const bottom = bbox.top + bbox.height;
    return {
      x: (value) => bbox.left + (value - x0) * kx,
      y: log ? (value) => bottom - (Math.log10(value) - y0) * ky : (value) => bottom - (value - y0) * ky,
    };
  }

  private trace(
    u: uPlot,
    xs: Float64Array,
    ys: Float64Array,
    curve: Curve,
    alpha: number,
    width: number,
    dash: number[],
    dots: boolean,
  ): void {
    const { ctx } = u;
    const scale = this.scaled(u);
    const log = this.look.log;
    const ratio = uPlot.pxRatio;
    ctx.globalAlpha = alpha;
    ctx.strokeStyle = ctx.fillStyle = curve.stroke.color;
    ctx.lineWidth = width * ratio;
    ctx.lineJoin = "round";
    ctx.setLineDash(dash.map((part) => part * ratio));
    ctx.beginPath();
    let down = false;
    let alone = -1;
    const lonely: number[] = [];
    for (let i = 0; i < xs.length; i++) {
      const y = ys[i]!;
      if (!Number.isFinite(y) || (log && y <= 0)) {
        if (alone >= 0) lonely.push(alone);
        down = false;
        alone = -1;
        continue;
      }
      if (down) {
        ctx.lineTo(scale.x(xs[i]!), scale.y(y));
        alone = -1;
      } else {
        ctx.moveTo(scale.x(xs[i]!), scale.y(y));
        alone = i;
      }
      down = true;
    }
    if (alone >= 0) lonely.push(alone);
    ctx.stroke();
    ctx.setLineDash([]);
    // A point without neighbours is no line: it is drawn as a dot.
    const shown = dots ? Array.from(xs.keys()) : lonely;
    for (const i of shown) {
      if (!Number.isFinite(ys[i]!) || (log && ys[i]! <= 0)) continue;
      ctx.beginPath();
      ctx.arc(scale.x(xs[i]!), scale.y(ys[i]!), (dots && xs.length > 1 ? 2 : 3) * ratio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.globalAlpha = 1;
  }

  /** Values that are no finite numbers, at the edge of the chart: a cross for NaN, a triangle for an infinity. */
  private marks(u: uPlot, curve: Curve): void {
    const { ctx, bbox } = u;
    const scale = this.scaled(u);
    const size = 3.5 * uPlot.pxRatio;
    ctx.strokeStyle = ctx.fillStyle = curve.stroke.color;
    ctx.lineWidth = 1.5 * uPlot.pxRatio;
    let last = -Infinity;
    for (let i = 0; i < curve.xs.length; i++) {
      const value = curve.ys[i]!;
      if (Number.isFinite(value)) continue;
      const x = scale.x(curve.xs[i]!);
      if (x - last < size) continue;
      last = x;
      const up = value === Infinity;
      const y = up ? bbox.top + 2 * size : bbox.top + bbox.height - 2 * size;
      ctx.beginPath();
      if (Number.isNaN(value)) {
        ctx.moveTo(x - size, y - size);
        ctx.lineTo(x + size, y + size);
        ctx.moveTo(x + size, y - size);
        ctx.lineTo(x - size, y + size);
        ctx.stroke();
      } else {
        const tipY = up ? y - size : y + size;
        ctx.moveTo(x, tipY);
        ctx.lineTo(x - size, up ? y + size : y - size);
        ctx.lineTo(x + size, up ? y + size : y - size);
        ctx.fill();
      }
    }
  }

  private select(u: uPlot): void {
    const { left, width } = u.select;
    if (width < 3) return;
    const low = u.posToVal(left, "x");
    const high = u.posToVal(left + width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (high > low) this.events.zoom([low, high]);
  }

  private point(u: uPlot): void {
    const { left, top } = u.cursor;
    if (left === undefined || top === undefined || left < 0 || this.curves.length === 0) {
      this.leave();
      return;
    }
    this.tell(u, u.posToVal(left, "x"), top);
  }

  /** Show the values at x, those nearest to `top` first. */
  private tell(u: uPlot, x: number, top: number): void {
    const hits: Hit[] = [];
    const [low, high] = this.extent.x;
    for (const curve of this.curves) {
      if (curve.line.attempt !== null) continue;
      const index = nearest(curve.xs, x);
      const at = curve.xs[index];
      if (index < 0 || at === undefined || at < low || at > high) continue;
      const smooth = curve.smoothX.length > 0;
      const y = smooth ? curve.smoothY[nearest(curve.smoothX, at)]! : curve.ys[index]!;
      // A line that ended long before says nothing of this place.
      const reach = Math.abs(u.valToPos(at, "x") - u.valToPos(x, "x"));
      if (reach > 60 && (index === 0 || index === curve.xs.length - 1)) continue;
      const place = u.valToPos(y, "y");
      hits.push({ curve, index, y, distance: Number.isFinite(place) ? Math.abs(place - top) + reach / 4 : 1e6 });
    }
    hits.sort((a, b) => a.distance - b.distance);
    const best = hits[0];
    if (!best) {
      this.leave();
      return;
    }
    this.highlight(u, best);
    const box = tooltip();
    put(
      box,
      h("div", { class: "tooltip-x" }, this.where(best)),
      ...hits.slice(0, TOLD).map((hit, i) => this.row(hit, i === 0)),
      hits.length > TOLD && h("div", { class: "tooltip-more" }, `and ${hits.length - TOLD} more`),
    );
    box.hidden = false;
    const rect = u.over.getBoundingClientRect();
    const { offsetWidth: w, offsetHeight: t } = box;
    const at = rect.left + u.valToPos(best.curve.xs[best.index]!, "x");
    const beside = at + 16 + w < window.innerWidth ? at + 16 : at - 16 - w;
    box.style.left = `${Math.max(4, Math.min(beside, window.innerWidth - w - 4))}px`;
    box.style.top = `${Math.max(4, Math.min(rect.top + top - t / 2, window.innerHeight - t - 4))}px`;
  }

  private where(hit: Hit): string {
    const { line, xs } = hit.curve;
    const step = `step ${number(line.steps[hit.index]!)}`;
    const clock = moment(line.times[hit.index]!);
    return this.look.x === "relative" ? `${duration(xs[hit.index]!)} · ${step}` : `${step} · ${clock}`;
  }

  private row(hit: Hit, first: boolean): HTMLElement {
    const { curve, index } = hit;
    const raw = curve.ys[index]!;
    const smooth = curve.smoothX.length > 0;
    const several = curve.line.starts.length > 1;
    return h(
      "div",
      { class: first ? "tooltip-row first" : "tooltip-row" },
      h("span", { class: `swatch ${curve.className}` }),
      h("span", { class: "tooltip-value" }, withUnit(smooth ? hit.y : raw, this.look.unit)),
      smooth && h("span", { class: "tooltip-raw" }, `raw ${withUnit(raw, this.look.unit)}`),
      h("span", { class: "tooltip-label" }, curve.label),
      several && h("span", { class: "tooltip-raw" }, `attempt ${attemptOf(curve.line, index)}`),
    );
  }

  /** The nearest line again, over the others, and its point: on a canvas of its own, which is quick to clear. */
  private highlight(u: uPlot, hit: Hit): void {
    const ratio = uPlot.pxRatio;
    const { width, height } = u.over.getBoundingClientRect();
    const canvas = this.over;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const ctx = canvas.getContext("2d");
    if (!ctx) return;
    ctx.scale(ratio, ratio);
    const { curve, index, y } = hit;
    ctx.strokeStyle = ctx.fillStyle = curve.stroke.color;
    if (this.curves.length > 1) {
      const [xs, ys] = curve.smoothX.length ? [curve.smoothX, curve.smoothY] : [curve.xs, curve.ys];
      ctx.lineWidth = 2.6;
      ctx.lineJoin = "round";
      ctx.beginPath();
      let down = false;
      for (let i = 0; i < xs.length; i++) {
        const at = u.valToPos(ys[i]!, "y");
        if (!Number.isFinite(at)) {
          down = false;
          continue;
        }
        if (down) ctx.lineTo(u.valToPos(xs[i]!, "x"), at);
        else ctx.moveTo(u.valToPos(xs[i]!, "x"), at);
        down = true;
      }
      ctx.stroke();
    }
    const at = u.valToPos(y, "y");
    if (!Number.isFinite(at)) return;
    ctx.beginPath();
    ctx.arc(u.valToPos(curve.xs[index]!, "x"), at, 4.5, 0, 2 * Math.PI);
    ctx.fill();
    ctx.lineWidth = 2;
    ctx.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--surface");
    ctx.stroke();
  }

  private leave(): void {
    hideTooltip();
    if (this.over.width) this.over.width = 0;
  }

  /** Arrows read the points of the first line, one by one. */
  private onKey(event: KeyboardEvent): void {
    const curve = this.curves.find((one) => one.line.attempt === null && one.xs.length > 0);
    if (!this.plot || !curve || event.ctrlKey || event.metaKey || event.altKey) return;
    const n = curve.xs.length;
    const steps: Record<string, number> = {
      ArrowLeft: this.key - 1, ArrowRight: this.key + 1, PageUp: this.key - 10, PageDown: this.key + 10,
      Home: 0, End: n - 1,
    };
    const wanted = steps[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    this.key = Math.max(0, Math.min(n - 1, wanted));
    const place = this.plot.valToPos(curve.ys[this.key]!, "y");
    this.tell(this.plot, curve.xs[this.key]!, Number.isFinite(place) ? place : 0);
  }
}
