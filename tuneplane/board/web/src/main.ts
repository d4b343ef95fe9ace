// The page: its parts, its keys, and the clock by which it asks what is new.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { type Overview, Refused, type Runs, get } from "./api";
import { ArtifactList } from "./artifacts";
import { Charts } from "./charts";
import { hideTooltip } from "./chart";
import { Config, DetailsOf } from "./config";
import { h, icon, iconButton, put, runName, setText } from "./dom";
import { age, count } from "./format";
import { Log } from "./log";
import { Model, type Theme } from "./model";
import { RunList } from "./runs";
import { TABS, type Tab, X_AXES, type XAxis, filterOf } from "./state";
import { Summary } from "./summary";

const POLL_MS = 2000;
const CHIPS = 8;
const TAB_WORDS: Record<Tab, string> = {
  charts: "Charts", system: "System", config: "Config", log: "Log", artifacts: "Artifacts", summary: "Summary",
};
const X_WORDS: Record<XAxis, string> = { step: "step", relative: "time since start", wall: "clock" };
const KEYS: [string, string][] = [
  ["/", "filter runs"],
  ["m", "filter metrics"],
  ["r", "go to the list of runs"],
  ["↑ ↓", "move in the list · in a chart ← → read its points"],
  ["Space", "add the run to the comparison, or take it out"],
  ["Enter", "show this run alone"],
  ["1 … 6", "charts, system, config, log, artifacts, summary"],
  ["x", "next x axis"],
  ["l", "logarithmic y axis"],
  ["z", "whole range again; so does a double click"],
  ["t", "light, dark, or as the system"],
  ["Esc", "leave a field, close this"],
];

interface View {
  element: HTMLElement;
  update(): void;
}

const model = new Model(() => schedule());
const runList = new RunList(model);
const details = new DetailsOf(model, () => schedule());
const views: Record<Tab, View> = {
  charts: new Charts(model, false, failed),
  system: new Charts(model, true, failed),
  config: new Config(model, details),
  log: new Log(model, failed),
  artifacts: new ArtifactList(model),
  summary: new Summary(model, details),
};

// The head

const live = h("span", { class: "live", role: "status" });
const themeButton = iconButton("auto", "", () => nextTheme());
const menu = iconButton("runs", "Runs", () => document.body.classList.toggle("side-open"), "menu");
const where = h("span", { class: "where" });
const header = h(
  "header",
  { class: "top" },
  menu,
  h("h1", { class: "brand" }, "TunePlane"),
  where,
  live,
  themeButton,
  iconButton("help", "Keys  ( ? )", () => help.showModal()),
);

const help = h(
  "dialog",
  { class: "help", "aria-label": "Keys" },
  h("div", { class: "help-head" }, h("h2", {}, "Keys"), iconButton("close", "Close", () => help.close())),
  h("dl", {}, ...KEYS.map(([key, text]) => h("div", {}, h("dt", {}, key), h("dd", {}, text)))),
  h("p", { class: "muted" }, "Drag in a chart to zoom. The address holds all that you see: keep it or send it on."),
);

// What is chosen

const alerts = h("div", { class: "alerts", role: "alert" });
const chips = h("div", { class: "chips" });
const notices = h("details", { class: "notices", hidden: true });

const tabs = h(
  "nav",
  { class: "tabs", role: "tablist", "aria-label": "Views" },
  ...TABS.map((tab) =>
    h(
      "button",
      { type: "button", role: "tab", id: `tab-${tab}`, "aria-controls": "view", on: { click: () => model.change({ tab }) } },
      TAB_WORDS[tab],
    ),
  ),
);

// How charts look

const metricSearch = h("input", {
  type: "search",
  class: "field grow",
  placeholder: "Filter metrics by regex  ( m )",
  "aria-label": "Filter metrics by regular expression",
  "aria-describedby": "metric-fault",
  spellcheck: "false",
  autocomplete: "off",
  on: { input: () => model.change({ metricFilter: metricSearch.value }) },
});
const metricFault = h("p", { class: "fault", id: "metric-fault", role: "alert", hidden: true });
const axis = h(
  "div",
  { class: "segments", role: "radiogroup", "aria-label": "x axis" },
  ...X_AXES.map((x) =>
    h("button", { type: "button", role: "radio", "data-x": x, on: { click: () => model.change({ x, zoom: null }) } }, X_WORDS[x]),
  ),
);
const smoothing = h("input", {
  type: "range",
  min: 0,
  max: 0.99,
  step: 0.01,
  "aria-label": "Smoothing",
  on: { input: () => model.change({ smooth: Number(smoothing.value) }) },
});
const smoothed = h("output", { class: "number" });
const logY = h("input", { type: "checkbox", on: { change: () => model.change({ log: logY.checked }) } });
const unzoom = h(
  "button",
  { type: "button", class: "button", on: { click: () => model.change({ zoom: null }) } },
  icon("reset"),
  "whole range",
);
const chartTools = [
  axis,
  h("label", { class: "smooth" }, "smoothing", smoothing, smoothed),
  h("label", { class: "check" }, logY, "log y"),
  unzoom,
];
const toolbar = h("div", { class: "toolbar" }, h("div", { class: "grow field-box" }, metricSearch, metricFault), ...chartTools);
const view = h("div", { class: "view", id: "view", role: "tabpanel" });
const main = h("main", { class: "main" }, alerts, chips, notices, tabs, toolbar, view);
const shade = h("div", { class: "shade", on: { click: () => document.body.classList.remove("side-open") } });

