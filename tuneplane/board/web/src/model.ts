// All that the page knows by now, and what the user chose. Views read it; `change` tells them.

import type { Overview, Run, Runs } from "./api";
import { Colors } from "./colors";
import { type State, filterOf, fromHash, toHash } from "./state";

export type Theme = "auto" | "light" | "dark";

export class Model {
  state: State = fromHash(location.hash);
  runs: Run[] = [];
  about: Runs["about"] | null = null;
  readAt = 0;
  ofBoard: string[] = []; // what is wrong with the board itself
  skew = 0; // the server's clock less this one's, seconds
  overviews = new Map<string, Overview>();
  missing = new Set<string>(); // chosen, but not there
  readonly colors = new Colors();
  private byId = new Map<string, Run>();
  private chosenOnce: boolean;

  constructor(private readonly changed: () => void) {
    this.chosenOnce = this.state.runs.length > 0;
    this.colors.assign(this.state.runs);
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === toHash(this.state)) return;
      this.state = fromHash(location.hash);
      this.colors.assign(this.state.runs);
      changed();
    });
  }

  get now(): number {
    return Date.now() / 1000 + this.skew;
  }

  get dark(): boolean {
    const theme = document.documentElement.dataset["theme"];
    return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  }

  run(id: string): Run | undefined {
    return this.byId.get(id);
  }

  /** Chosen runs that are there, in the order in which they were chosen. */
  get chosen(): Run[] {
    return this.state.runs.map((id) => this.byId.get(id)).filter((run): run is Run => run !== undefined);
  }

  change(patch: Partial<State>): void {
    this.state = { ...this.state, ...patch };
    if (patch.runs) {
      this.chosenOnce = true;
      this.colors.assign(this.state.runs);
    }
    const hash = toHash(this.state);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
    this.changed();
  }

  take(answer: Runs): void {
    this.runs = answer.runs;
    this.about = answer.about;
    this.readAt = answer.read_at_s;
    this.ofBoard = [answer.fault, answer.notice && `metrics are read anew at each start of the board: ${answer.notice}`].filter(Boolean);
    this.skew = answer.now_s - Date.now() / 1000;
    this.byId = new Map(answer.runs.map((run) => [run.id, run]));
    this.missing = new Set(this.readAt ? this.state.runs.filter((id) => !this.byId.has(id)) : []);
    const first = this.runs.find((run) => run.state === "RUNNING") ?? this.runs[0];
    // Whoever opens the board wants to see something: the run that runs, else the newest.
    if (!this.chosenOnce && first) this.change({ runs: [first.id] });
  }

  /** Runs that the filter lets through, in the order chosen. */
  listed(): { runs: Run[]; fault: string } {
    const { matches, fault } = filterOf(this.state.runFilter);
    const found = this.runs.filter((run) => matches(`${run.id} ${run.state} ${run.profile}`));
    const order: Record<string, (a: Run, b: Run) => number> = {
      newest: () => 0, // as the server has them
      name: (a, b) => a.id.localeCompare(b.id),
      state: (a, b) => Number(a.final) - Number(b.final) || a.state.localeCompare(b.state),
      data: (a, b) => (b.newest_s ?? 0) - (a.newest_s ?? 0),
    };
    return { runs: [...found].sort(order[this.state.sort]), fault };
  }
}
