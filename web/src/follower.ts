// Follows one session: its line so far from the ledger, then its events as they happen.

import { signal } from "@preact/signals";
import { api, ApiError } from "./api";
import { Line, spansOf, type Need } from "./line";
import { Socket, type SocketState } from "./socket";
import type { RocketEvent, Session } from "./types";

const historyTokens = 4096; // read at first and with each "earlier"
const turnsShown = 100; // older ones are not told apart from what was given
const retryMillis = 2000;
const rangeTokens = 4096; // of one request

export interface FollowerCalls {
  session: (id: string) => void; // its fields may have changed
  got: (session: Session) => void;
  gone: (id: string) => void;
  failed: (err: unknown, doing: string) => void;
}

export class Follower {
  readonly line = new Line();
  readonly version = signal(0);
  readonly state = signal<SocketState>("connecting");
  readonly ready = signal(false);
  private socket: Socket | null = null;
  private stopped = false;
  private frame = 0;
  private life = 0; // rises with each reload; answers of older ones are dropped

  constructor(
    readonly id: string,
    private readonly calls: FollowerCalls,
  ) {
    void this.reload();
  }

  stop(): void {
    this.stopped = true;
    this.socket?.stop();
    cancelAnimationFrame(this.frame);
  }

  /** The first token that is shown; older ones can be asked for. */
  get shownFrom(): number {
    return this.line.spans[0]?.from ?? this.line.cursor ?? 0;
  }

  async earlier(): Promise<void> {
    const to = this.shownFrom;
    await this.read(Math.max(0, to - historyTokens), to, Infinity);
  }

  private async reload(): Promise<void> {
    const life = ++this.life;
    this.socket?.stop();
    this.socket = null;
    try {
      const session = await api.get(this.id);
      if (this.stopped || life !== this.life) return;
      this.calls.got(session);
      this.line.reset(session.epoch, session.last_seq, session.length, session.state === "running");
      await this.read(Math.max(0, session.length - historyTokens), session.length, Infinity);
      await this.readTurns(life);
    } catch (err) {
      if (this.stopped || life !== this.life) return;
      if (err instanceof ApiError && err.status === 404) {
        this.calls.failed(err, "Open session");
        this.calls.gone(this.id);
        return;
      }
      this.calls.failed(err, "Read session");
      this.again(life);
      return;
    }
    if (this.stopped || life !== this.life) return;
    this.ready.value = true;
    this.show();
    this.socket = new Socket({
      path: () => `/v1/sessions/${encodeURIComponent(this.id)}/stream?from=${this.line.seq + 1}&epoch=${this.line.epoch}`,
      message: (data) => this.message(data as RocketEvent),
      state: (state) => (this.state.value = state),
      refused: () => void this.refused(),
    });
  }

  /** Marks what was generated and how the last turn went; the line's text does not depend on it. */
  private async readTurns(life: number): Promise<void> {
    const { data } = await api.turns(this.id, turnsShown);
    // A turn that still runs, or that the fork cut, has no usage: its tokens tell where they begin.
    const starts = await Promise.all(
      data.map(async (t) => {
        if (t.usage) return t.to - t.usage.completion_tokens;
        if (t.to <= t.from) return t.to;
        return t.to - ((await api.turnOf(this.id, t.id)).tokens?.length ?? 0);
      }),
    );
    if (life !== this.life) return;
    data.forEach((turn, i) => this.line.mark(Math.max(turn.from, starts[i]!), turn.to));
    const last = data[0];
    if (last && !last.inherited) {
      this.line.usage = last.usage;
      this.line.ended = last.finish_reason ?? "";
    }
  }

  private again(life: number): void {
    setTimeout(() => {
      if (!this.stopped && life === this.life) void this.reload();
    }, retryMillis);
  }

  /** A handshake that fails hides its status: plain HTTP tells whether the session is gone. */
  private async refused(): Promise<void> {
    const life = this.life;
    try {
      await api.get(this.id);
      // It is there, so the log no longer holds what was asked for: begin anew, but not in a tight circle.
      this.again(life);
    } catch (err) {
      if (!this.stopped && life === this.life && err instanceof ApiError && err.status === 404) {
        this.stop();
        this.calls.gone(this.id);
      }
    }
  }

  private message(event: RocketEvent): void {
    if (event.session_id !== this.id) return;
    if (event.type === "error") void this.reload(); // the log lacks what was asked for
    if (typeof event.seq !== "number") return; // "subscribed" and the like
    for (const need of this.line.apply(event)) this.meet(need);
    this.show();
  }

  private meet(need: Need): void {
    switch (need.kind) {
      case "session":
        this.calls.session(this.id);
        return;
      case "reconnect":
        this.socket?.restart();
        return;
      case "reload":
        void this.reload();
        return;
      case "tokens":
        void this.read(need.from, need.to, need.generatedFrom).catch((err) => this.calls.failed(err, "Read tokens"));
    }
  }

  private async read(from: number, to: number, generatedFrom: number): Promise<void> {
    const life = this.life;
    for (let at = from; at < to; at += rangeTokens) {
      const end = Math.min(to, at + rangeTokens);
      const range = await api.tokens(this.id, at, end);
      if (this.stopped || life !== this.life) return;
      const got = at + range.tokens.length;
      this.line.put(at, Math.min(end, got), spansOf(at, range.tokens, range.text, range.pieces, generatedFrom));
      this.show();
    }
  }

  /** At most one redraw a frame, however fast events come. */
  private show(): void {
    if (this.frame || this.stopped) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.version.value++;
    });
  }
}
