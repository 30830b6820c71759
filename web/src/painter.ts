// Draws the tree on a canvas: only what is in view, with less detail the farther away.

import { label, type Forest } from "./forest";
import { nodeHeight, nodeWidth, visible, type Layout, type View } from "./layout";
import type { Session } from "./types";

const detailScale = 0.62; // below this a node is a box with its title only
const titleScale = 0.28; // below this it is a coloured box without words
const edgeLabelScale = 0.8;

export interface Theme {
  surface: string;
  border: string;
  text: string;
  muted: string;
  accent: string;
  edge: string;
  states: Record<string, string>;
  tiers: { device: string; host: string; disk: string };
  font: string;
}

export function readTheme(element: Element): Theme {
  const style = getComputedStyle(element);
  const v = (name: string) => style.getPropertyValue(name).trim();
  return {
    surface: v("--surface"),
    border: v("--border-strong"),
    text: v("--text"),
    muted: v("--muted"),
    accent: v("--accent"),
    edge: v("--edge"),
    states: { idle: v("--idle"), running: v("--running"), detached: v("--detached"), closed: v("--closed") },
    tiers: { device: v("--device"), host: v("--host"), disk: v("--disk") },
    font: style.fontFamily,
  };
}

/** "12,345" */
export const grouped = (n: number) => n.toLocaleString("en-US");

export interface Scene {
  forest: Forest;
  layout: Layout;
  view: View;
  theme: Theme;
  selected: string | null;
  hovered: string | null;
  width: number; // CSS pixels
  height: number;
  ratio: number; // device pixels a CSS pixel
}

const widths = new Map<string, string>(); // text, cut to fit; keyed by font and text
const widthsMax = 20_000;

function cut(ctx: CanvasRenderingContext2D, text: string, max: number): string {
  const key = `${ctx.font}|${max}|${text}`;
  let short = widths.get(key);
  if (short === undefined) {
    short = text;
    if (ctx.measureText(text).width > max) {
      let lo = 0;
      let hi = text.length;
      while (lo < hi) {
        const mid = (lo + hi + 1) >> 1;
        if (ctx.measureText(text.slice(0, mid) + "…").width <= max) lo = mid;
        else hi = mid - 1;
      }
      short = text.slice(0, lo).trimEnd() + "…";
    }
    if (widths.size > widthsMax) widths.clear();
    widths.set(key, short);
  }
  return short;
}

/** Paints a scene and says how many nodes were in view. */
export function paint(ctx: CanvasRenderingContext2D, scene: Scene): number {
  const { layout, view, theme, ratio } = scene;
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, scene.width, scene.height);
  const x1 = view.x + scene.width / view.scale;
  const y1 = view.y + scene.height / view.scale;
  ctx.setTransform(ratio * view.scale, 0, 0, ratio * view.scale, -view.x * view.scale * ratio, -view.y * view.scale * ratio);

  paintEdges(ctx, scene, x1, y1);
  const inView = visible(layout, view.x, view.y, x1, y1);
  if (view.scale < titleScale) {
    paintBoxes(ctx, scene, inView);
  } else {
    for (const i of inView) {
      if (view.scale < detailScale) paintTitle(ctx, scene, i);
      else paintCard(ctx, scene, i);
    }
  }
  if (scene.selected !== null) {
    const at = layout.index.get(scene.selected);
    const p = at === undefined ? undefined : layout.placed[at];
    if (p) {
      ctx.strokeStyle = theme.accent;
      ctx.lineWidth = Math.max(2, 2 / view.scale);
      ctx.beginPath();
      ctx.roundRect(p.x - 1, p.y - 1, nodeWidth + 2, nodeHeight + 2, 7);
      ctx.stroke();
    }
  }
  return inView.length;
}

function paintEdges(ctx: CanvasRenderingContext2D, scene: Scene, x1: number, y1: number): void {
  const { layout, view, theme, forest } = scene;
  ctx.strokeStyle = theme.edge;
  ctx.lineWidth = Math.max(1.2, 0.7 / view.scale);
  ctx.beginPath();
  const labels: { x: number; y: number; text: string }[] = [];
  for (const child of layout.placed) {
    if (child.parent < 0) continue;
    const parent = layout.placed[child.parent]!;
    const ax = parent.x + nodeWidth;
    const ay = parent.y + nodeHeight / 2;
    const by = child.y + nodeHeight / 2;
    if (child.x < view.x || ax > x1 || Math.max(ay, by) < view.y || Math.min(ay, by) > y1) continue;
    const mid = (ax + child.x) / 2;
    ctx.moveTo(ax, ay);
    ctx.bezierCurveTo(mid, ay, mid, by, child.x, by);
    if (view.scale >= edgeLabelScale) {
      const at = forest.get(child.id)?.forked_at;
      if (at !== null && at !== undefined) labels.push({ x: child.x - 6, y: by - 4, text: grouped(at) });
    }
  }
  ctx.stroke();
  ctx.fillStyle = theme.muted;
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "right";
  for (const l of labels) ctx.fillText(l.text, l.x, l.y);
}

