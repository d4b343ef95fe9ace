// The end of a run's log, node by node, kept at its end while it grows.

import { type LogTail, get } from "./api";
import { h, put, setText } from "./dom";
import { bytes, count } from "./format";
import type { Model } from "./model";
import { filterOf } from "./state";

export class Log {
  readonly element = h("div", { class: "log" });
  private readonly runs: HTMLSelectElement;
  private readonly attempts: HTMLSelectElement;
  private readonly nodes: HTMLSelectElement;
  private readonly find: HTMLInputElement;
  private readonly follow = h("input", { type: "checkbox", checked: true });
  private readonly told = h("span", { class: "muted" });
  private readonly fault = h("p", { class: "fault", role: "alert", hidden: true });
  private readonly text = h("pre", { class: "log-text", tabindex: "0", "aria-label": "Log" });
  private run = "";
  private attempt = "";
  private node = "";
  private tail: LogTail | null = null;
  private busy = false;

  constructor(
    private readonly model: Model,
    private readonly failed: (error: unknown) => void,
  ) {
    this.runs = h("select", { class: "field", "aria-label": "Run", on: { change: () => this.choose(this.runs.value, "") } });
    this.attempts = h("select", {
      class: "field",
      "aria-label": "Attempt",
      on: { change: () => this.choose(this.run, this.attempts.value) },
    });
    this.nodes = h("select", {
      class: "field",
      "aria-label": "Node",
      on: {
        change: () => {
          this.node = this.nodes.value;
          this.show();
        },
      },
    });
    this.find = h("input", {
      type: "search",
      class: "field",
      placeholder: "Only lines that match (regex)",
      "aria-label": "Only lines that match this regular expression",
      spellcheck: "false",
      on: { input: () => this.show() },
    });
    put(
      this.element,
      h(
        "div",
        { class: "row" },
        this.runs, this.attempts, this.nodes, this.find,
        h("label", { class: "check" }, this.follow, "stay at the end"),
        this.told,
      ),
      this.fault,
      this.text,
    );
  }

  private choose(run: string, attempt: string): void {
    this.run = run;
    this.attempt = attempt;
    this.node = "";
    this.tail = null;
    put(this.text, "");
    this.update();
  }

  update(): void {
    const chosen = this.model.chosen;
    if (chosen.length === 0) {
      this.run = "";
      this.tail = null;
      put(this.runs);
      setText(this.text, "Choose a run on the left to see what it printed.");
      return;
    }
    if (!chosen.some((run) => run.id === this.run)) {
      this.choose(chosen[0]!.id, "");
      return;
    }
    options(this.runs, chosen.map((run) => [run.id, run.id]), this.run);
    void this.load();
  }

  private async load(): Promise<void> {
    if (this.busy) return;
    this.busy = true;
    const { run, attempt } = this;
    try {
      const tail = await get<LogTail>("/api/log", [["run", run], ["attempt", attempt], ["seen", this.tail?.stamp ?? ""]]);
      if (run === this.run && attempt === this.attempt && !tail.same) {
        this.tail = tail;
        this.show();
      }
    } catch (error) {
      this.failed(error);
    }
    this.busy = false;
    if (run !== this.run || attempt !== this.attempt) void this.load();
  }

  private show(): void {
    const { tail } = this;
    if (!tail) return;
    options(
      this.attempts,
      [["", tail.attempts.length ? "last attempt" : "no attempt yet"], ...tail.attempts.map((n): [string, string] => [String(n), `attempt ${n}`])],
      this.attempt,
    );
    const nodes = tail.nodes.map((node): [string, string] => [
      node.rank,
      node.rank === "" ? "Slurm's own output" : `node ${node.rank}${node.host ? ` (${node.host})` : ""}`,
    ]);
    if (!nodes.some(([rank]) => rank === this.node)) this.node = nodes[0]?.[0] ?? "";
    options(this.nodes, nodes.length ? nodes : [["", "no output yet"]], this.node);
    const { matches, fault } = filterOf(this.find.value);
    this.fault.hidden = fault === "";
    setText(this.fault, fault);
    const node = tail.nodes.find((one) => one.rank === this.node);
    const lines = (node?.lines ?? []).filter(matches);
    const cut = node?.cut ? `the last ${bytes(256 * 1024 / Math.max(1, tail.nodes.length))} of ${bytes(node.size_bytes)}` : "";
    setText(this.told, [count(lines.length, "line"), cut].filter(Boolean).join(" · "));
    const empty = "Nothing was printed yet. Until a node starts the run's command, this is empty.";
    setText(this.text, node ? lines.join("\n") : empty);
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }
}

function options(select: HTMLSelectElement, values: [string, string][], chosen: string): void {
  const as = JSON.stringify(values);
  if (select.dataset["as"] !== as) {
    put(select, ...values.map(([value, text]) => h("option", { value }, text)));
    select.dataset["as"] = as;
  }
  select.value = chosen;
}
