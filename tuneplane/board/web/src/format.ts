// Numbers, durations and moments as people read them. Pure.

/** A value with six digits that count; what is no finite number by its name. */
export function number(value: number, digits = 6): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return sign(value.toLocaleString("en-US"));
  if (size >= 1e-4 && size < 1e6) {
    if (size >= 10_000) return sign(value.toLocaleString("en-US", { maximumSignificantDigits: digits }));
    const text = value.toPrecision(digits);
    return sign(text.includes("e") ? text : text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
  }
  return sign(value.toExponential(digits - 1).replace(/(\.\d*?)0+e/, "$1e").replace(".e", "e").replace("e+", "e"));
}

function sign(text: string): string {
  return text.startsWith("-") ? `−${text.slice(1)}` : text;
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Bytes in powers of 1000, as `tp` prints them. */
export function bytes(value: number, digits = 3): string {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(size) : number(Number(size.toPrecision(digits)))} ${UNITS[unit]}`;
}

export type Unit = "" | "percent" | "bytes" | "bytes_per_s" | "watts" | "celsius" | "s";

/** The unit that a metric's name ends with. */
export function unitOf(name: string): Unit {
  for (const unit of ["bytes_per_s", "percent", "bytes", "watts", "celsius", "s"] as const) {
    if (name.endsWith(`_${unit}`) && !(unit === "s" && name.endsWith("_per_s"))) return unit;
  }
  return "";
}

export function withUnit(value: number, unit: Unit, digits = 6): string {
  if (!Number.isFinite(value)) return number(value);
  switch (unit) {
    case "percent":
      return `${number(value, digits)} %`;
    case "bytes":
      return bytes(value, digits);
    case "bytes_per_s":
      return `${bytes(value, digits)}/s`;
    case "watts":
      return `${number(value, digits)} W`;
    case "celsius":
      return `${number(value, digits)} °C`;
    case "s":
      return `${number(value, digits)} s`;
    default:
      return number(value, digits);
  }
}

/** `12 s`, `5 min`, `3 h`, `2 d`. */
export function age(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172_800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86_400)} d`;
}

/** `1:02:03` and, below a minute, seconds. */
export function duration(seconds: number): string {
  const minus = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  if (s < 60) return `${minus}${number(s, 3)} s`;
  const whole = Math.round(s);
  const days = Math.floor(whole / 86_400);
  const pad = (n: number): string => String(n).padStart(2, "0");
  const hours = Math.floor((whole % 86_400) / 3600);
  const clock = `${pad(Math.floor((whole % 3600) / 60))}:${pad(whole % 60)}`;
  if (days) return `${minus}${days} d ${pad(hours)}:${clock}`;
  return hours ? `${minus}${hours}:${clock}` : `${minus}${clock.replace(/^0/, "")}`;
}

/** A moment in the browser's own time zone. */
export function moment(seconds: number): string {
  const date = new Date(seconds * 1000);
  const pad = (n: number): string => String(n).padStart(2, "0");
  return (
    `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ` +
    `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`
  );
}

/** A value of a configuration, or of anything a run reported. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (typeof value === "number") return number(value, 15);
  return JSON.stringify(value);
}

export function count(n: number, word: string): string {
  return `${n.toLocaleString("en-US")} ${word}${n === 1 ? "" : "s"}`;
}

/** A number as the server writes it: what JSON has no word for is a text. */
export function numeric(value: number | string | null): number {
  if (value === null) return Number.NaN;
  return typeof value === "number" ? value : Number(value.replace("inf", "Infinity"));
}
