// The tree as the rows of a list, for the keyboard and for readers that see no canvas. Pure.

import { Forest, label, type Node } from "./forest";

export interface Row {
  id: string;
  node: Node;
  level: number; // from 1, as aria-level counts
  position: number; // among its siblings, from 1
  siblings: number;
  expandable: boolean;
  expanded: boolean;
}

/** Rows in reading order. A filter keeps matching rows and their ancestors, and opens all of them. */
export function rowsOf(forest: Forest, collapsed: ReadonlySet<string>, filter = ""): Row[] {
  const wanted = filter.trim().toLowerCase();
  const keep = wanted ? matching(forest, wanted) : null;
  const rows: Row[] = [];
  // A stack of own, since a chain of forks may be deeper than the call stack.
  const stack: { ids: string[]; next: number; level: number }[] = [];
  const visible = (ids: string[]) => (keep ? ids.filter((id) => keep.has(id)) : ids);
  stack.push({ ids: visible(forest.roots().map((n) => n.id)), next: 0, level: 1 });
  while (stack.length > 0) {
    const top = stack[stack.length - 1]!;
    const id = top.ids[top.next];
    if (id === undefined) {
      stack.pop();
      continue;
    }
    top.next++;
    const node = forest.nodes.get(id)!;
    const children = visible(node.children);
    const expanded = children.length > 0 && (keep !== null || !collapsed.has(id));
    rows.push({
      id,
      node,
      level: top.level,
      position: top.next,
      siblings: top.ids.length,
      expandable: children.length > 0,
      expanded,
    });
    if (expanded) stack.push({ ids: children, next: 0, level: top.level + 1 });
  }
  return rows;
}

function matching(forest: Forest, wanted: string): Set<string> {
  const keep = new Set<string>();
  for (const node of forest.nodes.values()) {
    const s = node.session;
    const labels = s ? Object.entries(s.labels ?? {}).map(([k, v]) => `${k}=${v}`) : [];
    const text = [label(node.id, s), node.id, s?.state ?? "", s?.model ?? "", ...labels].join(" ").toLowerCase();
    if (!text.includes(wanted)) continue;
    for (let up: Node | undefined = node; up && !keep.has(up.id); up = up.parent ? forest.nodes.get(up.parent) : undefined) {
      keep.add(up.id);
    }
  }
  return keep;
}

/** Where a key takes the active row; null when it means something else. */
export function moveTo(rows: Row[], activeId: string | null, key: string, page: number): string | null {
  if (rows.length === 0) return null;
  const at = rows.findIndex((r) => r.id === activeId);
  const clamp = (i: number) => rows[Math.max(0, Math.min(rows.length - 1, i))]!.id;
  switch (key) {
    case "ArrowDown":
      return clamp(at + 1);
    case "ArrowUp":
      return clamp(at < 0 ? 0 : at - 1);
    case "PageDown":
      return clamp(Math.max(at, 0) + page);
    case "PageUp":
      return clamp(at - page);
    case "Home":
      return clamp(0);
    case "End":
      return clamp(rows.length - 1);
  }
  return null;
}
