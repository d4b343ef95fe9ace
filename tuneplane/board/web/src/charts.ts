// The charts of the chosen runs, in groups that can be folded; of system metrics, a group is a node.

import { Card, type Host } from "./card";
import { h, icon, put, setText } from "./dom";
import { count } from "./format";
import { type Group, NO_PREFIX, groupsOf, isSystem } from "./groups";
import type { Model } from "./model";
import { filterOf } from "./state";

/** Charts of a group that are shown before one asks for more. */
const FIRST = 30;

interface Section {
  element: HTMLElement;
  button: HTMLButtonElement;
  name: HTMLElement;
  counted: HTMLElement;
  grid: HTMLElement;
  more: HTMLButtonElement;
  limit: number;
}

export class Charts {
  readonly element = h("div", { class: "charts" });
  private readonly empty = h("div", { class: "empty" });
  private readonly host: Host;
  private readonly cards = new Map<string, Card>();
  private readonly sections = new Map<string, Section>();
  private readonly folded = new Set<string>();
  private readonly seen = new WeakMap<Element, Card>();

  constructor(
    private readonly model: Model,
    private readonly system: boolean,
    failed: (error: unknown) => void,
  ) {
    const observer = new IntersectionObserver(
      (entries) => entries.forEach((entry) => this.seen.get(entry.target)?.setVisible(entry.isIntersecting)),
      { rootMargin: "400px" },
    );
    this.host = { model, observer, failed };
  }

  update(): void {
    const { matches } = filterOf(this.model.state.metricFilter);
    const overviews = this.model.chosen.map((run) => this.model.overviews.get(run.id)).filter((one) => one !== undefined);
    const groups = groupsOf(overviews, (name) => isSystem(name) === this.system && matches(name));
    const shown = new Set<string>();
    const names = new Set(groups.map((group) => group.name));
    for (const [name, section] of this.sections) {
      if (!names.has(name)) {
        section.element.remove();
        this.sections.delete(name);
      }
    }
    let before: Element | null = null;
    for (const group of groups) {
      const section = this.section(group);
      const next: Element | null = before ? before.nextElementSibling : this.element.firstElementChild;
      if (section.element !== next) this.element.insertBefore(section.element, next);
      before = section.element;
      this.fill(section, group, shown);
    }
    for (const [key, card] of this.cards) {
      if (!shown.has(key)) {
        card.destroy();
        this.cards.delete(key);
      }
    }
    this.tellEmpty(groups.length === 0);
  }

  recolor(): void {
    for (const card of this.cards.values()) card.recolor();
  }

  private section(group: Group): Section {
    const known = this.sections.get(group.name);
    if (known) return known;
    const grid = h("div", { class: "grid" });
    const name = h("span", { class: "group-name" }, group.name);
    const counted = h("span", { class: "muted" });
    const button = h(
      "button",
      { type: "button", class: "group-head", "aria-expanded": "true", on: { click: () => this.fold(group.name) } },
      icon("down"),
      name,
      counted,
    );
    const more = h("button", { type: "button", class: "link more", on: { click: () => this.showAll(group.name) } });
    const element = h("section", { class: "group" }, h("h2", {}, button), grid, more);
    const section = { element, button, name, counted, grid, more, limit: FIRST };
    this.sections.set(group.name, section);
    return section;
  }

  private fold(name: string): void {
    if (!this.folded.delete(name)) this.folded.add(name);
    this.update();
  }

  private showAll(name: string): void {
    this.sections.get(name)!.limit = Infinity;
    this.update();
  }

  private fill(section: Section, group: Group, shown: Set<string>): void {
    const folded = this.folded.has(group.name);
    section.button.setAttribute("aria-expanded", String(!folded));
    section.element.classList.toggle("folded", folded);
    setText(section.name, group.name === NO_PREFIX && !this.system ? "no prefix" : group.name);
    setText(section.counted, count(group.charts.length, "chart"));
    const charts = folded ? [] : group.charts.slice(0, section.limit);
    let next: Element | null = section.grid.firstElementChild;
    for (const spec of charts) {
      let card = this.cards.get(spec.key);
      if (!card) {
        card = new Card(spec, this.host);
        this.seen.set(card.element, card);
        this.cards.set(spec.key, card);
      }
      if (card.element !== next) section.grid.insertBefore(card.element, next);
      next = card.element.nextElementSibling;
      shown.add(spec.key);
      card.update(spec);
    }
    const left = folded ? 0 : group.charts.length - charts.length;
    section.more.hidden = left === 0;
    setText(section.more, `show ${count(left, "more chart")}`);
  }

  private tellEmpty(empty: boolean): void {
    if (!empty) {
      this.empty.remove();
      return;
    }
    put(this.empty, ...this.whyEmpty());
    if (!this.empty.isConnected) this.element.append(this.empty);
  }

  private whyEmpty(): (HTMLElement | string)[] {
    const { model } = this;
    const chosen = model.chosen;
    const line = (text: string): HTMLElement => h("p", {}, text);
    if (!model.readAt) return [line("Looking for runs…")];
    if (model.runs.length === 0) {
      return [h("h2", {}, "No runs yet"), line("A run appears here as soon as it is submitted:"), h("pre", {}, "tp submit NAME --profile …")];
    }
    if (chosen.length === 0) return [h("h2", {}, "No run chosen"), line("Choose one on the left; its box adds it to a comparison.")];
    if (chosen.some((run) => !model.overviews.get(run.id)?.read)) return [line("Reading points…")];
    if (model.state.metricFilter) {
      return [
        h("h2", {}, "No metric matches"),
        h("button", { type: "button", class: "link", on: { click: () => model.change({ metricFilter: "" }) } }, "clear the filter"),
      ];
    }
    if (this.system) {
      return [
        h("h2", {}, "No system metrics"),
        line("A run has them when its trainer says so, or when the platform samples its nodes:"),
        h("pre", {}, "tuneplane.report.init(monitor_hardware=True)"),
      ];
    }
    const waits = chosen.every((run) => !run.final && run.state !== "RUNNING");
    if (waits) return [h("h2", {}, "Not started yet"), line(chosen[0]!.reason || chosen[0]!.state)];
    const over = chosen.every((run) => run.final);
    return [
      h("h2", {}, over ? "No points" : "No points yet"),
      line(`The trainer reports them by log() of tuneplane.report. ${over ? "None came." : "Weights may still be loading: the log tells."}`),
      h("pre", {}, `tp job why ${chosen[0]!.id}`),
    ];
  }
}