document.body.append(header, h("div", { class: "body" }, runList.element, shade, main), help);

// Showing

let planned = false;
let shownTab: Tab | null = null;
let title = "";

function schedule(): void {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    render();
  });
}

let askedFor = "";

function render(): void {
  const { state } = model;
  runList.update();
  renderChips();
  renderNotices();
  renderTools();
  if (shownTab !== state.tab) {
    shownTab = state.tab;
    hideTooltip();
    put(view, views[state.tab].element);
    view.setAttribute("aria-labelledby", `tab-${state.tab}`);
  }
  views[state.tab].update();
  renderLive();
  const wanted = model.chosen.length === 1 ? `${model.chosen[0]!.id} · TunePlane` : "TunePlane board";
  if (title !== wanted) document.title = title = wanted;
  // Runs that were chosen a moment ago are not made to wait for the clock.
  if (state.runs.join() !== askedFor) void poll();
}

let shownChips = "";

function renderChips(): void {
  const { chosen, missing } = model;
  const shown = chosen.slice(0, CHIPS);
  const as = JSON.stringify([shown.map((run) => [run.id, run.reason, model.colors.className(run.id)]), chosen.length, [...missing]]);
  const ages = shown.map((run) => {
    const newest = model.overviews.get(run.id)?.newest_s ?? run.newest_s;
    return newest ? `data ${age(model.now - newest)} old` : run.state.toLowerCase();
  });
  if (as === shownChips) {  // so that what has the focus keeps it
    chips.querySelectorAll(".chip-age").forEach((element, i) => setText(element, ages[i] ?? ""));
    return;
  }
  shownChips = as;
  put(
    chips,
    ...shown.map((run, i) => {
      return h(
        "span",
        { class: "chip", title: run.reason || run.id },
        h("span", { class: `swatch ${model.colors.className(run.id)}` }),
        runName(run.id, "chip-name"),
        h("span", { class: "muted chip-age" }, ages[i]),
        iconButton("close", `Take ${run.id} out`, () => model.change({ runs: model.state.runs.filter((id) => id !== run.id) })),
      );
    }),
    chosen.length > CHIPS && h("span", { class: "muted" }, `and ${chosen.length - CHIPS} more`),
    ...[...missing].slice(0, 3).map((id) =>
      h(
        "span",
        { class: "chip missing" },
        `no run ${id} here`,
        iconButton("close", "Forget it", () => model.change({ runs: model.state.runs.filter((other) => other !== id) })),
      ),
    ),
  );
}

let toldNotices = "";

function renderNotices(): void {
  const several = model.chosen.length > 1;
  const ofRuns = model.chosen.flatMap((run) => {
    const overview = model.overviews.get(run.id);
    const lines = [...(overview?.notices ?? [])];
    if (overview?.metrics_left_out) lines.push(`${count(overview.metrics_left_out, "metric")} more are not listed: this run has too many`);
    return lines.map((line) => (several ? `${run.id}: ${line}` : line));
  });
  const told = [...model.ofBoard, ...ofRuns];
  const as = told.join("\n");
  if (as === toldNotices) return;
  toldNotices = as;
  notices.hidden = told.length === 0;
  const first = told.length === 1 ? told[0]! : `${count(told.length, "notice")}: ${told[0] ?? ""}`;
  put(notices, h("summary", {}, icon("warn"), first), told.length > 1 && h("ul", {}, ...told.slice(0, 100).map((line) => h("li", {}, line))));
}

function renderTools(): void {
  const { state } = model;
  const charts = state.tab === "charts" || state.tab === "system";
  const filters = charts || state.tab === "config" || state.tab === "summary";
  toolbar.hidden = !filters;
  for (const tool of chartTools) tool.hidden = !charts;
  if (metricSearch.value !== state.metricFilter) metricSearch.value = state.metricFilter;
  const { fault } = filterOf(state.metricFilter);
  metricSearch.setAttribute("aria-invalid", String(fault !== ""));
  metricFault.hidden = fault === "";
  setText(metricFault, fault);
  // What hardware did is of a time, not of a step.
  const x = state.tab === "system" && state.x === "step" ? "relative" : state.x;
  for (const button of axis.querySelectorAll("button")) {
    button.setAttribute("aria-checked", String(button.dataset["x"] === x));
    button.disabled = state.tab === "system" && button.dataset["x"] === "step";
  }
  metricSearch.placeholder = `Filter ${state.tab === "config" ? "keys" : "metrics"} by regex  ( m )`;
  if (Number(smoothing.value) !== state.smooth) smoothing.value = String(state.smooth);
  setText(smoothed, state.smooth.toFixed(2));
  logY.checked = state.log;
  unzoom.hidden = !charts || state.zoom === null;
  for (const tab of TABS) {
    const button = document.getElementById(`tab-${tab}`)!;
    button.setAttribute("aria-selected", String(tab === state.tab));
    button.setAttribute("tabindex", tab === state.tab ? "0" : "-1");
  }
}

