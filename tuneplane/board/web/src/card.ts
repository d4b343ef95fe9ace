// A chart with its frame: fetches the lines it shows while it is in sight, and hands them out as CSV and PNG.

import { type Line, type Query, address, getLines } from "./api";
import { Chart, type Look } from "./chart";
import { stroke } from "./colors";
import { type Curve, type Label, curveOf } from "./curve";
import { download, h, icon, iconButton, put, setText } from "./dom";
import { count, number, numeric, withUnit } from "./format";
import type { ChartSpec } from "./groups";
import type { Model } from "./model";
import type { XAxis } from "./state";

export interface Host {
  model: Model;
  observer: IntersectionObserver;
  failed: (error: unknown) => void;
}

export class Card {
  readonly element: HTMLElement;
  private readonly plot = h("div", { class: "plot", tabindex: "0", role: "img" });
  private readonly title = h("h3", { class: "card-title" });
  private readonly last = h("span", { class: "card-last" });
  private readonly note = h("p", { class: "card-note" });
  private readonly legend = h("p", { class: "legend" });
  private readonly expand: HTMLButtonElement;
  private readonly chart: Chart;
  private readonly lines = new Map<string, Line[]>(); // by run
  private readonly have = new Map<string, string>(); // by run, what was asked for
  private busy = false;
  private visible = false;
  private shownAs = "";
  private version = 0;

  constructor(
    private spec: ChartSpec,
    private readonly host: Host,
  ) {
    this.chart = new Chart(this.plot, { zoom: (zoom) => host.model.change({ zoom }) });
    this.expand = iconButton("expand", "Show large", () => {
      const { wide } = host.model.state;
      host.model.change({ wide: wide === this.spec.key ? "" : this.spec.key });
      this.element.scrollIntoView({ block: "nearest" });
    });
    this.element = h(
      "section",
      { class: "card" },
      h(
        "div",
        { class: "card-head" },
        this.title,
        this.last,
        h(
          "div",
          { class: "card-tools" },
          iconButton("table", "Save all points as CSV", () => this.saveCsv()),
          iconButton("image", "Save the chart as PNG", () => this.savePng()),
          this.expand,
        ),
      ),
      this.plot,
      this.legend,
      this.note,
    );
    host.observer.observe(this.element);
    new ResizeObserver(() => this.fit()).observe(this.plot);
  }

  destroy(): void {
    this.host.observer.unobserve(this.element);
    this.chart.destroy();
    this.element.remove();
  }

  setVisible(visible: boolean): void {
    this.visible = visible;
    if (visible) this.load();
  }

  update(spec: ChartSpec): void {
    this.spec = spec;
    const { model } = this.host;
    const wide = model.state.wide === spec.key;
    setText(this.title, spec.title);
    this.title.title = spec.members.map((member) => member.name).slice(0, 8).join("\n");
    if (this.element.classList.contains("wide") !== wide) {
      this.element.classList.toggle("wide", wide);
      put(this.expand, icon(wide ? "shrink" : "expand"));
      this.expand.setAttribute("aria-label", wide ? "Show small" : "Show large");
      this.expand.title = wide ? "Show small" : "Show large";
      this.fit();
    }
    setText(this.last, this.lastValue());
    this.load();
  }

  /** The last value, where the chart has one line. */
  private lastValue(): string {
    const { chosen, overviews } = this.host.model;
    if (chosen.length !== 1 || this.spec.members.length !== 1) return "";
    const metric = overviews.get(chosen[0]!.id)?.metrics.find((one) => one.id === this.spec.members[0]!.id);
    return metric ? withUnit(numeric(metric.last), this.spec.unit, 5) : "";
  }

  private get x(): XAxis {
    const { x } = this.host.model.state;
    // What hardware did is of a time, not of a step.
    return this.isSystem && x === "step" ? "relative" : x;
  }

  private get isSystem(): boolean {
    return this.spec.members[0]?.name.startsWith("system/node") ?? false;
  }

  private get zoom(): [number, number] | null {
    const { x, zoom } = this.host.model.state;
    return this.x === x ? zoom : null;
  }

