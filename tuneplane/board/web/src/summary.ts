// The chosen runs in words and numbers: how they are, their attempts and nodes, what was lost, last values.

import type { Details, Metric, Run } from "./api";
import type { DetailsOf } from "./config";
import { breakable, h, put } from "./dom";
import { age, count, duration, moment, number, numeric, unitOf, withUnit } from "./format";
import type { Model } from "./model";
import { stateClass } from "./runs";
import { filterOf } from "./state";

const MOST = 12;
const MOST_METRICS = 300;

export class Summary {
  readonly element = h("div", { class: "summary" });
  private shown = "";

  constructor(
    private readonly model: Model,
    private readonly details: DetailsOf,
  ) {}

  update(): void {
    const runs = this.model.chosen.slice(0, MOST);
    const known = runs.map((run) => this.details.of(run.id));
    const stamps = runs.map((run) => this.model.overviews.get(run.id)?.stamp);
    const second = Math.floor(this.model.now / 10);
    const as = JSON.stringify([runs.map((r) => [r.id, r.state, r.reason]), known, stamps, second, this.model.state.metricFilter]);
    if (as === this.shown) return;
    this.shown = as;
    if (runs.length === 0) {
      put(this.element, h("p", { class: "empty" }, "Choose runs on the left."));
      return;
    }
    const left = this.model.chosen.length - runs.length;
    put(
      this.element,
      runs.length > 1 ? this.values(runs) : null,
      ...runs.map((run, i) => this.one(run, known[i]!.details, known[i]!.fault)),
      runs.length === 1 ? this.values(runs) : null,
      left > 0 && h("p", { class: "muted" }, `and ${count(left, "more run")}`),
    );
  }

  /** Last values, a column a run; of one run also least and greatest. */
  private values(runs: Run[]): HTMLElement | null {
    const { matches } = filterOf(this.model.state.metricFilter);
    const columns = runs.map(
      (run) => new Map((this.model.overviews.get(run.id)?.metrics ?? []).map((metric) => [metric.name, metric])),
    );
    const names = [...new Set(columns.flatMap((column) => [...column.keys()]))].filter(matches).sort();
    if (names.length === 0) return null;
    const one = runs.length === 1;
    const cells = (metric: Metric | undefined): HTMLElement[] => {
      if (!metric) return [h("td", {}, "–")];
      const unit = unitOf(metric.name);
      const shown = (value: number | string | null): string => (value === null ? "" : withUnit(numeric(value), unit));
      const last = shown(metric.last);
      if (!one) return [h("td", { class: "right" }, last)];
      return [last, shown(metric.min), shown(metric.max), number(metric.last_step), metric.points.toLocaleString("en-US")].map((text) =>
        h("td", { class: "right" }, text),
      );
    };
    const heads = one ? ["last", "min", "max", "step", "points"] : runs.map((run) => run.id);
    return h(
      "section",
      { class: "block" },
      h("h2", { class: "block-title" }, one ? "Metrics" : "Last values"),
      h(
        "div",
        { class: "table-wrap" },
        h(
          "table",
          { class: "compare" },
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "metric"), ...heads.map((word) => h("th", { scope: "col", class: "right" }, word)))),
          h(
            "tbody",
            {},
            ...names.slice(0, MOST_METRICS).map((name) =>
              h("tr", {}, h("th", { scope: "row" }, ...breakable(name)), ...columns.flatMap((column) => cells(column.get(name)))),
            ),
          ),
        ),
      ),
      names.length > MOST_METRICS && h("p", { class: "muted" }, `and ${names.length - MOST_METRICS} more: the filter above narrows them`),
    );
  }

  private one(run: Run, details: Details | null, fault: string): HTMLElement {
    const overview = this.model.overviews.get(run.id);
    const state = details?.state;
    const field = (name: string, value: string | number | null | undefined): HTMLElement | null =>
      value === null || value === undefined || value === "" ? null : h("div", {}, h("dt", {}, name), h("dd", {}, value));
    const ran = state?.started_at ? (state.ended_at ?? this.model.now) - state.started_at : null;
    return h(
      "section",
      { class: "block" },
      h(
        "h2",
        { class: "block-title" },
        h("span", { class: `swatch ${this.model.colors.className(run.id)}` }),
        run.id,
        h("span", { class: `state ${stateClass(run)}` }, run.state),
      ),
      run.reason ? h("p", { class: "reason" }, run.reason) : null,
      fault ? h("p", { class: "fault", role: "alert" }, fault) : null,
      ...(overview?.notices ?? []).map((told) => h("p", { class: "notice" }, told)),
      h(
        "dl",
        { class: "fields" },
        field("newest point", overview?.newest_s ? `${age(this.model.now - overview.newest_s)} ago` : "none"),
        field("exit code", state?.code),
        field("job", state?.job_id),
        field("profile", run.profile),
        field("submitted", state?.submitted_at ? moment(state.submitted_at) : ""),
        field("started", state?.started_at ? moment(state.started_at) : ""),
        field("ended", state?.ended_at ? moment(state.ended_at) : ""),
        field("ran for", ran === null ? "" : duration(ran)),
        field("rerun of", state?.rerun_of),
        state?.subject ? field(`${state.operation} of`, state.subject) : null,
        field("folder", state?.folder),
      ),
      ...evaluation(details),
      details && details.attempts.length > 1
        ? table(
            ["attempt", "job", "started", "ended", "how", "exit", "step", "why"],
            details.attempts.map((one) => [
              String(one.number),
              one.job_id,
              one.started_at ? moment(one.started_at) : "",
              one.ended_at ? moment(one.ended_at) : "",
              one.how,
              one.code === null ? "" : String(one.code),
              one.step === null ? "" : String(one.step),
              [one.follows && `follows ${one.follows.replaceAll("_", " ")}`, one.reason, one.not_restarted].filter(Boolean).join("; "),
            ]),
          )
        : null,
      details && details.state.nodes.length
        ? table(
            ["node", "host", "state", "exit", "heartbeat", "reason"],
            details.state.nodes.map((node) => [
              String(node.rank),
              node.host,
              node.state,
              node.code === null ? "" : String(node.code),
              node.beat_age_s === null || node.state === "ended" ? "" : `${age(node.beat_age_s)} ago`,
              node.reason,
            ]),
          )
        : null,
    );
  }
}

/** What an evaluation found of the run's model, whoever wrote the report. */
function evaluation(details: Details | null): (HTMLElement | null)[] {
  const report = details?.report;
  if (!report) return [];
  const figure = (value: number | null): string => (value === null ? "" : number(value));
  const rows = report.rows.slice(0, MOST_METRICS).map((row) => [
    row.task,
    row.filter === "none" ? row.metric : `${row.metric}, ${row.filter}`,
    figure(row.value),
    figure(row.stderr),
    figure(row.samples),
    figure(row.fewshot),
  ]);
  const left = report.rows.length - rows.length;
  const said = [report.harness, report.ended_at, report.model_digest].filter(Boolean).join(" · ");
  return [
    rows.length ? h("h3", { class: "report" }, "Evaluation") : null,
    rows.length ? h("p", { class: "muted path" }, said) : null,
    rows.length ? table(["task", "metric", "value", "stderr", "samples", "fewshot"], rows) : null,
    left > 0 ? h("p", { class: "muted" }, `and ${count(left, "more row")}`) : null,
    ...report.notices.map((told) => h("p", { class: "notice" }, told)),
  ];
}

function table(heads: string[], rows: string[][]): HTMLElement {
  return h(
    "div",
    { class: "table-wrap" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...heads.map((word) => h("th", { scope: "col" }, word)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, cell))))),
    ),
  );
}