// Asking

let asking = false;
let again = false;
let answeredAt = 0;
let lost = "";

async function poll(): Promise<void> {
  if (document.visibilityState === "hidden") return;
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  try {
    do {
      again = false;
      askedFor = model.state.runs.join();
      model.take(await get<Runs>("/api/runs"));
      askedFor = model.state.runs.join();
      const runs = model.chosen.map((run) => run.id);
      for (const id of model.overviews.keys()) if (!runs.includes(id)) model.overviews.delete(id);
      if (runs.length) {
        const { overviews } = await get<{ overviews: Overview[] }>(
          "/api/overviews",
          runs.flatMap((run): [string, string][] => [["run", run], ["seen", model.overviews.get(run)?.stamp ?? ""]]),
        );
        for (const overview of overviews) if (!overview.same) model.overviews.set(overview.id, overview);
      }
      answeredAt = Date.now();
      lost = "";
      schedule();
    } while (again);
  } catch (error) {
    failed(error);
  }
  asking = false;
}

/** Say once what is wrong; the next answer takes it back. */
function failed(error: unknown): void {
  if (error instanceof Refused && error.status === 0) {
    lost = "The board does not answer. Has its tunnel or its terminal been closed? This page tries again.";
  } else if (error instanceof Refused && error.status === 403) {
    lost = "The board was started anew and does not know this browser: open the link that it prints.";
  } else {
    lost = error instanceof Error ? error.message : String(error);
  }
  schedule();
}

function renderLive(): void {
  const told = lost || "";
  if (alerts.dataset["told"] !== told) {
    alerts.dataset["told"] = told;
    put(alerts, told && h("p", { class: "banner" }, icon("warn"), told));
  }
  const old = (Date.now() - answeredAt) / 1000;
  const [word, look] = lost ? ["not connected", "bad"] : !answeredAt ? ["connecting", "waiting"] : old > 10 ? ["paused", "quiet"] : ["live", "running"];
  if (live.dataset["as"] !== word) {
    live.dataset["as"] = word;
    put(live, h("span", { class: `dot ${look}`, "aria-hidden": "true" }), word);
  }
  if (model.about) setText(where, `${model.about.user} on ${model.about.host}`);
}

setInterval(() => void poll(), POLL_MS);
setInterval(() => document.visibilityState === "visible" && schedule(), 5000);
document.addEventListener("visibilitychange", () => {
  void poll();
  renderLive();
});

// Colours

function theme(): Theme {
  const kept = localStorage.getItem("tuneplane-theme");
  return kept === "light" || kept === "dark" ? kept : "auto";
}

function applyTheme(): void {
  const wanted = theme();
  if (wanted === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = wanted;
  put(themeButton, icon(wanted === "light" ? "sun" : wanted === "dark" ? "moon" : "auto"));
  const words = `Colours: ${wanted === "auto" ? "as the system" : wanted}  ( t )`;
  themeButton.title = words;
  themeButton.setAttribute("aria-label", words);
  for (const tab of ["charts", "system"] as const) (views[tab] as Charts).recolor();
  schedule();
}

function nextTheme(): void {
  const order: Theme[] = ["auto", "light", "dark"];
  localStorage.setItem("tuneplane-theme", order[(order.indexOf(theme()) + 1) % order.length]!);
  applyTheme();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme());

// Keys

addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  const typing = target instanceof HTMLInputElement && target.type !== "checkbox" && target.type !== "range";
  if (event.key === "Escape") {
    hideTooltip();
    document.body.classList.remove("side-open");
    if (typing) target.blur();
    return;
  }
  if (typing || target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "/") {
    document.body.classList.add("side-open");
    runList.search.focus();
  } else if (event.key === "r") runList.focusList();
  else if (event.key === "m" && !toolbar.hidden) metricSearch.focus();
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key === "l") model.change({ log: !model.state.log });
  else if (event.key === "z") model.change({ zoom: null });
  else if (event.key === "x") {
    model.change({ x: X_AXES[(X_AXES.indexOf(model.state.x) + 1) % X_AXES.length]!, zoom: null });
  } else if (tab) model.change({ tab });
  else return;
  event.preventDefault();
});

for (const group of [tabs, axis] as HTMLElement[]) {
  group.addEventListener("keydown", (event) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!by) return;
    const buttons = [...group.querySelectorAll("button")];
    const next = buttons[(buttons.indexOf(document.activeElement as HTMLButtonElement) + by + buttons.length) % buttons.length];
    next?.focus();
    next?.click();
    event.preventDefault();
  });
}

applyTheme();
void poll();
