// What the server is asked, and its answers as types. Nothing else talks to it.

export interface Run {
  id: string;
  experiment: string;
  state: string;
  final: boolean;
  reason: string;
  code: number | null;
  profile: string;
  attempts: number;
  submitted_s: number | null;
  started_s: number | null;
  ended_s: number | null;
  newest_s: number | null;
  metrics: number | null;
  notices: number;
}

export interface Runs {
  now_s: number;
  read_at_s: number;
  fault: string;
  notice: string;
  runs: Run[];
  about: { user: string; host: string; version: string; started: string };
}

export interface Metric {
  id: string;
  name: string;
  last: number | string;
  last_step: number;
  min: number | null;
  max: number | null;
  points: number;
  hidden: number;
}

export interface Overview {
  id: string;
  stamp: string;
  same?: boolean;
  read: boolean;
  newest_s: number | null;
  origin_s: number | null;
  attempts: number[];
  notices: string[];
  metrics: Metric[];
  metrics_left_out: number;
}

export interface Line {
  run: string;
  metric: string;
  attempt: number | null;
  total: number;
  starts: [number, number][];
  steps: Float64Array;
  values: Float64Array;
  times: Float64Array;
  meanX: Float64Array;
  meanY: Float64Array;
}

export interface Details {
  state: {
    state: string;
    code: number | null;
    reason: string;
    job_id: string;
    profile: string;
    attempt: number | null;
    attempts: number;
    submitted_at: number | null;
    started_at: number | null;
    ended_at: number | null;
    folder: string;
    rerun_of: string;
    operation: string;
    subject: string;
    nodes: { rank: number; host: string; state: string; code: number | null; reason: string; beat_age_s: number | null }[];
  };
  attempts: {
    number: number;
    job_id: string;
    how: string;
    code: number | null;
    started_at: number | null;
    ended_at: number | null;
    step: number | null;
    cause: string;
    reason: string;
    follows: string;
    not_restarted: string;
  }[];
  config: Record<string, unknown>;
  hparams: Record<string, unknown>;
  notices: string[];
  report: { rows: ReportRow[]; run_id: string; model_digest: string; harness: string; ended_at: string; notices: string[] };
}

/** One value of one task of an evaluation. */
export interface ReportRow {
  task: string;
  metric: string;
  filter: string;
  value: number | null;
  stderr: number | null;
  samples: number | null;
  higher_is_better: boolean | null;
  fewshot: number | null;
}

export interface LogTail {
  stamp: string;
  same?: boolean;
  attempt: number | null;
  attempts: number[];
  nodes: { rank: string; host: string; size_bytes: number; cut: boolean; lines: string[] }[];
}

export interface Artifacts {
  folder: string;
  artifacts: { name: string; path: string; kind: string; size_bytes: number; modified_at: number; files: number }[];
  skipped: string[];
}

/** An answer that is none; `status` 0: nobody answered. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export type Query = [string, string | number][];

export function address(path: string, query: Query = []): string {
  const given = new URLSearchParams(query.map(([name, value]) => [name, String(value)]));
  return query.length ? `${path}?${given.toString()}` : path;
}

async function ask(path: string, query: Query): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(address(path, query), { credentials: "same-origin", cache: "no-store" });
  } catch {
    throw new Refused(0, "the board does not answer");
  }
  if (response.ok) return response;
  let told = "";
  try {
    told = ((await response.json()) as { error: string }).error;
  } catch {
    told = response.statusText;
  }
  throw new Refused(response.status, told);
}

export async function get<T>(path: string, query: Query = []): Promise<T> {
  return (await (await ask(path, query)).json()) as T;
}

export async function getLines(query: Query): Promise<Line[]> {
  return decode(await (await ask("/api/lines", query)).arrayBuffer());
}

interface Head {
  lines: (Omit<Line, "steps" | "values" | "times" | "meanX" | "meanY"> & { points: number; means: number })[];
}

/** A block of columns: length of its head, the head, then float64 columns. */
export function decode(block: ArrayBuffer): Line[] {
  const length = new DataView(block).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, length))) as Head;
  let offset = Math.ceil((4 + length) / 8) * 8;
  const column = (n: number): Float64Array => {
    const found = new Float64Array(block, offset, n);
    offset += 8 * n;
    return found;
  };
  return head.lines.map(({ points, means, ...line }) => ({
    ...line,
    steps: column(points),
    values: column(points),
    times: column(points),
    meanX: column(means),
    meanY: column(means),
  }));
}
