// A WebSocket that comes back. The caller says where to go on each time it is opened.

import { protocols } from "./key";

/** How long to wait before the n-th try in a row, in milliseconds; `random` spreads many readers out. */
export function backoff(tries: number, random: number): number {
  const base = Math.min(5000, 200 * 2 ** Math.min(tries, 10));
  return base * (0.5 + random / 2);
}

/** Close codes that mean "come back at once": the reader was slow, or the server is being replaced. */
const atOnce = new Set([1012, 1013]);

export type SocketState = "connecting" | "live" | "lost";

export interface SocketOptions {
  /** Path and query, asked anew at each try, so that it can carry the next seq. */
  path: () => string;
  message: (data: unknown) => void;
  state?: (state: SocketState) => void;
  /** Called when a try ended before it opened: the server may know why by plain HTTP. */
  refused?: () => void;
}

export class Socket {
  private ws: WebSocket | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private tries = 0;
  private stopped = false;

  constructor(private readonly options: SocketOptions) {
    this.open();
  }

  private open(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.options.state?.(this.tries === 0 ? "connecting" : "lost");
    const url = new URL(this.options.path(), location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const ws = new WebSocket(url, protocols());
    this.ws = ws;
    let opened = false;
    ws.onopen = () => {
      if (this.ws !== ws) return;
      opened = true;
      this.options.state?.("live");
    };
    ws.onmessage = (frame) => {
      if (this.ws !== ws || typeof frame.data !== "string") return;
      this.tries = 0; // it works when something arrives, not when it opens
      this.options.message(JSON.parse(frame.data));
    };
    ws.onclose = (close) => {
      if (this.ws !== ws) return;
      this.ws = null;
      if (this.stopped) return;
      if (!opened) this.options.refused?.();
      if (this.stopped) return; // refused() may have ended it
      const wait = opened && atOnce.has(close.code) && this.tries === 0 ? 0 : backoff(this.tries, Math.random());
      this.tries++;
      this.options.state?.("lost");
      this.timer = setTimeout(() => this.open(), wait);
    };
  }

  /** Drops the connection and opens it anew, from where path() now says. */
  restart(): void {
    if (this.stopped) return;
    const ws = this.ws;
    this.ws = null;
    ws?.close();
    this.open();
  }

  stop(): void {
    this.stopped = true;
    clearTimeout(this.timer);
    const ws = this.ws;
    this.ws = null;
    ws?.close();
  }
}
