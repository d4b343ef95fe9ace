// What the user chose, and how it stands in the address: a link shows the same again.

export type XAxis = "step" | "relative" | "wall";
export type Tab = "charts" | "system" | "config" | "log" | "artifacts" | "summary";
export type Sort = "newest" | "name" | "state" | "data";

export const TABS: readonly Tab[] = ["charts", "system", "config", "log", "artifacts", "summary"];
export const X_AXES: readonly XAxis[] = ["step", "relative", "wall"];
export const SORTS: readonly Sort[] = ["newest", "name", "state", "data"];

export interface State {
  runs: string[];
  tab: Tab;
  x: XAxis;
  smooth: number;
  log: boolean;
  zoom: [number, number] | null;
  runFilter: string;
  metricFilter: string;
  sort: Sort;
  wide: string; // key of the chart that is shown large
  all: boolean; // configuration: also what is the same in all runs
}

export const DEFAULTS: State = {
  runs: [],
  tab: "charts",
  x: "step",
  smooth: 0,
  log: false,
  zoom: null,
  runFilter: "",
  metricFilter: "",
  sort: "newest",
  wide: "",
  all: false,
};

export const MAX_RUNS = 200;

export function fromHash(hash: string): State {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const one = <T extends string>(name: string, words: readonly T[], otherwise: T): T => {
    const word = given.get(name) as T | null;
    return word !== null && words.includes(word) ? word : otherwise;
  };
  const [low, high] = (given.get("zoom") ?? "").split("~").map(Number);
  const zoomed = low !== undefined && high !== undefined && Number.isFinite(low) && Number.isFinite(high) && low < high;
  const smooth = Number(given.get("smooth"));
  const runs = (given.get("runs") ?? "").split(",").filter((run) => run !== "");
  return {
    runs: [...new Set(runs)].slice(0, MAX_RUNS),
    tab: one("tab", TABS, DEFAULTS.tab),
    x: one("x", X_AXES, DEFAULTS.x),
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    log: given.get("log") === "1",
    zoom: zoomed ? [low, high] : null,
    runFilter: given.get("find") ?? "",
    metricFilter: given.get("metrics") ?? "",
    sort: one("sort", SORTS, DEFAULTS.sort),
    wide: given.get("wide") ?? "",
    all: given.get("all") === "1",
  };
}

export function toHash(state: State): string {
  const out = new URLSearchParams();
  const put = (name: string, value: string, otherwise: string): void => {
    if (value !== otherwise) out.set(name, value);
  };
  put("runs", state.runs.join(","), "");
  put("tab", state.tab, DEFAULTS.tab);
  put("x", state.x, DEFAULTS.x);
  put("smooth", String(state.smooth), "0");
  put("log", state.log ? "1" : "", "");
  put("zoom", state.zoom ? state.zoom.join("~") : "", "");
  put("find", state.runFilter, "");
  put("metrics", state.metricFilter, "");
  put("sort", state.sort, DEFAULTS.sort);
  put("wide", state.wide, "");
  put("all", state.all ? "1" : "", "");
  return out.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
}

/** A filter as typed; `fault` says why it is none. An empty one matches everything. */
export interface Filter {
  matches: (text: string) => boolean;
  fault: string;
}

export function filterOf(text: string): Filter {
  if (text === "") return { matches: () => true, fault: "" };
  try {
    const expression = new RegExp(text, "i");
    return { matches: (candidate) => expression.test(candidate), fault: "" };
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    const why = words.replace(/^Invalid regular expression: /, "");
    return { matches: () => true, fault: `not a regular expression: ${why}` };
  }
}
