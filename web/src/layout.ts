// Where each node of the tree is drawn. Pure, in units of the canvas before zoom.
// Depth grows to the right, siblings downwards; each root has a band of its own.

import { hierarchy, tree } from "d3-hierarchy";
import type { Forest } from "./forest";

export const nodeWidth = 148;
export const nodeHeight = 40;
export const columnGap = 56;
export const rowGap = 10;
const bandGap = 18; // more air between the trees of two roots

export interface Placed {
  id: string;
  x: number; // left edge
  y: number; // top edge
  depth: number;
  parent: number; // index of the parent in Layout.placed, -1 for a root
}

export interface Layout {
  placed: Placed[]; // parents before children
  index: Map<string, number>;
  width: number;
  height: number;
}

interface Datum {
  id: string;
  children: Datum[];
}

/** Builds the nested form without recursion: chains of forks may be thousands deep. */
function nested(forest: Forest, rootId: string): Datum {
  const root: Datum = { id: rootId, children: [] };
  const work = [root];
  for (let datum = work.pop(); datum; datum = work.pop()) {
    for (const id of forest.nodes.get(datum.id)?.children ?? []) {
      const child: Datum = { id, children: [] };
      datum.children.push(child);
      work.push(child);
    }
  }
  return root;
}

export function layoutOf(forest: Forest): Layout {
  const placed: Placed[] = [];
  const index = new Map<string, number>();
  const place = tree<Datum>()
    .nodeSize([nodeHeight + rowGap, nodeWidth + columnGap])
    .separation((a, b) => (a.parent === b.parent ? 1 : 1.3));
  let top = 0;
  let width = 0;
  for (const rootNode of forest.roots()) {
    const root = place(hierarchy(nested(forest, rootNode.id)));
    // d3 centres a tree on its root: shift it so that its highest node touches the band's top.
    let min = Infinity;
    let max = -Infinity;
    root.each((n) => {
      min = Math.min(min, n.x);
      max = Math.max(max, n.x);
    });
    root.eachBefore((n) => {
      index.set(n.data.id, placed.length);
      placed.push({
        id: n.data.id,
        x: n.y,
        y: top + n.x - min,
        depth: n.depth,
        parent: n.parent ? index.get(n.parent.data.id)! : -1,
      });
      width = Math.max(width, n.y + nodeWidth);
    });
    top += max - min + nodeHeight + rowGap + bandGap;
  }
  return { placed, index, width, height: Math.max(0, top - rowGap - bandGap) };
}

/** What the canvas shows: screen = (world - origin) * scale. */
export interface View {
  x: number;
  y: number;
  scale: number;
}

export const scaleMin = 0.02;
export const scaleMax = 2.5;
const openingScale = 0.75;

/** Zooms about a point of the screen, which stays where it is. */
export function zoomAt(view: View, factor: number, screenX: number, screenY: number): View {
  const scale = Math.max(scaleMin, Math.min(scaleMax, view.scale * factor));
  return {
    scale,
    x: view.x + screenX / view.scale - screenX / scale,
    y: view.y + screenY / view.scale - screenY / scale,
  };
}

/** The view that shows everything, never larger than life. */
export function fit(layout: Layout, screenWidth: number, screenHeight: number, margin = 24): View {
  const w = Math.max(layout.width, 1);
  const h = Math.max(layout.height, 1);
  const scale = Math.max(
    scaleMin,
    Math.min(1, (screenWidth - 2 * margin) / w, (screenHeight - 2 * margin) / h),
  );
  // The top left, as text begins, even when the tree is smaller than the screen.
  return { scale, x: -margin / scale, y: -margin / scale };
}

/** The first view: near enough to read, though a large tree then reaches out of it. */
export function opening(layout: Layout, screenWidth: number, screenHeight: number): View {
  const all = fit(layout, screenWidth, screenHeight);
  return all.scale >= openingScale ? all : { scale: openingScale, x: -24 / openingScale, y: -24 / openingScale };
}

/** Moves the view no more than needed for a node to be inside. */
export function reveal(view: View, node: Placed, screenWidth: number, screenHeight: number, margin = 32): View {
  const m = margin / view.scale;
  const w = screenWidth / view.scale;
  const h = screenHeight / view.scale;
  const keepIn = (at: number, size: number, from: number, span: number) => {
    if (at - m < from) return at - m;
    if (at + size + m > from + span) return at + size + m - span;
    return from;
  };
  return {
    scale: view.scale,
    x: keepIn(node.x, nodeWidth, view.x, w),
    y: keepIn(node.y, nodeHeight, view.y, h),
  };
}

/** Indices of the nodes that meet a rectangle of the world. */
export function visible(layout: Layout, x0: number, y0: number, x1: number, y1: number): number[] {
  const found: number[] = [];
  for (let i = 0; i < layout.placed.length; i++) {
    const p = layout.placed[i]!;
    if (p.x < x1 && p.x + nodeWidth > x0 && p.y < y1 && p.y + nodeHeight > y0) found.push(i);
  }
  return found;
}

/** The node at a point of the world, or null. */
export function hit(layout: Layout, x: number, y: number): string | null {
  for (const p of layout.placed) {
    if (x >= p.x && x < p.x + nodeWidth && y >= p.y && y < p.y + nodeHeight) return p.id;
  }
  return null;
}
