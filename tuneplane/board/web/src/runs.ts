// The list of runs: filtered, sorted, only its visible rows in the document, worked by mouse or keyboard.

import type { Run } from "./api";
import { h, icon, put, runName, setText } from "./dom";
import { age, count } from "./format";
import type { Model } from "./model";
import { MAX_RUNS, SORTS, type Sort } from "./state";

const ROW = 46;
/** Width of a row's box, which adds it to the comparison. */
const BOX = 34;
const SORT_WORDS: Record<Sort, string> = { newest: "newest", name: "name", state: "state", data: "newest data" };

export class RunList {
  readonly element: HTMLElement;
  readonly search: HTMLInputElement;
  private readonly fault = h("p", { class: "fault", id: "run-fault", role: "alert", hidden: true });
  private readonly sort: HTMLSelectElement;
  private readonly spacer = h("div", { class: "run-spacer" });
  private readonly list: HTMLElement;
  private readonly counted = h("span", { class: "muted" });
  private shown: Run[] = [];
  private active = 0;
  private readonly rows = new Map<string, { element: HTMLElement; as: string }>(); // those in the document

  constructor(private readonly model: Model) {
    this.search = h("input", {
      type: "search",
      class: "field",
      placeholder: "Filter runs by regex  ( / )",
      "aria-label": "Filter runs by regular expression",
      "aria-describedby": "run-fault",
      spellcheck: "false",
      autocomplete: "off",
      on: { input: () => this.model.change({ runFilter: this.search.value }) },
    });
    this.sort = h(
      "select",
      {
        class: "field small",
        "aria-label": "Sort runs by",
        on: { change: () => this.model.change({ sort: this.sort.value as Sort }) },
      },
      ...SORTS.map((word) => h("option", { value: word }, SORT_WORDS[word])),
    );
    this.list = h(
      "div",
      {
        class: "run-list",
        role: "listbox",
        tabindex: "0",
        "aria-multiselectable": "true",
        "aria-label": "Runs",
        on: {
          scroll: () => this.render(),
          keydown: (event) => this.onKey(event),
          focus: () => this.render(),
          click: (event) => this.onClick(event),
        },
      },
      this.spacer,
    );
    const all = h(
      "button",
      { type: "button", class: "link", title: `Compare all that are listed, at most ${MAX_RUNS}`, on: { click: () => this.chooseAll() } },
      "compare all",
    );
    const none = h("button", { type: "button", class: "link", on: { click: () => this.model.change({ runs: [] }) } }, "none");
    this.element = h(
      "aside",
      { class: "side", "aria-label": "Runs" },
      h("div", { class: "side-head" }, this.search, this.fault, h("div", { class: "side-tools" }, this.sort, all, none)),
      this.list,
      h("div", { class: "side-foot" }, this.counted),
    );
    new ResizeObserver(() => this.render()).observe(this.list);
  }

  private chooseAll(): void {
    this.model.change({ runs: this.shown.slice(0, MAX_RUNS).map((run) => run.id) });
  }

  update(): void {
    const { state, runs } = this.model;
    if (this.search.value !== state.runFilter) this.search.value = state.runFilter;
    this.sort.value = state.sort;
    const { runs: shown, fault } = this.model.listed();
    this.shown = shown;
    this.search.setAttribute("aria-invalid", String(fault !== ""));
    this.fault.hidden = fault === "";
    setText(this.fault, fault);
    const some = shown.length === runs.length ? count(runs.length, "run") : `${shown.length} of ${count(runs.length, "run")}`;
    setText(this.counted, this.model.readAt ? `${some} · ${state.runs.length} shown` : "looking for runs…");
    this.active = Math.min(this.active, Math.max(0, shown.length - 1));
    this.render();
  }

  private render(): void {
    const height = this.list.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(this.shown.length, Math.ceil((this.list.scrollTop + height) / ROW) + 4);
    this.spacer.style.height = `${this.shown.length * ROW}px`;
    const rows = this.shown.slice(first, last).map((run, i) => this.row(run, first + i));
    if (this.shown.length === 0 && this.model.readAt) rows.push(this.nothing());
    const there = this.spacer.children;
    if (rows.length !== there.length || rows.some((row, i) => row !== there[i])) put(this.spacer, ...rows);
    for (const [id, { element }] of this.rows) if (!element.isConnected) this.rows.delete(id);
    this.list.setAttribute("aria-activedescendant", this.shown.length ? `run-${this.active}` : "");
  }

