// Which charts there are: metrics grouped by prefix, those of several ranks or GPUs together in one. Pure.

import type { Overview } from "./api";
import { type Unit, unitOf } from "./format";

export interface Member {
  id: string;
  name: string;
  label: string; // what tells it apart in its chart; empty where it is alone
}

export interface ChartSpec {
  key: string;
  group: string;
  title: string;
  members: Member[];
  unit: Unit;
}

export interface Group {
  name: string;
  charts: ChartSpec[];
}

const RANK = /^(.*)@(rank\d+)$/s;
const NODE = /^system\/(node\d+)\/(.*)$/s;
const GPU = /^(gpu\d+)\/(.*)$/s;

export const NO_PREFIX = "metrics";

export function isSystem(name: string): boolean {
  return NODE.test(name);
}

/** Where a metric is shown: group, title of the chart, and its own label there. */
export function placeOf(name: string): { group: string; title: string; label: string } {
  const node = NODE.exec(name);
  if (node) {
    const gpu = GPU.exec(node[2]!);
    return gpu
      ? { group: node[1]!, title: `gpu/${gpu[2]!}`, label: gpu[1]! }
      : { group: node[1]!, title: node[2]!, label: "" };
  }
  const rank = RANK.exec(name);
  const base = rank ? rank[1]! : name;
  const slash = base.indexOf("/");
  const [group, title] = slash > 0 ? [base.slice(0, slash), base.slice(slash + 1)] : [NO_PREFIX, base];
  return { group, title: title || base, label: rank ? rank[2]! : "" };
}

/** Charts of all metrics that `wanted` lets through, in groups by name. */
export function groupsOf(overviews: Overview[], wanted: (name: string) => boolean): Group[] {
  const charts = new Map<string, ChartSpec>();
  const seen = new Set<string>();
  for (const overview of overviews) {
    for (const { id, name } of overview.metrics) {
      if (seen.has(id)) continue;
      seen.add(id);
      if (!wanted(name)) continue;
      const { group, title, label } = placeOf(name);
      const key = `${group}/${title}`;
      let chart = charts.get(key);
      if (!chart) {
        chart = { key, group, title, members: [], unit: unitOf(title) };
        charts.set(key, chart);
      }
      chart.members.push({ id, name, label });
    }
  }
  const groups = new Map<string, Group>();
  for (const chart of [...charts.values()].sort((a, b) => compare(a.title, b.title))) {
    chart.members.sort((a, b) => compare(a.label, b.label));
    const group = groups.get(chart.group) ?? { name: chart.group, charts: [] };
    group.charts.push(chart);
    groups.set(chart.group, group);
  }
  return [...groups.values()].sort((a, b) => weight(a.name) - weight(b.name) || compare(a.name, b.name));
}

/** What one looks at first: how training goes, then how well it does. */
const FIRST = ["train", "training", "validation", "val", "eval", "test"];

function weight(group: string): number {
  const place = FIRST.indexOf(group);
  return place < 0 ? FIRST.length : place;
}

/** By name, numbers in it by size: gpu2 before gpu10. */
function compare(a: string, b: string): number {
  return a.localeCompare(b, "en", { numeric: true });
}
