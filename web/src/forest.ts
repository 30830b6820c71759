// The lineage of all sessions: who was forked from whom. Pure: no signals, no DOM.
//
// What always holds:
//   - every node but a root is listed among its parent's children exactly once;
//   - a parent that is not known (deleted) is a ghost: it has a place and no session;
//   - `structure` rises when a node comes, goes or moves, `version` at every change.

import type { Session } from "./types";

export interface Node {
  id: string;
  /** null for a ghost: what is left of a deleted session. */
  session: Session | null;
  parent: string | null;
  children: string[];
  /** Forest.version when the session was last put. */
  put: number;
}

export class Forest {
  readonly nodes = new Map<string, Node>();
  structure = 0;
  version = 0;
  private readonly removed = new Set<string>(); // ids are never used again, so these never come back

  get(id: string): Session | null {
    return this.nodes.get(id)?.session ?? null;
  }

  /** Sessions that exist, ghosts left out. */
  get size(): number {
    let n = 0;
    for (const node of this.nodes.values()) if (node.session) n++;
    return n;
  }

  /** Adds or replaces a session. An answer older than what is known, its deletion too, is dropped. */
  put(session: Session): void {
    if (this.removed.has(session.id)) return;
    let node = this.nodes.get(session.id);
    if (node?.session && older(session, node.session)) return;
    this.version++;
    if (!node) {
      node = { id: session.id, session, parent: null, children: [], put: 0 };
      this.nodes.set(session.id, node);
      this.structure++;
    } else if (!node.session) {
      this.structure++;
    }
    node.session = session;
    node.put = this.version;
    this.attach(node, session.parent_id, session.root_id);
  }

  private attach(node: Node, parentId: string | null, rootId: string): void {
    if (node.parent === parentId) return;
    this.detach(node);
    node.parent = parentId;
    this.structure++;
    if (parentId === null) return;
    let parent = this.nodes.get(parentId);
    if (!parent) {
      parent = { id: parentId, session: null, parent: null, children: [], put: 0 };
      this.nodes.set(parentId, parent);
      if (rootId !== parentId) this.attach(parent, rootId, rootId);
    }
    parent.children.push(node.id);
    // Oldest fork first; ids are UUIDv7, so they sort by time.
    parent.children.sort();
  }

  private detach(node: Node): void {
    if (node.parent === null) return;
    const parent = this.nodes.get(node.parent);
    if (parent) {
      parent.children = parent.children.filter((id) => id !== node.id);
      this.prune(parent);
    }
    node.parent = null;
  }

  /** Takes a ghost without children away, and then its parent if that is one too. */
  private prune(node: Node): void {
    if (node.session || node.children.length > 0) return;
    this.nodes.delete(node.id);
    this.detach(node);
  }

  /** A deleted session; while it has children its place stays as a ghost. */
  remove(id: string): void {
    this.removed.add(id);
    this.hide(id);
  }

  private hide(id: string): void {
    const node = this.nodes.get(id);
    if (!node?.session) return;
    this.version++;
    this.structure++;
    node.session = null;
    this.prune(node);
  }

  /**
   * Takes in a fresh list of all sessions that was asked for when `version` was `since`. What came after
   * that the list may not know: it stays as it is.
   */
  replace(sessions: Session[], since: number): void {
    const listed = new Set(sessions.map((s) => s.id));
    for (const s of sessions) this.put(s);
    for (const node of [...this.nodes.values()]) {
      if (node.session && !listed.has(node.id) && node.put <= since) this.hide(node.id);
    }
  }

  /** Roots, newest first. */
  roots(): Node[] {
    const all: Node[] = [];
    for (const node of this.nodes.values()) if (node.parent === null) all.push(node);
    return all.sort((a, b) => (a.id < b.id ? 1 : -1));
  }

  /** From the root down to id, both included. */
  path(id: string): Node[] {
    const up: Node[] = [];
    for (let node = this.nodes.get(id); node; node = node.parent ? this.nodes.get(node.parent) : undefined) up.push(node);
    return up.reverse();
  }

  /** Throws when what always holds does not. */
  check(): void {
    for (const node of this.nodes.values()) {
      if (node.parent !== null) {
        const mentions = this.nodes.get(node.parent)?.children.filter((id) => id === node.id).length ?? 0;
        if (mentions !== 1) throw new Error(`${node.id} is listed ${mentions} times by its parent`);
      }
      for (const child of node.children) {
        if (this.nodes.get(child)?.parent !== node.id) throw new Error(`${child} is listed by a parent it does not have`);
      }
      if (!node.session && node.children.length === 0) throw new Error(`ghost ${node.id} has no children`);
    }
  }
}

/** Answers may overtake each other: epoch, then seq, then the time of change tell which is newer. */
function older(a: Session, b: Session): boolean {
  if (a.epoch !== b.epoch) return a.epoch < b.epoch;
  if (a.last_seq !== b.last_seq) return a.last_seq < b.last_seq;
  return a.updated_at < b.updated_at;
}

/** What a person calls a session: its title, or the end of its id (the start is only its time). */
export function label(id: string, session: Session | null): string {
  if (!session) return "deleted";
  return session.title || shortId(id);
}

export function shortId(id: string): string {
  return "…" + id.slice(-6);
}