const stateColour = (theme: Theme, s: Session | null) => (s ? (theme.states[s.state] ?? theme.muted) : theme.border);

function paintBoxes(ctx: CanvasRenderingContext2D, scene: Scene, inView: number[]): void {
  // One path a colour: ten thousand nodes are then a handful of fills.
  const byColour = new Map<string, number[]>();
  for (const i of inView) {
    const colour = stateColour(scene.theme, scene.forest.get(scene.layout.placed[i]!.id));
    const list = byColour.get(colour);
    if (list) list.push(i);
    else byColour.set(colour, [i]);
  }
  for (const [colour, list] of byColour) {
    ctx.fillStyle = colour;
    ctx.beginPath();
    for (const i of list) {
      const p = scene.layout.placed[i]!;
      ctx.rect(p.x, p.y + 6, nodeWidth, nodeHeight - 12);
    }
    ctx.fill();
  }
}

/** Middle distance: the title in letters that stay legible, cut to the box. */
function paintTitle(ctx: CanvasRenderingContext2D, scene: Scene, i: number): void {
  const { theme, view } = scene;
  const p = scene.layout.placed[i]!;
  const session = scene.forest.get(p.id);
  const letters = Math.round(10 / view.scale);
  ctx.beginPath();
  ctx.roundRect(p.x, p.y, nodeWidth, nodeHeight, 6);
  ctx.fillStyle = theme.surface;
  ctx.fill();
  ctx.strokeStyle = scene.hovered === p.id ? theme.accent : theme.border;
  ctx.lineWidth = 1 / view.scale;
  if (!session) ctx.setLineDash([6, 6]);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.fillStyle = stateColour(theme, session);
  ctx.beginPath();
  ctx.roundRect(p.x, p.y, 9, nodeHeight, [6, 0, 0, 6]);
  ctx.fill();
  ctx.textAlign = "left";
  ctx.fillStyle = session ? theme.text : theme.muted;
  ctx.font = `${letters}px ${theme.font}`;
  ctx.fillText(cut(ctx, label(p.id, session), nodeWidth - 22), p.x + 16, p.y + nodeHeight / 2 + letters * 0.35);
}

function paintCard(ctx: CanvasRenderingContext2D, scene: Scene, i: number): void {
  const { theme } = scene;
  const p = scene.layout.placed[i]!;
  const session = scene.forest.get(p.id);
  const hovered = scene.hovered === p.id;
  ctx.beginPath();
  ctx.roundRect(p.x, p.y, nodeWidth, nodeHeight, 6);
  ctx.fillStyle = theme.surface;
  ctx.fill();
  ctx.strokeStyle = hovered ? theme.accent : theme.border;
  ctx.lineWidth = 1;
  if (!session) ctx.setLineDash([3, 3]);
  ctx.stroke();
  ctx.setLineDash([]);

  ctx.fillStyle = stateColour(theme, session);
  ctx.beginPath();
  ctx.arc(p.x + 12, p.y + 14, 3.5, 0, 7);
  ctx.fill();

  ctx.textAlign = "left";
  ctx.fillStyle = session ? theme.text : theme.muted;
  ctx.font = `500 12px ${theme.font}`;
  ctx.fillText(cut(ctx, label(p.id, session), nodeWidth - 30), p.x + 21, p.y + 18);
  if (!session) return;
  ctx.fillStyle = theme.muted;
  ctx.font = `10.5px ${theme.font}`;
  const turns = session.turn_count === 1 ? "1 turn" : `${grouped(session.turn_count)} turns`;
  ctx.fillText(cut(ctx, `${grouped(session.length)} tok · ${turns}`, nodeWidth - 30), p.x + 21, p.y + 31);
  paintResidency(ctx, theme, session, p.x, p.y);
}

/** A thin bar along the bottom: which share of the line lies where. */
function paintResidency(ctx: CanvasRenderingContext2D, theme: Theme, s: Session, x: number, y: number): void {
  if (s.length <= 0) return;
  const full = nodeWidth - 12;
  let at = x + 6;
  for (const tier of ["device", "host", "disk"] as const) {
    const share = Math.min(1, s.residency[tier] / s.length);
    const width = Math.min(full * share, x + 6 + full - at);
    if (width <= 0) continue;
    ctx.fillStyle = theme.tiers[tier];
    ctx.fillRect(at, y + nodeHeight - 4, width, 2);
    at += width;
  }
}