  /** Per run, what its lines are like: another text where they must be fetched again. */
  private wanted(): Map<string, string> {
    const { model } = this.host;
    const buckets = this.buckets();
    const view = `${this.x} ${this.zoom?.join(" ") ?? ""} ${buckets}`;
    const found = new Map<string, string>();
    for (const run of model.chosen) {
      const metrics = model.overviews.get(run.id)?.metrics ?? [];
      const mine = this.spec.members.map((member) => metrics.find((metric) => metric.id === member.id));
      if (mine.some((metric) => metric)) {
        found.set(run.id, `${view} ${mine.map((m) => (m ? `${m.points}.${m.hidden}.${m.last}` : "")).join(" ")}`);
      }
    }
    return found;
  }

  private buckets(): number {
    const pixels = (this.plot.clientWidth || 400) * Math.min(2, devicePixelRatio || 1);
    return Math.min(2000, Math.max(200, Math.ceil(pixels / 200) * 200));
  }

  private load(): void {
    if (!this.visible) return;
    const wanted = this.wanted();
    for (const run of [...this.lines.keys()]) {
      if (!wanted.has(run)) {
        this.lines.delete(run);
        this.have.delete(run);
        this.version += 1;
      }
    }
    const runs = [...wanted].filter(([run, as]) => this.have.get(run) !== as).map(([run]) => run);
    if (runs.length && !this.busy) void this.fetch(runs, wanted);
    this.draw();
  }

  private async fetch(runs: string[], wanted: Map<string, string>): Promise<void> {
    this.busy = true;
    const begun = performance.now();
    const query: Query = [
      ...runs.map((run): [string, string] => ["run", run]),
      ...this.spec.members.map((member): [string, string] => ["metric", member.id]),
      ["order", this.x],
      ["buckets", this.buckets()],
    ];
    if (this.zoom) query.push(["low", this.zoom[0]], ["high", this.zoom[1]]);
    let failed = false;
    try {
      const lines = await getLines(query);
      for (const run of runs) {
        this.lines.set(run, lines.filter((line) => line.run === run));
        this.have.set(run, wanted.get(run)!);
      }
      this.version += 1;
    } catch (error) {
      failed = true;
      this.host.failed(error);
    }
    this.busy = false;
    if (!this.element.isConnected) return;
    const fetched = performance.now();
    this.draw(() => {
      // For whoever asks how quick it is: the browser's own timeline has it.
      performance.measure(`fetch ${this.spec.key}`, { start: begun, end: fetched });
      performance.measure(`draw ${this.spec.key}`, { start: fetched, end: performance.now() });
    });
    if (!failed) this.load(); // something may have changed meanwhile
  }

  private label(run: string, metric: string, several: boolean): Label {
    const { colors, dark } = this.host.model;
    const index = this.spec.members.findIndex((member) => member.id === metric);
    const member = this.spec.members[index];
    const alone = this.spec.members.length === 1;
    if (!several && !alone) {
      return { text: member?.label || member?.name || "", stroke: stroke(index, dark), className: `c${index % 12}` };
    }
    const text = alone ? run : `${run} · ${member?.label || "rank0"}`;
    return { text, stroke: colors.of(run, dark), className: colors.className(run) };
  }

