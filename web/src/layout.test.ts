import { expect, test } from "vitest";
import { session } from "./fixtures";
import { Forest } from "./forest";
import { fit, hit, layoutOf, nodeHeight, nodeWidth, reveal, visible, zoomAt } from "./layout";

function randomForest(count: number, seed: number): Forest {
  const forest = new Forest();
  let x = seed;
  const random = () => (x = (x * 1103515245 + 12345) % 2147483648) / 2147483648;
  for (let i = 0; i < count; i++) {
    const id = "n" + String(i).padStart(6, "0");
    if (i === 0 || random() < 0.02) forest.put(session(id));
    else {
      const parent = "n" + String(Math.floor(random() * i)).padStart(6, "0");
      forest.put(session(id, parent, { root_id: forest.get(parent)!.root_id }));
    }
  }
  forest.check();
  return forest;
}

test("no two nodes overlap and children stand right of their parents", () => {
  for (const seed of [1, 2, 3]) {
    const layout = layoutOf(randomForest(400, seed));
    expect(layout.placed.length).toBe(400);
    const byColumn = new Map<number, number[]>();
    for (const p of layout.placed) {
      if (p.parent >= 0) expect(p.x).toBeGreaterThan(layout.placed[p.parent]!.x + nodeWidth);
      expect(p.y).toBeGreaterThanOrEqual(0);
      expect(p.y + nodeHeight).toBeLessThanOrEqual(layout.height + 1e-6);
      byColumn.set(p.x, [...(byColumn.get(p.x) ?? []), p.y]);
    }
    for (const ys of byColumn.values()) {
      ys.sort((a, b) => a - b);
      for (let i = 1; i < ys.length; i++) expect(ys[i]! - ys[i - 1]!).toBeGreaterThanOrEqual(nodeHeight);
    }
  }
});

test("ten thousand nodes are laid out, and culling agrees with looking at each", () => {
  const layout = layoutOf(randomForest(10_000, 7));
  expect(layout.placed.length).toBe(10_000);
  const [x0, y0, x1, y1] = [100, 5000, 900, 5600];
  const seen = visible(layout, x0, y0, x1, y1);
  expect(seen.length).toBeLessThan(400);
  const one = layout.placed[seen[0]!]!;
  expect(hit(layout, one.x + 1, one.y + 1)).toBe(one.id);
  expect(hit(layout, -1000, -1000)).toBeNull();
});

test("a chain deeper than the call stack is laid out", () => {
  const forest = new Forest();
  forest.put(session("n0"));
  for (let i = 1; i < 12000; i++) forest.put(session(`n${i}`, `n${i - 1}`, { root_id: "n0" }));
  expect(layoutOf(forest).placed.length).toBe(12000);
});

test("an empty forest has an empty layout", () => {
  const layout = layoutOf(new Forest());
  expect(layout.placed).toEqual([]);
  expect(layout.height).toBe(0);
  expect(fit(layout, 800, 600).scale).toBe(1);
});

test("zoom keeps the point under the pointer and stays within its limits", () => {
  const view = { x: 10, y: 20, scale: 1 };
  const zoomed = zoomAt(view, 2, 100, 50);
  expect(zoomed.x + 100 / zoomed.scale).toBeCloseTo(view.x + 100);
  expect(zoomed.y + 50 / zoomed.scale).toBeCloseTo(view.y + 50);
  expect(zoomAt(view, 1e9, 0, 0).scale).toBe(2.5);
  expect(zoomAt(view, 1e-9, 0, 0).scale).toBe(0.02);
});

test("fit shows everything; reveal moves only as far as needed", () => {
  const layout = layoutOf(randomForest(300, 5));
  const view = fit(layout, 800, 600);
  expect(layout.height * view.scale).toBeLessThanOrEqual(600);
  const inside = { id: "a", x: 200, y: 200, depth: 0, parent: -1 };
  const still = { x: 0, y: 0, scale: 1 };
  expect(reveal(still, inside, 800, 600)).toEqual(still);
  const moved = reveal(still, { ...inside, y: 900 }, 800, 600);
  expect(moved.x).toBe(0);
  expect(900 + nodeHeight - moved.y).toBeLessThanOrEqual(600);
});
