// Made-up sessions for unit tests.
import type { Session } from "./types";

export function session(id: string, parent: string | null = null, more: Partial<Session> = {}): Session {
  return {
    id,
    object: "session",
    model: "nano",
    title: "",
    labels: {},
    state: "idle",
    parent_id: parent,
    root_id: parent ?? id,
    forked_at: parent ? 10 : null,
    length: 20,
    turn_count: 1,
    child_count: 0,
    residency: { device: 20, host: 0, disk: 0, snapshots: 1 },
    last_seq: 1,
    epoch: 1,
    created_at: "2026-01-01T00:00:00Z",
    updated_at: "2026-01-01T00:00:00Z",
    expires_at: null,
    ...more,
  };
}