  private nothing(): HTMLElement {
    if (this.model.runs.length === 0) return h("p", { class: "empty small" }, "No runs yet: tp submit starts one.");
    return h("p", { class: "empty small" }, "No run matches this filter.");
  }

  private row(run: Run, index: number): HTMLElement {
    const chosen = this.model.state.runs.includes(run.id);
    const moment = run.ended_s ?? run.started_s ?? run.submitted_s;
    const now = this.model.now;
    const stale = run.state === "RUNNING" && run.newest_s !== null && now - run.newest_s > 120;
    const parts = [
      run.state.toLowerCase().replaceAll("_", " "),
      run.code ? `exit ${run.code}` : "",
      moment ? `${age(now - moment)} ago` : "",
      run.attempts > 1 ? `${run.attempts} attempts` : "",
    ].filter(Boolean);
    const data = run.newest_s === null ? (run.metrics === 0 ? "no points" : "") : `data ${age(now - run.newest_s)}`;
    const as = JSON.stringify([run, index, this.shown.length, chosen, index === this.active, parts, data, stale, this.model.colors.className(run.id)]);
    // A row stays the same element, so that a press and its release meet the same one.
    const known = this.rows.get(run.id) ?? { element: h("div", { role: "option" }), as: "" };
    this.rows.set(run.id, known);
    const row = known.element;
    if (known.as === as) return row;
    known.as = as;
    row.id = `run-${index}`;
    row.className = `run ${chosen ? "chosen" : ""} ${index === this.active ? "active" : ""}`;
    row.title = [run.id, run.reason, run.notices ? count(run.notices, "notice") : ""].filter(Boolean).join("\n");
    row.setAttribute("aria-selected", String(chosen));
    row.setAttribute("aria-setsize", String(this.shown.length));
    row.setAttribute("aria-posinset", String(index + 1));
    row.style.transform = `translateY(${index * ROW}px)`;
    put(
      row,
      h("span", { class: "run-box" }, h("span", { class: `swatch ${chosen ? this.model.colors.className(run.id) : "off"}` })),
      h(
        "span",
        { class: "run-text" },
        runName(run.id, "run-name"),
        h(
          "span",
          { class: "run-sub" },
          h("span", { class: `dot ${stateClass(run)}`, "aria-hidden": "true" }),
          h("span", { class: "run-state" }, parts.join(" · ")),
          h("span", { class: stale ? "run-data stale" : "run-data" }, data),
        ),
      ),
      run.notices > 0 && h("span", { class: "run-warn" }, icon("warn")),
    );
    return row;
  }

  private toggle(run: Run): void {
    const { runs } = this.model.state;
    const without = runs.filter((id) => id !== run.id);
    this.model.change({ runs: without.length < runs.length ? without : [...runs, run.id].slice(-MAX_RUNS) });
  }

  private onClick(event: MouseEvent): void {
    const rect = this.list.getBoundingClientRect();
    const index = Math.floor((event.clientY - rect.top + this.list.scrollTop) / ROW); // of what is in it, nothing is clicked
    const run = this.shown[index];
    if (!run) return;
    this.active = index;
    if (event.clientX - rect.left < BOX || event.ctrlKey || event.metaKey || event.shiftKey) {
      this.toggle(run);
      return;
    }
    this.model.change({ runs: [run.id] });
    document.body.classList.remove("side-open");
  }

  focusList(): void {
    this.list.focus();
  }

  private onKey(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const steps: Record<string, number> = {
      ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page, PageUp: this.active - page,
      Home: 0, End: this.shown.length - 1,
    };
    const wanted = steps[event.key];
    const run = this.shown[this.active];
    if (wanted !== undefined) {
      this.active = Math.max(0, Math.min(this.shown.length - 1, wanted));
      const top = this.active * ROW;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ROW > this.list.scrollTop + this.list.clientHeight) {
        this.list.scrollTop = top + ROW - this.list.clientHeight;
      }
      this.render();
    } else if (event.key === " " && run) this.toggle(run);
    else if (event.key === "Enter" && run) this.model.change({ runs: [run.id] });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

export function stateClass(run: { state: string; final: boolean }): string {
  switch (run.state) {
    case "RUNNING":
      return "running";
    case "COMPLETED":
      return "good";
    case "CANCELLED":
    case "PAUSED":
    case "PREPARED":
    case "NOT_RUN":
    case "NOT_SUBMITTED":
      return "quiet";
    default:
      return run.final ? "bad" : "waiting";
  }
}
