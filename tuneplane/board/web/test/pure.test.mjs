// What the page decides without a browser. Run by `npm test`.
import assert from "node:assert/strict";
import test from "node:test";
import { build } from "esbuild";

const bundled = await build({
  stdin: {
    contents: `
      export * from "./src/smooth"; export * from "./src/state"; export * from "./src/format";
      export * from "./src/groups"; export * from "./src/curve"; export * from "./src/colors";
      export { decode } from "./src/api";`,
    resolveDir: new URL("..", import.meta.url).pathname,
  },
  bundle: true, write: false, format: "esm", platform: "neutral",
});
const page = await import(`data:text/javascript;base64,${Buffer.from(bundled.outputFiles[0].contents).toString("base64")}`);

test("smoothing has no pull toward zero, and what is not finite stays a gap", () => {
  const xs = Float64Array.from({ length: 100 }, (_, i) => i);
  assert.deepEqual([...page.smooth(xs, xs.map(() => 5), 0.9)].map((y) => y.toFixed(9)), Array(100).fill("5.000000000"));
  const ys = page.smooth(Float64Array.of(0, 1, 2, 3), Float64Array.of(1, NaN, Infinity, 3), 0.5);
  assert.equal(ys[0], 1);
  assert.ok(Number.isNaN(ys[1]) && Number.isNaN(ys[2]) && ys[3] > 1 && ys[3] < 3);
  assert.deepEqual([...page.smooth(Float64Array.of(1, 2), Float64Array.of(4, 8), 0)], [4, 8]);
});

test("evenly spaced points are smoothed as TensorBoard does", () => {
  const ys = Float64Array.of(1, 4, 2, 8, 5);
  let last = 0;
  const expected = [...ys].map((y, i) => (last = last * 0.6 + 0.4 * y) / (1 - 0.6 ** (i + 1)));
  page.smooth(Float64Array.of(0, 1, 2, 3, 4), ys, 0.6).forEach((y, i) => assert.ok(Math.abs(y - expected[i]) < 1e-12));
});

test("smoothing goes by distance: twice as many points change little", () => {
  const dense = Float64Array.from({ length: 4001 }, (_, i) => i / 2);
  const wave = (x) => Math.sin(x / 100);
  const a = page.smooth(dense, dense.map(wave), 0.9);
  const thin = dense.filter((_, i) => i % 2 === 0);
  const b = page.smooth(thin, thin.map(wave), 0.9);
  for (let i = 0; i < thin.length; i += 97) assert.ok(Math.abs(a[2 * i] - b[i]) < 0.02);
});

test("what stands in the address comes back, and nonsense is the default", () => {
  const state = {
    runs: ["a-20260101-000000-aaaa", "b"], tab: "system", x: "wall", smooth: 0.5, log: true, zoom: [-1.5, 2e9],
    runFilter: "a&b=#%c", metricFilter: "损失|<b>", sort: "name", wide: "train/loss", all: true,
  };
  assert.deepEqual(page.fromHash("#" + page.toHash(state)), state);
  assert.deepEqual(page.fromHash("#tab=x&x=y&smooth=7&zoom=3~1&sort=&runs=,,"), page.DEFAULTS);
  assert.equal(page.toHash(page.DEFAULTS), "");
});

test("a filter is a regular expression, without regard to case; a bad one hides nothing and is told", () => {
  assert.ok(page.filterOf("LOSS$").matches("train/loss") && !page.filterOf("^loss").matches("train/loss"));
  const bad = page.filterOf("(");
  assert.ok(bad.matches("anything") && bad.fault.startsWith("not a regular expression"));
});

test("numbers read well", () => {
  const told = [0, 1234567, -3, 0.1 + 0.2, 3e-4, 1e-7, 1.5e9 + 0.5, 41234.567, NaN, Infinity, -Infinity].map((v) => page.number(v));
  assert.deepEqual(told, ["0", "1,234,567", "−3", "0.3", "0.0003", "1e-7", "1.5e9", "41,234.6", "NaN", "∞", "−∞"]);
  assert.equal(page.bytes(999.6), "1 kB");
  assert.equal(page.withUnit(64.2e9, "bytes"), "64.2 GB");
  assert.deepEqual([0.5, 75, 3661, 90061].map((s) => page.duration(s)), ["0.5 s", "1:15", "1:01:01", "1 d 01:01:01"]);
  assert.equal(page.unitOf("tokens_per_s"), "");
  assert.equal(page.unitOf("step_s"), "s");
});

test("metrics are grouped by prefix; ranks and GPUs share a chart", () => {
  assert.deepEqual(page.placeOf("train/a/b"), { group: "train", title: "a/b", label: "" });
  assert.deepEqual(page.placeOf("loss@rank3"), { group: "metrics", title: "loss", label: "rank3" });
  assert.deepEqual(page.placeOf("system/node1/gpu2/power_watts"), { group: "node1", title: "gpu/power_watts", label: "gpu2" });
  assert.deepEqual(page.placeOf("/x"), { group: "metrics", title: "/x", label: "" });
  const names = ["zeta", "train/x", "eval/x", "loss@rank10", "loss", "loss@rank2"];
  const metrics = names.map((name) => ({ id: name, name }));
  const groups = page.groupsOf([{ metrics }, { metrics }], () => true);
  assert.deepEqual(groups.map((group) => group.name), ["train", "eval", "metrics"]);
  assert.deepEqual(groups[2].charts.map((c) => c.members.map((m) => m.name)), [["loss", "loss@rank2", "loss@rank10"], ["zeta"]]);
});

test("compared runs have colours of their own, and keep them", () => {
  const runs = Array.from({ length: 36 }, (_, i) => `run-${i}`);
  const colors = new page.Colors();
  colors.assign(runs);
  const all = runs.map((run) => JSON.stringify(colors.of(run, false)));
  assert.equal(new Set(all).size, 36);
  colors.assign(["another", ...runs.slice(5)]);
  assert.deepEqual(runs.slice(5).map((run) => JSON.stringify(colors.of(run, false))), all.slice(5));
  const fresh = new page.Colors();
  fresh.assign([runs[7]]);
  assert.deepEqual(fresh.of(runs[7], true), new page.Colors().of(runs[7], true));
});

test("an axis holds what is seen, and no infinity", () => {
  const curve = (xs, ys) => ({ xs: Float64Array.from(xs), ys: Float64Array.from(ys) });
  const whole = page.extentOf([curve([0, 1, 2], [1, Infinity, 3])], null, false);
  assert.deepEqual(whole.x, [0, 2]);
  assert.ok(whole.y[0] < 1 && whole.y[0] > 0 && whole.y[1] > 3 && whole.y[1] < 4);
  const log = page.extentOf([curve([0, 1, 2], [0, -1, 10])], null, true);
  assert.equal(log.left, 2);
  assert.ok(log.y[0] > 0);
  assert.ok(page.extentOf([curve([0], [NaN])], null, false).empty);
  assert.deepEqual(page.extentOf([], null, false).x, [0, 1]);
  assert.equal(page.nearest([0, 10, 20], 14), 1);
  assert.equal(page.nearest([], 1), -1);
});
