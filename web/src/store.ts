// What the page shows, as signals; the only module that changes it.

import { batch, effect, signal } from "@preact/signals";
import { api, ApiError, inWords } from "./api";
import { Follower } from "./follower";
import { Forest } from "./forest";
import { Socket, type SocketState } from "./socket";
import type { RocketEvent, Session } from "./types";

const pageSize = 200; // the API's largest
const sessionsMax = 20_000; // more than anybody can read; the newest are shown
const refreshesAtOnce = 4;
const reloadAbove = 40; // so many single refreshes cost more than one list

export const forest = new Forest();
export const treeVersion = signal(0); // any change of the forest
export const treeStructure = signal(0); // nodes came or went
export const loaded = signal(false);
export const truncated = signal(false);
export const connection = signal<SocketState>("connecting");
export const selectedId = signal<string | null>(null);
export const follower = signal<Follower | null>(null);
export const serverVersion = signal("");

export interface Notice {
  id: number;
  kind: "error" | "info";
  text: string;
  details: string[];
}
export const notices = signal<Notice[]>([]);
const infoMillis = 6000;
let noticeId = 0;

export function notify(kind: Notice["kind"], text: string, details: string[] = []): void {
  const notice = { id: ++noticeId, kind, text, details };
  notices.value = [...notices.value.slice(-3), notice];
  if (kind === "info") setTimeout(() => dismiss(notice.id), infoMillis);
}

export function dismiss(id: number): void {
  notices.value = notices.value.filter((n) => n.id !== id);
}

export function report(err: unknown, doing: string): void {
  if (err instanceof DOMException && err.name === "AbortError") return;
  if (err instanceof ApiError && err.status === 401) return; // the page asks for a key
  const { text, details } = inWords(err);
  notify("error", `${doing}: ${text}`, details);
}

// --- the forest ---------------------------------------------------------------------------------

function changed(): void {
  batch(() => {
    treeVersion.value = forest.version;
    treeStructure.value = forest.structure;
  });
}

let loading: Promise<void> | null = null;

/** Lists all sessions anew. Calls that come meanwhile join the one under way. */
export function load(): Promise<void> {
  loading ??= loadAll().finally(() => (loading = null));
  return loading;
}

async function loadAll(): Promise<void> {
  const all: Session[] = [];
  const since = forest.version;
  let after: string | null = null;
  let more = true;
  try {
    while (more && all.length < sessionsMax) {
      const page: Awaited<ReturnType<typeof api.list>> = await api.list(pageSize, after);
      all.push(...page.data);
      after = page.next;
      more = page.has_more && after !== null;
    }
  } catch (err) {
    if (connection.value === "live" || !loaded.value) report(err, "List sessions");
    return;
  }
  forest.replace(all, since);
  batch(() => {
    truncated.value = more;
    loaded.value = true;
    changed();
  });
}

const pending = new Set<string>();
let refreshing = 0;

/** Asks for one session's fields soon; many at once become a fresh list. */
export function refresh(id: string): void {
  pending.add(id);
  if (pending.size > reloadAbove) {
    pending.clear();
    void load();
    return;
  }
  drain();
}

function drain(): void {
  while (refreshing < refreshesAtOnce) {
    const next = pending.values().next();
    if (next.done) return;
    pending.delete(next.value);
    refreshing++;
    void refreshOne(next.value).finally(() => {
      refreshing--;
      drain();
    });
  }
}

async function refreshOne(id: string): Promise<void> {
  try {
    put(await api.get(id));
  } catch (err) {
    if (err instanceof ApiError && err.status === 404) gone(id);
    // Anything else: the next event or the next list brings it.
  }
}

export function put(session: Session): void {
  forest.put(session);
  changed();
}

export function gone(id: string): void {
  forest.remove(id);
  if (selectedId.value === id) select(null);
  changed();
}

function onWatch(data: unknown): void {
  const event = data as RocketEvent;
  if (typeof event?.type !== "string") return;
  if (!event.session_id) {
    // A notice of the watch itself: events were lost while this page lagged.
    if (event.type.includes("lost") || event.type.includes("lagged")) void load();
    return;
  }
  if (event.type === "session.deleted") {
    gone(event.session_id);
    return;
  }
  refresh(event.session_id);
  if (event.type === "session.forked") for (const child of event.children ?? []) refresh(child);
}

export function start(): void {
  void load();
  api.version().then(
    (v) => (serverVersion.value = v.version ?? ""),
    () => undefined,
  );
  let wasLost = false;
  new Socket({
    path: () => "/v1/watch?turns=true",
    message: onWatch,
    refused: () => void api.list(1).catch(() => undefined), // a handshake hides its status; this asks for a key if it was that
    state: (state) => {
      connection.value = state;
      if (state === "live") {
        if (wasLost) void load(); // what happened meanwhile was not told
        wasLost = false;
      } else if (state === "lost") wasLost = true;
    },
  });
  addEventListener("hashchange", readHash);
  readHash();
}

// --- the selected session ----------------------------------------------------------------------

function readHash(): void {
  const id = decodeURIComponent(location.hash.slice(1));
  selectedId.value = id || null;
}

export function select(id: string | null): void {
  if (selectedId.value === id) return;
  history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
  selectedId.value = id;
}

effect(() => {
  const id = selectedId.value;
  const old = follower.peek();
  if (old?.id === id) return;
  old?.stop();
  follower.value = id ? new Follower(id, { session: refresh, got: put, gone, failed: report }) : null;
});
