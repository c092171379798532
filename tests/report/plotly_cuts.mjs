// Writes which parts of plotly.js pages leave out, for a version of it: all that only other kinds of plots need.
//
//   npm install --prefix build/cuts acorn eslint-scope
//   NODE_PATH=build/cuts/node_modules node tests/report/plotly_cuts.mjs \
//     .venv/lib/python3*/site-packages/plotly/package_data/plotly.min.js src/castwise/report/templates/plotly_cuts.json
//
// The bundle is a function of many statements: functions, and variables most of which hold a function that runs when it is
// first called. One statement registers all kinds of plots. Without those in its list that pages do not draw, a statement
// is kept if something that is kept mentions a name that it declares, by the scopes of the language.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const { parse } = createRequire(import.meta.url)("acorn"), { analyze } = createRequire(import.meta.url)("eslint-scope");
const KINDS = ["bar", "heatmap"]; // "scatter" is in the core
const [source, target] = process.argv.slice(2);
const text = readFileSync(source, "utf8");

const program = parse(text, { ecmaVersion: "latest", ranges: true });
const scopes = analyze(program, { ecmaVersion: 2024, sourceType: "script" }).scopes;
const bundle = scopes.filter((scope) => scope.type === "function").sort((a, b) => b.variables.length - a.variables.length)
  .find((scope) => scope.block.body.body?.length > 100);

// What can be cut: a statement, or the value of a variable of one that declares several.
const parts = bundle.block.body.body.flatMap((statement) => {
  const values = statement.type === "VariableDeclaration" ? statement.declarations.filter((each) => each.init) : [];
  if (statement.type === "VariableDeclaration" && statement.declarations.length > 1)
    return values.map((each) => ({ start: each.id.end, end: each.end }));
  return [{ start: statement.start, end: statement.end, isRoot: statement.type === "ReturnStatement", kind: statement.type }];
});
const partAt = (at) => {
  let low = 0, high = parts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (parts[middle].end <= at) low = middle + 1; else high = middle;
  }
  return parts[low] && parts[low].start <= at ? parts[low] : undefined;
};
for (const part of parts) part.mentions = [];
const declared = new Map(bundle.variables.map((variable) => [variable, new Set()]));
for (const variable of bundle.variables) {
  for (const { name, node } of variable.defs) {
    const part = partAt(node.type === "VariableDeclarator" && node.init ? node.init.start : name.range[0]);
    if (part) declared.get(variable).add(part);
  }
  for (const { identifier: { range: [at] } } of variable.references) partAt(at)?.mentions.push({ at, variable });
}

// The list of plots: each entry is a call of a module, which holds its kind, or exports another module that does.
const registered = text.lastIndexOf(".register([") + ".register([".length;
const entries = [...text.slice(registered, text.indexOf("])", registered)).matchAll(/([\w$]+)\(\),?/g)];
const byName = new Map(bundle.variables.map((variable) => [variable.name, variable]));
const kindOf = (name) => {
  for (const part of declared.get(byName.get(name)) ?? []) {
    const code = text.slice(part.start, part.end);
    const kind = code.match(/moduleType:"trace",name:"(\w+)"/), exported = code.match(/\.exports=([\w$]+)\(\)/);
    return kind ? kind[1] : exported ? kindOf(exported[1]) : undefined;
  }
};
const unused = entries.filter(([, name]) => !KINDS.includes(kindOf(name)))
  .map((entry) => ({ start: registered + entry.index, end: registered + entry.index + entry[0].length }));
if (entries.length - unused.length !== KINDS.length) throw new Error(`found ${entries.length - unused.length} kinds`);

const needed = new Set(), names = new Set(), following = parts.filter((part) => part.isRoot);
const isUnused = (at) => unused.some(({ start, end }) => start <= at && at < end);
const follow = () => {
  while (following.length) {
    const part = following.pop();
    if (needed.has(part)) continue;
    needed.add(part);
    for (const { at, variable } of part.mentions) {
      if (names.has(variable) || isUnused(at)) continue;
      names.add(variable);
      following.push(...declared.get(variable));
    }
  }
};
follow();
// Statements that are run at once, such as assignments to a property, are needed if what they mention is.
const run = parts.filter((part) => part.kind === "ExpressionStatement");
for (let count = -1; count !== needed.size;) {
  count = needed.size;
  following.push(...run.filter((part) => part.mentions.some(({ variable }) => names.has(variable))));
  follow();
}

const cuts = [];
for (const { start, end } of [...unused, ...parts.filter((part) => !needed.has(part))].sort((a, b) => a.start - b.start)) {
  if (cuts.length && cuts[cuts.length - 1][1] === start) cuts[cuts.length - 1][1] = end; else cuts.push([start, end]);
}
const hash = createHash("sha256").update(text).digest("hex");
const table = existsSync(target) ? JSON.parse(readFileSync(target, "utf8")) : {};
// Python counts code points, JavaScript UTF-16 units.
const pairs = [...text.matchAll(/[\u{10000}-\u{10ffff}]/gu)].map(({ index }) => index);
const points = (at) => at - pairs.filter((pair) => pair < at).length;
table[hash] = { version: text.match(/plotly\.js v([\d.]+)/)[1], cuts: cuts.map((cut) => cut.map(points)) };
writeFileSync(target, `${JSON.stringify(table)}\n`);
