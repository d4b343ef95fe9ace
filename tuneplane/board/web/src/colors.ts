// The colour of a run: the same on every page load, told apart from the others that are compared, in both themes.

export const LIGHT = [
  "#2563c9", "#c2410c", "#15803d", "#9333ea", "#0e7490", "#be185d",
  "#a16207", "#4f46e5", "#475569", "#4d7c0f", "#0f766e", "#86198f",
];
export const DARK = [
  "#6ea8fe", "#fb923c", "#4ade80", "#c084fc", "#22d3ee", "#f472b6",
  "#facc15", "#a5b4fc", "#b6c2d1", "#a3e635", "#2dd4bf", "#e879f9",
];

export interface Stroke {
  color: string;
  dash: number[];
}

function hash(text: string): number {
  let value = 2166136261;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

/** Slots beyond the number of colours are dashed. */
const SLOTS = LIGHT.length * 3;
const DASHES = [[], [6, 3], [2, 3]];

export class Colors {
  private readonly slots = new Map<string, number>();

  /** Give each of these runs a colour; the first keeps its own where two would have one. */
  assign(runs: string[]): void {
    const chosen = new Set(runs);
    for (const run of this.slots.keys()) if (!chosen.has(run)) this.slots.delete(run);
    const taken = new Set(this.slots.values());
    for (const run of runs) {
      if (this.slots.has(run)) continue;
      const first = hash(run) % LIGHT.length;
      let slot = first;
      for (let i = 0; i < SLOTS && taken.has(slot); i++) {
        const turn = Math.floor((i + 1) / LIGHT.length);
        slot = turn * LIGHT.length + ((first + i + 1) % LIGHT.length);
      }
      this.slots.set(run, slot);
      taken.add(slot);
    }
  }

  of(run: string, dark: boolean): Stroke {
    return stroke(this.slots.get(run) ?? hash(run) % LIGHT.length, dark);
  }

  /** The same as a class of the stylesheet. */
  className(run: string): string {
    return `c${(this.slots.get(run) ?? hash(run)) % LIGHT.length}`;
  }
}

/** The colour of a position, for lines of one run. */
export function stroke(slot: number, dark: boolean): Stroke {
  const palette = dark ? DARK : LIGHT;
  return {
    color: palette[slot % palette.length]!,
    dash: DASHES[Math.floor(slot / palette.length) % DASHES.length]!,
  };
}
