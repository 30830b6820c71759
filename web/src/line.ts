// A session's line of tokens as the dashboard knows it, and the events that change it. Pure.
//
// What always holds:
//   - spans are in order, not empty and never overlap: each is [from, to) of the line;
//   - `seq` is the last event taken in; the next one is seq + 1 or opens a newer epoch;
//   - what an interrupted turn sent past its last committed event is not on the line.

import type { RocketEvent, Usage } from "./types";

export type SpanKind = "given" | "generated";

export interface Span {
  from: number;
  to: number;
  text: string;
  kind: SpanKind;
  /** Event that brought it, 0 when it was read from the ledger. */
  seq: number;
}

export type Phase = "idle" | "running";

export type Need =
  | { kind: "tokens"; from: number; to: number; generatedFrom: number } // read this range from the ledger
  | { kind: "session" } // the session's own fields changed
  | { kind: "reconnect" } // events are missing: ask again from seq + 1
  | { kind: "reload" }; // start over from a fresh snapshot

export class Line {
  spans: Span[] = [];
  epoch = 0;
  seq = 0;
  phase: Phase = "idle";
  /** Where the next delta's tokens go; null until it is known. */
  cursor: number | null = null;
  turnFrom = 0;
  promptTo = 0;
  usage: Usage | null = null;
  ended = ""; // how the last turn ended
  error = "";

  /** Starts from a snapshot: a session's length, epoch and last event, read together. */
  reset(epoch: number, seq: number, length: number, running: boolean): void {
    this.spans = [];
    this.epoch = epoch;
    this.seq = seq;
    this.cursor = length;
    this.turnFrom = this.promptTo = length;
    this.phase = running ? "running" : "idle";
    this.usage = null;
    this.ended = this.error = "";
  }

  get end(): number {
    return this.spans.length > 0 ? this.spans[this.spans.length - 1]!.to : 0;
  }

  /** Replaces [from, to) by these spans. A span that reaches over an edge goes as a whole: its text cannot be cut. */
  put(from: number, to: number, spans: Span[]): void {
    const before = this.spans.filter((s) => s.to <= from);
    const after = this.spans.filter((s) => s.from >= to);
    this.spans = [...before, ...spans.filter((s) => s.to > s.from), ...after];
  }

  /** Says that [from, to) was generated. */
  mark(from: number, to: number): void {
    this.spans = this.spans.map((s) => (s.from >= from && s.to <= to && s.kind !== "generated" ? { ...s, kind: "generated" } : s));
  }

  /** Takes one event in and says what else is needed to show it. */
  apply(event: RocketEvent): Need[] {
    if (event.epoch < this.epoch) return []; // of a life that is over
    if (event.epoch === this.epoch) {
      if (event.seq <= this.seq) return []; // seen before
      if (event.seq > this.seq + 1) return [{ kind: "reconnect" }];
    }
    const newEpoch = event.epoch > this.epoch && this.epoch > 0;
    this.epoch = event.epoch;
    this.seq = event.seq;
    switch (event.type) {
      case "turn.started":
        return this.started(event);
      case "turn.delta":
        return this.delta(event);
      case "turn.interrupted":
        this.drop(event.last_seq ?? event.seq);
        this.end_turn(event, "interrupted");
        return [{ kind: "reload" }];
      case "turn.completed":
        return this.final(event, event.finish_reason ?? "completed");
      case "turn.cancelled":
        return this.final(event, "cancelled");
      case "turn.failed":
        this.error = event.error?.message ?? "the turn failed";
        return this.final(event, "failed");
    }
    return newEpoch ? [{ kind: "reload" }] : [{ kind: "session" }];
  }

  private started(event: RocketEvent): Need[] {
    this.phase = "running";
    this.ended = this.error = "";
    this.usage = null;
    const from = event.from ?? this.cursor;
    const to = event.to ?? from;
    if (from === null || to === null) return [{ kind: "reload" }];
    this.turnFrom = from;
    this.promptTo = this.cursor = to;
    const session: Need = { kind: "session" };
    return to > from ? [{ kind: "tokens", from, to, generatedFrom: to }, session] : [session];
  }

  private delta(event: RocketEvent): Need[] {
    const count = event.tokens?.length ?? 0;
    if (this.cursor === null) return [{ kind: "reload" }];
    const from = this.cursor;
    if (count > 0) {
      this.put(from, from + count, [
        { from, to: from + count, text: event.text ?? "", kind: "generated", seq: event.seq },
      ]);
      this.cursor = from + count;
    } else if (event.text) {
      // Text held back until it could be decoded belongs to the token before.
      const last = this.spans[this.spans.length - 1];
      if (last) this.spans = [...this.spans.slice(0, -1), { ...last, text: last.text + event.text }];
    }
    return [];
  }

  private drop(lastSeq: number): void {
    this.spans = this.spans.filter((s) => s.seq <= lastSeq);
    this.cursor = this.end;
  }

  private end_turn(event: RocketEvent, how: string): void {
    this.phase = "idle";
    this.ended = how;
    if (event.usage) this.usage = event.usage;
  }

  private final(event: RocketEvent, how: string): Need[] {
    this.end_turn(event, how);
    const from = event.from ?? this.turnFrom;
    const to = event.to ?? this.cursor ?? from;
    this.cursor = to;
    this.put(to, Infinity, []);
    // The ledger gives each token its own text; deltas may hold several.
    const needs: Need[] = [{ kind: "session" }];
    const generatedFrom = event.usage ? to - event.usage.completion_tokens : this.promptTo;
    if (to > from) needs.push({ kind: "tokens", from, to, generatedFrom: Math.max(generatedFrom, from) });
    return needs;
  }

  /** Throws when what always holds does not. */
  check(): void {
    let at = -1;
    for (const s of this.spans) {
      if (s.to <= s.from) throw new Error(`empty span at ${s.from}`);
      if (s.from < at) throw new Error(`spans overlap at ${s.from}`);
      at = s.to;
    }
  }
}

/** Spans of a range read from the ledger: one a token where the server says each token's text. */
export function spansOf(from: number, tokens: number[], text: string, pieces: string[] | undefined, generatedFrom: number): Span[] {
  const kind = (at: number): SpanKind => (at >= generatedFrom ? "generated" : "given");
  if (pieces && pieces.length === tokens.length) {
    return pieces.map((piece, i) => ({ from: from + i, to: from + i + 1, text: piece, kind: kind(from + i), seq: 0 }));
  }
  if (tokens.length === 0) return [];
  return [{ from, to: from + tokens.length, text, kind: kind(from), seq: 0 }];
}
