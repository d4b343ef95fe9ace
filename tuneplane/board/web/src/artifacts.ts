// What the chosen runs left below their output folders.

import { type Artifacts, get } from "./api";
import { h, put } from "./dom";
import { bytes, count, moment } from "./format";
import type { Model } from "./model";

const MOST = 10;
const FRESH_MS = 15_000;

export class ArtifactList {
  readonly element = h("div", { class: "artifacts" });
  private readonly known = new Map<string, { at: number; found: Artifacts | null; fault: string }>();
  private busy = false;
  private shown = "";

  constructor(private readonly model: Model) {}

  update(): void {
    const runs = this.model.chosen.slice(0, MOST).map((run) => run.id);
    this.render(runs);
    const old = runs.find((run) => Date.now() - (this.known.get(run)?.at ?? 0) > FRESH_MS);
    if (old && !this.busy) void this.load(old);
  }

  private async load(run: string): Promise<void> {
    this.busy = true;
    try {
      this.known.set(run, { at: Date.now(), found: await get<Artifacts>("/api/artifacts", [["run", run]]), fault: "" });
    } catch (error) {
      const fault = error instanceof Error ? error.message : String(error);
      this.known.set(run, { at: Date.now(), found: this.known.get(run)?.found ?? null, fault });
    }
    this.busy = false;
    this.update();
  }

  private render(runs: string[]): void {
    const known = runs.map((run) => this.known.get(run));
    const as = JSON.stringify([runs, known.map((one) => [one?.found, one?.fault])]);
    if (as === this.shown) return;
    this.shown = as;
    if (runs.length === 0) {
      put(this.element, h("p", { class: "empty" }, "Choose runs on the left to see what they left."));
      return;
    }
    const left = this.model.chosen.length - runs.length;
    put(
      this.element,
      ...runs.map((run, i) => this.one(run, known[i])),
      left > 0 && h("p", { class: "muted" }, `and ${count(left, "more run")}`),
    );
  }

  private one(run: string, known: { found: Artifacts | null; fault: string } | undefined): HTMLElement {
    const found = known?.found;
    const rows = (found?.artifacts ?? []).map((one) =>
      h(
        "tr",
        {},
        h("td", {}, one.name),
        h("td", { class: "path" }, one.path),
        h("td", {}, one.kind === "folder" ? count(one.files, "file") : "file"),
        h("td", { class: "right" }, bytes(one.size_bytes)),
        h("td", {}, moment(one.modified_at)),
      ),
    );
    const none = "No artifacts: checkpoints/, logs, hf_export or eval/report.json below $TUNEPLANE_OUT_DIR.";
    return h(
      "section",
      { class: "block" },
      h("h2", { class: "block-title" }, h("span", { class: `swatch ${this.model.colors.className(run)}` }), run),
      known?.fault ? h("p", { class: "fault", role: "alert" }, known.fault) : null,
      found ? h("p", { class: "muted path" }, found.folder) : known?.fault ? null : h("p", { class: "muted" }, "reading…"),
      rows.length > 0 &&
        h(
          "div",
          { class: "table-wrap" },
          h(
            "table",
            {},
            h("thead", {}, h("tr", {}, ...["output", "path", "kind", "size", "changed"].map((word) => h("th", { scope: "col" }, word)))),
            h("tbody", {}, ...rows),
          ),
        ),
      found && rows.length === 0 ? h("p", { class: "muted" }, none) : null,
      ...(found?.skipped ?? []).map((told) => h("p", { class: "notice" }, `skipped ${told}`)),
    );
  }
}
