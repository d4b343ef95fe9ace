// Hyper-parameters and configuration of the chosen runs side by side, what differs marked.

import { type Details, get } from "./api";
import { h, put, setText } from "./dom";
import { count, plain } from "./format";
import type { Model } from "./model";
import { filterOf } from "./state";

const MOST = 40;
/** How old a configuration may be: it does not change, hyper-parameters that were reported late do. */
const FRESH_MS = 10_000;

/** Details of runs, asked for once in a while. Shared with the summary. */
export class DetailsOf {
  private readonly known = new Map<string, { at: number; stamp: string; details: Details | null; fault: string }>();
  private readonly asked = new Set<string>();

  constructor(
    private readonly model: Model,
    private readonly changed: () => void,
  ) {}

  /** What is known of a run; asks for more where that is old. */
  of(run: string): { details: Details | null; fault: string } {
    const known = this.known.get(run);
    const stamp = `${this.model.overviews.get(run)?.stamp} ${this.model.run(run)?.state}`;
    const old = !known || (known.stamp !== stamp && Date.now() - known.at > FRESH_MS) || known.fault !== "";
    if (old && !this.asked.has(run) && this.asked.size < 4 && (!known || Date.now() - known.at > 2_000)) {
      void this.ask(run, stamp);
    }
    return known ?? { details: null, fault: "" };
  }

  private async ask(run: string, stamp: string): Promise<void> {
    this.asked.add(run);
    try {
      const details = await get<Details>("/api/details", [["run", run]]);
      this.known.set(run, { at: Date.now(), stamp, details, fault: "" });
    } catch (error) {
      const fault = error instanceof Error ? error.message : String(error);
      this.known.set(run, { at: Date.now(), stamp, details: this.known.get(run)?.details ?? null, fault });
    }
    this.asked.delete(run);
    this.changed();
  }
}

export class Config {
  readonly element = h("div", { class: "config" });
  private readonly all: HTMLInputElement;
  private readonly told = h("span", { class: "muted" });
  private readonly body = h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Configuration" });
  private shown = "";

  constructor(
    private readonly model: Model,
    private readonly details: DetailsOf,
  ) {
    this.all = h("input", { type: "checkbox", on: { change: () => model.change({ all: this.all.checked }) } });
    put(
      this.element,
      h("div", { class: "row" }, h("label", { class: "check" }, this.all, "also what is the same in all runs"), this.told),
      this.body,
    );
  }

  update(): void {
    const { model } = this;
    const chosen = model.chosen;
    const runs = chosen.slice(0, MOST);
    this.all.checked = model.state.all;
    this.all.disabled = runs.length < 2;
    const known = runs.map((run) => this.details.of(run.id));
    const notes = [
      chosen.length > MOST ? `the first ${MOST} of ${chosen.length} runs` : "",
      known.some((one) => !one.details) ? "reading…" : "",
      known.map((one) => one.fault).find((fault) => fault) ?? "",
    ];
    setText(this.told, notes.filter(Boolean).join(" · "));
    const hparams = known.map((one) => one.details?.hparams ?? null);
    const configs = known.map((one) => one.details?.config ?? null);
    const as = JSON.stringify([runs.map((run) => run.id), model.state.all, model.state.metricFilter, hparams, configs]);
    if (as === this.shown) return;
    this.shown = as;
    if (runs.length === 0) {
      put(this.body, h("p", { class: "empty" }, "Choose runs on the left to see their configuration side by side."));
      return;
    }
    put(
      this.body,
      h(
        "table",
        { class: "compare" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "key"),
            ...runs.map((run) =>
              h("th", { scope: "col", title: run.id }, h("span", { class: `swatch ${model.colors.className(run.id)}` }), run.id),
            ),
          ),
        ),
        ...this.part("hyper-parameters, as the trainer reported them", hparams, runs.length),
        ...this.part("configuration, as it was submitted", configs, runs.length),
      ),
    );
  }

  /** columns: null of a run that was not read yet, which differs from none. */
  private part(title: string, columns: (Record<string, unknown> | null)[], n: number): HTMLElement[] {
    const { matches } = filterOf(this.model.state.metricFilter);
    const keys = [...new Set(columns.flatMap((column) => Object.keys(column ?? {})))].sort();
    const rows = keys
      .filter((key) => matches(key))
      .map((key) => {
        const values = columns.map((column) => (column === null ? "…" : key in column ? plain(column[key]) : ""));
        return { key, values, differs: new Set(values.filter((_, i) => columns[i] !== null)).size > 1 };
      });
    const shown = rows.filter((row) => n < 2 || row.differs || this.model.state.all);
    const body = shown.map(({ key, values, differs }) =>
      h(
        "tr",
        { class: differs ? "differs" : "" },
        h("th", { scope: "row" }, key),
        ...values.map((value) => h("td", { title: value.length > 60 ? value : null }, value || "–")),
      ),
    );
    const none = rows.length === 0 ? "none" : `${count(rows.length, "key")}, the same in all runs`;
    return [
      h(
        "tbody",
        {},
        h("tr", { class: "part" }, h("th", { colspan: n + 1, scope: "rowgroup" }, title)),
        ...(body.length ? body : [h("tr", {}, h("td", { colspan: n + 1, class: "muted" }, none))]),
      ),
    ];
  }
}
