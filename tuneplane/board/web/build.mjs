// Builds the page into ../static: one script, one stylesheet, the document, the licence of what is bundled.
import { build } from "esbuild";
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";

const out = new URL("../static/", import.meta.url);
const here = (name) => new URL(name, import.meta.url);

await mkdir(out, { recursive: true });
await build({
  entryPoints: { app: here("src/main.ts").pathname },
  outdir: out.pathname,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2021"],
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) {
  await copyFile(here(name), new URL(name, out));
}
const licence = await readFile(here("node_modules/uplot/LICENSE"), "utf8");
await writeFile(new URL("licenses.txt", out), `uPlot 1.6.32, https://github.com/leeoniya/uPlot\n\n${licence}`);