  private draw(drawn: (() => void) | null = null): void {
    const { model } = this.host;
    const { smooth, log } = model.state;
    const look: Look = { x: this.x, log, unit: this.spec.unit, zoom: this.zoom };
    const as = [this.version, JSON.stringify(look), smooth, model.dark, model.state.runs.join()].join("|");
    if (as === this.shownAs && !drawn) return;
    if (this.lines.size === 0) {
      setText(this.note, this.busy ? "reading…" : "");
      if (!this.busy) this.shownAs = as;
      return;
    }
    this.shownAs = as;
    const several = model.chosen.length > 1;
    const curves: Curve[] = [];
    for (const run of model.chosen) {
      for (const line of this.lines.get(run.id) ?? []) {
        const origin = model.overviews.get(run.id)?.origin_s ?? 0;
        curves.push(curveOf(line, this.label(run.id, line.metric, several), look.x, smooth, origin));
      }
    }
    const extent = this.chart.show(curves, look, drawn);
    this.tellMembers(several);
    const notes: string[] = [];
    if (extent.empty && curves.length) notes.push(log ? "nothing above 0 for a logarithmic axis" : "no finite value here");
    else if (extent.left) notes.push(`${count(extent.left, "value")} of 0 or less: no place on a logarithmic axis`);
    const total = curves.reduce((sum, curve) => sum + curve.line.total, 0);
    const sent = curves.reduce((sum, curve) => sum + curve.xs.length, 0);
    if (sent < total) this.plot.title = `${count(total, "point")}: drawn are the extremes of each pixel`;
    else this.plot.removeAttribute("title");
    setText(this.note, notes.join(" · "));
    const lines = curves.filter((curve) => curve.line.attempt === null);
    const told = lines.slice(0, 4).map((curve) => `${curve.label} ${number(curve.ys[curve.ys.length - 1] ?? NaN)}`);
    this.plot.setAttribute(
      "aria-label",
      `Chart of ${this.spec.key}, ${count(lines.length, "line")}. Last: ${told.join(", ")}. Arrow keys read its points.`,
    );
  }

  /** Which colour is which GPU or rank, where colours are not those of runs. */
  private tellMembers(several: boolean): void {
    const { members } = this.spec;
    const named = several || members.length < 2 ? [] : members.slice(0, 16);
    const as = named.map((member) => member.id).join();
    if (this.legend.dataset["as"] === as) return;
    this.legend.dataset["as"] = as;
    put(
      this.legend,
      ...named.map((member, i) => h("span", {}, h("span", { class: `swatch c${i % 12}` }), member.label || "rank0")),
      members.length > named.length && named.length > 0 && `and ${members.length - named.length} more`,
    );
  }

  private fit(): void {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.chart.resize(width, this.element.classList.contains("wide"));
    this.load();
  }

  recolor(): void {
    this.chart.redraw();
  }

  private fileName(ending: string): string {
    const runs = this.host.model.chosen;
    const plain = `${runs.length === 1 ? runs[0]!.id : `${runs.length}-runs`}-${this.spec.key}`;
    return `${plain.replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 120)}.${ending}`;
  }

  private saveCsv(): void {
    const query: Query = [
      ...this.host.model.chosen.map((run): [string, string] => ["run", run.id]),
      ...this.spec.members.map((member): [string, string] => ["metric", member.id]),
    ];
    download(this.fileName("csv"), address("/api/lines.csv", query));
  }

  /** The chart as seen, with its name above and the runs below. */
  private savePng(): void {
    const chart = this.chart.canvas;
    if (!chart) return;
    const ratio = devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    const several = this.host.model.chosen.length > 1;
    const labels = new Map<string, string>();
    for (const lines of this.lines.values()) {
      for (const line of lines) {
        const label = this.label(line.run, line.metric, several);
        labels.set(label.text, label.stroke.color);
      }
    }
    const named = [...labels].slice(0, 30);
    const out = h("canvas");
    out.width = chart.width;
    out.height = chart.height + (34 + named.length * 16 + 8) * ratio;
    const ctx = out.getContext("2d")!;
    ctx.fillStyle = style.getPropertyValue("--surface");
    ctx.fillRect(0, 0, out.width, out.height);
    ctx.drawImage(chart, 0, 30 * ratio);
    ctx.scale(ratio, ratio);
    const font = style.getPropertyValue("--font");
    ctx.fillStyle = style.getPropertyValue("--text");
    ctx.font = `600 13px ${font}`;
    ctx.fillText(this.spec.key.slice(0, 200), 12, 20);
    ctx.font = `11px ${font}`;
    named.forEach(([text, color], i) => {
      const y = chart.height / ratio + 30 + 16 * (i + 1);
      ctx.fillStyle = color;
      ctx.fillRect(12, y - 8, 14, 4);
      ctx.fillStyle = style.getPropertyValue("--text");
      ctx.fillText(text.slice(0, 160), 32, y - 2);
    });
    out.toBlob((blob) => {
      if (!blob) return;
      const href = URL.createObjectURL(blob);
      download(this.fileName("png"), href);
      setTimeout(() => URL.revokeObjectURL(href), 10_000);
    });
  }
}
