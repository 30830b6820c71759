import { afterEach, beforeEach, expect, test } from "vitest";
import { session } from "./fixtures";
import { Forest, label } from "./forest";
import { moveTo, rowsOf } from "./rows";

let forest: Forest;
beforeEach(() => {
  forest = new Forest();
});
afterEach(() => forest.check());

const ids = (collapsed: string[] = [], filter = "") => rowsOf(forest, new Set(collapsed), filter).map((r) => `${"-".repeat(r.level - 1)}${r.id}`);

test("children may come before their parents", () => {
  forest.put(session("c", "b", { root_id: "a" }));
  forest.put(session("b", "a"));
  forest.put(session("a"));
  expect(ids()).toEqual(["a", "-b", "--c"]);
});

test("roots are newest first, children oldest first", () => {
  for (const id of ["a1", "a3", "a2"]) forest.put(session(id));
  for (const id of ["b2", "b1"]) forest.put(session(id, "a2"));
  expect(ids()).toEqual(["a3", "a2", "-b1", "-b2", "a1"]);
});

test("a deleted session with children leaves its place, and goes with the last of them", () => {
  forest.put(session("a"));
  forest.put(session("b", "a"));
  forest.put(session("c", "b", { root_id: "a" }));
  forest.remove("b");
  expect(ids()).toEqual(["a", "-b", "--c"]);
  expect(forest.size).toBe(2);
  expect(label("b", forest.get("b"))).toBe("deleted");
  forest.check();
  forest.remove("c");
  expect(ids()).toEqual(["a"]);
});

test("an unknown parent hangs below the root", () => {
  forest.put(session("a"));
  forest.put(session("c", "gone", { root_id: "a" }));
  expect(ids()).toEqual(["a", "-gone", "--c"]);
});

test("an older answer does not undo a newer one", () => {
  forest.put(session("a", null, { state: "running", last_seq: 5 }));
  const version = forest.version;
  forest.put(session("a", null, { state: "idle", last_seq: 4 }));
  expect(forest.get("a")?.state).toBe("running");
  expect(forest.version).toBe(version);
  forest.put(session("a", null, { state: "idle", last_seq: 2, epoch: 2 }));
  expect(forest.get("a")?.state).toBe("idle");
});

test("an answer that was on its way does not bring a deleted session back", () => {
  forest.put(session("a"));
  forest.put(session("b", "a"));
  forest.remove("a");
  forest.put(session("a", null, { last_seq: 9 }));
  expect(forest.get("a")).toBeNull();
  forest.remove("b");
  forest.put(session("b", "a"));
  forest.remove("never seen");
  forest.put(session("never seen"));
  expect(ids()).toEqual([]);
});

test("what a list left out may come back", () => {
  forest.put(session("old"));
  forest.replace([session("new")], forest.version);
  expect(ids()).toEqual(["new"]);
  forest.put(session("old", null, { last_seq: 3 }));
  expect(ids()).toEqual(["old", "new"]);
});

test("only the shape of the tree raises structure", () => {
  forest.put(session("a"));
  const before = forest.structure;
  forest.put(session("a", null, { length: 99, last_seq: 2 }));
  expect(forest.structure).toBe(before);
  forest.put(session("b", "a"));
  expect(forest.structure).toBeGreaterThan(before);
});

test("a fresh list takes away what it lacks", () => {
  forest.put(session("a"));
  forest.put(session("b"));
  forest.replace([session("b"), session("c", "b")], forest.version);
  expect(ids()).toEqual(["b", "-c"]);
});

test("a list that was asked for earlier neither takes away what came since nor brings back what went", () => {
  forest.put(session("a"));
  forest.put(session("b"));
  const since = forest.version;
  forest.put(session("new"));
  forest.remove("b");
  forest.replace([session("a"), session("b")], since);
  expect(ids()).toEqual(["new", "a"]);
  forest.replace([session("a")], forest.version);
  expect(ids()).toEqual(["a"]);
});

test("rows say level, position and how many siblings there are", () => {
  forest.put(session("a"));
  forest.put(session("b", "a"));
  forest.put(session("c", "a"));
  const rows = rowsOf(forest, new Set());
  expect(rows.map((r) => [r.level, r.position, r.siblings, r.expandable])).toEqual([
    [1, 1, 1, true],
    [2, 1, 2, false],
    [2, 2, 2, false],
  ]);
  expect(ids(["a"])).toEqual(["a"]);
});

test("a filter keeps ancestors and opens what was closed", () => {
  forest.put(session("a"));
  forest.put(session("b", "a", { title: "Needle", labels: { team: "red" } }));
  forest.put(session("c", "a"));
  expect(ids(["a"], "needle")).toEqual(["a", "-b"]);
  expect(ids([], "team=red")).toEqual(["a", "-b"]);
  expect(ids([], "nothing")).toEqual([]);
});

test("keys move within the rows", () => {
  for (const id of ["a", "b", "c"]) forest.put(session(id));
  const rows = rowsOf(forest, new Set());
  expect(moveTo(rows, null, "ArrowDown", 2)).toBe("c");
  expect(moveTo(rows, "c", "ArrowDown", 2)).toBe("b");
  expect(moveTo(rows, "c", "ArrowUp", 2)).toBe("c");
  expect(moveTo(rows, "c", "PageDown", 2)).toBe("a");
  expect(moveTo(rows, "c", "End", 2)).toBe("a");
  expect(moveTo(rows, "a", "Home", 2)).toBe("c");
  expect(moveTo(rows, "a", "x", 2)).toBeNull();
  expect(moveTo([], null, "End", 2)).toBeNull();
});

test("a chain of 20,000 forks is listed without recursion", () => {
  forest.put(session("n0"));
  for (let i = 1; i < 20000; i++) forest.put(session(`n${i}`, `n${i - 1}`, { root_id: "n0" }));
  const rows = rowsOf(forest, new Set());
  expect(rows.length).toBe(20000);
  expect(rows[19999]!.level).toBe(20000);
});
