import { afterEach, beforeEach, expect, test } from "vitest";
import { Line, spansOf } from "./line";
import type { RocketEvent } from "./types";

let line: Line;
let seq: number;
let epoch: number;

beforeEach(() => {
  line = new Line();
  line.reset(1, 3, 10, false);
  seq = 3;
  epoch = 1;
});
afterEach(() => line.check());

function event(type: string, more: Partial<RocketEvent> = {}): RocketEvent {
  return { seq: ++seq, epoch, type, session_id: "s", time: "", ...more };
}
const text = () => line.spans.map((s) => s.text).join("");

test("a turn: prompt asked for, deltas placed one after the other, tokens read again at the end", () => {
  expect(line.apply(event("turn.started", { from: 10, to: 14 }))).toContainEqual({ kind: "tokens", from: 10, to: 14, generatedFrom: 14 });
  expect(line.phase).toBe("running");
  expect(line.apply(event("turn.delta", { text: "ab", tokens: [1, 2] }))).toEqual([]);
  line.apply(event("turn.delta", { text: "c", tokens: [3] }));
  expect(line.spans.map((s) => [s.from, s.to, s.text])).toEqual([[14, 16, "ab"], [16, 17, "c"]]);
  const needs = line.apply(event("turn.completed", { from: 10, to: 17, finish_reason: "length" }));
  expect(needs).toContainEqual({ kind: "tokens", from: 10, to: 17, generatedFrom: 14 });
  expect([line.phase, line.ended]).toEqual(["idle", "length"]);
  line.put(10, 17, spansOf(10, [9, 9, 9, 9, 1, 2, 3], "xxxxabc", ["x", "x", "x", "x", "a", "b", "c"], 14));
  expect(text()).toBe("xxxxabc");
  expect(line.spans.filter((s) => s.kind === "generated").length).toBe(3);
});

test("an event seen twice changes nothing; a gap asks to reconnect and changes nothing", () => {
  line.apply(event("turn.started", { from: 10, to: 10 }));
  const delta = event("turn.delta", { text: "a", tokens: [1] });
  line.apply(delta);
  line.apply(delta);
  expect(text()).toBe("a");
  seq += 3;
  expect(line.apply(event("turn.delta", { text: "z", tokens: [9] }))).toEqual([{ kind: "reconnect" }]);
  expect(text()).toBe("a");
  expect(line.seq).toBe(5);
});

test("after a crash the interrupted turn drops what was never committed", () => {
  line.apply(event("turn.started", { from: 10, to: 10 }));
  line.apply(event("turn.delta", { text: "a", tokens: [1] }));
  const committed = seq;
  line.apply(event("turn.delta", { text: "lost", tokens: [2, 3] }));
  epoch = 2;
  seq = committed; // dense from the last committed event on
  const needs = line.apply(event("turn.interrupted", { last_seq: committed }));
  expect(needs).toEqual([{ kind: "reload" }]);
  expect(text()).toBe("a");
  expect(line.cursor).toBe(11);
  expect([line.epoch, line.seq, line.ended]).toEqual([2, committed + 1, "interrupted"]);
});

test("an event of an older epoch is ignored, even when its seq would be next", () => {
  line.reset(2, 5, 10, false);
  expect(line.apply({ seq: 6, epoch: 1, type: "turn.delta", session_id: "s", time: "", text: "x", tokens: [1] })).toEqual([]);
  expect(line.seq).toBe(5);
});

test("text held back belongs to the token before; tokens without text have a place", () => {
  line.apply(event("turn.started", { from: 10, to: 10 }));
  line.apply(event("turn.delta", { text: "", tokens: [240] }));
  line.apply(event("turn.delta", { text: "é", tokens: [] }));
  expect(line.spans).toMatchObject([{ from: 10, to: 11, text: "é" }]);
});

test("a cancelled turn ends where the server says", () => {
  line.apply(event("turn.started", { from: 10, to: 10 }));
  line.apply(event("turn.delta", { text: "abc", tokens: [1, 2, 3] }));
  line.apply(event("turn.cancelled", { from: 10, to: 13 }));
  expect(line.cursor).toBe(13);
  expect(line.ended).toBe("cancelled");
});

test("a failed turn keeps its reason", () => {
  line.apply(event("turn.started", { from: 10, to: 10 }));
  line.apply(event("turn.failed", { error: { code: "ledger_unavailable", message: "the ledger is away" }, from: 10, to: 10 }));
  expect(line.error).toBe("the ledger is away");
});

test("session events only ask for the session", () => {
  expect(line.apply(event("session.detached"))).toEqual([{ kind: "session" }]);
  expect(line.seq).toBe(4);
});

test("a range without pieces is one span, an empty one none", () => {
  expect(spansOf(5, [1, 2], "hi", undefined, 99)).toEqual([{ from: 5, to: 7, text: "hi", kind: "given", seq: 0 }]);
  expect(spansOf(5, [], "", [], 99)).toEqual([]);
});

test("random streams, delivered with repeats and gaps, end as the plain one does", () => {
  for (let seed = 1; seed <= 30; seed++) {
    let x = seed * 7919;
    const random = () => (x = (x * 1103515245 + 12345) % 2147483648) / 2147483648;
    const log: RocketEvent[] = [];
    let at = 0;
    let n = 0;
    for (let turn = 0; turn < 5; turn++) {
      const from = at;
      at += 3;
      log.push({ seq: ++n, epoch: 1, type: "turn.started", session_id: "s", time: "", from, to: at });
      for (let i = 0; i < 10; i++) {
        const tokens = Array.from({ length: 1 + Math.floor(random() * 3) }, () => 1);
        at += tokens.length;
        log.push({ seq: ++n, epoch: 1, type: "turn.delta", session_id: "s", time: "", text: `${n};`, tokens });
      }
      log.push({ seq: ++n, epoch: 1, type: "turn.completed", session_id: "s", time: "", from, to: at });
    }
    const plain = new Line();
    plain.reset(1, 0, 0, false);
    for (const e of log) plain.apply(e);
    const bumpy = new Line();
    bumpy.reset(1, 0, 0, false);
    for (let i = 0; i < log.length; ) {
      const jump = random() < 0.2 ? Math.floor(random() * 5) - 2 : 0;
      const e = log[Math.max(0, Math.min(log.length - 1, i + jump))]!;
      bumpy.apply(e);
      bumpy.check();
      i = bumpy.seq; // a reader comes back with seq + 1
    }
    expect(bumpy.spans).toEqual(plain.spans);
    expect(bumpy.end).toBe(at);
  }
});
