// The shapes of the native API, as /openapi.json describes them; only what the dashboard reads.

export type SessionState = "idle" | "running" | "detached" | "closed";

/** Where a session's bytes are, in tokens of its line; snapshots is a count. */
export interface Residency {
  device: number;
  host: number;
  disk: number;
  snapshots: number;
}

export interface Session {
  id: string;
  object: "session";
  model: string;
  title: string;
  labels: Record<string, string>;
  state: SessionState;
  parent_id: string | null;
  root_id: string;
  forked_at: number | null;
  length: number;
  turn_count: number;
  child_count: number;
  residency: Residency;
  last_seq: number;
  epoch: number;
  created_at: string;
  updated_at: string;
  expires_at: string | null;
}

export interface Page<T> {
  data: T[];
  has_more: boolean;
  next: string | null;
}

export interface Restored {
  device: number;
  host: number;
  disk: number;
  recomputed: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  cache_write_tokens: number;
  by_source: Restored;
  cold_reason?: string;
  cold_at?: number;
  ttft_ms: number;
  tokens_per_second: number;
}

export type TurnState = "queued" | "running" | "completed" | "cancelled" | "failed" | "interrupted";

export interface Turn {
  id: string;
  object: "turn";
  session_id: string;
  state: TurnState;
  text: string;
  tokens?: number[];
  finish_reason: string | null;
  /** [from, to) of the line: the prompt and what was generated. */
  from: number;
  to: number;
  seed: number;
  usage: Usage | null;
  inherited?: boolean;
}

export interface RocketEvent {
  seq: number;
  epoch: number;
  type: string;
  session_id: string;
  turn_id?: string;
  time: string;
  parent_id?: string | null;
  forked_at?: number;
  children?: string[];
  at?: number;
  text?: string;
  tokens?: number[];
  from?: number;
  to?: number;
  finish_reason?: string;
  usage?: Usage;
  error?: { code: string; message: string };
  last_seq?: number;
}

export interface TokenRange {
  tokens: number[];
  text: string;
  /** The text that each token adds; joined they are `text`. Asked for with pieces=true. */
  pieces?: string[];
}

export interface ForkResult {
  sessions: Session[];
  at: number;
  shared_tokens: number;
  replay_tokens: number;
}

export interface Version {
  version: string;
}
