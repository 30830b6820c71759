// Bundles src/ into dist/ (hashed names, so that browsers may keep assets for ever) and records in
// dist.sha256 which sources and which outputs belong together; embed_test.go checks both.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, rmSync, writeFileSync, mkdirSync } from "node:fs";
import { basename, join } from "node:path";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const root = import.meta.dirname;
const maxGzipBytes = 48 * 1024; // all of dist, gzipped file by file

rmSync(join(root, "dist"), { recursive: true, force: true });
mkdirSync(join(root, "dist"));

const result = await build({
  absWorkingDir: root,
  entryPoints: ["src/main.tsx", "src/style.css"],
  outdir: "dist/assets",
  entryNames: "[name]-[hash]",
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  metafile: true,
});

const outputs = Object.keys(result.metafile.outputs).map((p) => basename(p));
const asset = (ext) => {
  const name = outputs.find((n) => n.endsWith(ext));
  if (!name) throw new Error(`the bundle has no ${ext} file`);
  return `/assets/${name}`;
};
const html = readFileSync(join(root, "src/index.html"), "utf8")
  .replace("%STYLE%", asset(".css"))
  .replace("%SCRIPT%", asset(".js"));
writeFileSync(join(root, "dist/index.html"), html);
writeFileSync(join(root, "dist/favicon.svg"), readFileSync(join(root, "src/favicon.svg")));

// One hash over a sorted list of "path, newline, content": the Go test does the same.
function hashOf(paths) {
  const hash = createHash("sha256");
  for (const path of [...paths].sort()) {
    hash.update(path + "\n");
    hash.update(readFileSync(join(root, path)));
  }
  return hash.digest("hex");
}

function list(dir) {
  return readdirSync(join(root, dir), { withFileTypes: true, recursive: true })
    .filter((e) => e.isFile())
    .map((e) => join(e.parentPath, e.name).slice(root.length + 1));
}

const sources = list("src").filter((p) => !/\.test\.tsx?$/.test(p));
sources.push("build.mjs", "package-lock.json", "package.json", "tsconfig.json");
const built = list("dist");
writeFileSync(join(root, "dist.sha256"), `sources ${hashOf(sources)}\ndist ${hashOf(built)}\n`);

let total = 0;
for (const path of built) {
  const bytes = readFileSync(join(root, path));
  const gz = gzipSync(bytes, { level: 9 }).length;
  total += gz;
  console.log(`${path}  ${bytes.length} bytes, ${gz} gzipped`);
}
if (total > maxGzipBytes) throw new Error(`dist is ${total} bytes gzipped, the limit is ${maxGzipBytes}`);
